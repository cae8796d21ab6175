"""A look at a worker from the client's side: is it there, what has it, how fast is the way."""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from gguf_pp.gguf import Identity
from gguf_pp.net import parse_endpoint, read_secret
from gguf_pp.pipeline.lent import MAX_DEVICES, Access, LentDevice, visit
from gguf_pp.wire import MAX_CHUNK_BYTES, Fields, Verb

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
    devices: tuple[LentDevice, ...]
    has_model: str | None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def look_at(address: str, identity: Identity | None, access: Access) -> Report:
    """Connect to the worker at `address` (host:port) and measure. Raises RemoteError, ConfigError.

    The bandwidth is that of frames of 4 MiB, one at a time, half a second each way.
    """
    endpoint = parse_endpoint(address if "://" in address else f"tcp://{address}")
    with visit(endpoint, access) as connection:
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
            with_secret=read_secret(access.secret_file) is not None,
            encrypted=access.tls_ca is not None,
            round_trip_s=statistics.median(_seconds(trip) for _ in range(N_ROUND_TRIPS)),
            up_bytes_per_s=_rate(up),
            down_bytes_per_s=_rate(down),
            devices=tuple(LentDevice.read(item) for item in info.objects("devices", MAX_DEVICES)),
            has_model=None if identity is None else _has_model(info),
        )


def _has_model(info: Fields) -> str:
    return info.choice("has_model", "model-dir", "cache") if info.has("has_model") else "no"


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
