"""Tensors from the file to where they are wanted, or only their sizes."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from gguf_pp.errors import FormatError
from gguf_pp.gguf import ModelFile
from gguf_pp.ops.base import Matrix, Ops, Rope
from gguf_pp.ops.rope import RopeParams, make_rope
from gguf_pp.quants.raw import RawTensor


class _Tensors:
    """What both loaders do: find a tensor, check its shape, remember that it was asked for."""

    def __init__(self, file: ModelFile, n_ctx: int) -> None:
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

    def _require(self, name: str, *shape: int) -> None:
        self.file.require(name, shape)
        self.names.add(name)


class SizeLoader(_Tensors):
    """Checks names and shapes and adds up bytes as they lie in the file; reads no weights."""

    n_bytes: int = 0

    def _count(self, name: str, *shape: int) -> None:
        if name not in self.names:
            self._require(name, *shape)
            self.n_bytes += self.file.tensors[name].n_bytes

    def matrix(self, *parts: tuple[str, int], n_cols: int) -> Matrix:
        """Count matrices."""
        before = self.n_bytes
        for name, n_rows in parts:
            self._count(name, n_rows, n_cols)
        return _Sized(sum(n for _, n in parts), n_cols, self.n_bytes - before)

    def experts(self, *parts: tuple[str, int], n_cols: int, n_experts: int) -> list[Matrix]:
        """Count experts."""
        for name, n_rows in parts:
            self._count(name, n_experts, n_rows, n_cols)
        return [_Sized(sum(n for _, n in parts), n_cols, 0)] * n_experts

    def vector(self, name: str, size: int) -> Tensor:
        """Count a vector."""
        self._count(name, size)
        return torch.empty(size, device="meta")

    def rope(self, params: RopeParams) -> Rope:
        """Tables are not weights, but their factors are."""
        if params.freq_factors is not None:
            self._count(params.freq_factors, params.n_rot // 2)
        nothing = torch.empty(0, device="meta")
        return Rope(nothing, nothing, params.neox)


class _Sized:
    """A matrix that is only its size."""

    def __init__(self, n_rows: int, n_cols: int, n_bytes: int) -> None:
        self.n_rows, self.n_cols, self.n_bytes = n_rows, n_cols, n_bytes


class DeviceLoader(_Tensors):
    """Reads tensors to one stage's device. What is asked for twice is loaded once.

    `progress` is told the bytes of every tensor as it is read.
    """

    def __init__(
        self, file: ModelFile, n_ctx: int, ops: Ops, progress: Callable[[int], None]
    ) -> None:
        super().__init__(file, n_ctx)
        self._ops = ops
        self._progress = progress
        self._matrices: dict[tuple[tuple[str, int], ...], Matrix] = {}
        self._ropes: dict[RopeParams, Rope] = {}

    def _raw(self, name: str, *shape: int) -> RawTensor:
        self._require(name, *shape)
        info = self.file.tensors[name]
        self._progress(info.n_bytes)
        return RawTensor(name, info.type, info.shape, self.file.data(name))

    def matrix(self, *parts: tuple[str, int], n_cols: int) -> Matrix:
        """Tensors stacked by rows."""
        if parts not in self._matrices:
            raws = [self._raw(name, n_rows, n_cols) for name, n_rows in parts]
            self._matrices[parts] = self._ops.matrix(raws)
            self._forget(parts)
        return self._matrices[parts]

    def experts(self, *parts: tuple[str, int], n_cols: int, n_experts: int) -> list[Matrix]:
        """One matrix per expert, parts stacked by rows."""
        raws = [self._raw(name, n_experts, n_rows, n_cols) for name, n_rows in parts]
        matrices = [self._ops.matrix([_expert(raw, i) for raw in raws]) for i in range(n_experts)]
        self._forget(parts)
        return matrices

    def _forget(self, parts: Iterable[tuple[str, int]]) -> None:
        """What was copied need not stay in memory twice."""
        if not self._ops.maps_weights:
            for name, _ in parts:
                self.file.forget(name)

    def vector(self, name: str, size: int) -> Tensor:
        """A small tensor as float32."""
        return self._ops.vector(self._raw(name, size))

    def rope(self, params: RopeParams) -> Rope:
        """Rotation tables, shared by all layers that ask for the same."""
        if params not in self._ropes:
            name = params.freq_factors
            factors = None if name is None else self.vector(name, params.n_rot // 2)
            self._ropes[params] = make_rope(params, self.n_ctx, factors)
        return self._ropes[params]


def _expert(raw: RawTensor, i_expert: int) -> RawTensor:
    """The matrix of one expert, a view."""
    n_rows = raw.shape[1]
    return RawTensor(
        name=f"{raw.name}[{i_expert}]",
        type=raw.type,
        shape=raw.shape[1:],
        data=raw.data[i_expert * n_rows : (i_expert + 1) * n_rows],
    )
