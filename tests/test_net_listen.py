"""Accepting: who gets in, who is turned away, and what neither leaves behind."""

import contextlib
import logging
import queue
import socket
import threading
import time

import pytest

from gguf_pp.errors import ConfigError, RemoteError
from gguf_pp.net import Connection, Listener, connect, dial, greet_server
from gguf_pp.net import listen as listen_module
from tests.sockets import SHORT_S, WAIT_S, Recorder, eventually, no_more_than, usage

SECRET = b"sixteen bytes or more"


class Served:
    """Serves a connection by holding it until the other side ends it, or `release`."""

    def __init__(self):
        self.agreed = queue.Queue()
        self.n_ended = 0
        self.release = threading.Event()

    def __call__(self, channel, agreed):
        self.agreed.put(agreed)
        handler = Recorder()
        connection = Connection(channel, WAIT_S, handler)
        connection.start()
        handler.error()
        connection.close()
        self.n_ended += 1


@contextlib.contextmanager
def listening(serve=None, host="127.0.0.1", **options):
    listener = Listener(host, 0, serve or Served(), **{"timeout_s": WAIT_S, **options})
    listener.start()
    try:
        yield listener
    finally:
        listener.close()


def greeted(listener, secret=None):
    channel = dial("127.0.0.1", listener.port, WAIT_S)
    greet_server(channel, secret, WAIT_S)
    return channel


def test_a_client_that_shakes_hands_is_served_until_it_goes():
    serve = Served()
    with listening(serve) as listener:
        assert listener.port
        assert listener.address == f"127.0.0.1:{listener.port}"
        channel = greeted(listener)
        assert serve.agreed.get(timeout=WAIT_S).heartbeat_s == WAIT_S / 3
        assert listener.n_connections == 1
        channel.close()
        assert listener.join(WAIT_S)
        assert serve.n_ended == 1
        assert listener.n_connections == 0


def test_each_client_is_served_beside_the_others():
    serve = Served()
    with listening(serve) as listener:
        served = [greeted(listener) for _ in range(5)]
        for _ in range(5):
            serve.agreed.get(timeout=WAIT_S)
        assert listener.n_connections == 5
        for channel in served:
            channel.close()


def test_one_client_more_than_allowed_is_told_so():
    serve = Served()
    with listening(serve, max_connections=1) as listener:
        first = greeted(listener)
        serve.agreed.get(timeout=WAIT_S)
        handler = Recorder()
        second = Connection(greeted(listener), WAIT_S, handler)
        second.start()
        assert handler.error() == f"127.0.0.1:{listener.port}: busy with 1 connections"
        second.close()
        first.close()
        eventually(lambda: listener.n_connections == 0)
        third = greeted(listener)
        serve.agreed.get(timeout=WAIT_S)
        third.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_other_machines_are_not_let_in_without_a_secret(host):
    with pytest.raises(ConfigError, match=f"-H {host} lets other machines in") as caught:
        Listener(host, 0, Served(), timeout_s=WAIT_S)
    assert "--secret-file" in caught.value.hint
    assert "GGUF_PP_SECRET" in caught.value.hint


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost"])
def test_this_machine_is_let_in_without_a_secret(host):
    with listening(host=host) as listener:
        dial(host, listener.port, WAIT_S).close()


def test_other_machines_are_let_in_with_a_secret():
    serve = Served()
    with listening(serve, host="0.0.0.0", secret=SECRET) as listener:
        channel = greeted(listener, SECRET)
        serve.agreed.get(timeout=WAIT_S)
        channel.close()


def test_a_port_in_use_is_a_config_error_that_names_it():
    with (
        listening() as listener,
        pytest.raises(ConfigError, match=f"127.0.0.1:{listener.port}: Address already in use"),
    ):
        Listener("127.0.0.1", listener.port, Served(), timeout_s=WAIT_S)


def test_an_address_of_another_machine_is_a_config_error():
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:0"):
        Listener("192.0.2.1", 0, Served(), timeout_s=WAIT_S, secret=SECRET)
    with pytest.raises(ConfigError, match=r"-H no-such-host\.invalid"):
        Listener("no-such-host.invalid", 0, Served(), timeout_s=WAIT_S)


@pytest.mark.parametrize(
    ("raw", "line"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "speaks HTTP"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", "speaks TLS"),
        (b"\x00" * 64, "does not speak the protocol of gguf-pp"),
        (b"", "sent nothing, before it had shaken hands"),
        (b"GGPP\x01", "sent nothing, before it had shaken hands"),
    ],
    ids=["http", "tls", "zeros", "silence", "half a hello"],
)
def test_a_stranger_is_cut_off_with_one_line_in_the_log(raw, line, caplog):
    with listening(timeout_s=SHORT_S if "sent nothing" in line else WAIT_S) as listener:
        with socket.create_connection(("127.0.0.1", listener.port), WAIT_S) as sock:
            sock.sendall(raw)
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(1) == b""
            name = "{}:{}".format(*sock.getsockname())
        assert listener.join(WAIT_S)
        assert [record.getMessage() for record in caplog.records] == [f"{name} {line}"]


