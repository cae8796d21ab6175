"""The way of logits, or of tokens chosen from them, from a CUDA device to the host."""

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import Any

from torch import Tensor

from gguf_pp.backend.cuda_host import Landing, Parcel
from gguf_pp.batch import Choice
from gguf_pp.pipeline.executor import Deliver, Take

ROWS = 8
"""Logits that travel together: few, as each stands for a megabyte of pinned memory."""
MOST_AHEAD = 16
"""Ubatches that may be on their way, more than ever are in a pipeline of eight devices."""


class CudaOutlet:
    """Queues logits to the host, where `take` gets them when somebody waits for their ubatch.

    With `waits` that is at once, by the thread that launches: it may block.
    """

    def __init__(self, api: Any, n_slots: int, n_vocab: int, *, waits: bool) -> None:
        """Pinned memory for `n_slots` sequences that decode at once. Raises what torch raises if
        there is none."""
        n_parcels = 4 + n_slots // ROWS + min(n_slots, MOST_AHEAD)
        self._logits = Landing(api, n_parcels, (ROWS, n_vocab), api.float32)
        self._chosen = Landing(api, 2 * MOST_AHEAD, (n_slots,), api.int32)
        self._waits = waits

    def send(
        self,
        logits: Tensor,
        rows: range,
        take: Take,
        chosen: Tensor | None = None,
        choices: Sequence[Choice | None] = (),
    ) -> list[Parcel]:
        """Queue logits [n, V] of the outputs `rows` on the current stream; for those with one of
        `choices`, the token of `chosen` int32 [n] instead."""
        if chosen is None:
            return self._send_logits(logits, rows, take)
        parcels: list[Parcel] = []
        first = 0
        for is_chosen, run in groupby(choices, key=lambda choice: choice is not None):
            part = slice(first, first + len(list(run)))
            if is_chosen:
                consume = partial(_consume, take, rows[part])
                parcels.append(self._chosen.send(chosen[part], consume))
            else:
                parcels += self._send_logits(logits[part], rows[part], take)
            first = part.stop
        return parcels

    def _send_logits(self, logits: Tensor, rows: range, take: Take) -> list[Parcel]:
        return [
            self._logits.send(logits[at : at + ROWS], partial(_consume, take, rows[at : at + ROWS]))
            for at in range(0, len(rows), ROWS)
        ]

    def deliver(self, parcels: Sequence[Parcel]) -> Deliver | None:
        """What is left for the host to do about a ubatch's logits."""
        if self._waits:
            self._open(parcels)
            return None
        return partial(self._open, parcels)

    def _open(self, parcels: Sequence[Parcel]) -> None:
        for parcel in parcels:
            parcel.landing.deliver(parcel)


def _consume(take: Take, rows: range, made: Tensor) -> None:
    take(made, rows)
