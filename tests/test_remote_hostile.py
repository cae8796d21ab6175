"""A worker among strangers: whatever comes over the wire, it goes on and serves whoever behaves."""

import re
import socket
import struct
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from gguf_pp.batch import Span, UBatch
from gguf_pp.errors import RemoteError
from gguf_pp.net.handshake import OURS, _own_hello
from gguf_pp.pipeline.split import Part
from gguf_pp.wire import (
    HEADER,
    MAX_CHUNK_BYTES,
    Verb,
    pack_header,
    pack_json,
    pack_offset,
    pack_ubatch,
)
from tests.good_client import GoodClient
from tests.light import CTX_SIZE, WAIT_S, Light
from tests.nursery import nursery
from tests.prepared import prepare, whole
from tests.sockets import eventually
from tests.watchdog import watchdog

TIMEOUT_S = 5.0
PROMPT = "Once upon a time"
N_VOCAB = 262
HIDDEN_ROW_BYTES = 128


@pytest.fixture(autouse=True)
def no_hang():
    with watchdog(180):
        yield


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    with nursery(tmp_path_factory.mktemp("nursery")) as nurse:
        made = nurse.worker("--timeout", str(TIMEOUT_S), "--memory", "256MiB")
        yield made
        assert "Traceback" not in made.log(), made.log()
        assert resident_bytes(made) < 1 << 30


def resident_bytes(worker):
    status = Path(f"/proc/{worker.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) << 10


@pytest.fixture(scope="module")
def prepared(chat_model):
    return whole(chat_model)


@pytest.fixture(scope="module")
def middle(chat_model):
    """Two layers between others: hidden states in and out."""
    return prepare(chat_model, Part(range(1, 3), False, False))


@pytest.fixture(scope="module")
def good(chat_model, worker):
    with GoodClient(chat_model, worker) as client:
        yield client
        client.check()


@pytest.fixture(autouse=True)
def served_meanwhile(good):
    yield
    good.check()


def hello():
    return _own_hello(OURS, 60.0, wants_proof=False)


@contextmanager
def stranger(worker, *data):
    """A plain socket that has sent `data`."""
    with socket.create_connection(("127.0.0.1", worker.port), WAIT_S) as sock:
        for piece in data:
            sock.sendall(piece)
        yield sock


def ended(sock):
    """Wait until the worker has closed it; what it said until then."""
    heard = b""
    with suppress(ConnectionResetError):
        while piece := sock.recv(1 << 16):
            heard += piece
    return heard


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: worker\r\n\r\n",
        b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03" + bytes(32),
        b"\x00" * 100,
        b"GGPP" + b"\xff" * 60,
        b"SSH-2.0-OpenSSH_9.6\r\n",
    ],
    ids=["HTTP", "TLS", "zeros", "another version", "SSH"],
)
def test_who_speaks_something_else_is_sent_away(data, worker):
    with stranger(worker, data) as sock:
        ended(sock)


HALVES = {
    "nothing": b"",
    "half a hello": b"GGPP",
    "silence": hello(),
    "half a meta": hello() + pack_header(Verb.INFO, 1, 100, 0),
    "half a header": hello() + pack_header(Verb.INFO, 1, 2, 0)[:7],
    "half a payload": hello() + pack_header(Verb.TENSOR, 0, 8, 100) + bytes(8) + bytes(50),
}


def test_who_stops_halfway_is_cut_off_in_time(worker):
    start = time.monotonic()
    with ExitStack() as stack:
        for sock in [stack.enter_context(stranger(worker, data)) for data in HALVES.values()]:
            ended(sock)
    assert time.monotonic() - start < 2 * TIMEOUT_S + 10


def test_who_resets_or_leaves_halfway_costs_nothing(worker):
    for n in range(0, 200, 7):
        frames = hello() + pack_header(Verb.INFO, 1, 2, 0) + b"{}" + bytes(200)
        with stranger(worker, frames[:n]) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def test_a_slow_trickle_is_cut_off(worker):
    data = hello() + pack_header(Verb.OPEN, 1, 1000, 0)
    start = time.monotonic()
    with stranger(worker, data) as sock, pytest.raises(OSError):
        while time.monotonic() - start < 60:
            sock.sendall(b" ")
            time.sleep(0.05)
    assert time.monotonic() - start < 30


def test_a_thousand_who_connect_and_leave_cost_nothing(worker):
    n_before = len(list(Path(f"/proc/{worker.pid}/fd").iterdir()))
    for _ in range(1000):
        socket.create_connection(("127.0.0.1", worker.port), WAIT_S).close()
    eventually(lambda: len(list(Path(f"/proc/{worker.pid}/fd").iterdir())) <= n_before)


