"""The memory ladder: what is tried when buffers do not fit, in which order, and how to step down.

Each rung is strictly smaller than the one before and is tried once. A failed attempt is freed
before the next: an exception's traceback keeps every frame's tensors alive, so nothing is retried
inside an `except` block.
"""

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from gguf_pp.backend.base import OutOfMemory, is_out_of_memory
from gguf_pp.errors import PlacementError, in_short

MIN_UBATCH_SIZE = 32
MIN_CTX_SIZE = 512

log = logging.getLogger("gguf_pp")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rung:
    """Sizes that decide what a run allocates beside weights. One copy is not pipelined."""

    n_copies: int
    ubatch_size: int
    ctx_size: int


def rungs(asked: Rung, *, ctx_fixed: bool) -> list[Rung]:
    """The ladder from `asked` down; a context that the user set (`ctx_fixed`) is never cut."""
    ladder = [asked]
    for n_copies in (2, 1):
        if n_copies < ladder[-1].n_copies:
            ladder.append(replace(ladder[-1], n_copies=n_copies))
    while ladder[-1].ubatch_size > MIN_UBATCH_SIZE:
        smaller = max(MIN_UBATCH_SIZE, ladder[-1].ubatch_size // 2)
        ladder.append(replace(ladder[-1], ubatch_size=smaller))
    while not ctx_fixed and ladder[-1].ctx_size > MIN_CTX_SIZE:
        smaller = max(MIN_CTX_SIZE, ladder[-1].ctx_size // 2)
        ladder.append(replace(ladder[-1], ctx_size=smaller))
    return ladder


def climb_down(
    ladder: Sequence[Rung], attempt: Callable[[Rung], T], release: Callable[[], None]
) -> tuple[Rung, T]:
    """Try the rungs in order; return the first that fits and what `attempt` made of it.

    `release` frees whatever a failed attempt left. Raises PlacementError when no rung fits,
    with what was asked and free at each; any other failure of `attempt` passes through.
    """
    failures: list[str] = []
    for i, rung in enumerate(ladder):
        result, failure = _try(attempt, rung)
        if failure is None:
            assert result is not None
            return rung, result
        release()
        gc.collect()
        failures.append(
            f"n_copies={rung.n_copies} ubatch={rung.ubatch_size} ctx={rung.ctx_size}: {failure}"
        )
        if i + 1 < len(ladder):
            log.warning("%s", _step_down(rung, ladder[i + 1]))
    raise PlacementError(
        "the model does not fit:\n  " + "\n  ".join(failures),
        hint="use a smaller context (-c), fewer slots, or another device",
    )


def _try(attempt: Callable[[Rung], T], rung: Rung) -> tuple[T | None, str | None]:
    """The result, or why there was no memory for it, as a string that keeps nothing alive."""
    try:
        return attempt(rung), None
    except Exception as exc:
        if not is_out_of_memory(exc):
            raise
        if isinstance(exc, OutOfMemory):
            return None, str(exc)
        return None, in_short(exc)


def _step_down(rung: Rung, smaller: Rung) -> str:
    if smaller.n_copies < rung.n_copies:
        what = (
            f"retrying with n_copies={smaller.n_copies}"
            if smaller.n_copies > 1
            else "retrying without pipeline parallelism"
        )
        return f"compute buffer allocation failed, {what}"
    if smaller.ubatch_size < rung.ubatch_size:
        return f"allocation failed, retrying with a ubatch of {smaller.ubatch_size}"
    return f"allocation failed, retrying with a context of {smaller.ctx_size}"
