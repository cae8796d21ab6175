"""Our side of a session with a worker: requests, credits, and what becomes of each ubatch there."""

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from gguf_pp.backend.base import Memory, OutOfMemory
from gguf_pp.batch import UBatch
from gguf_pp.config import RuntimeConfig
from gguf_pp.errors import GgufPpError, PlacementError, RemoteError, UnsupportedError
from gguf_pp.net import Endpoint, Refused, Stats
from gguf_pp.pipeline.credits import Credits
from gguf_pp.pipeline.lent import MAX_DEVICES, Access, LentDevice, connect, misspoken
from gguf_pp.wire import (
    Fields,
    Frame,
    ProtocolError,
    Verb,
    pack_ubatch,
    unpack_json,
    unpack_range,
    unpack_seconds,
)

_CHUNKS_AHEAD = 2
"""Parts of logits that are received while an earlier one is used."""


class RemoteDevice:
    """A device that a worker lends: what placing asks of it. `name_there` is the worker's name."""

    local = False

    def __init__(self, peer: "Peer", lent: LentDevice) -> None:
        self.peer = peer
        self.lent = lent
        self.name_there = lent.name_there
        self.name = f"tcp://{peer.endpoint.peer}/{lent.name_there}"
        self.n_threads = lent.n_threads
        self.relative_speed = lent.relative_speed
        self._memory = Memory(
            f"{peer.endpoint.peer} {lent.pool}", lent.total_bytes, lent.free_bytes
        )

    def memory(self) -> Memory:
        """Total bytes, and those free when the worker was asked. Raises PlacementError for
        a device that is lent no more."""
        if self.lent.unusable:
            raise PlacementError(
                f"{self.name} can be used no more: {self.lent.unusable}",
                hint="restart that worker, then try again",
            )
        return self._memory


class Pending:
    """A ubatch that a worker has, from before it is sent until it is done there.

    The reader of the connection fills it; the stage's own thread says where the result goes.
    `followers` are the same ubatch at the workers that get it from this one.
    """

    def __init__(self, ubatch: UBatch, result_bytes: int, n_logits: int) -> None:
        self.ubatch = ubatch
        self.followers: list[Pending] = []
        self.seconds: tuple[float, ...] = ()
        self._left_bytes = result_bytes
        self._n_logits = n_logits
        self._n_received = 0
        self._error: BaseException | None = None
        self._wanted = threading.Event()
        self._target: memoryview | None = None
        self._early: memoryview | None = None
        self._dropped = False
        self._done = threading.Event()
        self._room = threading.Semaphore(_CHUNKS_AHEAD)
        self._chunks: queue.SimpleQueue[tuple[Tensor, range] | None] = queue.SimpleQueue()

    def receive(self, target: memoryview | None) -> None:
        """Wait for the end; the result goes to `target`. Raises what went wrong."""
        self._target = target
        self._wanted.set()
        self._done.wait()
        if self._error is not None:
            raise self._error
        if target is not None and self._early is not None:
            target[:] = self._early

    def receive_logits(self, take: Callable[[Tensor, range], object]) -> None:
        """Hand logits to `take` as they come, until the end. Raises what went wrong."""
        self._wanted.set()
        while (chunk := self._chunks.get()) is not None:
            try:
                take(*chunk)
            except BaseException:
                self.drop()
                raise
            self._room.release()
        self.receive(None)

    def drop(self) -> None:
        """Nobody waits for this one any more; what comes of it is thrown away."""
        self._dropped = True
        self._wanted.set()
        self._room.release(self.ubatch.n_rows)

    def result_target(self, n_bytes: int) -> memoryview:
        """Where the reader puts the result: where it is wanted, or aside until it is. It does not
        wait: to a worker, a peer that takes nothing while a slow stage computes looks dead."""
        if n_bytes != self._left_bytes:
            raise ProtocolError(f"a result of {n_bytes} bytes, {self._left_bytes} wanted")
        self._left_bytes = 0
        target = self._target
        if target is None:
            target = self._early = memoryview(bytearray(n_bytes))
        return target

    def logits_target(self, rows: range, n_vocab: int, n_bytes: int) -> tuple[Tensor, memoryview]:
        """Where the reader puts logits; waits while enough are unused."""
        if n_bytes != 4 * len(rows) * n_vocab:
            raise ProtocolError(f"{n_bytes} bytes of logits for {len(rows)} rows of {n_vocab}")
        if rows.start != self._n_received or rows.stop > self._n_logits:
            raise ProtocolError(f"logits of output {rows.start}, not of {self._n_received}")
        self._n_received = rows.stop
        self._wanted.wait()
        self._room.acquire()
        chunk = torch.empty(len(rows), n_vocab)
        return chunk, bytes_of(chunk)

    def push(self, chunk: Tensor, rows: range) -> None:
        """Logits have arrived."""
        if not self._dropped:
            self._chunks.put((chunk, rows))

    def complete(self, seconds: tuple[float, ...]) -> None:
        """The worker is through with it, and all that it makes has come. Raises ProtocolError."""
        if self._left_bytes or self._n_received != self._n_logits:
            raise ProtocolError("the end of a ubatch before its result")
        self.seconds = seconds
        self.end()

    def end(self, error: BaseException | None = None) -> None:
        """The worker is through with it, or will never be. Workers that follow get nothing then."""
        if self._done.is_set():
            return
        self._error = error
        self._done.set()
        self._chunks.put(None)
        if error is not None:
            self._wanted.set()
            self._room.release(self.ubatch.n_rows)
            for follower in self.followers:
                follower.end(error)


