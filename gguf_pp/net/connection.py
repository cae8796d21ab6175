"""Frames both ways over one channel: a thread that reads, a thread that writes, and requests."""

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Protocol

from gguf_pp.errors import RemoteError
from gguf_pp.net.channel import Bytes, Channel, Expired, Lost
from gguf_pp.net.requests import ANSWERS, Progress, Refused, Requests
from gguf_pp.wire import (
    HEADER,
    MAX_META_BYTES,
    Fields,
    Frame,
    ProtocolError,
    Verb,
    pack_header,
    pack_json,
    unpack_header,
)

_SLOWEST_BYTES_PER_S = 32 << 10
_MAX_QUEUED = 1 << 14
"""Frames: whoever asks and asks and reads no answers must not fill our memory with them."""
_FAREWELL_S = 1.0


class Handler(Protocol):
    """What a connection does with what comes in. Calls on the reader thread never overlap."""

    def payload_for(self, frame: Frame) -> memoryview:
        """Where the payload belongs: exactly `frame.n_payload` writable bytes, never 0.

        On the reader thread, before the payload is read. May wait, and may raise ProtocolError,
        which ends the connection. Asked for the payload of an OK too.
        """
        ...

    def handle(self, frame: Frame) -> None:
        """Act on a frame whose payload is in place. Never an OK, ERROR, PROGRESS or PING.

        On the reader thread, so the next frame waits. May raise ProtocolError.
        """
        ...

    def lost(self, error: RemoteError) -> None:
        """The connection is over, whatever ended it: called once, on the writer thread.

        `payload_for` or `handle` may still be running on the reader thread: make them return.
        """
        ...


class Stats(NamedTuple):
    """Bytes so far, and the seconds from the last answered request to its answer (0: none yet)."""

    sent_bytes: int
    received_bytes: int
    round_trip_s: float


class _Out(NamedTuple):
    """A frame, or what is left of it."""

    parts: Sequence[Bytes]
    n_bytes: int
    written: threading.Event | None


