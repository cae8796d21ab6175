"""The listening end: accepts, shakes hands, and runs each connection on a thread of its own."""

import errno
import ipaddress
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable
from select import POLLIN, poll

from gguf_pp.errors import ConfigError, RemoteError
from gguf_pp.net.address import join_host
from gguf_pp.net.channel import Channel, Lost
from gguf_pp.net.handshake import Agreed, greet_client
from gguf_pp.wire import Verb, pack_header, pack_json

Serve = Callable[[Channel, Agreed], None]
"""Runs one connection, on a thread of its own, until it ends. The channel is closed afterwards."""

_MAX_GREETED = 64
_SURE_GREETING_S = 1.0
"""Of those who take longer the first must go when more than 64 are being greeted."""
_MAX_GREETING_S = 10.0

log = logging.getLogger("gguf_pp")


class Listener:
    """Listens on host:port from construction on, accepts from `start` on.

    Port 0 picks one: `port` is the real one. At most `max_connections` at a time; who comes then is
    told so. Who fails the handshake, in `timeout_s` and never more than 10 s, costs one log line.

    Raises ConfigError where it cannot listen, and for an address that other machines reach when
    there is no secret.
    """

    def __init__(
        self,
        host: str,
        port: int,
        serve: Serve,
        *,
        timeout_s: float,
        secret: bytes | None = None,
        tls: ssl.SSLContext | None = None,
        max_connections: int = 64,
    ) -> None:
        self._sock = _listen(host, port, secret is not None)
        self.host = host
        self.port: int = self._sock.getsockname()[1]
        self._serve = serve
        self._timeout_s = timeout_s
        self._secret = secret
        self._tls = tls
        self._max_connections = max_connections
        self._waker, self._woken = socket.socketpair()
        self._changed = threading.Condition()
        self._stopped = False
        self._greeted: dict[Channel, float] = {}
        self._served: set[Channel] = set()
        self._threads: set[threading.Thread] = set()
        self._acceptor = threading.Thread(
            target=self._accept_all, name=f"listen {self.address}", daemon=True
        )

    @property
    def address(self) -> str:
        """host:port."""
        return join_host(self.host, self.port)

    @property
    def n_connections(self) -> int:
        """Connections that are served now."""
        return len(self._served)

    def start(self) -> None:
        """Begin to accept."""
        self._acceptor.start()

    def stop(self) -> None:
        """Accept no more, and end what has not shaken hands; the others go on. Idempotent."""
        with self._changed:
            if not self._stopped:
                self._stopped = True
                self._waker.close()
                self._changed.notify_all()
            greeted = list(self._greeted)
        for channel in greeted:
            channel.shutdown()
        if self._acceptor.is_alive():
            self._acceptor.join()
        self._sock.close()
        self._woken.close()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is served any more; False if something still is."""
        with self._changed:
            done = self._changed.wait_for(lambda: not self._threads, timeout_s)
        return done

    def close(self) -> None:
        """Stop, cut every connection, and wait for `serve` to return from each. Idempotent."""
        self.stop()
        with self._changed:
            served, threads = list(self._served), list(self._threads)
        for channel in served:
            channel.shutdown()
        for thread in threads:
            thread.join()

    def _accept_all(self) -> None:
        either = poll()
        either.register(self._sock, POLLIN)
        either.register(self._woken, POLLIN)
        while True:
            either.poll()
            if self._stopped:
                return
            try:
                sock, address = self._sock.accept()
            except OSError as exc:
                # Else it is one who has left meanwhile.
                if exc.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    log.warning("cannot accept a connection: %s", exc.strerror)
                    self._pause(_SURE_GREETING_S)
                continue
            self._admit(Channel(sock, join_host(*address[:2])))

    def _pause(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped, seconds)

    def _admit(self, channel: Channel) -> None:
        """Greet it, once there is room."""
        thread = threading.Thread(
            target=self._run, args=(channel,), name=f"serve {channel.peer}", daemon=True
        )
        with self._changed:
            while len(self._greeted) >= _MAX_GREETED and not self._stopped:
                oldest, since_s = next(iter(self._greeted.items()))
                left_s = since_s + _SURE_GREETING_S - time.monotonic()
                if left_s <= 0:
                    oldest.shutdown()
                self._changed.wait(left_s if left_s > 0 else None)
            if self._stopped:
                channel.close()
                return
            self._greeted[channel] = time.monotonic()
            self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError as exc:  # no more threads
            log.warning("%s turned away: %s", channel.peer, exc)
            self._forget(channel, thread)

    def _run(self, channel: Channel) -> None:
        try:
            agreed = self._greet(channel)
            if agreed is not None and self._enter(channel):
                self._serve(channel, agreed)
        finally:
            self._forget(channel, threading.current_thread())

    def _forget(self, channel: Channel, thread: threading.Thread) -> None:
        channel.shutdown()
        channel.close()
        with self._changed:
            self._greeted.pop(channel, None)
            self._served.discard(channel)
            self._threads.discard(thread)
            self._changed.notify_all()

    def _greet(self, channel: Channel) -> Agreed | None:
        deadline = time.monotonic() + min(self._timeout_s, _MAX_GREETING_S)
        try:
            if self._tls is not None:
                channel.start_tls(self._tls, deadline)
            return greet_client(channel, self._secret, self._timeout_s, deadline=deadline)
        except Lost as exc:
            log.warning("%s %s", channel.peer, exc)
        except RemoteError as exc:
            log.warning("%s", exc)
        return None

    def _enter(self, channel: Channel) -> bool:
        with self._changed:
            del self._greeted[channel]
            self._changed.notify_all()
            if self._stopped:
                return False
            if room := len(self._served) < self._max_connections:
                self._served.add(channel)
        if not room:
            self._turn_away(channel)
        return room

    def _turn_away(self, channel: Channel) -> None:
        message = f"busy with {self._max_connections} connections"
        meta = pack_json({"kind": "busy", "message": message})
        log.warning("%s turned away: %s", channel.peer, message)
        try:
            head = pack_header(Verb.ERROR, 0, len(meta), 0)
            channel.send([head, meta], time.monotonic() + self._timeout_s)
        except Lost:
            return


def _listen(host: str, port: int, has_secret: bool) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # Of a name such as localhost, the address that older clients try.
        family, _, _, _, address = min(found, key=lambda f: f[0] != socket.AF_INET)
    except (OSError, UnicodeError) as exc:
        raise ConfigError(f"-H {host}: {exc}", hint="an address of this machine") from exc
    if not has_secret and not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
        raise ConfigError(
            f"-H {host} lets other machines in, and there is no secret to ask them for",
            hint="--secret-file FILE or GGUF_PP_SECRET, here and at the client; or -H 127.0.0.1",
        )
    dual = address[0] == "::" and socket.has_dualstack_ipv6()
    try:
        sock = socket.create_server(address[:2], family=family, backlog=1024, dualstack_ipv6=dual)
    except OSError as exc:
        raise ConfigError(
            f"cannot listen on {join_host(host, port)}: {exc.strerror}",
            hint="another port, or -p 0 for any",
        ) from exc
    sock.setblocking(False)
    return sock