class Peer:
    """A session with a worker, and `devices` that it lends. Requests are made from one thread;
    ubatches are submitted from one other."""

    def __init__(self, endpoint: Endpoint, config: RuntimeConfig) -> None:
        """Connect, and ask what there is. Raises RemoteError, ConfigError."""
        self.endpoint = endpoint
        self.n_stages = 0
        self.n_vocab = 0
        self._access = Access.of(config)
        self._lock = threading.Lock()
        self._credits = Credits()
        self._pending: dict[int, Pending] = {}
        self._logits: tuple[Tensor, range] | None = None
        self._failure: RemoteError | None = None
        self._before: Peer | None = None
        self._connection = connect(endpoint, self._access, self)
        self._connection.start()
        self.devices = self._ask_devices()

    def _ask_devices(self) -> list[RemoteDevice]:
        try:
            info = self.request(Verb.INFO, {}, doing="saying what it has")
            self._forwards = info.has("forwards") and info.flag("forwards")
            lent = [LentDevice.read(item) for item in info.objects("devices", MAX_DEVICES)]
        except ProtocolError as exc:
            self.close()
            raise misspoken(self.endpoint, exc) from exc
        except BaseException:
            self.close()
            raise
        return [RemoteDevice(self, device) for device in lent]

    @property
    def failure(self) -> RemoteError | None:
        """How the session ended, from the moment on in which sending may say so."""
        return self._failure or self._connection.error

    def reconnect(self) -> None:
        """Begin a new session with the same worker. Raises RemoteError, and stays failed then."""
        self.close()
        self._connection = connect(self.endpoint, self._access, self)
        with self._lock:
            self._credits, self._failure, self._before = Credits(), None, None
            self._pending.clear()
        self._connection.start()

    def request(
        self,
        verb: Verb,
        body: dict[str, Any],
        *,
        doing: str,
        progress: Callable[[Fields], None] | None = None,
    ) -> Fields:
        """Ask the worker; raises RemoteError, OutOfMemory, PlacementError, UnsupportedError."""
        try:
            return self._connection.request(verb, body, doing=doing, progress=progress)
        except Refused as exc:
            with self.understood():
                raise self._error_of(exc) from exc

    @contextmanager
    def understood(self) -> Iterator[None]:
        """Read an answer inside; raises RemoteError for one that makes no sense."""
        try:
            yield
        except ProtocolError as exc:
            raise misspoken(self.endpoint, exc) from exc

    def _error_of(self, exc: Refused) -> Exception:
        """What the worker refused, as the error that a device of this machine would raise."""
        if exc.kind == "memory":
            device = f"tcp://{self.endpoint.peer}/{exc.fields.text('device', 64)}"
            what = exc.fields.text("what")
            sizes = exc.fields.integer("asked_bytes"), exc.fields.integer("free_bytes")
            return OutOfMemory(device, what, *sizes)
        kinds: dict[str, type[GgufPpError]] = {
            "config": PlacementError,
            "model": UnsupportedError,
        }
        return kinds.get(exc.kind, RemoteError)(str(exc), hint=exc.hint)

    @property
    def stats(self) -> Stats:
        """What went over the connection."""
        return self._connection.stats

    def send(self, verb: Verb, id_: int, meta: bytes, payload: memoryview) -> None:
        """Send bulk data; returns when the payload may change. Raises RemoteError."""
        self._connection.send(verb, id_, meta, payload, wait=True)

    def link_to(self, following: "Peer") -> bool:
        """Have the worker send hidden states straight to the one of `following`, if it can.

        It is told the address by which we reach that one.
        """
        if not self._forwards:
            return False
        where = following.request(Verb.LINK_IN, {}, doing="preparing a link")
        with following.understood():
            token = where.text("token", 64)
        body = {
            "host": following.endpoint.host,
            "port": following.endpoint.port,
            "token": token,
        }
        try:
            self.request(Verb.LINK_OUT, body, doing=f"reaching {following.endpoint.peer}")
        except RemoteError:
            return False
        following._before = self
        return True

    def expect(self, id_: int, pending: Pending) -> None:
        """Ubatch `id_` will come to this worker. Raises RemoteError if the session is over."""
        with self._lock:
            if self.failure is not None:
                raise self.failure
            self._pending[id_] = pending

    def submit(self, id_: int, ubatch: UBatch, *, tokens: bool, payload: memoryview | None) -> None:
        """Send a ubatch once the worker has a copy for it; returns when the payload may change.

        Raises RemoteError.
        """
        self._credits.spend()
        meta = pack_ubatch(ubatch, tokens=tokens)
        self._connection.send(Verb.SUBMIT, id_, meta, payload, wait=True)

    def payload_for(self, frame: Frame) -> memoryview:
        """As in net.Handler."""
        pending = self._pending.get(frame.id)
        if pending is None:
            raise ProtocolError(f"{frame.verb.name} for ubatch {frame.id}, which it does not have")
        if frame.verb is Verb.RESULT:
            return pending.result_target(frame.n_payload)
        if frame.verb is Verb.LOGITS:
            rows = unpack_range(frame.meta, len(pending.ubatch.outputs))
            chunk, target = pending.logits_target(rows, self.n_vocab, frame.n_payload)
            self._logits = chunk, rows
            return target
        raise ProtocolError(f"{frame.verb.name} with a payload")

    def handle(self, frame: Frame) -> None:
        """As in net.Handler."""
        if frame.verb is Verb.CREDIT:
            self._credits.grant(frame.id)
            return
        pending = self._pending.get(frame.id)
        if pending is None:
            raise ProtocolError(f"{frame.verb.name} for ubatch {frame.id}, which it does not have")
        if frame.verb is Verb.LOGITS and self._logits is not None:
            chunk, self._logits = self._logits, None
            pending.push(*chunk)
        elif frame.verb is Verb.DONE:
            pending.complete(unpack_seconds(frame.meta, self.n_stages))
            del self._pending[frame.id]
        elif frame.verb is Verb.FAIL:
            message = unpack_json(frame.meta).text("message")
            error = RemoteError(f"{self.endpoint.peer}: {message}")
            self._pending.pop(frame.id).end(error)
        elif frame.verb is not Verb.RESULT:
            raise ProtocolError(f"{frame.verb.name} is not for a client")

    def lost(self, error: RemoteError) -> None:
        """As in net.Handler."""
        if isinstance(error, Refused) and error.kind == "link" and self._before is not None:
            # The worker does not know that one by the name we know.
            error = RemoteError(f"{error} (it comes from {self._before.endpoint.peer})")
        with self._lock:
            self._failure = error
            pending = list(self._pending.values())
        self._credits.fail(error)
        for each in pending:
            each.end(error)

    def close(self) -> None:
        """End the session."""
        self._connection.close()


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, to send or to receive into."""
    assert tensor.is_contiguous()
    return memory_of(tensor.numpy())


def memory_of(array: NDArray[Any]) -> memoryview:
    """The bytes of a contiguous array."""
    return memoryview(array.data).cast("B")
