"""Tries what a run would rely on: kernels, streams, copies, memory. For `gguf-pp doctor`."""

import os
import platform
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

import torch

from gguf_pp import __version__
from gguf_pp.backend import cpu_trials, cuda_trials
from gguf_pp.backend.cpu import Budget, CpuBackend
from gguf_pp.backend.cuda_edges import Current, Mode, find_damage
from gguf_pp.backend.host import share_cores, system_memory
from gguf_pp.errors import ConfigError, in_short
from gguf_pp.native import describe, kernels
from gguf_pp.ops import make_ops
from gguf_pp.ops.check import KernelCheck, check_kernels
from gguf_pp.pipeline.stage import call

SMALL_BYTES = (4 << 10,)
LARGE_BYTES = (1 << 20, 16 << 20)

OVERLAP = 0.5

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Check:
    """Something that was tried. `ok` is None where it could not be. What is not `needed` has a
    substitute, so that a run is right without it."""

    name: str
    ok: bool | None
    detail: str
    needed: bool = True

    @property
    def broken(self) -> bool:
        """Whether a run would rely on it, and it does not work."""
        return self.needed and self.ok is False


@dataclass(frozen=True, slots=True)
class Kernels:
    """What computes on a device, why that, and how each block type fared."""

    name: str
    why: str
    checks: tuple[KernelCheck, ...]


CudaKernels = Callable[[int, Progress], Kernels]


@dataclass(frozen=True, slots=True)
class CpuReport:
    """The CPU. `bytes_per_s` is read and written by all cores."""

    cores: int
    total_bytes: int
    free_bytes: int
    bytes_per_s: float
    checks: tuple[Check, ...]
    kernels: Kernels


@dataclass(frozen=True, slots=True)
class CudaReport:
    """A CUDA device. Bytes per second of copies within it, to it and from it."""

    name: str
    model: str
    capability: tuple[int, int]
    total_bytes: int
    free_bytes: int
    bytes_per_s: float | None
    up_bytes_per_s: float | None
    down_bytes_per_s: float | None
    checks: tuple[Check, ...]
    kernels: Kernels | None


@dataclass(frozen=True, slots=True)
class PairReport:
    """Copies from one CUDA device to another. `mode` is what a run uses, None if nothing works."""

    source: str
    target: str
    peer_access: bool
    p2p_bytes_per_s: float | None
    host_bytes_per_s: float | None
    checks: tuple[Check, ...]
    mode: Mode | None


@dataclass(frozen=True, slots=True)
class Choice:
    """What a run uses for something, and why."""

    what: str
    choice: str
    why: str


@dataclass(frozen=True, slots=True)
class Report:
    """All of it. `broken` says what a run would use that does not work."""

    versions: dict[str, str | None]
    cpu: CpuReport
    cuda: tuple[CudaReport, ...]
    pairs: tuple[PairReport, ...]
    choices: tuple[Choice, ...]
    broken: tuple[str, ...]


def examine(
    *,
    cuda_kernels: CudaKernels | None = None,
    api: Any = torch,
    progress: Progress = lambda what: None,
) -> Report:
    """Try everything. Takes seconds, and minutes where kernels are compiled for the first time.

    `cuda_kernels` tries the kernels of a device by index, which is current then, with
    `check_kernels`. `progress` is told what comes next. Failures are in the report, not raised.
    """
    cpu = _examine_cpu(progress)
    n_devices = api.cuda.device_count() if api.cuda.is_available() else 0
    cuda = [_examine_cuda(api, i, cuda_kernels, progress) for i in range(n_devices)]
    pairs = [
        _examine_pair(api, i, j, progress)
        for i in range(n_devices)
        for j in range(n_devices)
        if i != j
    ]
    return Report(
        versions=_versions(api),
        cpu=cpu,
        cuda=tuple(cuda),
        pairs=tuple(pairs),
        choices=tuple(_choices(api, cpu, cuda, pairs)),
        broken=tuple(_broken(cpu, cuda, pairs)),
    )


