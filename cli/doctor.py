"""`gguf-pp doctor`: try what a run relies on, and say what it would use."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from .session import print_json
from .tables import count, print_table, printable, size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from gguf_pp.doctor import Check, CpuReport, CudaReport, Kernels, PairReport, Progress, Report

_RESULTS = {True: "ok", False: "fails", None: "-"}

Row = tuple[str, str, str, str]


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Try what a run relies on: kernels, copies, streams, memory; say what would be used and why.

    Takes seconds; for the first time on a CUDA device minutes, as kernels are compiled. Without one
    the CPU side is tried. The exit code is 1 if something that would be used does not work.
    """
    from gguf_pp.doctor import examine

    with _status() as update:
        report = examine(progress=update, cuda_kernels=_cuda_kernels)
    if as_json:
        print_json(asdict(report))
    else:
        show(report)
    if report.broken:
        raise typer.Exit(1)


def _cuda_kernels(index: int, progress: "Progress") -> "Kernels":
    """Try what computes on a CUDA device."""
    import torch

    from gguf_pp.doctor import Kernels
    from gguf_pp.ops.check import check_kernels
    from gguf_pp.triton import why_unusable
    from gguf_pp.triton.ops import DeviceOps

    device = f"cuda:{index}"
    why = why_unusable(torch.device(device))
    checks = check_kernels(
        lambda exact: DeviceOps(device, exact=exact),
        device,
        tell=lambda type: progress(f"{device}: kernels of {type}"),
    )
    if why is not None:
        return Kernels("torch", why, checks)
    return Kernels("triton", "Triton loads, and its kernels compute", checks)


@contextmanager
def _status() -> Iterator["Callable[[str], None]"]:
    """Lend a function that shows on the terminal what is being tried."""
    from rich.console import Console

    out = Console(stderr=True, highlight=False, markup=False, emoji=False)
    if not out.is_terminal:
        yield lambda what: None
        return
    with out.status("") as status:
        yield status.update


def show(report: "Report") -> None:
    """Print the report as tables."""
    print(", ".join(f"{name} {value or 'not there'}" for name, value in report.versions.items()))
    print()
    rows = [*_cpu_rows(report.cpu)]
    for gpu in report.cuda:
        rows += _cuda_rows(gpu)
    for pair in report.pairs:
        rows += _pair_rows(pair)
    cells = (tuple(map(printable, row)) for row in rows)
    print_table(("device", "tried", "result", "detail"), cells, n_left=4)
    print()
    uses = [tuple(map(printable, (c.what, c.choice, c.why))) for c in report.choices]
    print_table(("for", "used", "because"), uses, n_left=3)
    print()
    if not report.cuda:
        print("only the CPU side was tried")
    for fault in report.broken:
        print(f"broken: {printable(fault)}")
    if not report.broken:
        print("all that would be used works")


def _cpu_rows(cpu: "CpuReport") -> "Iterable[Row]":
    memory = f"{size(cpu.free_bytes)} of {size(cpu.total_bytes)} free"
    yield "cpu", "memory", "ok", f"{memory}, copies move {_rate(cpu.bytes_per_s)}"
    yield "cpu", "cores", "ok", count(cpu.cores, "core")
    yield from _check_rows("cpu", cpu.checks)
    yield from _kernel_rows("cpu", cpu.kernels)


def _cuda_rows(gpu: "CudaReport") -> "Iterable[Row]":
    major, minor = gpu.capability
    memory = f"{size(gpu.free_bytes)} of {size(gpu.total_bytes)} free"
    if gpu.total_bytes:
        yield gpu.name, "device", "ok", f"{gpu.model}, capability {major}.{minor}, {memory}"
    rates = (gpu.bytes_per_s, gpu.up_bytes_per_s, gpu.down_bytes_per_s)
    details = "copies move {} within the device, {} to it, {} from it"
    yield gpu.name, "bandwidth", "-", details.format(*map(_rate, rates))
    yield from _check_rows(gpu.name, gpu.checks)
    if gpu.kernels is not None:
        yield from _kernel_rows(gpu.name, gpu.kernels)


def _pair_rows(pair: "PairReport") -> "Iterable[Row]":
    name = f"{pair.source} to {pair.target}"
    yield name, "peer access", "ok" if pair.peer_access else "-", f"used: {pair.mode or 'nothing'}"
    rates = f"{_rate(pair.p2p_bytes_per_s)} directly, {_rate(pair.host_bytes_per_s)} by the host"
    yield name, "bandwidth", "-", rates
    yield from _check_rows(name, pair.checks)


def _check_rows(name: str, checks: "Iterable[Check]") -> "Iterable[Row]":
    for check in checks:
        yield name, check.name, _RESULTS[check.ok], check.detail


def _kernel_rows(name: str, kernels: "Kernels") -> "Iterable[Row]":
    sound = [check for check in kernels.checks if not check.fault]
    worst = max((check.error or 0.0 for check in sound), default=0.0)
    all_sound = _RESULTS[len(sound) == len(kernels.checks)]
    types = f"{len(sound)} of {count(len(kernels.checks), 'block type')} right"
    yield name, "kernels", all_sound, f"{kernels.name}: {types}, at most {worst:.0e} off"
    for check in kernels.checks:
        if check.fault:
            yield name, f"kernels {check.type}", "fails", check.fault


def _rate(bytes_per_s: float | None) -> str:
    return "unknown" if bytes_per_s is None else f"{size(int(bytes_per_s))}/s"
