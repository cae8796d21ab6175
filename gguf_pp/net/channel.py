"""A connected socket with deadlines: every byte that is awaited is awaited until some time.

Deadlines are values of `time.monotonic()`. One thread may send while another receives. Any thread
may `shutdown`, which ends what the two are waiting for; `close` is for when neither uses it.
"""

import math
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TypeVar

from gguf_pp.errors import RemoteError
from gguf_pp.net.address import join_host

Bytes = bytes | bytearray | memoryview

A = TypeVar("A")
R = TypeVar("R")

_TLS_PIECE_BYTES = 1 << 18  # a reader waits for the encryption of at most this much
_TLS_RECORD_BYTES = 1 << 14


class Lost(Exception):
    """The other side went away; the message is what it did, such as "closed the connection"."""


class Expired(Lost):
    """The other side neither sent nor took what was due by the deadline."""


class Channel:
    """Owns a connected socket. `peer` is host:port of the other side."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            with suppress(OSError):  # gone already, which the first use will say
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.peer = peer
        self._sock = sock
        self._tls: ssl.SSLSocket | None = None
        self._ending = threading.Lock()
        self._guard: AbstractContextManager[object] = nullcontext()

    def start_tls(
        self, context: ssl.SSLContext, deadline: float, *, server_name: str | None = None
    ) -> None:
        """Encrypt from here on: as the client of `server_name`, or as the server without one.

        Raises Lost, Expired.
        """
        try:
            tls = context.wrap_socket(
                self._sock,
                server_side=server_name is None,
                server_hostname=server_name,
                do_handshake_on_connect=False,
            )
        except OSError as exc:  # gone already
            raise Lost(_reason(exc)) from exc
        self._sock = self._tls = tls
        # OpenSSL has one state for both directions.
        self._guard = threading.Lock()
        self._until(deadline, select.POLLIN, tls.do_handshake, False)

    def send(self, parts: Sequence[Bytes], deadline: float) -> None:
        """Hand all `parts` to the kernel, in order and uncopied. Raises Lost, Expired."""
        if self._tls is not None:
            self._send_tls(self._tls, parts, deadline)
            return
        left = _views(parts)
        while left:
            left = _after(left, self._until(deadline, select.POLLOUT, self._sock.sendmsg, left))

    def send_some(self, parts: Sequence[Bytes]) -> list[memoryview]:
        """Hand over what the kernel takes at once; the rest is for `send`. Raises Lost."""
        left = _views(parts)
        if self._tls is not None:
            return left
        try:
            return _after(left, self._sock.sendmsg(left))
        except BlockingIOError:
            return left
        except OSError as exc:
            raise Lost(_reason(exc)) from exc

    def _send_tls(self, tls: ssl.SSLSocket, parts: Sequence[Bytes], deadline: float) -> None:
        if sum(memoryview(part).nbytes for part in parts) <= _TLS_RECORD_BYTES:
            parts = (b"".join(parts),)
        for view in _views(parts):
            while len(view):
                piece = view[:_TLS_PIECE_BYTES]
                view = view[self._until(deadline, select.POLLOUT, tls.send, piece) :]

    def recv_into(self, view: memoryview, deadline: float) -> None:
        """Fill `view`, bytes. Raises Lost, Expired."""
        n_bytes = len(view)
        while len(view):
            n_read = self._until(deadline, select.POLLIN, self._sock.recv_into, view)
            if not n_read:
                whole = len(view) == n_bytes
                raise Lost("closed the connection" + ("" if whole else " in the middle of a frame"))
            view = view[n_read:]

    def recv(self, n_bytes: int, deadline: float) -> bytes:
        """Exactly `n_bytes`. Raises Lost, Expired."""
        data = bytearray(n_bytes)
        self.recv_into(memoryview(data), deadline)
        return bytes(data)

    def _until(self, deadline: float, mask: int, call: Callable[[A], R], argument: A) -> R:
        """What the call returns once it need not wait; `mask` is what a plain socket waits for."""
        while True:
            try:
                with self._guard:
                    return call(argument)
            except ssl.SSLWantReadError:
                mask = select.POLLIN
            except ssl.SSLWantWriteError:
                mask = select.POLLOUT
            except BlockingIOError:
                pass
            except OSError as exc:
                raise Lost(_reason(exc)) from exc
            self._wait(mask, deadline)

    def _wait(self, mask: int, deadline: float) -> None:
        left = max(0.0, deadline - time.monotonic())
        poll = select.poll()
        poll.register(self._sock, mask)
        if not poll.poll(None if left == math.inf else math.ceil(left * 1000)):
            raise Expired("sent nothing" if mask == select.POLLIN else "took nothing")

    def shutdown(self) -> None:
        """End the connection: whoever sends or receives raises Lost, now and from now on."""
        with self._ending, suppress(OSError):  # not connected any more, or closed
            # Below TLS, whose own state belongs to the two threads.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the descriptor back; what was sent before still goes out. Idempotent."""
        with self._ending:
            self._sock.close()


def dial(host: str, port: int, timeout_s: float, tls: ssl.SSLContext | None = None) -> Channel:
    """Connect to any address of `host`, within `timeout_s` (looking the name up not counted).

    Raises RemoteError.
    """
    peer = join_host(host, port)
    deadline = time.monotonic() + timeout_s
    channel = Channel(_connect(host, port, deadline), peer)
    if tls is not None:
        try:
            channel.start_tls(tls, deadline, server_name=host)
        except Lost as exc:
            channel.close()
            raise RemoteError(
                f"{peer}: no TLS: {exc}",
                hint="does the worker run with --tls-cert, and did --tls-ca sign for this name?",
            ) from exc
    return channel


def _views(parts: Sequence[Bytes]) -> list[memoryview]:
    return [view.cast("B") for part in parts if (view := memoryview(part)).nbytes]


def _after(left: list[memoryview], n_sent: int) -> list[memoryview]:
    for i, view in enumerate(left):
        if n_sent < len(view):
            return [view[n_sent:], *left[i + 1 :]]
        n_sent -= len(view)
    return []


def _connect(host: str, port: int, deadline: float) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as exc:
        raise RemoteError(f"{host}: {_reason(exc)}", hint="check the name of the host") from exc
    reason = "it has no address"
    for i, (family, kind, protocol, _, address) in enumerate(found):
        try:
            sock = socket.socket(family, kind, protocol)
        except OSError as exc:  # no IPv6 here
            reason = _reason(exc)
            continue
        # An address that drops packets leaves time for the others.
        sock.settimeout(max(0.001, deadline - time.monotonic()) / (len(found) - i))
        try:
            sock.connect(address)
            return sock
        except OSError as exc:
            reason = _reason(exc)
            sock.close()
    raise RemoteError(
        f"{join_host(host, port)} is unreachable: {reason}",
        hint="is `gguf-pp worker` running there, and does a firewall let this port through?",
    )


def _reason(exc: OSError | UnicodeError) -> str:
    if isinstance(exc, ConnectionResetError):
        return "reset the connection"
    if isinstance(exc, BrokenPipeError | ssl.SSLEOFError):
        return "closed the connection"
    if isinstance(exc, ssl.SSLCertVerificationError):
        return f"its certificate does not verify: {exc.verify_message}"
    if isinstance(exc, ssl.SSLError):
        return f"TLS failed: {(exc.reason or str(exc)).replace('_', ' ').lower()}"
    if isinstance(exc, TimeoutError):
        return "no answer in time"
    return (isinstance(exc, OSError) and exc.strerror) or str(exc)
