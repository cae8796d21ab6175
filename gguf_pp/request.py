"""One sequence on its way through the engine."""

from dataclasses import dataclass, field
from typing import Literal

from gguf_pp.sampling import Sampler

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(slots=True, eq=False)
class Request:
    """One sequence, from its prompt to its last token. Times are perf_counter seconds.

    Tokens, by where they are (`n_queued` cells are computed or on their way):
        [0, n_queued)         in the KV cache once their ubatches are through
        [n_queued, n_prompt)  of the prompt, still to be queued
        the last one          sampled, and queued next
    The request ends when it has `limit` tokens, prompt included. `turn` is the number of its last
    ubatch. `has_gaps`: some of its cells were never computed.
    """

    prompt: tuple[int, ...]
    sampler: Sampler
    limit: int
    tokens: list[int] = field(default_factory=list)
    slot: int = -1
    n_queued: int = 0
    n_cached: int = 0
    n_in_flight: int = 0
    turn: int = 0
    has_gaps: bool = False
    finish_reason: FinishReason | None = None
    error: BaseException | None = None
    added_s: float = 0.0
    started_s: float = 0.0
    first_token_s: float = 0.0
    finished_s: float = 0.0

    @property
    def generated(self) -> list[int]:
        """Tokens after the prompt."""
        return self.tokens[len(self.prompt) :]

    @property
    def in_prompt(self) -> bool:
        """Whether some of the prompt is still to be queued."""
        return self.n_queued < len(self.prompt)

    @property
    def ready(self) -> bool:
        """Whether a sampled token waits to be queued."""
        return not self.in_prompt and self.n_queued < len(self.tokens)
