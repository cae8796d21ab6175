"""Devices to plan for: those here, those that workers say they lend, and others by their memory."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from gguf_pp import config
from gguf_pp.backend.base import Memory
from gguf_pp.backend.host import share_cores, system_memory
from gguf_pp.config import Options, RuntimeConfig
from gguf_pp.errors import ConfigError, RemoteError
from gguf_pp.net import is_remote, parse_endpoint
from gguf_pp.pipeline.lent import Access, ask, expanded

RAM = "ram"

Source = Literal["here", "worker", "flag"]
"""Where the figures of a device are from: this machine, its worker, or --memory."""


@dataclass(frozen=True, slots=True)
class PlannedDevice:
    """A device by name. The speed of one that only a flag tells of is not known."""

    name: str
    relative_speed: float
    room: Memory
    source: Source

    @property
    def local(self) -> bool:
        """Whether it is of this machine."""
        return not is_remote(self.name)

    def memory(self) -> Memory:
        """Total and free bytes."""
        return self.room


def resolve(asked: Options) -> tuple[RuntimeConfig, tuple[PlannedDevice, ...]]:
    """Check the flags as `config.resolve` does, for devices that need not exist.

    `asked.memory` is NAME=SIZE,... with the memory of devices by name, or the SIZE of the RAM. A
    device that is not here has to have one; a worker that has none is asked. Raises ConfigError,
    RemoteError.
    """
    ram_bytes, given = parse_memory(asked.memory)
    names = _names(asked, given)
    if unknown := [name for name in given if name not in map(_hardware, names)]:
        raise ConfigError(
            f"--memory is given for {unknown[0]!r}, which is not among the devices",
            hint=f"the devices: {', '.join(dict.fromkeys(map(_hardware, names)))}",
        )
    # All other checks are those of the run; CPU devices of it may have a memory each.
    known = [f"cpu:{i}" if _is_cpu(name) else name for i, name in enumerate(names)]
    device = ",".join(map(_hardware, known))
    settled = config.resolve(replace(asked, device=device, rpc=None, memory=None))
    settled = replace(settled, memory_bytes=ram_bytes)
    opened = [names[known.index(device.name)] for device in settled.devices]
    found = _devices(opened, settled, given)
    devices = tuple(device for named in found for device in named)
    return expanded(settled, [len(named) for named in found]), devices


def parse_memory(text: str | None) -> tuple[int | None, dict[str, int]]:
    """`8GiB`, or `cuda:0=24GiB,cuda:1=12GiB`: the RAM to take, and memories by device."""
    ram_bytes: int | None = None
    given: dict[str, int] = {}
    for part in [] if text is None else text.split(","):
        name, equals, size = part.strip().rpartition("=")
        n_bytes = config.parse_bytes("--memory", size)
        name = _plain(name)
        if equals and name in given:
            raise ConfigError(f"--memory gives {name!r} twice")
        if equals:
            given[name] = n_bytes
        elif ram_bytes is not None:
            raise ConfigError(
                f"--memory {text!r} gives two sizes without a name",
                hint="name the devices: --memory cpu:0=8GiB,cpu:1=4GiB",
            )
        else:
            ram_bytes = n_bytes
    return ram_bytes, given


def _is_cpu(name: str) -> bool:
    return name.partition(":")[0] == "cpu"


def _hardware(name: str) -> str:
    """The CUDA device that a virtual one, cuda:0#2, is on; any other name as it is."""
    return name if is_remote(name) else name.partition("#")[0]


def _plain(name: str) -> str:
    """A name as it is written everywhere else: not cuda:00, nor a worker's without its port."""
    if is_remote(name):
        return str(parse_endpoint(name))
    number = re.fullmatch(r"cuda:([0-9]{1,4})", name)
    return f"cuda:{int(number[1])}" if number else name


