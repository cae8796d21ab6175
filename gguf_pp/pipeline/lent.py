"""What workers lend, as they say it themselves: asked without loading anything. No torch."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from gguf_pp.config import RuntimeConfig
from gguf_pp.errors import ConfigError, RemoteError
from gguf_pp.net import (
    Connection,
    Endpoint,
    Handler,
    client_context,
    dial,
    greet_server,
    read_secret,
)
from gguf_pp.pipeline.split import split_by_shares
from gguf_pp.wire import MAX_CHUNK_BYTES, Fields, Frame, ProtocolError, Verb

MAX_DEVICES = 64


@dataclass(frozen=True, slots=True)
class Access:
    """How to reach workers: files with a secret and a certificate, and how long to wait."""

    secret_file: Path | None
    tls_ca: Path | None
    timeout_s: float

    @classmethod
    def of(cls, config: RuntimeConfig) -> "Access":
        """As configured."""
        secret, ca = config.secret_file, config.tls_ca
        return cls(
            None if secret is None else Path(secret),
            None if ca is None else Path(ca),
            config.timeout_s,
        )


@dataclass(frozen=True, slots=True)
class LentDevice:
    """A device of a worker. `name_there` is the worker's name for it, `pool` its memory's.
    `unusable` says why it does not lend it any more, or is empty."""

    name_there: str
    n_threads: int
    relative_speed: float
    total_bytes: int
    free_bytes: int
    pool: str
    kernels: str
    unusable: str = ""

    @classmethod
    def read(cls, fields: Fields) -> "LentDevice":
        """From an item of the answer to INFO. Raises ProtocolError."""
        return cls(
            name_there=fields.text("name", 64),
            n_threads=fields.integer("n_threads", 0, 1 << 16),
            relative_speed=max(1e-6, fields.number("relative_speed")),
            total_bytes=fields.integer("total_bytes"),
            free_bytes=fields.integer("free_bytes"),
            pool=fields.text("pool", 64),
            kernels=fields.text("kernels", 16),
            unusable=fields.text("unusable") if fields.has("unusable") else "",
        )


class _Visitor:
    """Takes payloads that nobody looks at."""

    def __init__(self) -> None:
        self._chunk = memoryview(b"")

    def payload_for(self, frame: Frame) -> memoryview:
        """As in net.Handler."""
        if not self._chunk:
            self._chunk = memoryview(bytearray(MAX_CHUNK_BYTES))
        return self._chunk[: frame.n_payload]

    def handle(self, frame: Frame) -> None:
        """As in net.Handler."""
        raise ProtocolError(f"{frame.verb.name} without being asked")

    def lost(self, error: RemoteError) -> None:
        """As in net.Handler."""


def connect(endpoint: Endpoint, access: Access, handler: Handler) -> Connection:
    """A connection that has shaken hands, and is not started. Raises RemoteError, ConfigError."""
    secret = read_secret(access.secret_file)
    tls = None if access.tls_ca is None else client_context(access.tls_ca)
    channel = dial(endpoint.host, endpoint.port, access.timeout_s, tls)
    try:
        agreed = greet_server(channel, secret, access.timeout_s)
    except BaseException:
        channel.close()
        raise
    return Connection(channel, access.timeout_s, handler, heartbeat_s=agreed.heartbeat_s)


@contextmanager
def visit(endpoint: Endpoint, access: Access) -> Iterator[Connection]:
    """A connection to look around with. Raises RemoteError, also for what it should not say."""
    connection = connect(endpoint, access, _Visitor())
    connection.start()
    try:
        yield connection
    except ProtocolError as exc:
        raise misspoken(endpoint, exc) from exc
    finally:
        connection.close()


def misspoken(endpoint: Endpoint, exc: ProtocolError) -> RemoteError:
    """What to say of a worker that does not keep to the protocol."""
    return RemoteError(
        f"{endpoint.peer} sent what it should not: {exc}",
        hint="do both machines run the same version of gguf-pp?",
    )


def ask(endpoint: Endpoint, access: Access) -> list[LentDevice]:
    """The devices at an endpoint: the one it names, or all. Raises RemoteError, ConfigError."""
    with visit(endpoint, access) as connection:
        info = connection.request(Verb.INFO, {}, doing="saying what it has")
        lent = [LentDevice.read(item) for item in info.objects("devices", MAX_DEVICES)]
    return chosen(endpoint, lent)


def chosen(endpoint: Endpoint, lent: list[LentDevice]) -> list[LentDevice]:
    """Those of a worker's devices that a name means. Raises ConfigError."""
    if endpoint.device is None:
        return lent
    wanted = [device for device in lent if device.name_there == endpoint.device]
    if not wanted:
        have = ", ".join(device.name_there for device in lent)
        raise ConfigError(f"{endpoint}: the worker has no such device", hint=f"it has {have}")
    return wanted


def expanded(config: RuntimeConfig, counts: Sequence[int]) -> RuntimeConfig:
    """Replace every name that means several devices by those; what was asked of it is divided.

    `counts` are the devices that each name means. Raises ConfigError, PlacementError.
    """
    if all(n == 1 for n in counts):
        return config
    shares, layers = config.shares, config.layers
    if shares is not None:
        shares = tuple(s / n for s, n in zip(shares, counts, strict=True) for _ in range(n))
    if layers is not None:
        if len(layers) != len(counts):
            raise ConfigError(
                f"--layers has {len(layers)} numbers for {len(counts)} names of devices",
                hint="a worker named without a device is one name: name tcp://host:port/cpu:0, ...",
            )
        layers = tuple(
            len(part)
            for n_layers, n in zip(layers, counts, strict=True)
            for part in split_by_shares(n_layers, [1.0] * n)
        )
    pairs = zip(config.devices, counts, strict=True)
    devices = tuple(device for device, n in pairs for _ in range(n))
    return replace(config, devices=devices, shares=shares, layers=layers)
