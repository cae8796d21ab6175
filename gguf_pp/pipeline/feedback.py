"""Chosen tokens on their way from the last stage back to the first, past the host.

So the host may queue a step of a sequence before it knows the sequence's token. Parcels are lent by
the engine: one per ubatch that chooses tokens, until the host has landed it and knows them itself.
Who waits for whom is written in pipeline/ring.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from gguf_pp.backend.base import Backend, Buffer, Event, Stream
from gguf_pp.batch import Late, UBatch


class End(Protocol):
    """The first or the last stage."""

    @property
    def backend(self) -> Backend:
        """The device."""
        ...

    @property
    def compute(self) -> Stream:
        """Where tokens are read, and where they are chosen."""
        ...


@dataclass(frozen=True, slots=True)
class Parcel:
    """Room for the tokens of one ubatch: int32 bits in float32 [n_rows, 1].

    `out` is on the last device and `inp` on the first; one and the same where both ends are one
    stage. `chosen` passes when `out` is written, `filled` when `inp` is.
    """

    out: Buffer
    inp: Buffer
    chosen: Event
    filled: Event


class Feedback:
    """All parcels, and the stream of the last device that ships them."""

    def __init__(self, first: End, last: End, stream: Stream, n_vocab: int) -> None:
        """`stream` is one of its own, or `last.compute` where copying is quicker than handing
        over."""
        self.parcels: list[Parcel] = []
        self._first = first
        self._last = last
        self._stream = stream
        self._n_vocab = n_vocab
        self._reserved: list[tuple[Backend, int]] = []

    def allocate(self, n_parcels: int, n_rows: int) -> None:
        """Make parcels for `n_rows` tokens each; raises OutOfMemory. `release` undoes it, whole or
        half done."""
        for i in range(n_parcels):
            out = inp = self._buffer(self._last, n_rows, f"chosen tokens {i}")
            if self._first is not self._last:
                inp = self._buffer(self._first, n_rows, f"tokens to come {i}")
            backend = self._last.backend
            self.parcels.append(Parcel(out, inp, backend.event(), backend.event()))

    @property
    def n_bytes(self) -> int:
        """Of all parcels, on each end."""
        return sum(parcel.out.n_bytes for parcel in self.parcels)

    def _buffer(self, end: End, n_rows: int, what: str) -> Buffer:
        buffer = end.backend.buffer(n_rows, 1, what)
        self._reserved.append((end.backend, buffer.n_bytes))
        return buffer

    def release(self) -> None:
        """Drop all parcels and give their bytes back."""
        self.parcels.clear()
        while self._reserved:
            backend, n_bytes = self._reserved.pop()
            backend.release(n_bytes)

    def expect(self, ubatch: UBatch) -> None:
        """Queue what must have passed before `ubatch` is computed."""
        if self._first is self._last:  # one stream writes and reads, in order
            return
        for i_parcel in dict.fromkeys(late.parcel for late in ubatch.late):
            self._first.compute.wait(self.parcels[i_parcel].filled)
        if ubatch.parcel is not None:
            self._last.compute.wait(self.parcels[ubatch.parcel].filled)

    def ship(self, ubatch: UBatch) -> None:
        """Queue the way of what `ubatch`, which was queued before, leaves in its parcel."""
        if self._first is self._last or ubatch.parcel is None:
            return
        parcel = self.parcels[ubatch.parcel]
        self._last.compute.record(parcel.chosen)
        self._stream.wait(parcel.chosen)
        self._stream.copy(parcel.inp, parcel.out, len(ubatch.outputs))
        self._stream.record(parcel.filled)

    def fill_in(self, ids: Tensor, late: Sequence[Late]) -> None:
        """Put what was chosen into the `late` rows of `ids` int64 [T], on the first device.

        Only slices are copied: indexes would have to be brought to the device first.
        """
        for first, n in _runs(late):
            tokens = self.parcels[first.parcel].inp.tensor.view(torch.int32)
            chosen = tokens[first.i_output : first.i_output + n, 0]
            ids[first.row : first.row + n].copy_(chosen)
        # A ubatch that failed has left anything at all: nobody reads what comes of it, but it must
        # not be read from beyond the embedding.
        ids.clamp_(0, self._n_vocab - 1)

    def leave(self, parcel: int, rows: range, chosen: Tensor) -> None:
        """Write tokens of the outputs `rows` where the next ubatch finds them."""
        self.parcels[parcel].out.tensor.view(torch.int32)[rows.start : rows.stop, 0].copy_(chosen)


def _runs(late: Sequence[Late]) -> Iterator[tuple[Late, int]]:
    """Rows that follow each other both here and in their parcel: the first, and how many."""
    pairs = groupby(
        enumerate(late), key=lambda p: (p[1].parcel, p[1].row - p[0], p[1].i_output - p[0])
    )
    for _, run in pairs:
        rows = [each for _, each in run]
        yield rows[0], len(rows)
