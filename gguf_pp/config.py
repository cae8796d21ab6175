"""What the user asked for, in the words of the flags, and what that means."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

from gguf_pp.errors import ConfigError
from gguf_pp.net.address import Endpoint, parse_endpoint

MAX_COPIES = 16
MAX_RUN_AHEAD = 2
DEFAULT_UBATCH_SIZE = 512
DEFAULT_COPIES = 2
MIN_TIMEOUT_S, MAX_TIMEOUT_S = 0.5, 3600.0
MAX_SHARES = 1e100  # a product with a number of layers stays finite

SplitMode = Literal["none", "layer"]
Kernels = Literal["auto", "native", "torch"]
Wire = Literal["f32", "f16"]
CudaBytes = tuple[tuple[int, int], ...]
"""(index, bytes) of CUDA devices."""
EdgeCopy = Literal["auto", "p2p", "host"]
GpuLayers = int | Literal["auto"] | None
"""Layers on GPUs: a number of them, as many as fit, or None for all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Flags as given. A field has the name of its flag; None is a flag not given, or "auto"."""

    device: str | None = None
    rpc: str | None = None
    split_mode: str = "layer"
    tensor_split: str | None = None
    layers: str | None = None
    main_gpu: int = 0
    n_gpu_layers: str | None = None
    n_copies: int | None = None
    ctx_size: int | None = None
    batch_size: int = 2048
    ubatch_size: int | None = None
    parallel: int = 1
    run_ahead: int | None = None
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    threads: str | None = None
    kernels: str = "auto"
    exact: bool = False
    memory: str | None = None
    edge_copy: str = "auto"
    cuda_graphs: bool = True
    override_kv: tuple[str, ...] = ()
    wire: str = "f32"
    timeout: float = 15.0
    secret_file: str | None = None
    tls_ca: str | None = None


@dataclass(frozen=True, slots=True)
class Device:
    """A device by name: `kind` "cpu" and an index, or None for all cores; `kind` "cuda" and an
    index, which several may share; or `kind` "tcp", the devices of a worker at `endpoint`, or one
    of them. Its `threads` if those were given."""

    name: str
    kind: str
    index: int | None = None
    threads: int | None = None
    endpoint: Endpoint | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeConfig:
    """Settings of one run, checked against each other. What only the model can settle stays
    open: `ctx_size` None is as much as fits, `shares` and `layers` None is a split by bytes,
    `ubatch_size` None is chosen per prompt. `n_gpu_layers` are the last ones, and those before them
    go to the CPU. `run_ahead` are the decode steps that are queued before their tokens are known.
    `memory_bytes` caps the RAM, `cuda_bytes` CUDA devices."""

    devices: tuple[Device, ...]
    shares: tuple[float, ...] | None
    layers: tuple[int, ...] | None
    n_gpu_layers: GpuLayers
    n_copies: int
    ctx_size: int | None
    batch_size: int
    ubatch_size: int | None
    n_slots: int
    run_ahead: int
    kv_types: tuple[str, str]
    kernels: Kernels
    exact: bool
    memory_bytes: int | None
    cuda_bytes: CudaBytes
    edge_copy: EdgeCopy
    cuda_graphs: bool
    override_kv: tuple[str, ...]
    wire: Wire
    timeout_s: float
    secret_file: str | None
    tls_ca: str | None
    notes: tuple[str, ...]

    @property
    def max_ubatch_size(self) -> int:
        """Rows that buffers are made for."""
        return self.ubatch_size or min(DEFAULT_UBATCH_SIZE, self.batch_size)


def resolve(asked: Options) -> RuntimeConfig:
    """Check every flag and settle what does not depend on the model; raises ConfigError."""
    named = parse_devices(named_devices(asked))
    notes: list[str] = []
    devices, shares, layers = _split(asked, _with_threads(named, asked.threads), notes)
    n_gpu_layers = _n_gpu_layers(asked.n_gpu_layers, devices, layers, notes)
    _sizes(asked)
    memory_bytes, cuda_bytes = _memory(asked.memory, named)
    return RuntimeConfig(
        devices=devices,
        shares=shares,
        layers=layers,
        n_gpu_layers=n_gpu_layers,
        n_copies=_copies(asked.n_copies, devices, notes, n_gpu_layers),
        ctx_size=asked.ctx_size or None,
        batch_size=asked.batch_size,
        ubatch_size=asked.ubatch_size,
        n_slots=asked.parallel,
        run_ahead=_run_ahead(asked.run_ahead, devices),
        kv_types=(
            _choice("--cache-type-k", asked.cache_type_k, ("f32", "f16")),
            _choice("--cache-type-v", asked.cache_type_v, ("f32", "f16")),
        ),
        kernels=cast(Kernels, _choice("--kernels", asked.kernels, ("auto", "native", "torch"))),
        exact=asked.exact,
        memory_bytes=memory_bytes,
        cuda_bytes=cuda_bytes,
        edge_copy=cast(EdgeCopy, _choice("--edge-copy", asked.edge_copy, ("auto", "p2p", "host"))),
        cuda_graphs=asked.cuda_graphs,
        override_kv=asked.override_kv,
        wire=cast(Wire, _choice("--wire", asked.wire, ("f32", "f16"))),
        timeout_s=_timeout(asked.timeout),
        secret_file=asked.secret_file,
        tls_ca=asked.tls_ca,
        notes=tuple(notes),
    )


def named_devices(asked: Options) -> str:
    """`--device`, and after it the workers of `--rpc`."""
    device = "cpu" if asked.device is None else asked.device
    if asked.rpc is None:
        return device
    return ",".join([device, *(f"tcp://{peer.strip()}" for peer in asked.rpc.split(","))])


def parse_devices(text: str) -> tuple[Device, ...]:
    """`cpu`, `cpu:0,cpu:1`, `cuda:0,cuda:1`, `cpu,tcp://host:port`: names in pipeline order.

    A CUDA device that is named again is a virtual device beside the first, cuda:0#2.
    """
    devices: list[Device] = []
    for name in text.split(","):
        device = _parse_device(name.strip())
        n_before = sum((d.kind, d.index) == (device.kind, device.index) for d in devices)
        if device.kind == "cuda" and n_before:
            device = replace(device, name=f"{device.name}#{n_before + 1}")
        devices.append(device)
    names = [d.name for d in devices]
    if repeated := sorted({n for n in names if names.count(n) > 1}):
        raise ConfigError(f"device {repeated[0]!r} is named twice")
    if "cpu" in names and sum(d.kind == "cpu" for d in devices) > 1:
        raise ConfigError(
            "cpu is all cores and leaves none for another device",
            hint="name shares of the cores instead: cpu:0,cpu:1",
        )
    return tuple(devices)


def _parse_device(name: str) -> Device:
    if name.startswith(("tcp://", "rpc:")):
        endpoint = parse_endpoint(name)
        return Device(str(endpoint), "tcp", endpoint=endpoint)
    match = re.fullmatch(r"(cpu|cuda)(?::(\d{1,4}))?", name)
    if match is None:
        raise ConfigError(
            f"no device {name!r}",
            hint="devices: cpu (all cores), or cpu:0,cpu:1,... (equal shares), cuda:0,cuda:1,..., "
            "and tcp://host:port for those of another machine",
        )
    kind, index = match[1], None if match[2] is None else int(match[2])
    if kind == "cuda":
        index = index or 0
    return Device(kind if index is None else f"{kind}:{index}", kind, index)


def parse_shares(text: str) -> tuple[float, ...]:
    """`3,1` or `3/1`: finite, not negative, not all zero."""
    try:
        shares = tuple(float(part) for part in re.split("[,/]", text))
    except ValueError as exc:
        raise ConfigError(f"-ts {text!r} is not a list of numbers such as 3,1") from exc
    if not sum(shares) < MAX_SHARES or min(shares) < 0:  # a sum of NaN is not less
        raise ConfigError(f"-ts {text!r}: shares are finite and not negative")
    if not any(shares):
        raise ConfigError(f"-ts {text!r} leaves no device: at least one share must be above 0")
    return shares


def parse_counts(flag: str, text: str) -> tuple[int, ...]:
    """`10,12,8`: positive whole numbers."""
    parts = [part.strip() for part in re.split("[,/]", text)]
    if not all(re.fullmatch(r"\d{1,9}", part) and int(part) > 0 for part in parts):
        raise ConfigError(f"{flag} {text!r} is not a list of positive whole numbers")
    return tuple(int(part) for part in parts)


_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_bytes(flag: str, text: str) -> int:
    """`8GiB`, `512M`, `1.5g` or plain bytes; units are powers of 1024."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if match is None:
        raise ConfigError(f"{flag} {text!r} is not a size such as 8GiB or 512MiB")
    return int(float(match[1]) * _UNITS[match[2]])


