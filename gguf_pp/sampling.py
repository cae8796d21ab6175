"""Logits to a token. Order and meaning of the steps follow llama.cpp's default chain:
penalties, top-k, top-p, min-p, temperature, draw."""

import math
from collections import Counter, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from gguf_pp.batch import Choice
from gguf_pp.errors import ConfigError, RequestError

Floats = NDArray[np.float32]

NO_TOKEN = -1
"""Chosen from logits whose largest is not a finite number: any token would be nonsense."""

_BLOCK = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose. temperature <= 0 is greedy; top_k 0, top_p 1, min_p 0 and penalties of 1.0
    (repeat) or 0.0 are off; `repeat_last_n` tokens are penalized, -1 for all; `seed` None draws
    one."""

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """Refuse values without a meaning; raises ConfigError."""
        checks = {
            "--temp": math.isfinite(self.temperature),
            "--top-p": 0 <= self.top_p <= 1,
            "--min-p": 0 <= self.min_p <= 1,
            "--repeat-penalty": math.isfinite(self.repeat_penalty) and self.repeat_penalty > 0,
            "--repeat-last-n": self.repeat_last_n >= -1,
            "--frequency-penalty": math.isfinite(self.frequency_penalty),
            "--presence-penalty": math.isfinite(self.presence_penalty),
            "--top-k": self.top_k >= 0,
            "--seed": self.seed is None or 0 <= self.seed < 1 << 64,
        }
        for flag, good in checks.items():
            if not good:
                value = getattr(self, _FIELDS.get(flag, flag[2:].replace("-", "_")))
                raise ConfigError(f"{flag} cannot be {value}")

    @property
    def is_greedy(self) -> bool:
        """Whether chance has no say."""
        return self.temperature <= 0

    @property
    def penalizes(self) -> bool:
        """Whether the tokens so far have a say."""
        has_penalty = self.repeat_penalty != 1 or self.frequency_penalty or self.presence_penalty
        return bool(has_penalty) and self.repeat_last_n != 0


_FIELDS = {"--temp": "temperature"}


class SamplingOptions(TypedDict, total=False):
    """Keyword arguments of SamplingParams."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    repeat_last_n: int
    frequency_penalty: float
    presence_penalty: float
    seed: int | None
    ignore_eos: bool


def not_numbers() -> RequestError:
    """What to tell whose NO_TOKEN was chosen."""
    return RequestError(
        "the model computed logits that are not numbers",
        hint="compare the file's checksum with its publisher's, or try --kernels torch",
    )


class Sampler:
    """The state of one sequence: recent tokens and random numbers, one per token drawn.

    The numbers come from a counter-based generator seeded once, so that the text depends on the
    seed alone, whatever runs beside it.
    """

    def __init__(
        self, params: SamplingParams, eog_ids: Collection[int], prompt: Iterable[int]
    ) -> None:
        self.params = params
        self._banned = np.array(sorted(eog_ids) if params.ignore_eos else [], dtype=np.int64)
        seed = params.seed if params.seed is not None else np.random.SeedSequence().entropy
        self._random = np.random.Generator(np.random.Philox(seed))
        n = params.repeat_last_n
        self._recent: deque[int] = deque(prompt, maxlen=None if n < 0 else n)

    def __call__(self, logits: Floats) -> int:
        """Choose the next token from `logits` [V], which are left as they are.

        NO_TOKEN unless the largest is a finite number.
        """
        token = self._choose(self._penalized(logits))
        if token != NO_TOKEN:
            self._recent.append(token)
        return token

    def choice(self) -> Choice | None:
        """How to choose the next token where its logits are: the one that a call would choose.

        Uses up the random number that the call would. None where the tokens so far have a say.
        """
        p = self.params
        if p.penalizes:
            return None
        number = 0.0 if p.is_greedy else self._random.random()
        return Choice(p.temperature, p.top_k, p.top_p, p.min_p, number, p.ignore_eos)

    def _choose(self, logits: Floats) -> int:
        if not np.isfinite(logits.max()):
            return NO_TOKEN
        return int(np.argmax(logits)) if self.params.is_greedy else self._draw(logits)

    def _penalized(self, logits: Floats) -> Floats:
        p = self.params
        if not p.penalizes and not len(self._banned):
            return logits
        logits = logits.copy()
        logits[self._banned] = -np.inf
        if p.penalizes and self._recent:
            counts = Counter(self._recent)
            ids = np.fromiter(counts.keys(), dtype=np.int64)
            times = np.fromiter(counts.values(), dtype=np.float32)
            chosen = logits[ids]
            chosen = np.where(chosen > 0, chosen / p.repeat_penalty, chosen * p.repeat_penalty)
            logits[ids] = chosen - times * p.frequency_penalty - p.presence_penalty
        return logits

    def _draw(self, logits: Floats) -> int:
        ids = _top_k(logits, self.params.top_k)
        values = logits[ids].astype(np.float64)
        weights = np.exp(values - values[0])
        keep = len(ids)
        if self.params.top_p < 1:
            # The smallest set whose probability reaches top_p, never empty.
            cumulative = np.cumsum(weights)
            cumulative /= cumulative[-1]
            keep = min(keep, 1 + int(np.searchsorted(cumulative, self.params.top_p)))
        if self.params.min_p > 0:
            keep = min(keep, max(1, int((weights >= self.params.min_p).sum())))
        with np.errstate(over="ignore"):  # minus infinity is what they should weigh then
            weights = np.exp((values[:keep] - values[0]) / self.params.temperature)
        cumulative = np.cumsum(weights)
        place = np.searchsorted(cumulative, self._random.random() * cumulative[-1], side="right")
        return int(ids[min(int(place), keep - 1)])


def _top_k(logits: Floats, k: int) -> NDArray[np.intp]:
    """Indexes of the `k` largest (0: all), largest first, equal ones in index order."""
    n_blocks = len(logits) // _BLOCK
    if 0 < k <= n_blocks:
        # k blocks have their largest at or above this, so the k largest are all at or above it.
        largest = logits[: n_blocks * _BLOCK].reshape(n_blocks, _BLOCK).max(axis=1)
        ids = np.flatnonzero(logits >= np.partition(largest, n_blocks - k)[n_blocks - k])
    else:
        ids = np.arange(len(logits))
    best = ids[np.lexsort((ids, -logits[ids]))]
    return best[:k] if k else best
