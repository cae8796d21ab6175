"""How fast kernels are on the device, as shares of what it can do, and which way is the fastest."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from gguf_pp.ops.base import Attention, Rope
from gguf_pp.triton import attention_torch
from gguf_pp.triton.linear import Limits, MatrixOps
from gguf_pp.triton.matrix import DeviceMatrix
from gguf_pp.triton.planes import Planes
from tests.gpu.cases import EVEN, planes_of, raw_of, rows_of, seconds_of
from tests.gpu.check import BLOCK_TYPES
from tests.gpu.harness import Report

T = GGMLQuantizationType
WEIGHT_BYTES = 1 << 30
DEVICE = "cuda:0"
MODEL_ROWS = 14336
"""Rows of a feed-forward matrix of an 8B model, whose columns are those of EVEN."""


def matrix_of(type: T, n_bytes: int) -> tuple[DeviceMatrix, int]:
    """At least `n_bytes` of random rows that repeat, and after how many they do."""
    raw = raw_of(type, 2048, EVEN.n_cols)
    n_times = -(-n_bytes // raw.data.nbytes)
    return as_matrix(planes_of(raw, DEVICE, n_times)), raw.n_rows


def as_matrix(planes: Planes) -> DeviceMatrix:
    """Without going through the file's layout again."""
    matrix = object.__new__(DeviceMatrix)
    matrix._set([planes], planes.n_cols)
    return matrix