def test_who_asks_and_never_reads_fills_no_memory(worker):
    before = resident_bytes(worker)
    ask = pack_json({"n_bytes": MAX_CHUNK_BYTES})
    with stranger(worker, hello()) as sock:
        sock.settimeout(1)
        with suppress(OSError):
            for i in range(1, 100_000):
                sock.sendall(pack_header(Verb.SEND, i, len(ask), 0) + ask)
        assert resident_bytes(worker) < before + (64 << 20)


@pytest.mark.parametrize("verb", list(Verb))
def test_lengths_that_are_too_large_are_refused_before_anything_is_allocated(verb, worker):
    for n_meta, n_payload in ((1 << 31, 0), (0, 1 << 41), (0, 1 << 39), (0, (1 << 64) - 1)):
        with stranger(worker, hello(), pack_header_of(verb, n_meta, n_payload)) as sock:
            ended(sock)
    assert resident_bytes(worker) < 1 << 30


def pack_header_of(verb, n_meta, n_payload):
    return HEADER.pack(verb, 1, n_meta, n_payload)


def broken_off(client):
    """Wait until the worker has ended the session; why."""
    while client.frames.get(timeout=WAIT_S) is not None:
        pass
    return str(client.error)


@contextmanager
def loaded(worker, prepared):
    client = Light(worker.address)
    try:
        client.load(prepared)
        yield client
    finally:
        client.close()


def test_what_comes_before_its_time_ends_the_session(worker, prepared):
    ubatch = pack_ubatch(UBatch((1,), (Span(0, 0, 1),), (0,)), tokens=True)
    early = {
        "a ubatch": lambda c: c.connection.send(Verb.SUBMIT, 1, ubatch),
        "a tensor": lambda c: c.connection.send(Verb.TENSOR, 0, pack_offset(0), bytes(4)),
        "sizes": lambda c: c.ask(Verb.ALLOCATE, n_copies=1, ubatch_size=1, ctx_size=1),
        "giving back": lambda c: c.ask(Verb.RELEASE),
        "loading": lambda c: c.ask(Verb.LOAD, n_ctx=1),
        "a way in": lambda c: c.ask(Verb.LINK_IN),
        "a way out": lambda c: c.ask(Verb.LINK_OUT, host="127.0.0.1", port=1, token=""),
        "a link": lambda c: c.ask(Verb.JOIN, token="00" * 32),
    }
    for what, send in early.items():
        client = Light(worker.address)
        with suppress(RemoteError):
            send(client)
        assert broken_off(client), what
        client.close()
    client = Light(worker.address)
    client.open(prepared)
    client.connection.send(Verb.SUBMIT, 1, ubatch)
    assert "before the stage is loaded" in broken_off(client)
    client.close()


def test_what_was_settled_by_loading_stays(worker, prepared):
    late = {
        "sizes": lambda c: c.ask(Verb.ALLOCATE, n_copies=1, ubatch_size=1, ctx_size=1),
        "giving back": lambda c: c.ask(Verb.RELEASE),
        "loading": lambda c: c.ask(Verb.LOAD, n_ctx=CTX_SIZE),
        "a way in": lambda c: c.ask(Verb.LINK_IN),
        "another model": lambda c: c.ask(Verb.OPEN, **prepared["open"]),
        "a tensor": lambda c: c.connection.send(Verb.TENSOR, 0, pack_offset(0), bytes(4)),
    }
    for what, send in late.items():
        with loaded(worker, prepared) as client:
            client.submit(0, [65] * 16, 0)
            with suppress(RemoteError):
                send(client)
            assert broken_off(client), what


UBATCHES = {
    "no rows": UBatch((), (), ()),
    "a slot that is none": UBatch((1,), (Span(1, 0, 1),), (0,)),
    "a slot twice": UBatch((1, 2), (Span(0, 0, 1), Span(0, 1, 1)), (0,)),
    "beyond the context": UBatch((1,), (Span(0, CTX_SIZE, 1),), (0,)),
    "cells never computed": UBatch((1,), (Span(0, 5, 1),), (0,)),
    "rows that do not add up": UBatch((1, 2), (Span(0, 0, 1),), (0,)),
    "a span of nothing": UBatch((1,), (Span(0, 0, 0), Span(0, 0, 1)), (0,)),
    "a token that is none": UBatch((N_VOCAB,), (Span(0, 0, 1),), (0,)),
    "a large token": UBatch(((1 << 32) - 1,), (Span(0, 0, 1),), (0,)),
    "an output that is none": UBatch((1,), (Span(0, 0, 1),), (1,)),
    "an output twice": UBatch((1, 2), (Span(0, 0, 2),), (0, 0)),
    "too many rows": UBatch((1,) * 17, (Span(0, 0, 17),), (0,)),
}


