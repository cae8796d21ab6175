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


class Choice(NamedTuple):
    """How the token of one output is chosen where its logits are; as in SamplingParams.

    `number` in [0, 1) is what chance says, drawn beforehand; `bans_ends` is ignore_eos.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    number: float
    bans_ends: bool


class Late(NamedTuple):
    """A row whose token was not known when it was queued: what was chosen for output `i_output` of
    the ubatch before that left its tokens in `parcel` (pipeline/feedback.py)."""

    row: int
    parcel: int
    i_output: int


@dataclass(frozen=True, slots=True)
class UBatch:
    """The part of a batch that walks down the stages together.

    `tokens` holds the spans' tokens back to back, 0 in rows that are `late`; `outputs` are the
    indexes of the rows whose logits are wanted, ascending. `choices` are theirs, if they are to be
    chosen from on the last device, None for those that the host chooses from. `parcel` is where
    chosen tokens are left for the ubatches that follow.
    """

    tokens: tuple[int, ...]
    spans: tuple[Span, ...]
    outputs: tuple[int, ...]
    late: tuple[Late, ...] = ()
    choices: tuple[Choice | None, ...] = ()
    parcel: int | None = None

    @property
    def n_rows(self) -> int:
        """Number of tokens."""
        return len(self.tokens)