def _names(asked: Options, given: Iterable[str]) -> list[str]:
    """Names in order, virtual devices as `config.parse_devices` numbers them. Without --device they
    are those that have a memory, then those of --rpc."""
    if asked.device is None:
        lent = (
            [] if asked.rpc is None else [f"tcp://{peer.strip()}" for peer in asked.rpc.split(",")]
        )
        others = [name for name in given if name not in lent]
        asked = replace(asked, device=",".join(others) or None)
    names = [_plain(name.strip()) for name in config.named_devices(asked).split(",")]
    if cpus := [name for name in names if _is_cpu(name)]:
        config.parse_devices(",".join(cpus))
    for name in names:
        if not (_is_cpu(name) or is_remote(name) or re.fullmatch(r"cuda:[0-9]{1,4}", name)):
            raise ConfigError(
                f"no device {name!r}",
                hint="a plan knows cpu, cpu:0,cpu:1,..., cuda:0 and tcp://host:port",
            )
    if repeated := sorted({n for n in names if is_remote(n) and names.count(n) > 1}):
        raise ConfigError(f"device {repeated[0]!r} is named twice")
    n_before = [names[:i].count(name) for i, name in enumerate(names)]
    return [f"{name}#{n + 1}" if n else name for name, n in zip(names, n_before, strict=True)]


def _ram(settled: RuntimeConfig) -> Memory:
    total, free = system_memory()
    return Memory(RAM, total, free if settled.memory_bytes is None else settled.memory_bytes)


def in_front(settled: RuntimeConfig, devices: Sequence[PlannedDevice]) -> list[PlannedDevice]:
    """Those of `settled`: of `devices`, and the CPU where -ngl has put it in front of them."""
    cpu = PlannedDevice("cpu", 1.0, _ram(settled), "here")
    by_name = {device.name: device for device in devices}
    return [by_name.get(device.name, cpu) for device in settled.devices]


def cuda_here(settled: RuntimeConfig) -> list[PlannedDevice]:
    """The CUDA devices of a run and what they have free, looked at before any is opened for it.

    Raises ConfigError for one that is not here.
    """
    from gguf_pp.backend.cuda import open_cuda  # only here: others need not load it

    found = []
    for device in settled.devices:
        (backend,) = open_cuda([device], limit_bytes=dict(settled.cuda_bytes))
        room, speed = backend.memory(), backend.relative_speed
        backend.close()
        found.append(PlannedDevice(device.name, speed, room, "here"))
    return found


def _cuda(name: str, settled: RuntimeConfig) -> PlannedDevice:
    """One that is here. Raises ConfigError."""
    devices = config.parse_devices(_hardware(name))
    try:
        return replace(cuda_here(replace(settled, devices=devices))[0], name=name)
    except ConfigError as exc:
        raise ConfigError(
            f"device {name!r} is not one that runs here, and its memory is not known",
            hint=f"to plan for it, say what it has: --memory {_hardware(name)}=24GiB",
        ) from exc


def _devices(
    names: Sequence[str], settled: RuntimeConfig, given: dict[str, int]
) -> list[list[PlannedDevice]]:
    """The devices that each name means. Where a speed is not known, all count as equal."""
    ram = _ram(settled)
    shares = iter(share_cores(max(1, sum(map(_is_cpu, names)))))
    found = []
    for name, asked in zip(names, settled.devices, strict=True):
        if (pool := _hardware(name)) in given:
            room = Memory(pool, given[pool], given[pool])
            found.append([PlannedDevice(name, 1.0, room, "here" if _is_cpu(name) else "flag")])
        elif is_remote(name):
            found.append(_lent(name, settled))
        elif not _is_cpu(name):
            found.append([_cuda(name, settled)])
        else:
            cores = next(shares)
            speed = float(min(asked.threads or len(cores), len(cores)))
            found.append([PlannedDevice(name, speed, ram, "here")])
    if all(device.source != "flag" for named in found for device in named):
        return found
    return [[replace(device, relative_speed=1.0) for device in named] for named in found]


def _lent(name: str, settled: RuntimeConfig) -> list[PlannedDevice]:
    """What the worker of that name says it has. Raises RemoteError, ConfigError."""
    endpoint = parse_endpoint(name)
    try:
        lent = ask(endpoint, Access.of(settled))
    except RemoteError as exc:
        instead = f"to plan without asking it, say what it has: --memory {name}=24GiB"
        raise RemoteError(str(exc), hint=f"{exc.hint}; {instead}" if exc.hint else instead) from exc
    return [
        PlannedDevice(
            f"tcp://{endpoint.peer}/{device.name_there}",
            device.relative_speed,
            Memory(f"{endpoint.peer} {device.pool}", device.total_bytes, device.free_bytes),
            "worker",
        )
        for device in lent
    ]
