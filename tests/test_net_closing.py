"""The end of a connection: by whom, told to whom, and after what."""

import threading

import pytest

from gguf_pp.errors import RemoteError
from gguf_pp.net import Connection
from gguf_pp.wire import MAX_META_BYTES, Verb, pack_header
from tests.sockets import (
    WAIT_S,
    Answering,
    Recorder,
    against,
    channels,
    connections,
    in_thread,
    take,
)


def test_after_close_nothing_can_be_sent_and_the_reason_is_told():
    client, server = Recorder(), Recorder()
    with connections(client, server) as (a, b):
        a.close("no more work")
        a.close("another reason")
        message = f"the connection with {a.peer} is over: no more work"
        assert client.error() == message
        with pytest.raises(RemoteError) as caught:
            a.send(Verb.CREDIT)
        assert str(caught.value) == message
        with pytest.raises(RemoteError, match="no more work while asking"):
            a.request(Verb.INFO, {}, doing="asking")
        assert server.error() == f"{b.peer} closed the connection"
    assert client.errors.empty()  # told once


def test_closing_from_both_sides_and_many_threads_at_once_ends_both():
    for _ in range(20):
        client, server = Recorder(), Recorder()
        with connections(client, server) as (a, b):
            barrier = threading.Barrier(6)

            def close(connection, barrier=barrier):
                barrier.wait(WAIT_S)
                connection.close()

            closing = [in_thread(close, c) for c in (a, b) * 3]
            for result in closing:
                assert result.get(timeout=WAIT_S) is None
        assert client.errors.qsize() == server.errors.qsize() == 1


@pytest.mark.parametrize("where", ["handle", "payload_for", "progress", "lost"])
def test_the_handler_may_close_its_connection(where):
    class Closing(Recorder):
        def handle(self, frame):
            if where == "handle":
                self.connection.close("from handle")

        def payload_for(self, frame):
            if where == "payload_for":
                self.connection.close("from payload_for")
            return super().payload_for(frame)

        def lost(self, error):
            self.connection.close("from lost")
            super().lost(error)

    def answer(connection, frame):
        connection.send(Verb.PROGRESS, frame.id, b"{}")
        connection.send(Verb.SUBMIT, 1, b"", b"payload")

    client = Closing()
    progress = (lambda f: client.connection.close("from progress")) if where == "progress" else None
    with connections(client, Answering(answer)) as (a, b):
        asked = in_thread(lambda: a.request(Verb.LOAD, {}, doing="loading", progress=progress))
        if where == "lost":
            b.close()
        assert isinstance(asked.get(timeout=WAIT_S), RemoteError)
        error = client.error()
        assert "from" in error if where != "lost" else error
        assert client.errors.empty()


def test_lost_can_wake_a_handler_that_waits_for_memory():
    class Waiting(Recorder):
        def __init__(self):
            super().__init__()
            self.asked, self.over = threading.Event(), threading.Event()

        def payload_for(self, frame):
            self.asked.set()
            assert self.over.wait(WAIT_S)
            return super().payload_for(frame)

        def lost(self, error):
            self.over.set()
            super().lost(error)

    handler = Waiting()
    with connections(Recorder(), handler) as (a, b):
        a.send(Verb.RESULT, 1, b"", b"payload")
        assert handler.asked.wait(WAIT_S)
        assert in_thread(b.close).get(timeout=WAIT_S) is None
        assert handler.frames.empty()


def test_closing_before_the_start_gives_the_socket_back():
    a, b = channels()
    handler = Recorder()
    connection = Connection(a, WAIT_S, handler)
    connection.close()
    connection.close()
    with pytest.raises(RemoteError):
        connection.send(Verb.CREDIT)
    assert handler.errors.empty()
    b.close()


def test_the_last_words_arrive_if_they_were_waited_for():
    handler = Recorder()
    with against(handler) as (connection, other):
        meta, payload = b"m" * MAX_META_BYTES, bytes(8 << 20)
        head = pack_header(Verb.SUBMIT, 1, len(meta), len(payload))
        received = in_thread(take, other, len(head + meta + payload) + 1)
        connection.send(Verb.SUBMIT, 1, meta, payload, wait=True)
        connection.close()
        assert received.get(timeout=WAIT_S) == head + meta + payload