def _versions(api: Any) -> dict[str, str | None]:
    """None is what is not there. Triton builds its launcher with a C compiler where it runs."""
    driver = getattr(getattr(api, "_C", None), "_cuda_getDriverVersion", None)
    compilers = [name for name in ("cc", "gcc", "clang") if shutil.which(name)]
    try:
        triton: str | None = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = None
    return {
        "gguf_pp": __version__,
        "python": platform.python_version(),
        "torch": str(api.__version__),
        "cuda": api.version.cuda,
        "cuda_driver": _dotted(driver()) if driver and api.cuda.is_available() else None,
        "triton": triton,
        "c_compiler": compilers[0] if compilers else None,
    }


def _dotted(version: int) -> str:
    """13010 is 13.1, as cuDriverGetVersion counts."""
    return f"{version // 1000}.{version % 1000 // 10}"


def _try(name: str, work: Callable[[], tuple[bool | None, str]], *, needed: bool = True) -> Check:
    """What came of `work`, or how it failed."""
    try:
        return Check(name, *work(), needed=needed)
    except Exception as exc:  # noqa: BLE001 - of whatever kind, it goes into the report
        return Check(name, False, in_short(exc), needed=needed)


# The CPU.


def _examine_cpu(progress: Progress) -> CpuReport:
    total, free = system_memory()
    cores = share_cores(1)[0]
    backend = CpuBackend("cpu", cores, len(cores), Budget())
    # Kernels set the threads of the thread that makes them, so they get one of the device's own.
    stream = backend.stream("doctor compute", compute=True)
    try:
        progress("cpu: memory and threads")
        bytes_per_s = call(stream, cpu_trials.ram_bytes_per_s).result()
        checks = (
            _try("affinity", lambda: _affinity(min(cores)), needed=False),
            _try("overlap", lambda: (True, _share(cpu_trials.overlap(backend)))),
        )
        progress("cpu: kernels")
        computing = call(stream, _cpu_kernels).result()
    finally:
        backend.close()
    return CpuReport(
        cores=len(cores),
        total_bytes=total,
        free_bytes=free,
        bytes_per_s=bytes_per_s,
        checks=checks,
        kernels=computing,
    )


def _cpu_kernels() -> Kernels:
    checks = check_kernels(lambda exact: make_ops("auto", 1, exact=exact))
    if kernels() is not None:
        return Kernels(f"native ({describe()})", "they were built and load", checks)
    try:
        kernels("native")
    except ConfigError as exc:
        return Kernels("torch", str(exc), checks)
    return Kernels("torch", f"GGUF_PP_KERNELS is {os.environ['GGUF_PP_KERNELS']}", checks)


def _affinity(core: int) -> tuple[bool | None, str]:
    if not hasattr(os, "sched_getaffinity"):
        return None, "this system does not say where threads run"
    n_others = cpu_trials.stray_cores(core)
    if n_others:
        return False, f"a thread for core {core} may run on {n_others} others"
    return True, "threads stay on the cores of their device"


def _share(overlap: float) -> str:
    return f"{overlap:.0%} of the shorter ran beside the longer"


# CUDA devices.


def _examine_cuda(
    api: Any, index: int, cuda_kernels: CudaKernels | None, progress: Progress
) -> CudaReport:
    name = f"cuda:{index}"
    progress(f"{name}: copies, streams, graphs")
    found = CudaReport(name, "unknown", (0, 0), 0, 0, None, None, None, (), None)

    def is_there() -> tuple[bool, str]:
        nonlocal found
        free, total = api.cuda.mem_get_info(index)
        found = replace(
            found,
            model=api.cuda.get_device_name(index),
            capability=tuple(api.cuda.get_device_capability(index)),
            free_bytes=free,
            total_bytes=total,
        )
        return True, "a context can be made"

    def copies() -> tuple[bool, str]:
        nonlocal found
        within = cuda_trials.copy_bytes_per_s(api, index, index, "p2p")
        up, down = cuda_trials.host_bytes_per_s(api, index)
        found = replace(found, bytes_per_s=within, up_bytes_per_s=up, down_bytes_per_s=down)
        return True, "within the device, to it and from it"

    def runs_beside() -> tuple[bool, str]:
        share = cuda_trials.overlap(api, index)
        return share > OVERLAP, _share(share)

    def computes() -> tuple[bool, str]:
        nonlocal found
        if cuda_kernels is not None:
            # Triton launches on the current device, wherever the tensors are.
            with Current(api.cuda, api.cuda.Stream(device=index)):
                found = replace(found, kernels=cuda_kernels(index, progress))
        return True, "can be tried"

    checks = [
        _try("memory", is_there),
        _try("copies", copies),
        _try("overlap", runs_beside, needed=False),
        _try_graphs(api, index),
    ]
    computing = _try("kernels", computes)
    return replace(found, checks=tuple(checks if computing.ok else [*checks, computing]))