def _memory(text: str | None, devices: Sequence[Device]) -> tuple[int | None, CudaBytes]:
    """`8GiB`, `cuda:0=20GiB`, or both: the RAM to take, and bytes of CUDA devices by index."""
    ram_bytes: int | None = None
    cuda_bytes: dict[int, int] = {}
    indices = {f"cuda:{d.index}": d.index for d in devices if d.kind == "cuda"}
    for part in [] if text is None else text.split(","):
        name, equals, size = part.strip().rpartition("=")
        n_bytes = parse_bytes("--memory", size)
        if not equals and ram_bytes is None:
            ram_bytes = n_bytes
        elif not equals:
            raise ConfigError(f"--memory {text!r} gives two sizes without a name")
        elif (index := indices.get(name)) is None:
            have = ", ".join(indices) or "none"
            raise ConfigError(
                f"--memory is given for {name!r}, which is no CUDA device of this run",
                hint=f"CUDA devices: {have}; CPU devices share the RAM, a SIZE without a name",
            )
        elif index in cuda_bytes:
            raise ConfigError(f"--memory gives {name!r} twice")
        else:
            cuda_bytes[index] = n_bytes
    return ram_bytes, tuple(sorted(cuda_bytes.items()))


_OTHER_MODES = {
    "row": "rows of a matrix are not split over devices here",
    "tensor": "tensors are not split over devices here",
}


