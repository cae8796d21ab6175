"""What a connection makes of a peer that is broken, slow, stopped or hostile."""

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest

from gguf_pp.errors import RemoteError
from gguf_pp.net import Channel, Connection
from gguf_pp.wire import HEADER, ProtocolError, Verb, pack_header, pack_json
from tests.sockets import (
    SHORT_S,
    WAIT_S,
    Recorder,
    against,
    connections,
    eventually,
    in_thread,
    no_more_than,
    take,
    usage,
)

BIG = bytes(8 << 20)  # more than the kernel holds for a connection


def frame(verb, id_=0, meta=b"", payload=b""):
    return pack_header(verb, id_, len(meta), len(payload)) + meta + payload


WHOLE = frame(Verb.SUBMIT, 1, b"meta", b"payload")


@pytest.mark.parametrize("n_bytes", [0, 1, 19, 20, 22, 24, 30])
def test_a_frame_that_ends_halfway_is_never_handled(n_bytes):
    handler = Recorder()
    with against(handler) as (_, other):
        other.sendall(WHOLE + WHOLE[:n_bytes])
        other.shutdown(socket.SHUT_WR)
        assert handler.error().startswith("the peer closed the connection")
        assert handler.frames.qsize() == 1


def test_a_reset_is_told_with_what_was_being_done():
    handler = Recorder()
    with against(handler) as (connection, other):
        result = in_thread(lambda: connection.request(Verb.LOAD, {}, doing="loading"))
        take(other, HEADER.size + 2)
        other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        other.close()
        assert str(result.get(timeout=WAIT_S)) == "the peer reset the connection while loading"
        assert handler.error() == "the peer reset the connection"


def test_a_silent_peer_is_gone_after_the_timeout():
    handler = Recorder()
    before = time.monotonic()
    with against(handler, timeout_s=SHORT_S) as (connection, _):
        result = in_thread(lambda: connection.request(Verb.LOAD, {}, doing="loading"))
        assert handler.error() == "the peer was silent for 0.3 s"
        assert SHORT_S <= time.monotonic() - before < WAIT_S
        assert str(result.get(timeout=WAIT_S)) == "the peer was silent for 0.3 s while loading"


@pytest.mark.parametrize(
    ("begun", "complaint"),
    [
        (b"", "the peer was silent for 0.3 s"),
        (pack_header(Verb.SUBMIT, 1, 3200, 0), "the peer did not send 3200 bytes in 0.398 s"),
        (pack_header(Verb.SUBMIT, 1, 0, 6400), "the peer did not send 6400 bytes in 0.495 s"),
    ],
    ids=["header", "meta", "payload"],
)
def test_a_trickle_of_bytes_does_not_keep_a_frame_alive(begun, complaint):
    handler = Recorder()
    with against(handler, SHORT_S, begun) as (_, other):
        over = threading.Event()

        def trickle():
            while not over.wait(SHORT_S / 10):
                try:
                    other.sendall(b"\x01")
                except OSError:
                    return

        trickling = in_thread(trickle)
        assert handler.error() == complaint
        over.set()
        trickling.get(timeout=WAIT_S)


@pytest.mark.parametrize("wait", [False, True])
def test_a_peer_that_never_reads_is_gone_after_the_timeout(wait, monkeypatch):
    handler = Recorder()
    with against(handler) as (connection, _):
        allowed_s = connection._allowed_s
        monkeypatch.setattr(connection, "_allowed_s", lambda n: allowed_s(n) - WAIT_S + SHORT_S)
        result = in_thread(send_until_it_fails, connection, BIG[: 1 << 14], wait)
        assert handler.error() == "the peer did not take 16404 bytes in 0.801 s"
        assert isinstance(result.get(timeout=WAIT_S), RemoteError)


def send_until_it_fails(connection, payload, wait):
    while True:
        connection.send(Verb.TENSOR, 0, b"", payload, wait=wait)
        if not wait:
            time.sleep(0.001)


def test_answers_that_are_not_read_do_not_fill_our_memory():
    handler = Recorder()
    with against(handler) as (connection, _):
        connection.send(Verb.TENSOR, 0, b"", BIG)
        with pytest.raises(RemoteError, match="left 16384 frames unread"):
            for _ in range(20_000):
                connection.send(Verb.CREDIT)
        assert handler.error() == "the peer left 16384 frames unread"


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "a frame of unknown kind 71"),
        (b"\xff" * 20, "a frame of unknown kind 255"),
        (pack_header(Verb.SUBMIT, 1, (1 << 20) + 1, 0), "SUBMIT with 1048577 bytes about it"),
        (pack_header(Verb.TENSOR, 1, 0, 1 << 63), "TENSOR with a payload of 9223372036854775808"),
        (pack_header(Verb.PING, 0, 0, 1), "PING with a payload of 1 bytes, at most 0"),
        (frame(Verb.OK, 1, b"{}"), "OK for a request that was never made"),
        (frame(Verb.ERROR, 9, b'{"kind":"x","message":"y"}'), "ERROR for a request that was"),
        (frame(Verb.PROGRESS, 0, b"{}"), "PROGRESS for a request that was never made"),
        (frame(Verb.OK, 1, b"\x80"), "not JSON"),
        (frame(Verb.OK, 1, b"[" * 100_000), "not JSON"),
        (frame(Verb.ERROR, 0, b"{}"), "message is None"),
    ],
)
def test_what_no_peer_of_ours_sends_ends_the_connection_and_the_peer_is_told_why(raw, complaint):
    handler = Recorder()
    with against(handler) as (_, other):
        other.sendall(raw)
        assert handler.error().startswith(f"the peer broke the protocol: {complaint}")
        answer = take(other, 1 << 20)
        meta = answer[HEADER.size :]
        assert answer.startswith(pack_header(Verb.ERROR, 0, len(meta), 0))
        assert f'{{"kind":"protocol","message":"{complaint}'.encode() in meta
        assert handler.frames.empty()


