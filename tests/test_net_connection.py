"""Frames, requests and heartbeats between two connections."""

import hashlib
import os
import random
import threading

import pytest

from gguf_pp.errors import RemoteError
from gguf_pp.net import Connection, Refused
from gguf_pp.wire import HEADER, ProtocolError, Verb, pack_json
from tests.sockets import (
    LIVE_S,
    SHORT_S,
    WAIT_S,
    Answering,
    Recorder,
    channels,
    connections,
    eventually,
    in_thread,
)


def echo(connection, frame):
    connection.send(Verb.OK, frame.id, frame.meta)


def test_a_frame_arrives_as_it_was_sent():
    client, server = Recorder(), Recorder()
    payload, meta = os.urandom(3 << 20), os.urandom(1 << 20)
    with connections(client, server) as (a, b):
        a.send(Verb.SUBMIT, 7, meta, payload)
        frame, received = server.frame()
        assert frame == (Verb.SUBMIT, 7, meta, len(payload))
        assert received == payload
        b.send(Verb.CREDIT)
        assert client.frame() == ((Verb.CREDIT, 0, b"", 0), b"")
        n_bytes = HEADER.size + len(meta) + len(payload)
        # What is written is counted afterwards.
        eventually(lambda: a.stats[:2] == (n_bytes, HEADER.size))
        eventually(lambda: b.stats[:2] == (HEADER.size, n_bytes))


def test_a_payload_goes_where_the_handler_wants_it():
    class Placing(Recorder):
        place = memoryview(bytearray(8)).cast("B", (2, 4))

        def payload_for(self, frame):
            return self.place

    handler = Placing()
    with connections(Recorder(), handler) as (a, _):
        a.send(Verb.RESULT, 1, b"", memoryview(b"abcdefgh").cast("B", (4, 2)))
        handler.frame()
    assert handler.place.tobytes() == b"abcdefgh"


def test_without_a_payload_the_handler_is_not_asked_for_memory():
    class Refusing(Recorder):
        def payload_for(self, frame):
            raise AssertionError

    handler = Refusing()
    with connections(Recorder(), handler) as (a, _):
        a.send(Verb.SUBMIT, 1, b"meta")
        a.send(Verb.SUBMIT, 2, b"meta", b"")
        assert [handler.frame()[0].id for _ in range(2)] == [1, 2]


def test_waiting_for_a_frame_to_be_written_frees_its_memory():
    received = []

    class Digesting(Recorder):
        def handle(self, frame):
            received.append(hashlib.sha256(self.payload).digest())
            super().handle(frame)

    handler = Digesting()
    payload = bytearray(4 << 20)
    expected = []
    with connections(Recorder(), handler) as (a, _):
        for i in range(8):
            payload[:] = bytes([i]) * len(payload)
            expected.append(hashlib.sha256(payload).digest())
            a.send(Verb.TENSOR, i, b"", payload, wait=True)
        payload[:] = bytes(len(payload))
        for _ in range(8):
            handler.frame()
    assert received == expected


N_FRAMES = 9_999
PATTERN = random.Random(1).randbytes(1 << 19)


