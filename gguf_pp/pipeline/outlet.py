"""The way of logits from a CUDA device to the host."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from gguf_pp.backend.cuda_host import Landing, Parcel
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
        self._landing = Landing(api, n_parcels, ROWS, n_vocab)
        self._waits = waits

    def send(self, logits: Tensor, rows: range, take: Take) -> list[Parcel]:
        """Queue logits [n, V] of the outputs `rows` on the current stream."""
        return [
            self._landing.send(
                logits[at : at + ROWS], partial(_consume, take, rows[at : at + ROWS])
            )
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
            self._landing.deliver(parcel)


def _consume(take: Take, rows: range, logits: Tensor) -> None:
    take(logits, rows)
