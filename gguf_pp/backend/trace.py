"""What ran when: one record per piece of work, kept only when asked."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

Kind = Literal["compute", "transfer", "host"]


@dataclass(slots=True)
class Slice:
    """A piece of work. Times are seconds of the trace's clock.

    "compute" is stage `i_stage` on ubatch `i_ubatch`, "transfer" its output on the way to the
    next stage, "host" the host queueing the ubatch (`i_stage` is -1). `queued_s` is when the host
    asked for it; it could start once its input was there, which is when the transfer of the stage
    before ended (for the first stage: when it was queued).
    """

    kind: Kind
    i_stage: int
    i_ubatch: int
    i_copy: int
    n_rows: int
    queued_s: float
    start_s: float = 0.0
    end_s: float = 0.0


class DeviceClock(Protocol):
    """Tells when a device came to what the host only queues there."""

    def note(self, tell: Callable[[float], None]) -> None:
        """Have `tell` called, at a later `settle`, with the time at which the current stream comes
        here."""
        ...

    def settle(self, clock: Callable[[], float]) -> None:
        """Tell what has passed, in seconds of the host's `clock`."""
        ...


class Trace:
    """Slices in the order in which they were queued, while `enabled`.

    A slice belongs to the stream that runs it until it has ended; the list to the host. `clocks`
    are those of stages, by index, whose work is only launched when its stream's turn has come.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.enabled = False
        self.clocks: dict[int, DeviceClock] = {}
        self._slices: list[Slice] = []
        self._clock = clock

    @property
    def slices(self) -> list[Slice]:
        """All slices, with the times that are known by now; 0 are those that are not."""
        for clock in self.clocks.values():
            clock.settle(self._clock)
        return self._slices

    def open(
        self, kind: Kind, i_stage: int, i_ubatch: int, i_copy: int, n_rows: int
    ) -> Slice | None:
        """A new slice to `start` and `end`, or None when nothing is recorded."""
        if not self.enabled:
            return None
        piece = Slice(kind, i_stage, i_ubatch, i_copy, n_rows, self._clock())
        self._slices.append(piece)
        return piece

    def start(self, piece: Slice) -> None:
        """Its work begins now."""
        self._note(piece, "start_s")

    def end(self, piece: Slice) -> None:
        """Its work is done now."""
        self._note(piece, "end_s")

    def _note(self, piece: Slice, name: Literal["start_s", "end_s"]) -> None:
        clock = self.clocks.get(piece.i_stage)
        if clock is None:
            setattr(piece, name, self._clock())
        else:
            clock.note(partial(setattr, piece, name))
