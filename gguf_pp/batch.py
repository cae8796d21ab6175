"""What crosses a stage at once: tokens, where they stand, and which rows want logits."""

from collections.abc import Iterator, Sequence
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


def cut(n_tokens: int, ubatch_size: int) -> Iterator[range]:
    """Cut `n_tokens` into ranges of at most `ubatch_size`, in order, none empty."""
    for first in range(0, n_tokens, ubatch_size):
        yield range(first, min(first + ubatch_size, n_tokens))


def prompt_ubatches(
    slot: int, start: int, tokens: Sequence[int], ubatch_size: int, outputs: str = "last"
) -> Iterator[UBatch]:
    """Cut one sequence's `tokens`, which begin at position `start`, into ubatches.

    `outputs` says which rows want logits: "last", "all" or "none".
    """
    for part in cut(len(tokens), ubatch_size):
        rows: Sequence[int] = ()
        if outputs == "all":
            rows = range(len(part))
        elif outputs == "last" and part.stop == len(tokens):
            rows = (len(part) - 1,)
        yield UBatch(
            tokens=tuple(tokens[part.start : part.stop]),
            spans=(Span(slot, start + part.start, len(part)),),
            outputs=tuple(rows),
        )
