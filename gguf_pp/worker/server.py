"""The worker: listens, serves sessions, and ends in order."""

import secrets
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gguf_pp.config import CudaBytes, Device, EdgeCopy
from gguf_pp.errors import RemoteError
from gguf_pp.net import Agreed, Channel, Listener, dial, greet_server
from gguf_pp.wire import ProtocolError
from gguf_pp.worker.lender import Lender
from gguf_pp.worker.session import Session
from gguf_pp.worker.store import Store

LOOK_S = 0.05
QUIET_LOOKS = 10
"""A client that generates has a ubatch in flight, or got one done, at one look of so many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerConfig:
    """What a worker lends, to whom, and how it finds weights. Port 0 is any that is free.

    `memory_bytes` caps the RAM, `cuda_bytes` CUDA devices, for all clients together.
    `secret` is asked of every client, and is needed to listen where other machines reach. `tls`
    encrypts; `tls_to` is how this worker connects to others that do.
    """

    host: str
    port: int
    devices: tuple[Device, ...]
    memory_bytes: int | None = None
    cuda_bytes: CudaBytes = ()
    edge_copy: EdgeCopy = "auto"
    model_dirs: tuple[Path, ...] = ()
    cache_dir: Path | None = None
    cache_bytes: int = 0
    secret: bytes | None = None
    tls: ssl.SSLContext | None = None
    tls_to: ssl.SSLContext | None = None
    timeout_s: float = 15.0
    max_clients: int = 8
    forwards: bool = True


class Worker:
    """Listens from construction on, serves from `start` to `close`; a host to its sessions."""

    def __init__(self, config: WorkerConfig) -> None:
        """Raises ConfigError where it cannot listen, or use a folder, or lend a device;
        PlacementError where copies between two of them arrive damaged."""
        self.config = config
        self.timeout_s = config.timeout_s
        self.forwards = config.forwards
        self.lender = Lender(
            config.devices, config.memory_bytes, dict(config.cuda_bytes), config.edge_copy
        )
        self.store = Store(config.model_dirs, config.cache_dir, config.cache_bytes)
        self._lock = threading.Condition()
        self._sessions: set[Session] = set()
        self._clients: set[Session] = set()
        self._offers: dict[str, Session] = {}
        self._listener = Listener(
            config.host,
            config.port,
            self._serve,
            timeout_s=config.timeout_s,
            secret=config.secret,
            tls=config.tls,
        )
        self.port = self._listener.port
        self.address = self._listener.address

    def start(self) -> None:
        """Begin to serve."""
        self._listener.start()

    def admit(self, session: Session) -> None:
        """Give `session` a place for a model, once those that end have left; raises RemoteError if
        there is none."""

        def settled() -> bool:
            # One that comes back at once finds what it had before free again.
            return all(other.error is None for other in self._clients)

        with self._lock:
            self._lock.wait_for(settled, self.timeout_s)
            n_open = len(self._clients)
            if n_open < self.config.max_clients:
                self._clients.add(session)
                return
        raise RemoteError(
            f"the worker serves {n_open} clients already",
            hint="wait for one to end, or start it with a larger --max-clients",
        )

    def _serve(self, channel: Channel, agreed: Agreed) -> None:
        session = Session(self, channel, agreed)
        with self._lock:
            self._sessions.add(session)
        try:
            session.run()
        finally:
            with self._lock:
                self._sessions.discard(session)
                self._clients.discard(session)
                self._lock.notify_all()

    def dial(self, host: str, port: int) -> tuple[Channel, Agreed]:
        """Connect to another worker, with the same secret. Raises RemoteError."""
        channel = dial(host, port, self.timeout_s, self.config.tls_to)
        try:
            return channel, greet_server(channel, self.config.secret, self.timeout_s)
        except BaseException:
            channel.close()
            raise

    def offer_link(self, session: Session) -> str:
        """A token by which another worker may find `session`."""
        token = secrets.token_hex(32)
        self.withdraw_links(session)
        with self._lock:
            self._offers[token] = session
        return token

    def linked(self, token: str) -> Session:
        """The session that waits for this token, once. Raises ProtocolError."""
        with self._lock:
            session = self._offers.pop(token, None)
        if session is None:
            raise ProtocolError("no session waits for this link")
        return session

    def withdraw_links(self, session: Session) -> None:
        """Forget tokens for `session`."""
        with self._lock:
            self._offers = {t: s for t, s in self._offers.items() if s is not session}

    def drain(self, grace_s: float, tick: Callable[[float], object] = time.sleep) -> None:
        """Take no more clients, let what is computed end within `grace_s`, then close."""
        self._listener.stop()
        deadline = time.monotonic() + grace_s
        n_quiet, before = 0, None
        while time.monotonic() < deadline and n_quiet < QUIET_LOOKS:
            with self._lock:
                progress = {session: session.progress for session in self._sessions}
            is_quiet = progress == before and all(is_idle for _, is_idle in progress.values())
            n_quiet, before = (n_quiet + 1 if is_quiet else 0), progress
            tick(LOOK_S)
        self.close()

    def close(self) -> None:
        """End all sessions and stop listening. Idempotent."""
        self._listener.close()
