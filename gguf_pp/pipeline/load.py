"""Tensors from the file to where they are wanted."""

import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from gguf_pp.gguf.source import TensorSource
from gguf_pp.ops.base import ExpertMatrix, Matrix, Ops, Rope, RopeParams
from gguf_pp.ops.rope import make_rope
from gguf_pp.pipeline.sizing import Tensors
from gguf_pp.quants.raw import RawTensor


class Stopped(Exception):
    """Reading was given up because something else failed."""


class Reading:
    """Adds up what several threads read, for `progress` (so far, in all). Left by an exception, it
    ends those that `step` at their next tensor."""

    def __init__(self, total: int, progress: Callable[[int, int], None]) -> None:
        self._total, self._progress = total, progress
        self._done = 0
        self._lock = threading.Lock()
        self._stopped = False

    def count(self, n_bytes: int) -> None:
        """So much more is read."""
        with self._lock:
            self._done += n_bytes
            self._progress(min(self._done, self._total), self._total)

    def step(self, n_bytes: int) -> None:
        """The same of what is about to be read. Raises Stopped."""
        if self._stopped:
            raise Stopped
        self.count(n_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stopped = exc is not None


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

    def experts(self, *parts: tuple[str, int], n_cols: int, n_experts: int) -> ExpertMatrix:
        """The matrices of all experts, the rows of each stacked."""
        raws = [self._raw(name, n_experts, n_rows, n_cols) for name, n_rows in parts]
        experts = self._ops.experts(raws)
        self._forget(parts)
        return experts

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
