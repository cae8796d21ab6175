"""Requests on their way over one connection: ids, answers, and what an ERROR becomes."""

import threading
import time
from collections.abc import Callable

from gguf_pp.errors import RemoteError
from gguf_pp.wire import Fields, Frame, ProtocolError, Verb, unpack_json

Progress = Callable[[Fields], None]

ANSWERS = frozenset({Verb.OK, Verb.ERROR, Verb.PROGRESS})
_MAX_TEXT = 4096


class Refused(RemoteError):
    """The other side answered ERROR: `kind` and `fields` are as it said."""

    def __init__(self, message: str, *, hint: str | None, kind: str, fields: Fields) -> None:
        super().__init__(message, hint=hint)
        self.kind = kind
        self.fields = fields


class Request:
    """One of them; `over` is set with its `answer`, or without when the connection is lost."""

    def __init__(self, id_: int, doing: str, progress: Progress | None) -> None:
        self.id = id_
        self.doing = doing
        self.progress = progress
        self.since_s = time.monotonic()
        self.answer: Fields | Refused | None = None
        self.over = threading.Event()


class Requests:
    """Those that wait for an answer of `peer`. `round_trip_s` is how long the last answer took."""

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self._lock = threading.Lock()
        self._open: dict[int, Request] = {}
        self._last_id = 0
        self._lost = False
        self.round_trip_s = 0.0

    def open(self, doing: str, progress: Progress | None) -> Request:
        """A request with a fresh id; over at once if the connection is lost."""
        with self._lock:
            self._last_id += 1
            request = Request(self._last_id, doing, progress)
            self._open[request.id] = request
            if self._lost:
                request.over.set()
        return request

    def forget(self, request: Request) -> None:
        """Nobody waits for it any more; a late answer is dropped."""
        with self._lock:
            del self._open[request.id]

    def lose(self) -> None:
        """The connection is lost: no answers any more."""
        with self._lock:
            self._lost = True
            for request in self._open.values():
                request.over.set()

    def answer(self, frame: Frame) -> None:
        """Take an OK, ERROR or PROGRESS to whoever waits for it.

        Raises ProtocolError for an id that no request had, and Refused for an ERROR without an id:
        that one is about the connection as a whole.
        """
        fields = unpack_json(frame.meta)
        if frame.verb is Verb.ERROR and not frame.id:
            raise self._refused(self._peer, fields)
        with self._lock:
            if not 0 < frame.id <= self._last_id:
                raise ProtocolError(f"{frame.verb.name} for a request that was never made")
            request = self._open.get(frame.id)
        if request is None or request.over.is_set():
            return
        if frame.verb is Verb.PROGRESS:
            if request.progress is not None:
                request.progress(fields)
            return
        self.round_trip_s = time.monotonic() - request.since_s
        if frame.verb is Verb.ERROR:
            request.answer = self._refused(f"{self._peer}, while {request.doing}", fields)
        else:
            request.answer = fields
        request.over.set()

    @staticmethod
    def _refused(where: str, fields: Fields) -> Refused:
        hint = _printable(fields.text("hint", _MAX_TEXT)) if fields.has("hint") else None
        return Refused(
            f"{where}: {_printable(fields.text('message', _MAX_TEXT))}",
            hint=hint,
            kind=fields.text("kind"),
            fields=fields,
        )


def _printable(text: str) -> str:
    """Text of the other side, harmless on a terminal and on one line."""
    return "".join(c if c.isprintable() else "?" for c in text)
