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
    Where the host runs ahead, n_queued exceeds the known `tokens` by as much. `promised` is where
    the token after the last queued one is left for the next ubatch (batch.Late), if it is.

    The request ends when it has `limit` tokens, prompt included. `turn` is the number of its last
    ubatch. Once it has ended, n_queued does not count what was never computed.
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
    promised: tuple[int, int] | None = None
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
    def decodes(self) -> bool:
        """Whether tokens after the prompt are still to be queued; the last one never is."""
        return self.finish_reason is None and len(self.prompt) <= self.n_queued < self.limit - 1

    def is_ready(self, run_ahead: int) -> bool:
        """Whether the next token, of one that decodes, may be queued: it is known, or it will be
        left where it is needed, at most `run_ahead` steps before the host knows it."""
        n_unknown = self.n_queued - len(self.tokens) + 1
        return n_unknown <= 0 or (self.promised is not None and n_unknown <= run_ahead)