def _choice(
    flag: str, value: str, allowed: Sequence[str], why_not: dict[str, str] | None = None
) -> str:
    if value not in allowed:
        hint = (why_not or {}).get(value, "")
        hint = f"{hint}; choose one of {', '.join(allowed)}".lstrip("; ")
        raise ConfigError(f"{flag} cannot be {value!r}", hint=hint)
    return value


def _split(
    asked: Options, devices: tuple[Device, ...], notes: list[str]
) -> tuple[tuple[Device, ...], tuple[float, ...] | None, tuple[int, ...] | None]:
    """The devices to open, and their shares or numbers of layers if those were given."""
    shares = None if asked.tensor_split is None else parse_shares(asked.tensor_split)
    layers = None if asked.layers is None else parse_counts("--layers", asked.layers)
    if shares is not None and layers is not None:
        raise ConfigError("-ts and --layers both say how to split", hint="give one of them")
    mode = _choice("--split-mode", asked.split_mode, ("none", "layer"), _OTHER_MODES)
    if mode == "none":
        if shares is not None or layers is not None:
            flag = "--layers" if shares is None else "-ts"
            notes.append(f"{flag} has no effect: --split-mode is none")
        return _main_device(devices, asked.main_gpu), None, None
    if shares is not None:
        devices, shares = _open_shares(devices, shares)
    return devices, shares, layers


def _open_shares(
    devices: tuple[Device, ...], shares: tuple[float, ...]
) -> tuple[tuple[Device, ...], tuple[float, ...]]:
    """Leave out devices with a share of 0."""
    if len(shares) != len(devices):
        raise ConfigError(
            f"-ts has {len(shares)} shares for {len(devices)} devices",
            hint="one share per device, in the order of --device",
        )
    kept = [(d, s) for d, s in zip(devices, shares, strict=True) if s > 0]
    return tuple(d for d, _ in kept), tuple(s for _, s in kept)


def _main_device(devices: tuple[Device, ...], main_gpu: int) -> tuple[Device, ...]:
    if not 0 <= main_gpu < len(devices):
        raise ConfigError(f"-mg {main_gpu}: there are {len(devices)} devices, counted from 0")
    return (devices[main_gpu],)