def test_what_the_handler_does_not_accept_ends_the_connection_before_its_payload_is_read():
    class Refusing(Recorder):
        def payload_for(self, frame):
            raise ProtocolError(f"{frame.n_payload} bytes, 12 wanted")

    handler = Refusing()
    with against(handler) as (_, other):
        other.sendall(pack_header(Verb.RESULT, 1, 0, 1 << 40))
        assert handler.error() == ("the peer broke the protocol: 1099511627776 bytes, 12 wanted")


def test_a_complaint_about_the_whole_connection_is_how_it_ends():
    handler = Recorder()
    with against(handler) as (connection, other):
        other.sendall(frame(Verb.ERROR, 0, pack_json({"kind": "busy", "message": "try later"})))
        assert handler.error() == "the peer: try later"
        with pytest.raises(RemoteError, match="the peer: try later while asking"):
            connection.request(Verb.INFO, {}, doing="asking")


def test_a_bug_in_the_handler_ends_the_connection_and_is_seen(monkeypatch):
    seen = []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_type))

    class Broken(Recorder):
        def handle(self, frame):
            raise ZeroDivisionError

    handler = Broken()
    with against(handler) as (connection, other):
        other.sendall(WHOLE)
        assert handler.error() == "the connection with the peer is over: its reader failed"
        connection.close()
    assert seen == [ZeroDivisionError]


def test_ctrl_c_amid_a_frame_ends_the_connection_rather_than_leave_half_of_it(monkeypatch):
    def interrupted(channel, parts):
        raise KeyboardInterrupt

    handler = Recorder()
    with against(handler) as (connection, other):
        monkeypatch.setattr(Channel, "send_some", interrupted)
        with pytest.raises(KeyboardInterrupt):
            connection.send(Verb.SUBMIT, 1, b"meta", BIG)
        assert handler.error() == "sending to the peer was interrupted"
        assert take(other, 1) == b""


def test_random_and_mutated_frames_end_the_connection_or_arrive_and_nothing_else():
    rng = random.Random(2)
    for _ in range(300):
        raw = bytearray(WHOLE * 3 if rng.random() < 0.8 else rng.randbytes(rng.randrange(200)))
        for _ in range(rng.randrange(4) if raw else 0):
            raw[rng.randrange(len(raw))] = rng.randrange(256)

        class Bounded(Recorder):
            def payload_for(self, frame):
                if frame.n_payload > 1000:
                    raise ProtocolError("too much")
                return super().payload_for(frame)

        handler = Bounded()
        with against(handler) as (_, other):
            other.sendall(raw)
            with suppress(OSError):  # refused already
                other.shutdown(socket.SHUT_WR)
            assert handler.error().startswith(("the peer closed", "the peer broke", "the peer:"))


@pytest.mark.parametrize("sent", [signal.SIGSTOP, signal.SIGKILL])
def test_a_process_that_is_stopped_or_killed_is_noticed(sent):
    script = """
import socket, sys, time
from gguf_pp.net import Channel, Connection, dial
class Nobody:
    def lost(self, error): sys.exit()
connection = Connection(dial("127.0.0.1", int(sys.argv[1]), 30), 30, Nobody(), heartbeat_s=0.05)
connection.start()
time.sleep(1000)
"""
    handler = Recorder()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        process = subprocess.Popen([sys.executable, "-c", script, port])
        try:
            sock, _ = server.accept()
            connection = Connection(Channel(sock, "the peer"), 3.0, handler)
            connection.start()
            eventually(lambda: connection.stats.received_bytes >= 5 * HEADER.size)
            os.kill(process.pid, sent)
            before = time.monotonic()
            assert handler.error() in (
                ["the peer was silent for 3 s"]
                if sent == signal.SIGSTOP
                else ["the peer closed the connection", "the peer reset the connection"]
            )
            assert time.monotonic() - before < WAIT_S
            connection.close()
        finally:
            process.kill()
            process.wait()


def test_nothing_of_a_connection_remains():
    before = usage()
    for _ in range(50):
        with connections(Recorder(), Recorder()) as (a, _):
            a.send(Verb.CREDIT)
    eventually(lambda: no_more_than(before))
