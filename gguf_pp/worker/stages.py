"""The stages of a session, and the ways in and out around them."""

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from gguf_pp.arch import Model
from gguf_pp.backend.base import Backend, Event, Stream
from gguf_pp.backend.cpu import CpuBackend
from gguf_pp.batch import UBatch
from gguf_pp.ops.base import Ops
from gguf_pp.pipeline.executor import Deliver, Take
from gguf_pp.pipeline.memory import Rung
from gguf_pp.pipeline.peer import bytes_of
from gguf_pp.pipeline.ring import Copy, Ring
from gguf_pp.pipeline.split import Part
from gguf_pp.pipeline.stage import LayerStage

Send = Callable[[UBatch, memoryview], None]
"""Sends hidden states of a ubatch on; returns when their memory may change."""


class _Clock(Protocol):
    """Where work runs: moments of it, and seconds between two that have passed."""

    def now(self) -> Any: ...

    def between(self, start: Any, end: Any) -> float: ...


class _HostClock:
    def now(self) -> float:
        return time.perf_counter()

    def between(self, start: float, end: float) -> float:
        return end - start


class _CudaClock:
    """By events on the current stream."""

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda

    def now(self) -> Any:
        event = self._cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Any, end: Any) -> float:
        return float(1e-3 * start.elapsed_time(end))


def _clock_of(backend: Backend) -> _Clock:
    if isinstance(backend, CpuBackend):
        return _HostClock()
    from gguf_pp.backend.cuda import CudaBackend

    assert isinstance(backend, CudaBackend)
    return _CudaClock(backend.api.cuda)


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
        """`consumed` is called on the compute stream."""
        super().__init__(i_stage, backend, make_ops, model, part)
        self._clock = _clock_of(backend)
        self._laps: dict[int, tuple[Any, Any]] = {}
        self._consumed = consumed

    def load(self, copy: Copy, ubatch: UBatch) -> None:
        """Move the input out of `copy`."""
        try:
            super().load(copy, ubatch)
        finally:  # whatever becomes of it, the copy is free
            if self._consumed is not None:
                self._consumed()

    def forward(self, copy: Copy, ubatch: UBatch, take: Take) -> Deliver | None:
        """Run the layers."""
        start = self._clock.now()
        deliver = super().forward(copy, ubatch, take)
        self._laps[id(ubatch)] = start, self._clock.now()
        return deliver

    def seconds_of(self, ubatch: UBatch, *, is_through: bool) -> float:
        """What `ubatch` has taken here; 0 if the device is not through with it. Asked once."""
        lap = self._laps.pop(id(ubatch), None)
        return self._clock.between(*lap) if is_through and lap is not None else 0.0


class Inlet:
    """Takes hidden states in for a first stage on a CUDA device: to the executor it is a stage
    before that, without layers, whose output is there when a ubatch is submitted.

    Whoever receives writes to `out` of a copy, in pinned memory; `upload`, a stream of the device,
    ships it. The copy may be written to again when the device is through with that, which `lend`
    waits for: as for every stage, `filled` of the next one says so.
    """

    elapsed_s = None

    def __init__(self, backend: CpuBackend, upload: Stream, n_cols: int) -> None:
        self.backend: Backend = backend
        self.compute: Stream = backend.stream("inlet")
        self.transfer: Stream | None = upload
        self.ring: Ring
        self._n_cols = n_cols

    @property
    def intake(self) -> Stream:
        """Of the host."""
        return self.compute

    def allocate(self, rung: Rung) -> None:
        """Make room for what is received; raises OutOfMemory."""
        shape = (rung.ubatch_size, self._n_cols)
        self.ring = Ring(self.backend, rung.n_copies, *shape, inp=False, out=True)

    def release(self) -> None:
        """Give it back."""
        if hasattr(self, "ring"):
            self.ring.release()

    def load(self, copy: Copy, ubatch: UBatch) -> None:
        """It is there already."""

    def forward(self, copy: Copy, ubatch: UBatch, take: Take) -> None:
        """It is there already."""

    def abandon(self, copy: Copy, ubatch: UBatch) -> None:
        """Nothing was kept."""

    def lend(self, filled: Event, consumed: Callable[[], None]) -> None:
        """Call `consumed` once the ubatch submitted last has left, for which the next stage's
        `filled` stands."""
        self.compute.wait(filled)
        self.compute.run(consumed)


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