def _try_graphs(api: Any, index: int) -> Check:
    """A run whose graphs cannot be captured goes kernel by kernel, but would not notice one that
    computes something else."""
    replayed: list[bool] = []

    def replays() -> tuple[bool, str]:
        replayed.append(cuda_trials.graph_replays(api, index))
        if replayed[0]:
            return True, "a captured graph replays"
        return False, "a captured graph computes something else; --no-cuda-graphs goes without"

    return replace(_try("graphs", replays, needed=False), needed=bool(replayed))


def _examine_pair(api: Any, i: int, j: int, progress: Progress) -> PairReport:
    progress(f"cuda:{i} to cuda:{j}")

    rates: dict[Mode, float | None] = {"p2p": None, "host": None}

    def arrives(mode: Mode, sizes: Sequence[int]) -> tuple[bool, str]:
        damage = find_damage(api, i, j, mode, sizes)
        if not damage:
            rates[mode] = cuda_trials.copy_bytes_per_s(api, i, j, mode)
        return not damage, damage or "arrives unharmed"

    def has_access() -> tuple[bool, str]:
        return bool(api.cuda.can_device_access_peer(i, j)), ""

    checks = (
        _try("p2p small", lambda: arrives("p2p", SMALL_BYTES), needed=False),
        _try("p2p large", lambda: arrives("p2p", LARGE_BYTES), needed=False),
        _try("host", lambda: arrives("host", SMALL_BYTES + LARGE_BYTES), needed=False),
    )
    direct, staged = checks[0].ok and checks[1].ok, checks[2].ok
    return PairReport(
        source=f"cuda:{i}",
        target=f"cuda:{j}",
        peer_access=_try("peer access", has_access).ok is True,
        p2p_bytes_per_s=rates["p2p"],
        host_bytes_per_s=rates["host"],
        checks=checks,
        mode="p2p" if direct else "host" if staged else None,
    )


# The verdict.


def _choices(
    api: Any, cpu: CpuReport, cuda: Sequence[CudaReport], pairs: Sequence[PairReport]
) -> Iterator[Choice]:
    yield Choice("cpu kernels", cpu.kernels.name, cpu.kernels.why)
    if not cuda:
        built = api.version.cuda is not None
        why = "no CUDA device is visible" if built else f"torch {api.__version__} is without CUDA"
        yield Choice("devices", "cpu", why)
        return
    broken = [fault.partition(": ")[0] for fault in _broken(cpu, cuda, pairs)]
    names = ",".join(gpu.name for gpu in cuda if gpu.name not in broken)
    named = f": --device {names}" if names else ""
    yield Choice("devices", "cpu", f"CUDA devices are used where they are named{named}")
    for gpu in cuda:
        if gpu.kernels is not None:
            yield Choice(f"{gpu.name} kernels", gpu.kernels.name, gpu.kernels.why)
        graphs = next(check for check in gpu.checks if check.name == "graphs")
        is_captured = graphs.ok or graphs.needed
        yield Choice(f"{gpu.name} decode", "graphs" if is_captured else "eager", graphs.detail)
    for pair in pairs:
        why = next((c.detail for c in pair.checks if not c.ok), "data arrives unharmed")
        yield Choice(f"{pair.source} to {pair.target}", pair.mode or "nothing", why)


def _broken(
    cpu: CpuReport, cuda: Iterable[CudaReport], pairs: Iterable[PairReport]
) -> Iterator[str]:
    devices = [("cpu", cpu.checks, cpu.kernels), *((g.name, g.checks, g.kernels) for g in cuda)]
    for name, checks, computing in devices:
        yield from (f"{name}: {c.name}: {c.detail}" for c in checks if c.broken)
        if computing is not None:
            faults = (check for check in computing.checks if check.fault)
            yield from (f"{name}: kernels of {check.type}: {check.fault}" for check in faults)
    for pair in pairs:
        if pair.mode is None:
            yield f"{pair.source} to {pair.target}: {pair.checks[-1].detail}"
