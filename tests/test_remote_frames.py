"""Random and mutated frames: against a live worker, and by the million against its sessions."""

import json
import logging
import random
import socket
import struct
import time
from contextlib import suppress
from pathlib import Path

import pytest

from gguf_pp.batch import Span, UBatch
from gguf_pp.config import Options, resolve
from gguf_pp.errors import RemoteError
from gguf_pp.gguf import ModelFile
from gguf_pp.net import Agreed
from gguf_pp.net.handshake import OURS, _own_hello
from gguf_pp.pipeline.split import Part
from gguf_pp.wire import (
    HEADER,
    Frame,
    ProtocolError,
    Verb,
    pack_json,
    pack_offset,
    pack_ubatch,
    unpack_header,
)
from gguf_pp.worker import session as session_module
from gguf_pp.worker.server import Worker, WorkerConfig
from gguf_pp.worker.session import Session
from tests.good_client import GoodClient
from tests.light import CTX_SIZE, WAIT_S
from tests.nursery import nursery
from tests.prepared import prepare, whole
from tests.watchdog import watchdog

ANSWERED = {Verb.INFO, Verb.OPEN, Verb.ALLOCATE, Verb.LOAD, Verb.LINK_IN, Verb.SEND, Verb.SINK}
ROW_BYTES = 128


def conversation(prepared, embeds):
    """Frames (verb, id, meta, payload) of a client that does nothing wrong, up to its ubatches."""
    names = [t[0] for t in prepared["open"]["tensors"]]
    sizes = {"n_copies": 2, "ubatch_size": 16, "ctx_size": CTX_SIZE}
    frames = [
        (Verb.INFO, 1, pack_json({"identity": prepared["open"]["identity"]}), b""),
        (Verb.SINK, 2, b"{}", bytes(100)),
        (Verb.SEND, 3, pack_json({"n_bytes": 100}), b""),
        (Verb.OPEN, 4, json.dumps(prepared["open"]).encode(), b""),
        (Verb.ALLOCATE, 5, pack_json(sizes), b""),
        (Verb.LINK_IN, 6, b"{}", b""),
    ]
    with ModelFile.open(prepared["path"]) as file:
        for i, name in enumerate(names):
            frames.append((Verb.TENSOR, i, pack_offset(0), file.data(name).tobytes()))
    frames.append((Verb.LOAD, 7, pack_json({"n_ctx": CTX_SIZE}), b""))
    for i, (start, n) in enumerate([(0, 16), (16, 3), (19, 1)]):
        ubatch = UBatch(tuple(range(32, 32 + n)), (Span(0, start, n),), (n - 1,))
        payload = b"" if embeds else bytes(ROW_BYTES * n)
        frames.append((Verb.SUBMIT, i, pack_ubatch(ubatch, tokens=embeds), payload))
    frames += [(Verb.PING, 0, b"", b""), (Verb.RELEASE, 8, b"{}", b"")]
    frames += [(Verb.JOIN, 9, pack_json({"token": "00" * 32}), b"")]
    where = {"host": "127.0.0.1", "port": 9, "token": "00" * 32}
    frames += [(Verb.LINK_OUT, 10, pack_json(where), b"")]
    return frames


@pytest.fixture(scope="module")
def conversations(chat_model):
    return [
        conversation(whole(chat_model), True),
        conversation(prepare(chat_model, Part(range(1, 3), False, False)), False),
    ]


def mutated(rng, data):
    """Some bytes flipped, inserted, left out, or made extreme."""
    data = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randint(0, len(data))
        what = rng.randrange(4)
        if what == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif what == 1:
            data[at:at] = rng.randbytes(rng.randint(1, 4))
        elif what == 2:
            del data[at : at + rng.randint(1, 4)]
        else:
            data[at : at + 4] = rng.choice([b"\xff" * 4, bytes(4), b"\0\0\0\x80", b"9999", b"-1.5"])
    return bytes(data)


def hostile(rng, frames):
    """One frame: of the conversation but changed, or made up."""
    verb, id_, meta, payload = rng.choice(frames)
    what = rng.randrange(8)
    if what == 0:
        return rng.choice(list(Verb)), id_, rng.randbytes(rng.randint(0, 64)), payload
    if what == 1:
        return rng.choice(list(Verb)), id_, meta, payload
    if what == 2:
        return verb, rng.getrandbits(32), meta, payload
    if what == 3:
        return verb, id_, meta, mutated(rng, payload[:4096])
    if what == 4:
        return verb, id_, meta, payload
    return verb, id_, mutated(rng, meta), payload


def raw(frame):
    verb, id_, meta, payload = frame
    return HEADER.pack(verb, id_, len(meta), len(payload)) + meta + payload


def take(sock, n_bytes):
    data = bytearray()
    while len(data) < n_bytes:
        piece = sock.recv(n_bytes - len(data))
        if not piece:
            raise ConnectionResetError
        data += piece
    return bytes(data)


def answered(sock, id_):
    """Read frames until the answer to a request."""
    while True:
        verb, got, n_meta, n_payload = unpack_header(take(sock, HEADER.size))
        take(sock, n_meta + n_payload)
        if verb in (Verb.OK, Verb.ERROR) and got == id_:
            return


