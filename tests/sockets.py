"""Two ends of a real connection over loopback, and a handler that writes down what it is told."""

import gc
import queue
import socket
import ssl
import threading
import time
from contextlib import contextmanager
from pathlib import Path

from gguf_pp.net import Channel, Connection, dial

FDS = Path("/proc/self/fd")
WAIT_S = 30  # how long a test waits for what must happen
SHORT_S = 0.3  # a timeout that is meant to pass
LIVE_S = 1.0  # a timeout that who is alive must not let pass, on a busy machine either


def soon(seconds: float = WAIT_S) -> float:
    return time.monotonic() + seconds


def eventually(condition):
    """Wait for what other threads are about to do."""
    deadline = soon()
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def usage():
    """Threads and descriptors of this process."""
    gc.collect()
    return threading.active_count(), len(list(FDS.iterdir())) if FDS.is_dir() else 0


def no_more_than(before):
    """Whether nothing has been added to an earlier `usage`, which may have counted what was just
    about to end."""
    return all(n <= m for n, m in zip(usage(), before, strict=True))


def in_thread(call, *args):
    """Call it elsewhere; the result, or what it raised, comes from `.get(timeout=…)`."""
    results = queue.Queue()

    def run():
        try:
            results.put(call(*args))
        except Exception as exc:  # noqa: BLE001 - the test looks at it
            results.put(exc)

    threading.Thread(target=run, daemon=True).start()
    return results


def raw_pair(host="127.0.0.1"):
    """A connected client socket and its server's, both ordinary."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        client = socket.create_connection(server.getsockname()[:2], WAIT_S)
        accepted, _ = server.accept()
    accepted.settimeout(WAIT_S)
    return client, accepted


def take(sock, n_bytes):
    """Exactly so many bytes from an ordinary socket, or fewer if it ends before."""
    data = bytearray()
    while len(data) < n_bytes and (piece := sock.recv(min(1 << 20, n_bytes - len(data)))):
        data += piece
    return bytes(data)


def channels(
    server_tls: ssl.SSLContext | None = None, client_tls: ssl.SSLContext | None = None
) -> tuple[Channel, Channel]:
    """A client's and a server's channel."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept():
            sock, _ = server.accept()
            channel = Channel(sock, "the client")
            if server_tls is not None:
                channel.start_tls(server_tls, soon())
            return channel

        accepted = in_thread(accept)
        client = dial("127.0.0.1", server.getsockname()[1], WAIT_S, client_tls)
        return client, accepted.get(timeout=WAIT_S)


class Recorder:
    """Takes every payload into memory of its own; `frames` are (frame, payload) as they came."""

    def __init__(self):
        self.frames = queue.Queue()
        self.errors = queue.Queue()
        self.payload = memoryview(b"")
        self.connection = None

    def payload_for(self, frame):
        self.payload = memoryview(bytearray(frame.n_payload))
        return self.payload

    def handle(self, frame):
        self.frames.put((frame, bytes(self.payload) if frame.n_payload else b""))

    def lost(self, error):
        self.errors.put(error)

    def frame(self):
        return self.frames.get(timeout=WAIT_S)

    def error(self):
        return str(self.errors.get(timeout=WAIT_S))


class Answering(Recorder):
    """Answers every request with what `answer` sends over its connection."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def handle(self, frame):
        super().handle(frame)
        self.answer(self.connection, frame)


@contextmanager
def connections(*handlers, timeout_s=WAIT_S, tls=(None, None)):
    """Started connections of the client's and the server's handler; closed afterwards."""
    both = [
        Connection(channel, timeout_s, handler)
        for channel, handler in zip(channels(*tls), handlers, strict=True)
    ]
    for connection, handler in zip(both, handlers, strict=True):
        handler.connection = connection
    try:
        for connection in both:
            connection.start()
        yield both
    finally:
        for connection in both:
            connection.close()


@contextmanager
def against(handler, timeout_s=WAIT_S, begun=b""):
    """A started connection whose other end is a plain socket in the hands of the test, which has
    sent `begun` already."""
    sock, other = raw_pair()
    other.sendall(begun)
    connection = handler.connection = Connection(Channel(sock, "the peer"), timeout_s, handler)
    try:
        connection.start()
        yield connection, other
    finally:
        connection.close()
        other.close()