def _n_gpu_layers(
    value: str | None,
    devices: Sequence[Device],
    layers: Sequence[int] | None,
    notes: list[str],
) -> GpuLayers:
    """The layers on GPUs, as many as fit unless -ngl says otherwise; None where it cannot say."""
    asked = "auto" if value is None else value
    if asked not in ("auto", "all") and not re.fullmatch(r"-?\d{1,9}", asked):
        raise ConfigError(f"-ngl {value!r} is not a number of layers, auto or all")
    why = ""
    if all(d.kind != "cuda" for d in devices):
        why = "there is no GPU among the devices"
    elif any(d.kind != "cuda" for d in devices):
        why = "there are others than GPUs among the devices"
    elif layers is not None:
        why = "--layers says what each device has"
    if why and value is not None:
        notes.append(f"-ngl has no effect: {why}")
    if why or asked == "all" or asked.startswith("-"):
        return None
    return "auto" if asked == "auto" else int(asked)


def _with_threads(devices: tuple[Device, ...], threads: str | None) -> tuple[Device, ...]:
    if threads is None:
        return devices
    counts = parse_counts("--threads", threads)
    if len(counts) == 1:
        counts *= len(devices)
    if len(counts) != len(devices):
        raise ConfigError(f"--threads has {len(counts)} numbers for {len(devices)} devices")
    if max(counts) > 1024:
        raise ConfigError(f"--threads cannot be {max(counts)}", hint="at most 1024")
    return tuple(replace(d, threads=n) for d, n in zip(devices, counts, strict=True))


def _timeout(seconds: float) -> float:
    if not MIN_TIMEOUT_S <= seconds <= MAX_TIMEOUT_S:  # NaN is neither
        raise ConfigError(
            f"--timeout cannot be {seconds:g}",
            hint=f"seconds, {MIN_TIMEOUT_S:g} to {MAX_TIMEOUT_S:g}",
        )
    return seconds


def _copies(
    asked: int | None, devices: Sequence[Device], notes: list[str], n_gpu_layers: GpuLayers
) -> int:
    if asked is not None and not 1 <= asked <= MAX_COPIES:
        raise ConfigError(f"--n-copies cannot be {asked}", hint=f"1 to {MAX_COPIES}, or auto")
    # A worker's name without a device stands for all that it has, and -ngl may add the CPU.
    if len(devices) == 1 and not _may_be_several(devices[0]) and n_gpu_layers is None:
        if asked is not None and asked > 1:
            notes.append(f"--n-copies {asked} has no effect: there is one device")
        return 1
    return DEFAULT_COPIES if asked is None else asked


def _run_ahead(asked: int | None, devices: Sequence[Device]) -> int:
    """As asked, else 1 where tokens are chosen on a CUDA device, which would idle meanwhile."""
    if asked is None:
        here = [device for device in devices if device.endpoint is None]
        return int(bool(here) and here[-1].kind == "cuda")
    if not 0 <= asked <= MAX_RUN_AHEAD:
        raise ConfigError(f"--run-ahead cannot be {asked}", hint=f"0 to {MAX_RUN_AHEAD}, or auto")
    return asked


def _may_be_several(device: Device) -> bool:
    return device.endpoint is not None and device.endpoint.device is None


def _sizes(asked: Options) -> None:
    limits = {
        "--ctx-size": (asked.ctx_size or 1, 1 << 30),
        "--batch-size": (asked.batch_size, 1 << 20),
        "--ubatch-size": (asked.ubatch_size or 1, 1 << 16),
        "--parallel": (asked.parallel, 1 << 12),
    }
    if asked.ubatch_size is not None:
        limits["--ubatch-size"] = (asked.ubatch_size, 1 << 16)
    for flag, (value, most) in limits.items():
        if not 1 <= value <= most:
            raise ConfigError(f"{flag} cannot be {value}", hint=f"1 to {most}")
    if asked.ubatch_size is not None and asked.ubatch_size > asked.batch_size:
        raise ConfigError(
            f"--ubatch-size ({asked.ubatch_size}) exceeds --batch-size ({asked.batch_size})",
            hint="a batch is cut into ubatches",
        )