class Connection:
    """Speaks frames over `channel`, which it owns, after the handshake.

    The other side counts as gone once it was silent for `timeout_s`, or took that long over a frame
    (plus a second for each 32 KiB of it). It hears of us every `heartbeat_s` at least: a third of
    `timeout_s`, unless the handshake agreed on something else.
    """

    def __init__(
        self,
        channel: Channel,
        timeout_s: float,
        handler: Handler,
        *,
        heartbeat_s: float | None = None,
    ) -> None:
        self._channel = channel
        self._timeout_s = timeout_s
        self._heartbeat_s = timeout_s / 3 if heartbeat_s is None else heartbeat_s
        self._handler = handler
        self._out: SimpleQueue[_Out | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._error: RemoteError | None = None
        self._requests = Requests(channel.peer)
        self._header = bytearray(HEADER.size)
        self._sent_bytes = self._received_bytes = 0
        self._n_unwritten = 0
        self._writing: threading.Event | None = None
        self._threads: tuple[threading.Thread, ...] = ()
        self._n_running = 0

    def start(self) -> None:
        """Begin to read and write; the handler is called from now on."""
        assert not self._threads, "started twice"
        self._n_running = 2
        self._threads = tuple(
            threading.Thread(target=target, name=f"{name} {self.peer}", daemon=True)
            for target, name in ((self._read, "read"), (self._write, "write"))
        )
        for thread in self._threads:
            thread.start()

    @property
    def peer(self) -> str:
        """host:port of the other side."""
        return self._channel.peer

    @property
    def stats(self) -> Stats:
        """What went over it so far."""
        return Stats(self._sent_bytes, self._received_bytes, self._requests.round_trip_s)

    def send(
        self,
        verb: Verb,
        id_: int = 0,
        meta: bytes = b"",
        payload: Bytes | None = None,
        *,
        wait: bool = False,
    ) -> None:
        """Queue a frame; frames go out in the order they were queued.

        With `wait`, return once the kernel has the payload, whose memory is free again; without,
        never block. Raises RemoteError once the connection is lost.
        """
        written = threading.Event() if wait else None
        self._queue(verb, id_, meta, payload, written)
        if written is not None:
            written.wait()
            self._check()

    def _queue(
        self,
        verb: Verb,
        id_: int,
        meta: bytes,
        payload: Bytes | None,
        written: threading.Event | None,
    ) -> None:
        assert len(meta) <= MAX_META_BYTES
        n_payload = 0 if payload is None else memoryview(payload).nbytes
        head = pack_header(verb, id_, len(meta), n_payload) + meta
        out = _Out([head] if payload is None else [head, payload], len(head) + n_payload, written)
        # If ^C comes in between, nobody knows how much of the frame is gone.
        error: str | None = f"sending to {self.peer} was interrupted"
        try:
            with self._lock:
                if self._error is None and self._n_unwritten < _MAX_QUEUED:
                    self._put(out)
                    error = None
                else:
                    error = f"{self.peer} left {_MAX_QUEUED} frames unread"
        except Lost as exc:
            error = f"{self.peer} {exc}"
        finally:
            if error is not None:
                self._fail(error)
        if error is not None:
            self._check()

    def _put(self, out: _Out) -> None:
        """With the lock held: write it here and now, which saves waking the writer; or queue it."""
        if not self._n_unwritten:
            out = out._replace(parts=self._channel.send_some(out.parts))
            if not out.parts:
                self._wrote(out)
                return
        self._n_unwritten += 1
        self._out.put(out)

    def _wrote(self, out: _Out) -> None:
        self._sent_bytes += out.n_bytes
        if out.written is not None:
            out.written.set()

    @property
    def error(self) -> RemoteError | None:
        """How it ended. The handler hears of it a little later."""
        return self._error

    def _check(self) -> None:
        if self._error is not None:
            raise RemoteError(str(self._error), hint=self._error.hint)

    def request(
        self,
        verb: Verb,
        body: dict[str, Any],
        payload: Bytes | None = None,
        *,
        doing: str,
        timeout_s: float | None = None,
        progress: Progress | None = None,
    ) -> Fields:
        """Send a request and wait for its answer, as long as the other side shows signs of life.

        `doing` completes "10.0.0.2:50052 closed the connection while ...". `progress` gets every
        PROGRESS, on the reader thread. Raises Refused for an ERROR, and RemoteError when the
        connection is lost or, given `timeout_s`, that has passed. Not for the handler's use.
        """
        assert threading.current_thread() not in self._threads, "the answer could not be read"
        request = self._requests.open(doing, progress)
        try:
            self.send(verb, request.id, pack_json(body), payload)
            if not request.over.wait(timeout_s):
                raise RemoteError(f"{self.peer} gave no answer in {timeout_s:g} s")
            if request.answer is None:
                self._check()
        except RemoteError as exc:
            raise RemoteError(f"{exc} while {doing}", hint=exc.hint) from exc
        finally:
            self._requests.forget(request)
        if isinstance(request.answer, Refused):
            raise request.answer
        assert request.answer is not None
        return request.answer

    def close(self, reason: str = "closed here") -> None:
        """End the connection, from any thread. Idempotent.

        Frames not yet written are dropped: `send` the last one with `wait`. Both threads have ended
        on return, unless this is called on one of them.
        """
        self._fail(self._over(reason))
        if not self._threads:
            self._channel.close()
        if threading.current_thread() not in self._threads:
            for thread in self._threads:
                thread.join()

    def _over(self, reason: str) -> str:
        return f"the connection with {self.peer} is over: {reason}"

    def _fail(self, error: str | RemoteError) -> None:
        """End it, unless it has ended already. The writer thread does the rest."""
        with self._lock:
            if self._error is not None:
                return
            self._error = RemoteError(error) if isinstance(error, str) else error
            self._out.put(None)
        self._channel.shutdown()
        self._requests.lose()

    def _leave(self) -> None:
        with self._lock:
            self._n_running -= 1
            last = not self._n_running
        if last:
            self._channel.close()

    def _write(self) -> None:
        try:
            while self._error is None:
                self._write_next()
        except Lost as exc:
            self._fail(f"{self.peer} {exc}")
        finally:
            self._fail(self._over("its writer failed"))
            self._write_end()

    def _write_next(self) -> None:
        try:
            out = self._out.get(timeout=self._heartbeat_s)
        except Empty:
            with suppress(RemoteError):
                self._queue(Verb.PING, 0, b"", None, None)
            return
        if out is None:
            return
        allowed_s = self._allowed_s(out.n_bytes)
        self._writing = out.written
        try:
            self._channel.send(out.parts, time.monotonic() + allowed_s)
        except Expired as exc:
            raise Lost(f"did not take {out.n_bytes} bytes in {allowed_s:.3g} s") from exc
        with self._lock:
            self._n_unwritten -= 1
            self._wrote(out)

    def _write_end(self) -> None:
        """Wake who waits for a frame to be written; nothing is queued any more by now."""
        try:
            if self._writing is not None:
                self._writing.set()
            while not self._out.empty():
                out = self._out.get()
                if out is not None and out.written is not None:
                    out.written.set()
            assert self._error is not None
            self._handler.lost(self._error)
        finally:
            self._leave()

    def _read(self) -> None:
        try:
            while self._error is None:
                self._read_next()
        except Lost as exc:
            self._fail(f"{self.peer} {exc}")
        except ProtocolError as exc:
            self._farewell(str(exc))
            self._fail(f"{self.peer} broke the protocol: {exc}")
        except RemoteError as exc:
            self._fail(exc)
        finally:
            self._fail(self._over("its reader failed"))
            self._leave()

    def _read_next(self) -> None:
        try:
            self._channel.recv_into(memoryview(self._header), time.monotonic() + self._timeout_s)
        except Expired as exc:
            raise Lost(f"was silent for {self._timeout_s:g} s") from exc
        verb, id_, n_meta, n_payload = unpack_header(self._header)
        meta = bytearray(n_meta)
        self._fill(memoryview(meta))
        frame = Frame(verb, id_, bytes(meta), n_payload)
        if n_payload:
            view = self._handler.payload_for(frame)
            assert view.nbytes == n_payload
            self._fill(view.cast("B"))
        self._received_bytes += HEADER.size + n_meta + n_payload
        if self._error is not None:  # lost while payload_for was waiting
            return
        if verb in ANSWERS:
            self._requests.answer(frame)
        elif verb is not Verb.PING:
            self._handler.handle(frame)

    def _fill(self, view: memoryview) -> None:
        allowed_s = self._allowed_s(len(view))
        try:
            self._channel.recv_into(view, time.monotonic() + allowed_s)
        except Expired as exc:
            raise Lost(f"did not send {len(view)} bytes in {allowed_s:.3g} s") from exc

    def _allowed_s(self, n_bytes: int) -> float:
        return self._timeout_s + n_bytes / _SLOWEST_BYTES_PER_S

    def _farewell(self, message: str) -> None:
        """Say why, to a peer that may be an honest one of another version."""
        written = threading.Event()
        meta = pack_json({"kind": "protocol", "message": message})
        with suppress(RemoteError):
            self._queue(Verb.ERROR, 0, meta, None, written)
            written.wait(_FAREWELL_S)