def talk(port, rng, frames):
    """Say the first frames as they are, and then what is not; how many of the latter."""
    n_good = 0 if rng.random() < 0.6 else rng.randrange(len(frames))
    with socket.create_connection(("127.0.0.1", port), WAIT_S) as sock:
        hello = _own_hello(OURS, 60.0, wants_proof=False)
        if rng.random() < 0.05:
            sock.sendall(mutated(rng, hello) + rng.randbytes(100))
            sock.shutdown(socket.SHUT_WR)
            return 1
        sock.sendall(hello)
        take(sock, len(hello))
        for frame in frames[:n_good]:
            sock.sendall(raw(frame))
            if frame[0] in ANSWERED:
                answered(sock, frame[1])
        tail = [raw(hostile(rng, frames)) for _ in range(rng.randint(1, 6))]
        if rng.random() < 0.3:
            tail = [mutated(rng, piece) for piece in tail]
        sock.sendall(b"".join(tail))
        if rng.random() < 0.2:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return len(tail)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(1 << 16):
            pass
        return len(tail)


def attack(worker, conversations, n_frames, seed):
    rng = random.Random(seed)
    n = 0
    while n < n_frames:
        with suppress(OSError):  # it has ended the connection already
            n += talk(worker.port, rng, rng.choice(conversations))
    return n


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    with nursery(tmp_path_factory.mktemp("nursery")) as nurse:
        made = nurse.worker("--timeout", "5", "--memory", "256MiB", "--max-clients", "16")
        yield made
        assert "Traceback" not in made.log(), made.log()


def resident_bytes(worker):
    pages = Path(f"/proc/{worker.pid}/statm").read_text().split()[1]
    return int(pages) * 4096


def live(worker, conversations, chat_model, n_frames):
    with GoodClient(chat_model, worker) as good:
        attack(worker, conversations, 500, 0)
        before = resident_bytes(worker)
        attack(worker, conversations, n_frames, 1)
        good.check()
        assert resident_bytes(worker) < before + (128 << 20)


def test_mutated_frames_do_not_disturb_a_good_client(worker, conversations, chat_model):
    with watchdog(240):
        live(worker, conversations, chat_model, 2000)


@pytest.mark.slow
def test_many_mutated_frames_do_not_disturb_a_good_client(worker, conversations, chat_model):
    with watchdog(1800):
        live(worker, conversations, chat_model, 50_000)


class Unplugged:
    """Stands for a connection whose other side takes everything."""

    def __init__(self, channel, timeout_s, handler, heartbeat_s=None):
        self.peer = "a stranger"

    def send(self, verb, id_=0, meta=b"", payload=None, *, wait=False):
        if payload is not None:
            bytes(memoryview(payload)[:1])

    def close(self, reason=""):
        pass


class Stranger:
    """What the session of a connection asks its channel."""

    peer = "a stranger"


class Faults(logging.Handler):
    """Fails the test where a session found a fault in itself."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def emit(self, record):
        if record.exc_info:
            self.seen.append(self.format(record) + str(record.exc_info))


def feed(session, frame):
    """Let a session have a frame as its connection would, and answer what it asks."""
    verb, id_, _, n_payload = unpack_header(raw(frame)[: HEADER.size])
    got = Frame(verb, id_, frame[2], n_payload)
    if n_payload:
        session.payload_for(got)[:] = frame[3]
    if verb in (Verb.OK, Verb.ERROR, Verb.PROGRESS, Verb.PING):
        return
    session.handle(got)
    while not session._requests.empty():
        session._answer(session._requests.get())


def millions(worker, conversations, n_frames, seed):
    """Each session gets 500 frames, in whatever state, and is not closed for what is wrong."""
    rng = random.Random(seed)
    free = worker.lender.describe()[0]["free_bytes"]
    for _ in range(n_frames // 500):
        frames = rng.choice(conversations)
        session = Session(worker, Stranger(), Agreed(1, frozenset(), 1.0))
        for frame in frames[: rng.randrange(len(frames))]:
            with suppress(ProtocolError, RemoteError):
                feed(session, frame)
        for _ in range(500):
            with suppress(ProtocolError, RemoteError):
                feed(session, hostile(rng, frames))
        session.error = RemoteError("over")
        session._end()
        with worker._lock:
            worker._clients.discard(session)
        assert worker.lender.describe()[0]["free_bytes"] == free


@pytest.fixture
def unplugged(monkeypatch, tmp_path):
    monkeypatch.setattr(session_module, "Connection", Unplugged)
    monkeypatch.setattr(session_module, "trim", lambda: None)  # takes as long as the frames
    devices = resolve(Options(device="cpu")).devices
    config = WorkerConfig(host="127.0.0.1", port=0, devices=devices, memory_bytes=1 << 28)
    worker = Worker(config)

    def dial(host, port):
        raise RemoteError("nobody is there")

    worker.dial = dial
    faults = Faults()
    logging.getLogger("gguf_pp").addHandler(faults)
    yield worker
    logging.getLogger("gguf_pp").removeHandler(faults)
    worker.close()
    assert not faults.seen, faults.seen[:3]


def test_sessions_survive_frames_of_every_kind_in_every_state(unplugged, conversations):
    with watchdog(240):
        millions(unplugged, conversations, 10_000, 2)


@pytest.mark.slow
def test_sessions_survive_a_million_frames(unplugged, conversations):
    with watchdog(3000):
        start = time.monotonic()
        millions(unplugged, conversations, 1_000_000, 3)
        print(f"{time.monotonic() - start:.0f} s")