def content(id_):
    """Meta and payload of a frame: every 100th is 256 KiB, the others small, and many empty."""
    size = 1 << 18 if id_ % 100 == 0 else id_ * 7919 % 1500 - 500
    start = id_ * 104729 % (1 << 18)
    whole = PATTERN[start : start + max(0, size)]
    return whole[: len(whole) // 3], whole[len(whole) // 3 :]


class Checking(Recorder):
    """Holds every frame against what it must be, and the frames of each sender to their order."""

    def __init__(self, n_senders):
        super().__init__()
        self.n_each = N_FRAMES // n_senders
        self.n_received = [0] * n_senders
        self.done = threading.Event()
        self.memory = memoryview(bytearray(1 << 18))

    def payload_for(self, frame):
        return self.memory[: frame.n_payload]

    def handle(self, frame):
        sender, i = divmod(frame.id, self.n_each)
        whole = (frame.meta, self.memory[: frame.n_payload])
        if self.n_received[sender] != i or whole != content(frame.id):
            raise ProtocolError(f"frame {frame.id}")
        self.n_received[sender] += 1
        if sum(self.n_received) == N_FRAMES:
            self.done.set()


@pytest.mark.parametrize("n_senders", [1, 3])
def test_frames_of_all_sizes_both_ways_at_once_arrive_whole_and_in_order(n_senders):
    def send_all(connection, sender):
        n_each = N_FRAMES // n_senders
        for id_ in range(sender * n_each, (sender + 1) * n_each):
            connection.send(Verb.SUBMIT, id_, *content(id_), wait=id_ % 10 == 0)

    handlers = Checking(n_senders), Checking(n_senders)
    with connections(*handlers) as both:
        sent = [in_thread(send_all, c, i) for c in both for i in range(n_senders)]
        for result in sent:
            assert result.get(timeout=2 * WAIT_S) is None
        for handler in handlers:
            assert handler.done.wait(WAIT_S), handler.n_received
            assert handler.errors.empty()


def test_a_request_gets_its_answer():
    with connections(Recorder(), Answering(echo)) as (a, _):
        for i in range(3):
            assert a.request(Verb.INFO, {"i": i}, doing="asking").integer("i") == i
        assert 0 < a.stats.round_trip_s < WAIT_S


def test_requests_from_several_threads_get_each_their_own_answer():
    held, all_here = [], threading.Event()

    def hold(connection, frame):
        held.append(frame)
        if len(held) == 5:
            all_here.set()

    handler = Answering(hold)
    with connections(Recorder(), handler) as (a, b):
        results = [
            in_thread(lambda i=i: a.request(Verb.INFO, {"i": i}, doing="asking").integer("i"))
            for i in range(5)
        ]
        assert all_here.wait(WAIT_S)
        for frame in reversed(held):
            b.send(Verb.OK, frame.id, frame.meta)
        assert [result.get(timeout=WAIT_S) for result in results] == [0, 1, 2, 3, 4]


def test_the_payload_of_an_answer_is_in_place_before_the_request_returns():
    client = Recorder()
    payload = os.urandom(1 << 20)

    def answer(connection, frame):
        connection.send(Verb.OK, frame.id, b"{}", payload)

    with connections(client, Answering(answer)) as (a, _):
        a.request(Verb.SEND, {"n_bytes": len(payload)}, doing="measuring")
        assert client.payload == payload
        assert client.frames.empty()


def test_progress_is_told_while_the_request_is_worked_on():
    def answer(connection, frame):
        for done in (1, 2):
            connection.send(Verb.PROGRESS, frame.id, pack_json({"done_bytes": done}))
        connection.send(Verb.OK, frame.id, b"{}")

    told = []
    with connections(Recorder(), Answering(answer)) as (a, _):
        a.request(
            Verb.LOAD, {}, doing="loading", progress=lambda f: told.append(f.integer("done_bytes"))
        )
        a.request(Verb.LOAD, {}, doing="loading")
    assert told == [1, 2]


def test_an_error_is_raised_with_what_was_being_done_and_its_numbers():
    body = {"kind": "memory", "message": "cpu:0 is full", "hint": "--memory", "free_bytes": 12}

    def answer(connection, frame):
        connection.send(Verb.ERROR, frame.id, pack_json(body))

    with connections(Recorder(), Answering(answer)) as (a, _):
        with pytest.raises(Refused) as caught:
            a.request(Verb.ALLOCATE, {}, doing="reserving memory")
        assert str(caught.value) == f"{a.peer}, while reserving memory: cpu:0 is full"
        assert caught.value.hint == "--memory"
        assert caught.value.kind == "memory"
        assert caught.value.fields.integer("free_bytes") == 12
        a.send(Verb.CREDIT)  # the connection goes on


def test_text_of_the_other_side_cannot_write_to_the_terminal():
    def answer(connection, frame):
        body = {"kind": "internal", "message": "a\x1b[2Jb\nc\u202e", "hint": "\x07"}
        connection.send(Verb.ERROR, frame.id, pack_json(body))

    with connections(Recorder(), Answering(answer)) as (a, _):
        with pytest.raises(Refused) as caught:
            a.request(Verb.INFO, {}, doing="asking")
        assert str(caught.value).endswith(": a?[2Jb?c?")
        assert caught.value.hint == "?"


def test_a_request_may_have_a_deadline_of_its_own_and_a_late_answer_is_dropped():
    handler = Answering(lambda connection, frame: None)
    with connections(Recorder(), handler) as (a, b):
        with pytest.raises(RemoteError, match=r"gave no answer in 0\.01 s while asking"):
            a.request(Verb.INFO, {}, doing="asking", timeout_s=0.01)
        frame, _ = handler.frame()
        b.send(Verb.PROGRESS, frame.id, b"{}")
        b.send(Verb.OK, frame.id, b"{}")
        handler.answer = echo
        assert a.request(Verb.INFO, {"i": 1}, doing="asking").integer("i") == 1


def test_a_request_in_flight_fails_when_the_connection_does_and_says_what_it_did():
    handler = Answering(lambda connection, frame: None)
    with connections(Recorder(), handler) as (a, b):
        result = in_thread(lambda: a.request(Verb.LOAD, {}, doing="loading layers 3 to 9"))
        handler.frame()
        b.close()
        error = result.get(timeout=WAIT_S)
        assert isinstance(error, RemoteError)
        assert str(error) == f"{a.peer} closed the connection while loading layers 3 to 9"


def test_an_idle_connection_outlives_many_timeouts():
    client, server = Recorder(), Answering(echo)
    with connections(client, server, timeout_s=LIVE_S) as (a, b):
        eventually(lambda: b.stats.received_bytes >= 7 * HEADER.size)
        assert client.errors.empty()
        assert a.request(Verb.INFO, {"i": 1}, doing="asking").integer("i") == 1
        assert server.frame()[0].verb is Verb.INFO
        assert server.frames.empty()  # heartbeats are nobody's business


def test_heartbeats_come_as_often_as_was_agreed():
    a, b = channels()
    handler = Recorder()
    sending = Connection(a, WAIT_S, Recorder(), heartbeat_s=SHORT_S / 10)
    receiving = Connection(b, WAIT_S, handler, heartbeat_s=WAIT_S)
    sending.start()
    receiving.start()
    eventually(lambda: receiving.stats.received_bytes >= 30 * HEADER.size)
    assert handler.errors.empty()
    sending.close()
    receiving.close()


def test_a_long_request_is_waited_for_while_the_peer_shows_signs_of_life():
    handler = Answering(lambda connection, frame: None)
    with connections(Recorder(), handler, timeout_s=LIVE_S) as (a, b):
        result = in_thread(lambda: a.request(Verb.LOAD, {}, doing="loading").values())
        frame, _ = handler.frame()
        before = a.stats.received_bytes
        eventually(lambda: a.stats.received_bytes >= before + 4 * HEADER.size)
        b.send(Verb.OK, frame.id, b'{"done":1}')
        assert result.get(timeout=WAIT_S) == {"done": 1}
