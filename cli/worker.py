"""`gguf-pp worker`: lend this machine's devices, or look at a worker from the other side."""

import gc
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from gguf_pp import config, fetch
from gguf_pp.errors import ConfigError
from gguf_pp.net import client_context, read_secret, server_context

from .check import check, what_is_lent
from .console import Misuse, logs
from .tables import print_table, size

if TYPE_CHECKING:
    from gguf_pp.worker.server import Worker, WorkerConfig

DEFAULT_CACHE_SIZE = "20GiB"


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFlags:
    """What is lent, where, to whom."""

    host: Annotated[
        str, typer.Option("--host", "-H", metavar="ADDRESS", help="Where to listen.")
    ] = "127.0.0.1"
    port: Annotated[
        int, typer.Option("--port", "-p", metavar="N", min=0, max=65535, help="0 picks one.")
    ] = 50052
    device: Annotated[
        str,
        typer.Option(
            "--device",
            "-dev",
            "-d",
            metavar="NAME,...",
            help="cpu, cpu:0,cpu:1,... or cuda:0,cuda:1,...; a CUDA device may be named again.",
        ),
    ] = "cpu"
    threads: Annotated[
        str | None,
        typer.Option(
            "--threads",
            "-t",
            metavar="N,...",
            help="Threads of every device, or of each.",
            show_default="its cores",
        ),
    ] = None
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            metavar="SIZE",
            help="What all clients together may take: RAM, cuda:0=SIZE, or both.",
            show_default="what is available",
        ),
    ] = None
    edge_copy: Annotated[
        str,
        typer.Option(
            "--edge-copy",
            metavar="auto|p2p|host",
            help="How CUDA devices copy to each other; auto tries it first.",
        ),
    ] = "auto"
    model_dir: Annotated[
        list[Path] | None,
        typer.Option(
            "--model-dir",
            metavar="DIR",
            show_default=False,
            help="Use models from here where a client has the same. Repeatable.",
        ),
    ] = None
    cache: Annotated[
        Path | None,
        typer.Option(
            "--cache",
            "-c",
            metavar="DIR",
            show_default="in the user's cache folder",
            help="Keep what clients send, so that they send it once.",
        ),
    ] = None
    cache_size: Annotated[
        str, typer.Option("--cache-size", metavar="SIZE", help="0 keeps nothing.")
    ] = DEFAULT_CACHE_SIZE
    secret_file: Annotated[
        Path | None,
        typer.Option(
            "--secret-file",
            metavar="FILE",
            show_default=False,
            help="A secret that clients must have too; also $GGUF_PP_SECRET.",
        ),
    ] = None
    tls_cert: Annotated[
        Path | None,
        typer.Option("--tls-cert", metavar="FILE", help="Encrypt, with this.", show_default=False),
    ] = None
    tls_key: Annotated[
        Path | None,
        typer.Option("--tls-key", metavar="FILE", help="Its key.", show_default=False),
    ] = None
    tls_ca: Annotated[
        Path | None,
        typer.Option(
            "--tls-ca",
            metavar="FILE",
            show_default=False,
            help="Connect with TLS to other workers, and with --check, and believe this.",
        ),
    ] = None
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="S", help="Silence after which a peer is gone.")
    ] = 15.0
    max_clients: Annotated[
        int, typer.Option("--max-clients", metavar="N", min=1, max=64, help="Models at a time.")
    ] = 4
    no_forward: Annotated[
        bool, typer.Option("--no-forward", help="Do not connect to other workers.")
    ] = False
    check: Annotated[
        str | None,
        typer.Option(
            "--check",
            metavar="HOST:PORT",
            show_default=False,
            help="Serve nothing: say what the worker there has, and how fast the way is.",
        ),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            metavar="MODEL",
            help="With --check: has it this model?",
            show_default=False,
        ),
    ] = None
    as_json: Annotated[
        bool, typer.Option("--json", help="With --check: print one JSON object.")
    ] = False
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say more.")] = False


