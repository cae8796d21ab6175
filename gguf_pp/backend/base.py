"""The seam between the scheduler and a device: streams, events, buffers, memory.

The contract, on which every test of the scheduler rests:

- A stream runs its work in the order in which it was queued. Queueing never blocks the host.
- `wait(event)` holds later work of the stream until the *latest record at the time of the call*
  has passed; a wait for an event that was never recorded is no wait.
- `record(event)` makes the event pass once everything queued so far on the stream is done.
- A buffer has one writer or any number of readers at a time; who waits for whom is the ring's
  business (`pipeline/ring.py`), not the backend's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class OutOfMemory(Exception):
    """A device cannot give what was asked; caught by the memory ladder, never shown raw."""

    def __init__(self, device: str, what: str, asked_bytes: int, free_bytes: int) -> None:
        super().__init__(f"{device}: {asked_bytes} bytes for {what}, {free_bytes} free")
        self.device = device
        self.what = what
        self.asked_bytes = asked_bytes
        self.free_bytes = free_bytes


_LOOK_ALIKES = (
    "can't allocate memory",  # the RAM
    "out of memory",  # pinned memory, a module, a context: torch.AcceleratorError or RuntimeError
    "ALLOC_FAILED",  # cuBLAS
    "CUBLAS_STATUS_NOT_INITIALIZED",  # what cuBLAS says when its handle does not fit
)


def is_out_of_memory(exc: BaseException) -> bool:
    """Whether `exc` is an allocation failure, in any of the shapes torch gives it."""
    import torch  # not before it is needed: this module serves plans too

    if isinstance(exc, OutOfMemory | MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(exc, RuntimeError) and any(text in str(exc) for text in _LOOK_ALIKES)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a device. Devices with the same `pool` share it (CPU devices share the RAM)."""

    pool: str
    total_bytes: int
    free_bytes: int


class Buffer(Protocol):
    """Float32 [n_rows, n_cols] on one device, allocated once."""

    n_bytes: int

    @property
    def tensor(self) -> torch.Tensor:
        """The memory itself, for work that runs on the buffer's own device."""
        ...


class Event(Protocol):
    """A point in a stream that streams and the host can wait for."""

    def synchronize(self) -> None:
        """Block the host until the latest record has passed."""
        ...


class Stream(Protocol):
    """An in-order queue of work on one device. No method here blocks the host."""

    name: str

    def wait(self, event: Event) -> None:
        """Hold later work on this stream until `event` has passed."""
        ...

    def record(self, event: Event) -> None:
        """Let `event` pass once all work queued so far is done."""
        ...

    def copy(self, dst: Buffer, src: Buffer, n_rows: int) -> None:
        """Queue a copy of the first `n_rows` rows of `src`, on this device, into `dst`, on any."""
        ...

    def run(self, work: Callable[[], None]) -> None:
        """Queue `work`. It must not raise: what can fail is caught where it can be reported."""
        ...


class Backend(Protocol):
    """One device. `relative_speed` is a guess (cores of a CPU device), for splits by time.

    `n_threads` is how many threads of the host compute for it. `local` is true: devices of another
    machine are not driven through streams, but by the worker there.
    """

    name: str
    local: bool
    n_threads: int
    relative_speed: float

    def buffer(self, n_rows: int, n_cols: int, what: str) -> Buffer:
        """Reserve a buffer; raises OutOfMemory. `what` names it in the message."""
        ...

    def event(self) -> Event:
        """Make an event that was never recorded."""
        ...

    def stream(self, name: str, *, compute: bool = False) -> Stream:
        """Make a stream. The compute stream owns the device's threads."""
        ...

    def reserve(self, n_bytes: int, what: str) -> None:
        """Count `n_bytes` as taken; raises OutOfMemory if the device has less."""
        ...

    def release(self, n_bytes: int) -> None:
        """Give back what `reserve` took."""
        ...

    def memory(self) -> Memory:
        """Total and free bytes now, what is reserved counted as taken."""
        ...

    def close(self) -> None:
        """Stop the device's threads. Streams made here must be idle."""
        ...
