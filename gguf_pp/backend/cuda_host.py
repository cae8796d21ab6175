"""Tensors between host and CUDA device, without either waiting for the other.

A copy from or to memory that is not pinned blocks the host until the device has come to it, which
would leave the device with nothing queued. Both classes belong to one thread and one stream, the
compute stream: what is brought is wanted there next, so that a stream beside it would win nothing.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class Uploads:
    """Positions, rows and token ids on their way to a device, or weights: `n_slots` pinned copies
    of `n_bytes` in turn.

    The host waits only if all are on their way, which bounds how far it runs ahead.
    """

    def __init__(self, api: Any, n_slots: int, n_bytes: int) -> None:
        self.n_bytes = n_bytes
        self._slots = [
            (api.empty((n_bytes,), dtype=api.uint8, pin_memory=True), api.cuda.Event(blocking=True))
            for _ in range(n_slots)
        ]
        self._next = 0

    def send(self, values: Tensor, out: Tensor) -> None:
        """Queue `out` <- `values` on the current stream; `values` may change right after.

        Both are contiguous, of the same dtype and shape, at most `n_bytes` long.
        """
        self.send_pieces([values], out)

    def send_pieces(self, pieces: Sequence[Tensor], out: Tensor) -> None:
        """The same for values in several tensors, stacked by rows."""
        memory, passed = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        passed.synchronize()
        rows, at = memory[: out.nbytes].view(out.dtype).view(out.shape), 0
        for piece in pieces:
            rows[at : at + len(piece)].copy_(piece)
            at += len(piece)
        out.copy_(rows, non_blocking=True)
        passed.record()


class Parcel:
    """A tensor on its way to the host, and what is to be done with it there."""

    def __init__(
        self, landing: "Landing", rows: Tensor, landed: Any, consume: Callable[[Tensor], None]
    ) -> None:
        self.landing = landing
        self._rows = rows
        self._landed = landed
        self._consume = consume
        self._error: BaseException | None = None
        self._is_open = False

    def open(self) -> None:
        """Block until it is here and consume it, once; what that raises is kept for `check`.

        An interrupt before that leaves it closed.
        """
        self._landed.synchronize()
        if self._is_open:
            return
        try:
            self._is_open = True
            self._consume(self._rows)
        except BaseException as exc:  # noqa: BLE001 - raised again by `check`
            self._error = exc

    def check(self) -> None:
        """Raise what consuming it raised, an interrupt only once."""
        error = self._error
        if error is None:
            return
        if not isinstance(error, Exception):
            self._error = RuntimeError("it was interrupted while it was consumed")
        raise error


class Landing:
    """Results on their way to the host: `n_slots` pinned tensors of `shape` in turn.

    Parcels are opened in the order in which they were sent, by whoever first wants one of them or
    of those after it, or when a slot is needed again.
    """

    def __init__(self, api: Any, n_slots: int, shape: tuple[int, ...], dtype: Any) -> None:
        self._slots = [
            (api.empty(shape, dtype=dtype, pin_memory=True), api.cuda.Event(blocking=True))
            for _ in range(n_slots)
        ]
        self._n_sent = 0
        self._closed: deque[Parcel] = deque()

    def send(self, rows: Tensor, consume: Callable[[Tensor], None]) -> Parcel:
        """Queue `rows`, at most as many as the shape has, to the host, on the current stream.

        `consume` gets them there; they are overwritten afterwards.
        """
        if len(self._closed) == len(self._slots):
            self._open_next()
        memory, landed = self._slots[self._n_sent % len(self._slots)]
        self._n_sent += 1
        target = memory[: len(rows)]
        target.copy_(rows, non_blocking=True)
        landed.record()
        parcel = Parcel(self, target, landed, consume)
        self._closed.append(parcel)
        return parcel

    def deliver(self, parcel: Parcel) -> None:
        """Open `parcel` and all before it; raises what consuming `parcel` raised."""
        with torch.inference_mode():
            while parcel in self._closed:
                self._open_next()
        parcel.check()

    def _open_next(self) -> None:
        self._closed[0].open()
        self._closed.popleft()  # not before: an interrupt would lose it
