"""Who is there: two fixed-size hellos, and where a secret is asked for, a proof from each side.

    client -> server   hello: magic, versions, features, timeout, a fresh nonce
    server -> client   hello: the same, and whether it wants a proof
    client -> server   HMAC(secret, "client" + both hellos)              where wanted
    server -> client   HMAC(secret, "server" + both hellos + the client's proof)

HMAC is with SHA-256 (RFC 2104). The nonces make every proof good for one connection only. Nothing
else is read before this is through, and nothing is ever allocated by what a hello says.
"""

import hmac
import logging
import os
import secrets
import stat
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from gguf_pp.errors import ConfigError, RemoteError
from gguf_pp.net.channel import Channel, Lost
from gguf_pp.wire import MIN_VERSION, VERSION

FEATURES: Mapping[str, int] = {"f16": 1 << 0, "link": 1 << 1}
"""Bits of what a side can do; those that both set are agreed on, unknown ones are ignored."""
MIN_SECRET_BYTES, MAX_SECRET_BYTES = 16, 4096

_MAGIC = b"GGPP"
_HELLO = struct.Struct("<4sHHQII32s8x")
"""magic, min_version, version, features, timeout_ms, flags, nonce, room for more."""
_WANTS_PROOF = 1
_PROOF_BYTES = 32
_MIN_TIMEOUT_S = 0.1
"""A shorter timeout of the other side is not served: it would have us send heartbeats only."""
_SECRET_HINT = "both sides need the same --secret-file or GGUF_PP_SECRET"

log = logging.getLogger("gguf_pp")


class Versions(NamedTuple):
    """The frames a side can speak: both ends belong to the range."""

    first: int = MIN_VERSION
    last: int = VERSION

    def __str__(self) -> str:
        return str(self.last) if self.first == self.last else f"{self.first} to {self.last}"


OURS = Versions()


class Agreed(NamedTuple):
    """What two sides settled: `heartbeat_s` suits the shorter of their timeouts."""

    version: int
    features: frozenset[str]
    heartbeat_s: float


def greet_server(
    channel: Channel, secret: bytes | None, timeout_s: float, *, versions: Versions = OURS
) -> Agreed:
    """The client's half, over within `timeout_s`. Raises RemoteError, and leaves the channel open.

    With a secret, a server that does not prove that it has it too is refused.
    """
    peer, deadline = channel.peer, time.monotonic() + timeout_s
    own = _own_hello(versions, timeout_s, wants_proof=False)
    try:
        channel.send([own], deadline)
        hello = _read_hello(channel, deadline)
    except Lost as exc:
        raise RemoteError(
            f"{peer} {exc}, before it said what it is",
            hint="is `gguf-pp worker` what runs there, and with the same TLS settings?",
        ) from exc
    agreed = _agree(peer, versions, timeout_s, hello)
    if secret is None:
        if hello.wants_proof:
            raise RemoteError(f"{peer} asks for a secret", hint=_SECRET_HINT)
        return agreed
    if not hello.wants_proof:
        raise RemoteError(
            f"{peer} has no secret, so it cannot prove that it is the worker you mean",
            hint="start that worker with the secret, or leave it out here",
        )
    seen = own + hello.raw
    proof = _proof(secret, b"client", seen)
    try:
        channel.send([proof], deadline)
        answer = channel.recv(_PROOF_BYTES, deadline)
    except Lost as exc:
        raise RemoteError(f"{peer} did not accept our secret: it {exc}", hint=_SECRET_HINT) from exc
    if not hmac.compare_digest(answer, _proof(secret, b"server", seen + proof)):
        raise RemoteError(f"{peer} does not know our secret", hint=_SECRET_HINT)
    return agreed


def greet_client(
    channel: Channel,
    secret: bytes | None,
    timeout_s: float,
    *,
    deadline: float | None = None,
    versions: Versions = OURS,
) -> Agreed:
    """The server's half, over by `deadline` (else within `timeout_s`, which the client is told).

    Raises RemoteError, and leaves the channel open.
    """
    peer = channel.peer
    deadline = time.monotonic() + timeout_s if deadline is None else deadline
    own = _own_hello(versions, timeout_s, wants_proof=secret is not None)
    try:
        hello = _read_hello(channel, deadline)
        channel.send([own], deadline)  # before versions are compared: the client compares too
        agreed = _agree(peer, versions, timeout_s, hello)
        if secret is None:
            return agreed
        seen = hello.raw + own
        proof = channel.recv(_PROOF_BYTES, deadline)
        if not hmac.compare_digest(proof, _proof(secret, b"client", seen)):
            raise RemoteError(f"{peer} has another secret", hint=_SECRET_HINT)
        channel.send([_proof(secret, b"server", seen + proof)], deadline)
    except Lost as exc:
        raise RemoteError(f"{peer} {exc}, before it had shaken hands") from exc
    return agreed