@pytest.mark.parametrize("name", UBATCHES)
def test_a_ubatch_that_does_not_fit_the_stage_ends_the_session(name, worker, prepared):
    with loaded(worker, prepared) as client:
        client.connection.send(Verb.SUBMIT, 0, pack_ubatch(UBATCHES[name], tokens=True))
        assert broken_off(client)


def test_more_ubatches_than_there_are_copies_end_the_session(worker, prepared):
    with loaded(worker, prepared) as client, suppress(RemoteError):
        for i in range(1000):
            client.submit(i, [65] * 16, 0)
    worker.wait_for("a ubatch more than there are copies")


@pytest.mark.parametrize("n_bytes", [0, 4, HIDDEN_ROW_BYTES * 2, HIDDEN_ROW_BYTES + 1, 1 << 30])
def test_hidden_states_of_another_size_end_the_session(n_bytes, worker, middle):
    ubatch = pack_ubatch(UBatch((0,), (Span(0, 0, 1),), (0,)), tokens=False)
    with loaded(worker, middle) as client:
        head = HEADER.pack(Verb.SUBMIT, 0, len(ubatch), n_bytes) + ubatch
        client.connection._channel.send([head], time.monotonic() + WAIT_S)
        assert "bytes" in broken_off(client)


def test_links_are_for_who_was_asked_and_for_once(worker, middle):
    with loaded(worker, middle) as client:
        pass
    client = Light(worker.address)
    client.open(middle)
    token = client.ask(Verb.LINK_IN).text("token", 64)
    other = client.ask(Verb.LINK_IN).text("token", 64)
    for guess in (token, "", "00" * 32, token.upper()):  # a newer token replaces an older one
        stray = Light(worker.address)
        with pytest.raises(RemoteError, match="no session waits"):
            stray.ask(Verb.JOIN, token=guess)
        stray.close()
    link = Light(worker.address)
    link.ask(Verb.JOIN, token=other)
    again = Light(worker.address)
    with pytest.raises(RemoteError, match="no session waits"):
        again.ask(Verb.JOIN, token=other)
    again.close()
    third = client.ask(Verb.LINK_IN).text("token", 64)
    second = Light(worker.address)
    with pytest.raises(RemoteError, match="no session waits"):
        second.ask(Verb.JOIN, token=third)
    second.close()
    client.send_tensors(middle, list(range(len(middle["open"]["tensors"]))))
    client.ask(Verb.LOAD, n_ctx=CTX_SIZE)
    ubatch = pack_ubatch(UBatch((0,), (Span(0, 0, 1),), (0,)), tokens=False)
    link.next(Verb.CREDIT)
    link.connection.send(Verb.SUBMIT, 7, ubatch, bytes(HIDDEN_ROW_BYTES))
    assert client.next(Verb.RESULT).id == 7
    client.connection.send(Verb.SUBMIT, 8, ubatch, bytes(HIDDEN_ROW_BYTES))
    assert "does not come over the link" in broken_off(client)
    assert "over" in broken_off(link) or "closed" in str(link.error)
    client.close()
    link.close()


def test_a_link_that_goes_ends_the_session_behind_it(worker, middle):
    client, link = Light(worker.address), Light(worker.address)
    client.open(middle)
    link.ask(Verb.JOIN, token=client.ask(Verb.LINK_IN).text("token", 64))
    client.send_tensors(middle, list(range(len(middle["open"]["tensors"]))))
    client.ask(Verb.LOAD, n_ctx=CTX_SIZE)
    link.close()
    assert "the link that brings its input is lost" in broken_off(client)
    client.close()


def test_a_worker_does_not_wait_forever_for_whom_it_should_reach(worker, middle):
    """Who accepts the connection, and beats like a heart, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        done = threading.Event()

        def serve():
            sock, _ = server.accept()
            sock.recv(60)
            sock.sendall(hello())
            with suppress(OSError):
                while not done.wait(0.2):
                    sock.sendall(pack_header(Verb.PING, 0, 0, 0))
            sock.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        client = Light(worker.address)
        client.open(middle)
        where = {"host": "127.0.0.1", "port": server.getsockname()[1], "token": "00" * 32}
        with pytest.raises(RemoteError, match="no answer"):
            client.ask(Verb.LINK_OUT, **where)
        done.set()
        thread.join(WAIT_S)
        client.close()
