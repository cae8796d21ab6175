"""Sizes of a model's tensors without reading them."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from gguf_pp.errors import FormatError
from gguf_pp.gguf.source import TensorSource
from gguf_pp.ops.base import ExpertMatrix, Matrix, Rope, RopeParams

if TYPE_CHECKING:
    from torch import Tensor


class Tensors:
    """What both loaders do: find a tensor, check its shape, remember that it was asked for."""

    def __init__(self, file: TensorSource, n_ctx: int) -> None:
        self.file = file
        self.n_ctx = n_ctx
        self.names: set[str] = set()

    def has(self, name: str) -> bool:
        """Whether the file holds the tensor."""
        return name in self.file.tensors

    def n_rows(self, name: str) -> int:
        """Rows of a matrix whose size only the file knows."""
        if name not in self.file.tensors:
            raise FormatError(f"{self.file.path}: tensor {name!r} is missing")
        return self.file.tensors[name].shape[0]

    def require(self, name: str, *shape: int) -> None:
        """Check that the file holds the tensor in this shape. Raises FormatError."""
        self.file.require(name, shape)
        self.names.add(name)


_NOTHING = cast("Tensor", None)
"""Stands for a tensor where only its size counts: an empty one would take the import of torch."""


class SizeLoader(Tensors):
    """Checks names and shapes and adds up bytes as they lie in the file; reads no weights."""

    n_bytes: int = 0

    def _count(self, name: str, *shape: int) -> None:
        if name not in self.names:
            self.require(name, *shape)
            self.n_bytes += self.file.tensors[name].n_bytes

    def matrix(self, *parts: tuple[str, int], n_cols: int) -> Matrix:
        """Count matrices."""
        before = self.n_bytes
        for name, n_rows in parts:
            self._count(name, n_rows, n_cols)
        return _Sized(sum(n for _, n in parts), n_cols, self.n_bytes - before)

    def experts(self, *parts: tuple[str, int], n_cols: int, n_experts: int) -> ExpertMatrix:
        """Count experts."""
        before = self.n_bytes
        for name, n_rows in parts:
            self._count(name, n_experts, n_rows, n_cols)
        return _Sized(sum(n for _, n in parts), n_cols, self.n_bytes - before, n_experts)

    def vector(self, name: str, size: int) -> Tensor:
        """Count a vector."""
        self._count(name, size)
        return _NOTHING

    def vectors(self, *parts: tuple[str, int]) -> Tensor:
        """Count vectors."""
        for name, size in parts:
            self._count(name, size)
        return _NOTHING

    def rope(self, params: RopeParams) -> Rope:
        """Tables are not weights, but their factors are."""
        if params.freq_factors is not None:
            self._count(params.freq_factors, params.n_rot // 2)
        return Rope(_NOTHING, _NOTHING, params.neox)


class _Sized:
    """A matrix, or one per expert, that is only its size."""

    def __init__(self, n_rows: int, n_cols: int, n_bytes: int, n_experts: int = 1) -> None:
        self.n_rows, self.n_cols, self.n_bytes = n_rows, n_cols, n_bytes
        self.n_experts = n_experts
