"""The stages of a session, and the way out behind the last of them."""

from collections.abc import Callable

import torch
from torch import Tensor

from gguf_pp.arch import Model
from gguf_pp.backend.base import Backend, Stream
from gguf_pp.backend.cpu import CpuBackend
from gguf_pp.batch import UBatch
from gguf_pp.ops.base import Ops
from gguf_pp.pipeline.executor import Take
from gguf_pp.pipeline.memory import Rung
from gguf_pp.pipeline.peer import bytes_of
from gguf_pp.pipeline.ring import Copy, Ring
from gguf_pp.pipeline.split import Part
from gguf_pp.pipeline.stage import LayerStage

Send = Callable[[UBatch, memoryview], None]
"""Sends hidden states of a ubatch on; returns when their memory may change."""


class WorkedStage(LayerStage):
    """A stage that tells when its input copy is free again and how long each ubatch took."""

    def __init__(
        self,
        i_stage: int,
        backend: Backend,
        make_ops: Callable[[], Ops],
        model: Model,
        part: Part,
        consumed: Callable[[], None] | None,
    ) -> None:
        """`consumed` is called on the compute stream. `seconds_of` has ubatches by id."""
        super().__init__(i_stage, backend, make_ops, model, part)
        self.seconds_of: dict[int, float] = {}
        self._consumed = consumed

    def load(self, copy: Copy, ubatch: UBatch) -> None:
        """Move the input out of `copy`."""
        try:
            super().load(copy, ubatch)
        finally:  # whatever becomes of it, the copy is free
            if self._consumed is not None:
                self._consumed()

    def forward(self, copy: Copy, ubatch: UBatch, take: Take) -> None:
        """Run the layers."""
        super().forward(copy, ubatch, take)
        self.seconds_of[id(ubatch)] = self.recent[-1][2]


class Outlet:
    """Sends what the last stage wrote: to the executor it is one more stage, without layers."""

    elapsed_s = None

    def __init__(self, backend: CpuBackend, n_cols: int, send: Send, *, half: bool) -> None:
        self.backend: Backend = backend
        self.compute: Stream = backend.stream("outlet")
        self.transfer: Stream | None = None
        self.ring: Ring
        self._n_cols = n_cols
        self._send = send
        self._half: Tensor | None = None
        self._wants_half = half

    @property
    def intake(self) -> Stream:
        """Its only stream."""
        return self.compute

    def allocate(self, rung: Rung) -> None:
        """Make room for what is to be sent; raises OutOfMemory."""
        shape = (rung.ubatch_size, self._n_cols)
        self.ring = Ring(self.backend, rung.n_copies, *shape, inp=True, out=False)
        self._half = torch.empty(shape, dtype=torch.float16) if self._wants_half else None

    def release(self) -> None:
        """Give it back."""
        if hasattr(self, "ring"):
            self.ring.release()
        self._half = None

    def load(self, copy: Copy, ubatch: UBatch) -> None:
        """Send the hidden states on."""
        assert copy.inp is not None
        x = copy.inp.tensor[: ubatch.n_rows]
        if self._half is not None:
            half = self._half[: ubatch.n_rows]
            half.copy_(x)
            x = half
        self._send(ubatch, bytes_of(x))

    def forward(self, copy: Copy, ubatch: UBatch, take: Take) -> None:
        """Nothing is left to do."""

    def abandon(self, copy: Copy, ubatch: UBatch) -> None:
        """Nothing was kept."""