def test_a_wrong_secret_is_in_the_log(caplog):
    with listening(secret=SECRET) as listener:
        channel = dial("127.0.0.1", listener.port, WAIT_S)
        with pytest.raises(RemoteError, match="did not accept our secret"):
            greet_server(channel, b"another secret of enough bytes", WAIT_S)
        channel.close()
        assert listener.join(WAIT_S)
    assert caplog.messages[0].endswith("has another secret")


def test_a_thousand_that_connect_and_close_cost_nothing_lasting(caplog):
    caplog.set_level(logging.ERROR)
    serve = Served()
    with listening(serve) as listener:
        before = usage()
        for i in range(1000):
            with socket.create_connection(("127.0.0.1", listener.port), WAIT_S) as sock:
                if i % 2:
                    sock.sendall(b"GGPP")
                if i % 3 == 0:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        channel = greeted(listener)
        serve.agreed.get(timeout=WAIT_S)
        channel.close()
        assert listener.join(WAIT_S)
        eventually(lambda: no_more_than(before))


def test_silent_strangers_do_not_keep_a_client_out(monkeypatch, caplog):
    monkeypatch.setattr(listen_module, "_SURE_GREETING_S", SHORT_S)
    serve = Served()
    with listening(serve) as listener:
        silent = [socket.create_connection(("127.0.0.1", listener.port), WAIT_S) for _ in range(80)]
        before = time.monotonic()
        channel = greeted(listener)
        serve.agreed.get(timeout=WAIT_S)
        assert time.monotonic() - before < WAIT_S / 3  # long before their timeout
        assert len(listener._greeted) <= 64
        channel.close()
        for sock in silent:
            sock.close()


def test_running_out_of_descriptors_is_survived(caplog):
    class Empty:
        """A listening socket of a process without descriptors, twice."""

        def __init__(self, sock):
            self.sock, self.left = sock, 2

        def accept(self):
            if self.left:
                self.left -= 1
                raise OSError(24, "Too many open files")
            return self.sock.accept()

        def __getattr__(self, name):
            return getattr(self.sock, name)

    serve = Served()
    listener = Listener("127.0.0.1", 0, serve, timeout_s=WAIT_S)
    listener._sock = Empty(listener._sock)
    listener._pause = lambda seconds: None
    listener.start()
    channel = greeted(listener)
    serve.agreed.get(timeout=WAIT_S)
    channel.close()
    listener.close()
    assert caplog.messages[:2] == ["cannot accept a connection: Too many open files"] * 2


def test_running_out_of_threads_is_survived(monkeypatch, caplog):
    serve = Served()
    with listening(serve) as listener:
        before = usage()
        with monkeypatch.context() as patch:

            def start(thread):
                raise RuntimeError("can't start new thread")

            patch.setattr(threading.Thread, "start", start)
            channel = dial("127.0.0.1", listener.port, WAIT_S)
            with pytest.raises(RemoteError, match="before it said what it is"):
                greet_server(channel, None, WAIT_S)
            channel.close()
        assert caplog.messages[0].endswith("turned away: can't start new thread")
        eventually(lambda: no_more_than(before))
        channel = greeted(listener)
        serve.agreed.get(timeout=WAIT_S)
        channel.close()


@pytest.mark.parametrize("secret", [None, SECRET])
def test_connect_goes_from_an_address_to_frames(secret):
    serve = Served()
    with listening(serve, secret=secret, timeout_s=WAIT_S / 2) as listener:
        handler = Recorder()
        connection, agreed = connect(
            "127.0.0.1", listener.port, handler, timeout_s=WAIT_S, secret=secret
        )
        assert agreed == serve.agreed.get(timeout=WAIT_S)
        assert agreed.heartbeat_s == WAIT_S / 6
        connection.start()
        listener.close()
        assert handler.error() == f"{listener.address} closed the connection"
        connection.close()


def test_connect_leaves_nothing_behind_where_it_is_refused(caplog):
    with listening(secret=SECRET) as listener:
        before = usage()
        with pytest.raises(RemoteError, match="asks for a secret"):
            connect("127.0.0.1", listener.port, Recorder(), timeout_s=WAIT_S)
        eventually(lambda: no_more_than(before))


def test_stop_ends_the_listening_and_the_greeting_but_not_the_serving():
    serve = Served()
    with listening(serve) as listener:
        served = greeted(listener)
        serve.agreed.get(timeout=WAIT_S)
        with socket.create_connection(("127.0.0.1", listener.port), WAIT_S) as silent:
            eventually(lambda: len(listener._greeted) == 1)
            listener.stop()
            listener.stop()
            assert silent.recv(1) == b""
        with pytest.raises(RemoteError, match="unreachable"):
            dial("127.0.0.1", listener.port, WAIT_S)
        assert not listener.join(0.01)
        assert listener.n_connections == 1
        served.close()
        assert listener.join(WAIT_S)


def test_close_cuts_what_is_served_and_waits_for_it():
    before = usage()
    serve = Served()
    with listening(serve) as listener:
        channel = greeted(listener)
        serve.agreed.get(timeout=WAIT_S)
        listener.close()
        assert serve.n_ended == 1
        channel.close()
    eventually(lambda: no_more_than(before))


def test_a_listener_that_never_started_gives_its_socket_back():
    before = usage()
    Listener("127.0.0.1", 0, Served(), timeout_s=WAIT_S).close()
    eventually(lambda: no_more_than(before))