def copy_bytes_per_s() -> float:
    """Bytes read and written per second by a copy within the device."""
    src, dst = (torch.empty(WEIGHT_BYTES, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    return 2 * WEIGHT_BYTES / seconds_of(lambda: dst.copy_(src), 0.05)


def check_bandwidth(part: str, report: Report) -> None:
    """One row, and eight, times a GiB of weights of every type."""
    ops = MatrixOps(DEVICE)
    if ops.why_torch is not None:
        report.fault(f"Triton's kernels are not used: {ops.why_torch}")
        return
    peak = copy_bytes_per_s()
    report.tell(copy_gb_per_s=peak / 1e9, launch_us=_launch_us(ops))
    for name in (*BLOCK_TYPES, "F16", "BF16"):
        report.tell(**{name: _shares(ops, T[name], peak, report)})
        torch.cuda.empty_cache()


def _shares(ops: MatrixOps, type: T, peak: float, report: Report) -> dict[str, float]:
    """Bytes of weights per second as a share of `peak`, by the rows of x."""
    w, period = matrix_of(type, WEIGHT_BYTES)
    shares = {}
    for n_rows, exact in ((1, False), (8, False), (1, True)):
        rows = ops.prepared(rows_of(n_rows, w.n_cols, DEVICE))
        product = partial(ops.linear, rows, w, exact=exact)
        y = product().view(n_rows, -1, period)
        alike = torch.equal(y, y[:, :1].expand_as(y))
        report.require(alike, f"{type.name}: equal rows of a large matrix give different results")
        key = f"{n_rows} exact" if exact else str(n_rows)
        shares[key] = w.n_bytes / seconds_of(product, 0.02) / peak
    return shares


def _launch_us(ops: MatrixOps) -> float:
    """What the host takes for a product of one row, its quantization included."""
    w, _ = matrix_of(T.Q4_0, 1)
    x = rows_of(1, w.n_cols, DEVICE)
    ops.linear(x, w)
    torch.cuda.synchronize()
    start, n = time.perf_counter(), 200
    for _ in range(n):
        ops.linear(x, w)
    launched = time.perf_counter() - start
    torch.cuda.synchronize()
    return 1e6 * launched / n


ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 256)
WAYS = {
    "gemv": (32, Limits(1 << 30, 0)),
    "gemm": (256, Limits(0, 1 << 30)),
    "mm": (256, Limits(0, 0)),
}
"""The most rows that a way is tried with, and how it is asked for."""


def check_crossover(part: str, report: Report) -> None:
    """Microseconds of each way for 1 to 256 rows; which is fastest, and what the default costs."""
    for name in BLOCK_TYPES:
        raw = raw_of(T[name], MODEL_ROWS, EVEN.n_cols)
        # Together they are too large for the cache.
        matrices = [as_matrix(planes_of(raw, DEVICE)) for _ in range(4)]
        times = {way: _times(matrices, *settings) for way, settings in WAYS.items()}
        report.tell(**{name: table_of(times)})


def _times(matrices: list[DeviceMatrix], most: int, limits: Limits) -> dict[int, float]:
    ops = MatrixOps(DEVICE, limits=limits)
    times = {}
    for n_rows in (n for n in ROWS if n <= most):
        x = rows_of(n_rows, matrices[0].n_cols, DEVICE)

        def all_of_them(x: Tensor = x) -> None:
            for w in matrices:
                ops.linear(x, w)

        times[n_rows] = 1e6 * seconds_of(all_of_them) / len(matrices)
    return times


def table_of(times: dict[str, dict[int, float]]) -> dict[str, Any]:
    """`times` by way and rows as rows of text, the rows up to which each way is the fastest, and
    how many times slower than that the default limits are at worst."""
    rows = sorted({n for by_rows in times.values() for n in by_rows})
    fastest = {n: min((t[n], way) for way, t in times.items() if n in t)[1] for n in rows}
    last = {way: max((n for n in rows if fastest[n] == way), default=0) for way in times}
    limits = Limits()
    losses = {}
    for n in rows:
        way = "gemv" if n <= limits.gemv else "gemm" if n <= limits.gemm else "mm"
        losses[n] = times[way][n] / times[fastest[n]][n]
    at = max(rows, key=lambda n: losses[n])
    return {
        "us": {way: [round(t[n], 1) for n in rows if n in t] for way, t in times.items()},
        "rows": rows,
        "fastest": [fastest[n] for n in rows],
        "fastest_up_to": last,
        "default_loses": {"rows": at, "times": losses[at]},
    }


NO_ROPE = Rope(torch.empty(0, 0), torch.empty(0, 0), neox=True)


def check_attention(part: str, report: Report) -> None:
    """Decode and prefill by our kernels, by the twin, and by what torch has for prefill."""
    from gguf_pp.triton import attention

    spec = Attention(32, 8, 128, 128**-0.5, NO_ROPE)
    peak = copy_bytes_per_s()
    for n_rows, n_cells in ((1, 512), (1, 8192), (16, 512), (16, 8192), (1, 131072)):
        there = _cache(spec, n_rows, n_cells)
        out = torch.empty(n_rows, 32 * 128, device=DEVICE)
        n_bytes = there["k"].nbytes + there["v"].nbytes
        figures = {}
        for name, module in (("triton", attention), ("torch", attention_torch)):
            seconds = seconds_of(_bound(module.decode_attention, there, spec, out, n_cells))
            figures[f"{name}_us"] = 1e6 * seconds
            figures[f"{name}_of_copy"] = n_bytes / seconds / peak
        report.tell(**{f"decode {n_rows}x{n_cells}": figures})
        del there
        torch.cuda.empty_cache()
    for n_rows, start in ((512, 0), (512, 7680)):
        report.tell(**{f"prefill {n_rows} at {start}": _prefill(spec, n_rows, start)})


def _cache(spec: Attention, n_slots: int, n_cells: int) -> dict[str, Tensor]:
    """A row at the end of every slot."""
    shape = (n_slots, spec.n_kv_heads, n_cells, spec.head_size)
    k, v = (torch.randn(shape, dtype=torch.float16, device=DEVICE) for _ in range(2))
    return {
        "q": torch.randn(n_slots, spec.n_heads, spec.head_size, device=DEVICE),
        "k": k,
        "v": v,
        "slots": torch.arange(n_slots, dtype=torch.int32, device=DEVICE),
        "positions": torch.full((n_slots,), n_cells - 1, dtype=torch.int32, device=DEVICE),
    }


def _bound(
    attend: Callable[..., None], there: dict[str, Tensor], spec: Attention, out: Tensor, n: int
) -> Callable[[], None]:
    return lambda: attend(**there, spec=spec, out=out, n_cells=n)


def _prefill(spec: Attention, n_rows: int, start: int) -> dict[str, Any]:
    """Microseconds by way; of torch's fused attention, by each of its backends."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from gguf_pp.triton import attention

    n_cells = start + n_rows
    there = _cache(spec, 1, n_cells)
    there["q"] = torch.randn(n_rows, spec.n_heads, spec.head_size, device=DEVICE)
    there["slots"] = torch.zeros(n_rows, dtype=torch.int32, device=DEVICE)
    there["positions"] = torch.arange(start, n_cells, dtype=torch.int32, device=DEVICE)
    out = torch.empty(n_rows, spec.n_heads * spec.head_size, device=DEVICE)
    us: dict[str, Any] = {}
    us["triton"] = 1e6 * seconds_of(_bound(attention.prefill_attention, there, spec, out, n_cells))
    twin = _bound(attention_torch.prefill_attention, there, spec, out, n_cells)
    us["torch"] = 1e6 * seconds_of(twin)
    for name in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"):
        backend = getattr(SDPBackend, name, None)
        if backend is None:
            continue
        try:
            with sdpa_kernel(backend):
                us[f"torch {name.lower()}"] = 1e6 * seconds_of(twin)
        except RuntimeError as exc:
            us[f"torch {name.lower()}"] = str(exc).splitlines()[0][:80]
    return us
