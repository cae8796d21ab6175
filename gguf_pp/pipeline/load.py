"""Tensors from the file to where they are wanted."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from gguf_pp.gguf.source import TensorSource
from gguf_pp.ops.base import Matrix, Ops, Rope, RopeParams
from gguf_pp.ops.rope import make_rope
from gguf_pp.pipeline.sizing import Tensors
from gguf_pp.quants.raw import RawTensor


class DeviceLoader(Tensors):
    """Reads tensors to one stage's device. What is asked for twice is loaded once.

    `progress` is told the bytes of every tensor as it is read.
    """

    def __init__(
        self, file: TensorSource, n_ctx: int, ops: Ops, progress: Callable[[int], None]
    ) -> None:
        super().__init__(file, n_ctx)
        self._ops = ops
        self._progress = progress
        self._matrices: dict[tuple[tuple[str, int], ...], Matrix] = {}
        self._ropes: dict[RopeParams, Rope] = {}

    def _raw(self, name: str, *shape: int) -> RawTensor:
        self.require(name, *shape)
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

    def vectors(self, *parts: tuple[str, int]) -> Tensor:
        """Small tensors as one of float32."""
        return torch.cat([self.vector(name, size) for name, size in parts])

    def rope(self, params: RopeParams) -> Rope:
        """Rotation tables, shared by all layers that ask for the same."""
        if params not in self._ropes:
            name = params.freq_factors
            factors = None if name is None else self.vector(name, params.n_rot // 2).cpu()
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
