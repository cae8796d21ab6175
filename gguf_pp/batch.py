"""What crosses a stage at once: tokens, where they stand, and which rows want logits."""

from dataclasses import dataclass
from typing import NamedTuple


class Span(NamedTuple):
    """Consecutive tokens of one sequence: `n_rows` rows that start at position `start`.

    The rows attend to cells [0, start + n_rows) of `slot`; row r to [0, start + r].
    """

    slot: int
    start: int
    n_rows: int


@dataclass(frozen=True, slots=True)
class UBatch:
    """The part of a batch that walks down the stages together.

    `tokens` holds the spans' tokens back to back; `outputs` are the indexes of the rows whose
    logits are wanted, ascending.
    """

    tokens: tuple[int, ...]
    spans: tuple[Span, ...]
    outputs: tuple[int, ...]

    @property
    def n_rows(self) -> int:
        """Number of tokens."""
        return len(self.tokens)
