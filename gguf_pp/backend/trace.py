"""What ran when: one record per piece of work, kept only when asked."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

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


class Trace:
    """Slices in the order in which they were queued, while `enabled`.

    A slice belongs to the stream that runs it until it has ended; the list to the host.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.enabled = False
        self.slices: list[Slice] = []
        self._clock = clock

    def open(
        self, kind: Kind, i_stage: int, i_ubatch: int, i_copy: int, n_rows: int
    ) -> Slice | None:
        """A new slice to `start` and `end`, or None when nothing is recorded."""
        if not self.enabled:
            return None
        piece = Slice(kind, i_stage, i_ubatch, i_copy, n_rows, self._clock())
        self.slices.append(piece)
        return piece

    def start(self, piece: Slice) -> None:
        """Its work begins now."""
        piece.start_s = self._clock()

    def end(self, piece: Slice) -> None:
        """Its work is done now."""
        piece.end_s = self._clock()