def worker(flags: WorkerFlags) -> None:
    """Lend devices of this machine to `gguf-pp run --device tcp://host:port` elsewhere.

    Listens on this machine only unless --host says otherwise, which takes a secret. SIGTERM lets
    what is computed end; Ctrl-C does not.
    """
    if flags.check is not None:
        with logs(verbose=flags.verbose):
            check(
                flags.check,
                flags.model,
                flags.secret_file,
                flags.tls_ca,
                flags.timeout,
                as_json=flags.as_json,
            )
        return
    if flags.model is not None or flags.as_json:
        raise Misuse("-m and --json are for --check")
    settings = _settings(flags)
    from gguf_pp.worker.server import Worker

    with logs(verbose=True), _until_stopped() as stop:
        host = Worker(settings)
        _show(host)
        # What is loaded by now stays: a look for garbage, after each session, is for the rest.
        gc.freeze()
        host.start()
        stop.wait()
        if stop.gently:
            host.drain(settings.timeout_s)
        host.close()


def _settings(flags: WorkerFlags) -> "WorkerConfig":
    """Check the flags. Raises ConfigError."""
    from gguf_pp.worker.server import WorkerConfig

    asked = config.resolve(
        config.Options(
            device=flags.device,
            threads=flags.threads,
            memory=flags.memory,
            edge_copy=flags.edge_copy,
            timeout=flags.timeout,
        )
    )
    if [device for device in asked.devices if device.endpoint is not None]:
        raise ConfigError("a worker lends its own devices, not those of another")
    if (flags.tls_cert is None) != (flags.tls_key is None):
        raise Misuse("--tls-cert and --tls-key belong together")
    return WorkerConfig(
        host=flags.host,
        port=flags.port,
        devices=asked.devices,
        memory_bytes=asked.memory_bytes,
        cuda_bytes=asked.cuda_bytes,
        edge_copy=asked.edge_copy,
        model_dirs=tuple(flags.model_dir or ()),
        cache_dir=flags.cache or fetch.default_cache_dir() / "worker",
        cache_bytes=config.parse_bytes("--cache-size", flags.cache_size),
        secret=read_secret(flags.secret_file),
        tls=None
        if flags.tls_cert is None or flags.tls_key is None
        else server_context(flags.tls_cert, flags.tls_key),
        tls_to=None if flags.tls_ca is None else client_context(flags.tls_ca),
        timeout_s=asked.timeout_s,
        max_clients=flags.max_clients,
        forwards=not flags.no_forward,
    )


def _show(host: "Worker") -> None:
    """Print what is lent, and where."""
    rows = [
        (
            lent["name"],
            what_is_lent(lent["name"], lent["n_threads"], lent["kernels"], lent.get("unusable")),
            size(lent["total_bytes"]),
            size(lent["free_bytes"]),
        )
        for lent in host.lender.describe()
    ]
    print_table(("device", "what", "total", "free"), rows, n_left=2)
    secret = "with a secret" if host.config.secret else "without a secret"
    tls = "encrypted" if host.config.tls else "not encrypted"
    print(f"listening on {host.address}, {secret}, {tls}", flush=True)


class _Stop:
    """Set by signals; `gently` unless by Ctrl-C or a second signal."""

    def __init__(self) -> None:
        self.gently = True
        self._event = threading.Event()

    def handle(self, number: int, frame: FrameType | None) -> None:
        """A signal came. During a drain, another one ends it."""
        self.gently = number == signal.SIGTERM
        if self._event.is_set():
            raise KeyboardInterrupt
        self._event.set()

    def wait(self) -> None:
        """Sleep until a signal comes."""
        # One that a thread takes which just starts wakes nobody here: so look now and then.
        while not self._event.wait(1.0):
            pass


@contextmanager
def _until_stopped() -> Iterator[_Stop]:
    stop = _Stop()
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, stop.handle) for number in numbers]
    try:
        yield stop
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