class _Hello(NamedTuple):
    versions: Versions
    features: int
    timeout_s: float
    wants_proof: bool
    raw: bytes


def _own_hello(versions: Versions, timeout_s: float, *, wants_proof: bool) -> bytes:
    bits = sum(FEATURES.values())
    timeout_ms = min(max(1, round(timeout_s * 1000)), (1 << 32) - 1)
    flags = _WANTS_PROOF if wants_proof else 0
    nonce = secrets.token_bytes(32)
    return _HELLO.pack(_MAGIC, versions.first, versions.last, bits, timeout_ms, flags, nonce)


def _read_hello(channel: Channel, deadline: float) -> _Hello:
    """Raises Lost, and RemoteError as soon as it is not one of ours."""
    raw = channel.recv(len(_MAGIC), deadline)
    if raw != _MAGIC:
        what, hint = _stranger(raw)
        raise RemoteError(f"{channel.peer} {what}", hint=hint)
    raw += channel.recv(_HELLO.size - len(_MAGIC), deadline)
    _, first, last, features, timeout_ms, flags, _ = _HELLO.unpack(raw)
    return _Hello(
        Versions(first, last), features, timeout_ms / 1000, bool(flags & _WANTS_PROOF), raw
    )


def _stranger(raw: bytes) -> tuple[str, str]:
    if raw[:1] in (b"\x15", b"\x16"):  # record types: alert, handshake
        return "speaks TLS", "the worker's --tls-cert and the client's --tls-ca go together"
    if raw in (b"HTTP", b"GET ", b"POST", b"HEAD", b"PUT ", b"OPTI", b"CONN", b"PRI "):
        return "speaks HTTP", "is this the port of a gguf-pp worker?"
    return "does not speak the protocol of gguf-pp", "is this the port of a gguf-pp worker?"


def _agree(peer: str, ours: Versions, timeout_s: float, hello: _Hello) -> Agreed:
    theirs = hello.versions
    version = min(ours.last, theirs.last)
    if version < max(ours.first, theirs.first):
        raise RemoteError(
            f"{peer} speaks protocol {theirs}, this side speaks {ours}",
            hint="install the same version of gguf-pp on both machines",
        )
    features = frozenset(name for name, bit in FEATURES.items() if hello.features & bit)
    return Agreed(version, features, max(_MIN_TIMEOUT_S, min(timeout_s, hello.timeout_s)) / 3)


def _proof(secret: bytes, role: bytes, seen: bytes) -> bytes:
    return hmac.digest(secret, role + seen, "sha256")


def read_secret(path: Path | None, environ: Mapping[str, str] = os.environ) -> bytes | None:
    """The bytes in the file, without white space around them, or those of GGUF_PP_SECRET, or None.

    Warns of a file that others can read. Raises ConfigError unless there are 16 to 4096 bytes.
    """
    if path is None:
        text = environ.get("GGUF_PP_SECRET")
        return None if text is None else _checked("GGUF_PP_SECRET", text.encode())
    try:
        with path.open("rb") as file:
            others = os.fstat(file.fileno()).st_mode & (stat.S_IRGRP | stat.S_IROTH)
            data = file.read(MAX_SECRET_BYTES + 1)
    except OSError as exc:
        raise ConfigError(f"--secret-file {path}: {exc.strerror}") from exc
    if others:
        log.warning("%s: others can read this secret; chmod 600 it", path)
    return _checked(f"--secret-file {path}", data)


def _checked(where: str, data: bytes) -> bytes:
    secret = data.strip()
    if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
        raise ConfigError(
            f"{where}: a secret of {len(secret)} bytes, "
            f"not of {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES}",
            hint="make one: head -c 32 /dev/urandom | base64",
        )
    return secret
