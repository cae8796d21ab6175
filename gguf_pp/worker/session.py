"""One connection to a worker: answers requests, takes ubatches in, sends results out.

The connection's reader takes frames; requests go to the session's own thread, which answers them in
order, ubatches go straight to the stages. Whatever the other side does wrong ends this session and
nothing else.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from gguf_pp import __version__
from gguf_pp.batch import UBatch
from gguf_pp.errors import RemoteError
from gguf_pp.net import Agreed, Channel, Connection
from gguf_pp.pipeline.credits import Outgoing
from gguf_pp.wire import (
    MAX_CHUNK_BYTES,
    MIN_VERSION,
    REQUESTS,
    VERSION,
    Fields,
    Frame,
    ProtocolError,
    Verb,
    pack_json,
    pack_range,
    pack_seconds,
    pack_ubatch,
    unpack_json,
    unpack_offset,
    unpack_ubatch,
)
from gguf_pp.worker.declared import read_declared, read_identity, read_rung
from gguf_pp.worker.host import Host
from gguf_pp.worker.lender import trim
from gguf_pp.worker.link import join
from gguf_pp.worker.refusal import refusal, shown
from gguf_pp.worker.store import StoredModel
from gguf_pp.worker.work import Ways, Work

PROGRESS_S = 0.2
"""Between two reports on loading."""
MAX_REQUESTS = 16
"""Requests of one client that may wait to be answered."""

log = logging.getLogger("gguf_pp")


class Session:
    """A client's connection, or one of a worker that sends ubatches to a client's stages here."""

    def __init__(self, host: Host, channel: Channel, agreed: Agreed) -> None:
        self.peer = channel.peer
        self.work: Work | None = None
        self._host = host
        self._stored: StoredModel | None = None
        self._started_s = time.monotonic()
        self._requests: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._chunk = memoryview(b"")
        self._incoming: UBatch | None = None
        self._ids: dict[int, int] = {}
        self._n_free = 0
        self._lock = threading.Lock()
        self._link: Outgoing | None = None
        self._upstream: Session | None = None
        self._feeds: Session | None = None
        self._is_sealed = False  # neither stages nor what brings ubatches changes any more
        self._disk_error: RemoteError | None = None
        self.error: RemoteError | None = None
        self.connection = Connection(channel, host.timeout_s, self, heartbeat_s=agreed.heartbeat_s)

    def run(self) -> None:
        """Serve until the connection ends."""
        self.connection.start()
        try:
            while (frame := self._requests.get()) is not None:
                self._answer(frame)
        finally:
            self._end()

    def _answer(self, frame: Frame) -> None:
        """Do what a request asks. What cannot be done is told; what must not ends the session."""
        try:
            answer, payload = self._do(frame)
        except Exception as exc:
            # Whatever it is, it must cost this session only.
            body = refusal(exc)
            if body["kind"] == "internal":
                log.exception("%s: %s failed", self.peer, frame.verb.name)
            self._send(Verb.ERROR, frame.id, pack_json(body), wait=True)
            if isinstance(exc, ProtocolError):
                self.connection.close(f"sent what it should not: {exc}")
        else:
            # Waiting, so that a client which asks and never listens fills no memory.
            self._send(Verb.OK, frame.id, pack_json(answer), payload, wait=True)

    def _send(
        self,
        verb: Verb,
        id_: int,
        meta: bytes = b"",
        payload: memoryview | None = None,
        *,
        wait: bool = False,
    ) -> None:
        with suppress(RemoteError):  # the end of the session is on its way
            self.connection.send(verb, id_, meta, payload, wait=wait)

    def _do(self, frame: Frame) -> tuple[dict[str, Any], memoryview | None]:
        verb, body = frame.verb, unpack_json(frame.meta)
        if verb is Verb.SEND:
            n_bytes = body.integer("n_bytes", 0, MAX_CHUNK_BYTES)
            return {}, memoryview(bytes(n_bytes)) if n_bytes else None
        doers: dict[Verb, Callable[[Fields], dict[str, Any]]] = {
            Verb.INFO: self._info,
            Verb.OPEN: self._open,
            Verb.ALLOCATE: self._allocate,
            Verb.RELEASE: self._release,
            Verb.LINK_IN: self._link_in,
            Verb.LINK_OUT: self._link_out,
            Verb.JOIN: self._join,
            Verb.SINK: lambda body: {},
        }
        if verb is Verb.LOAD:
            return self._load(body, frame.id), None
        return doers[verb](body), None

    def _info(self, body: Fields) -> dict[str, Any]:
        host = self._host
        answer: dict[str, Any] = {
            "version": __version__,
            "wire": [MIN_VERSION, VERSION],
            "devices": host.lender.describe(),
            "forwards": host.forwards,
        }
        if body.has("identity"):
            answer["has_model"] = host.store.where(read_identity(body.object("identity")))
        return answer

    def _open(self, body: Fields) -> dict[str, Any]:
        if self._stored is not None or self._feeds is not None:
            raise ProtocolError("a second model in one session")
        declared = read_declared(body, self._host.lender.names)
        self._host.admit(self)
        self._stored = self._host.store.open(declared.identity, declared.metadata, declared.tensors)
        again, broke = partial(self._grant, 1), partial(self._tell_lost, "device")
        ways = Ways(self._send_on, self._send_logits, self._report, again, broke)
        self.work = Work(declared, self._stored, self._host.lender.loan(), ways)
        stages = self.work.stages
        return {
            "missing": list(self._stored.missing),
            "origin": self._stored.origin,
            "weight_bytes": [stage.weight_bytes for stage in stages],
            "kernels": [stage.kernels for stage in stages],
            "overhead_rows": max(stage.overhead_rows for stage in stages),
        }

    def _opened(self) -> Work:
        if self.work is None:
            raise ProtocolError("no model is open")
        return self.work

    def _preparing(self) -> Work:
        work = self._opened()
        if self._is_sealed:
            raise ProtocolError("the model is loaded already")
        return work

    def _allocate(self, body: Fields) -> dict[str, Any]:
        work = self._preparing()
        work.allocate(read_rung(body))
        uses = [use for stage in work.stages for use in stage.uses()]
        return {
            "kv_bytes": [use.kv_bytes for use in uses],
            "buffer_bytes": [use.buffer_bytes for use in uses],
            "free_bytes": [use.free_bytes for use in uses],
        }

    def _release(self, body: Fields) -> dict[str, Any]:
        self._preparing().release()
        trim()  # what failed to be allocated is still held by what it raised
        return {}

    def _load(self, body: Fields, id_: int) -> dict[str, Any]:
        work = self._preparing()
        with self._lock:
            self._is_sealed = True
        total = sum(stage.weight_bytes for stage in work.stages)
        done, told_s = 0, time.monotonic()

        def step(n_bytes: int) -> None:
            nonlocal done, told_s
            if self.error is not None:  # nobody waits for it any more
                raise self.error
            with self._lock:
                done += n_bytes
                now = time.monotonic()
                if now - told_s < PROGRESS_S:
                    return
                told_s = now
            progress = {"done_bytes": min(done, total), "total_bytes": total}
            self._send(Verb.PROGRESS, id_, pack_json(progress))

        work.load(body.integer("n_ctx", 1, 1 << 30), step)
        assert work.rung is not None and self._stored is not None
        log.info("%s: %s loaded from the %s", self.peer, self._what, self._stored.origin)
        self._grant(work.rung.n_copies)
        return {}

    @property
    def _what(self) -> str:
        declared = self._opened().declared
        stages = declared.stages
        layers = f"{stages[0][1].layers.start}-{stages[-1][1].layers.stop - 1}"
        return f"layers {layers} of {declared.label}"

    def _grant(self, n: int) -> None:
        """Let whoever sends ubatches send `n` more."""
        with self._lock:
            self._n_free += n
            source = self._upstream or self
        source._send(Verb.CREDIT, n)

    def _link_in(self, body: Fields) -> dict[str, Any]:
        self._preparing()
        return {"token": self._host.offer_link(self)}

    def _join(self, body: Fields) -> dict[str, Any]:
        if self.work is not None or self._feeds is not None:
            raise ProtocolError("a session cannot be a link too")
        target = self._host.linked(body.text("token", 64))
        target.follow(self)
        self._feeds = target
        return {}

    def follow(self, upstream: "Session") -> None:
        """From now on ubatches come over that link only. Raises ProtocolError."""
        with self._lock:
            if self._is_sealed or self._upstream is not None:
                raise ProtocolError("no session waits for this link any more")
            self._upstream = upstream

    def unfollow(self) -> None:
        """The link is over. The client must know: a ubatch may have been lost on it."""
        with self._lock:
            upstream, self._upstream = self._upstream, None
        if self._is_sealed and upstream is not None:
            self._tell_lost("link", f"the link that brings its input is lost: {upstream.error}")

    def _tell_lost(self, kind: str, message: str) -> None:
        """Have the client end the session, with a reason."""
        if self.error is None:
            log.warning("%s: %s", self.peer, message)
            self._send(Verb.ERROR, 0, pack_json({"kind": kind, "message": message}))

    def _link_out(self, body: Fields) -> dict[str, Any]:
        work = self._preparing()
        if work.declared.heads or self._link is not None:
            raise ProtocolError("nothing goes on from here")
        self._link = join(self._host, body, self._link_lost)
        return {}

    def _link_lost(self, error: RemoteError) -> None:
        if self._link is not None:
            self._tell_lost("link", f"the link is lost: {error}")

    def payload_for(self, frame: Frame) -> memoryview:
        """As in net.Handler."""
        if frame.verb in (Verb.TENSOR, Verb.SINK):
            if not self._chunk:
                self._chunk = memoryview(bytearray(MAX_CHUNK_BYTES))
            return self._chunk[: frame.n_payload]
        if frame.verb is not Verb.SUBMIT:
            raise ProtocolError(f"{frame.verb.name} with a payload")
        return self._target_session().expect(frame)

    def _target_session(self) -> "Session":
        if self._upstream is not None:
            raise ProtocolError("a ubatch that does not come over the link")
        return self._feeds or self

    def expect(self, frame: Frame) -> memoryview:
        """Where the hidden states of a ubatch belong, which `frame` announces."""
        work, ubatch = self._read_ubatch(frame)
        self._incoming = ubatch
        return work.target(ubatch)

    def _read_ubatch(self, frame: Frame) -> tuple[Work, UBatch]:
        work = self._opened()
        ubatch = unpack_ubatch(frame.meta, tokens=work.declared.embeds)
        n_bytes = work.payload_bytes(ubatch)
        if frame.n_payload != n_bytes:
            raise ProtocolError(f"a ubatch with {frame.n_payload} bytes, {n_bytes} wanted")
        with self._lock:
            if self._n_free < 1:
                raise ProtocolError("a ubatch more than there are copies")
            self._n_free -= 1
        return work, ubatch

    def handle(self, frame: Frame) -> None:
        """As in net.Handler."""
        if frame.verb is Verb.SUBMIT:
            self._target_session().take_in(frame)
        elif frame.verb is Verb.TENSOR:
            if self._stored is None:
                raise ProtocolError("a tensor before a model was opened")
            self._keep(self._stored, frame)
        elif frame.verb in REQUESTS:
            if self._requests.qsize() >= MAX_REQUESTS:
                raise ProtocolError(f"more than {MAX_REQUESTS} requests at once")
            self._requests.put(frame)
        else:
            raise ProtocolError(f"{frame.verb.name} is not for a worker")

    def _keep(self, stored: StoredModel, frame: Frame) -> None:
        if self._disk_error is not None:
            return
        try:
            stored.write(frame.id, unpack_offset(frame.meta), self._chunk[: frame.n_payload])
        except RemoteError as exc:  # LOAD will say so to the client
            log.warning("%s: %s", self.peer, exc)
            self._disk_error = exc

    def take_in(self, frame: Frame) -> None:
        """Run the ubatch that `frame` brought."""
        ubatch, self._incoming = self._incoming, None
        if ubatch is None:
            _, ubatch = self._read_ubatch(frame)
        with self._lock:
            self._ids[id(ubatch)] = frame.id
        self._opened().take_in(ubatch)

    def _send_on(self, ubatch: UBatch, data: memoryview) -> None:
        """Hidden states, to the next worker or to the client."""
        id_ = self._ids[id(ubatch)]
        if self._link is not None:
            self._link.submit(id_, pack_ubatch(ubatch, tokens=False), data)
        else:
            self.connection.send(Verb.RESULT, id_, b"", data, wait=True)

    def _send_logits(self, ubatch: UBatch, rows: range, data: memoryview) -> None:
        id_ = self._ids[id(ubatch)]
        self.connection.send(Verb.LOGITS, id_, pack_range(rows), data, wait=True)

    def _report(self, ubatch: UBatch, seconds: list[float], error: BaseException | None) -> None:
        with self._lock:
            id_ = self._ids.pop(id(ubatch))
        if error is None:
            self.connection.send(Verb.DONE, id_, pack_seconds(seconds))
            return
        log.warning("%s: a ubatch failed: %s", self.peer, shown(error))
        self.connection.send(Verb.FAIL, id_, pack_json({"message": shown(error)}))

    def lost(self, error: RemoteError) -> None:
        """As in net.Handler."""
        self.error = error
        if self._link is not None:
            self._link.close()
        self._requests.put(None)

    @property
    def progress(self) -> tuple[int, bool]:
        """Rows computed so far, and whether nothing is in flight here."""
        return (0, True) if self.work is None else (self.work.n_rows, self.work.is_idle)

    def _end(self) -> None:
        """Give everything back, and say what the session was."""
        self.connection.close()
        with self._lock:
            self._is_sealed, upstream = True, self._upstream
        if self._link is not None:
            self._link.close()
        self._host.withdraw_links(self)
        if upstream is not None:
            upstream.connection.close("the session that it fed is over")
        if self._feeds is not None:
            self._feeds.unfollow()
        if self.work is not None:
            log.info(
                "%s: %s, %d tokens, %.1f s: %s",
                self.peer,
                self._what,
                self.work.n_rows,
                time.monotonic() - self._started_s,
                self.error,
            )
            self.work.close()
        self.work = self._upstream = self._feeds = None
        self._chunk = memoryview(b"")
        if self._stored is not None:
            self._stored.close()
            self._stored = None
            trim()
            self._host.lender.tidy()
