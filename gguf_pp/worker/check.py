"""A look at a worker from the client's side: is it there, what has it, how fast is the way."""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gguf_pp.errors import RemoteError
from gguf_pp.gguf import Identity
from gguf_pp.net import Connection, client_context, dial, greet_server, parse_endpoint, read_secret
from gguf_pp.wire import MAX_CHUNK_BYTES, Frame, ProtocolError, Verb

N_ROUND_TRIPS = 20
MEASURED_S = 0.5


@dataclass(frozen=True, slots=True)
class Report:
    """What a worker is. Rates are bytes per second; `has_model` None if no model was asked for."""

    address: str
    version: str
    wire_versions: tuple[int, int]
    with_secret: bool
    encrypted: bool
    round_trip_s: float
    up_bytes_per_s: float
    down_bytes_per_s: float
    devices: tuple[dict[str, Any], ...]
    has_model: str | None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class _Sink:
    """Takes payloads that nobody wants."""

    def __init__(self) -> None:
        self._chunk = memoryview(bytearray(MAX_CHUNK_BYTES))

    def payload_for(self, frame: Frame) -> memoryview:
        return self._chunk[: frame.n_payload]

    def handle(self, frame: Frame) -> None:
        raise ProtocolError(f"{frame.verb.name} without being asked")

    def lost(self, error: RemoteError) -> None:
        pass


def look_at(
    address: str,
    identity: Identity | None,
    secret_file: Path | None,
    tls_ca: Path | None,
    timeout_s: float,
) -> Report:
    """Connect to the worker at `address` (host:port) and measure. Raises RemoteError, ConfigError.

    The bandwidth is that of frames of 4 MiB, one at a time, half a second each way.
    """
    endpoint = parse_endpoint(address if "://" in address else f"tcp://{address}")
    secret = read_secret(secret_file)
    channel = dial(
        endpoint.host,
        endpoint.port,
        timeout_s,
        None if tls_ca is None else client_context(tls_ca),
    )
    try:
        agreed = greet_server(channel, secret, timeout_s)
    except BaseException:
        channel.close()
        raise
    connection = Connection(channel, timeout_s, _Sink(), heartbeat_s=agreed.heartbeat_s)
    connection.start()
    try:
        body: dict[str, Any] = {}
        if identity is not None:
            body["identity"] = {"sizes": list(identity.sizes), "digest": identity.digest}
        info = connection.request(Verb.INFO, body, doing="saying what it has")
        first, last = info.integers("wire", 2, 0, 1 << 16)
        chunk = memoryview(bytes(MAX_CHUNK_BYTES))

        def trip() -> None:
            connection.request(Verb.SINK, {}, doing="answering")

        def up() -> None:
            connection.request(Verb.SINK, {}, chunk, doing="taking data")

        def down() -> None:
            connection.request(Verb.SEND, {"n_bytes": len(chunk)}, doing="sending data")

        return Report(
            address=endpoint.peer,
            version=info.text("version"),
            wire_versions=(first, last),
            with_secret=secret is not None,
            encrypted=tls_ca is not None,
            round_trip_s=statistics.median(_seconds(trip) for _ in range(N_ROUND_TRIPS)),
            up_bytes_per_s=_rate(up),
            down_bytes_per_s=_rate(down),
            devices=tuple(fields.values() for fields in info.objects("devices", 64)),
            has_model=_has_model(info.values()) if identity is not None else None,
        )
    except ProtocolError as exc:
        raise RemoteError(f"{endpoint.peer} sent what it should not: {exc}") from exc
    finally:
        connection.close()


def _has_model(info: dict[str, Any]) -> str:
    return str(info.get("has_model") or "no")


def _seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _rate(work: Callable[[], None]) -> float:
    """Bytes per second of chunks that `work` moves."""
    n, seconds = 0, 0.0
    while seconds < MEASURED_S:
        seconds += _seconds(work)
        n += 1
    return n * MAX_CHUNK_BYTES / seconds
