"""What ran when: one record per piece of work, kept only when asked."""

from typing import NamedTuple


class Slice(NamedTuple):
    """`what` ran on `track` (a stream's name) from `start_s` to `end_s`, on `n_rows` rows."""

    track: str
    what: str
    start_s: float
    end_s: float
    n_rows: int


class Trace:
    """A list of slices; appending is atomic in CPython, so streams share one without a lock."""

    def __init__(self, enabled: bool = False) -> None:
        self.enabled = enabled
        self.slices: list[Slice] = []

    def add(self, track: str, what: str, start_s: float, end_s: float, n_rows: int) -> None:
        """Keep one slice, if asked to."""
        if self.enabled:
            self.slices.append(Slice(track, what, start_s, end_s, n_rows))
