"""Random matrices and rows on a device, how products are judged, and how long work takes."""

import statistics
from collections.abc import Callable
from typing import NamedTuple

import gguf.quants
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from gguf_pp.ops.check import random_matrix
from gguf_pp.quants.raw import RawTensor
from gguf_pp.triton.planes import Planes, to_planes

CANARY = -12345.0
PAD = 8


class Shape(NamedTuple):
    """Of a matrix, about, and the numbers of rows of x that are tried with it."""

    n_rows: int
    n_cols: int
    gemv: tuple[int, ...]
    gemm: tuple[int, ...]


RAGGED = Shape(37, 1300, (1, 2, 3, 5, 8), (9, 17, 33, 64))
EVEN = Shape(4096, 4096, (1, 2, 4, 8, 16), (16, 32, 64))
"""Another specialization of the kernels, the one that models have. What is compiled for it is what
the sections that measure use."""
LOW = Shape(512, 1024, (1, 8), (16, 64))
"""With so few rows of W programs take fewer of them, and share its columns."""


def raw_of(type: GGMLQuantizationType, n_rows: int, n_cols: int) -> RawTensor:
    """Random, with about so many columns: whole blocks."""
    size = GGML_QUANT_SIZES[type][0]
    n_blocks = max(1, n_cols // size)
    return random_matrix(type, n_rows, size * n_blocks if size > 1 else n_cols // 8 * 8)[0]


def weights_of(raw: RawTensor, device: str) -> Tensor:
    """What the library makes of it: float64."""
    values = gguf.quants.dequantize(raw.data, raw.type)
    return torch.from_numpy(values.copy()).to(device).double()


def planes_of(raw: RawTensor, device: str, n_times: int = 1) -> Planes:
    """On the device, the same rows `n_times` one after the other."""
    w = to_planes(raw.type, raw.n_cols, [torch.from_numpy(raw.data)], torch.device(device))
    if n_times == 1:
        return w
    planes = {name: plane.repeat(n_times, 1) for name, plane in w.planes.items()}
    return Planes(w.type, w.n_cols, planes, w.gain)


def rows_of(n_rows: int, n_cols: int, device: str, seed: int = 0) -> Tensor:
    """Normal, with columns and rows of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n_rows, n_cols, generator=generator)
    x[:, ::7] *= 3
    return (x * (10.0 ** torch.randint(-3, 4, (n_rows, 1), generator=generator))).to(device)


def worst(y: Tensor, x: Tensor, w: Tensor) -> float:
    """The largest |error| of y = x Wᵀ as a share of Σ|x||w|; NaN where there is one."""
    x = x.double()
    share = (y.double() - x @ w.t()).abs() / (x.abs() @ w.abs().t()).clamp_min(1e-300)
    return float(share.max())


class Framed:
    """A float32 result in the middle of canaries."""

    def __init__(self, n_rows: int, n_cols: int, device: str) -> None:
        self._whole = torch.full((n_rows + 2, n_cols + 2 * PAD), CANARY, device=device)
        self.inner = self._whole[1:-1, PAD:-PAD]

    def is_sound(self) -> bool:
        """All canaries live, and the result was filled."""
        n_alive = int((self._whole == CANARY).sum())
        return n_alive == self._whole.numel() - self.inner.numel()


def from_graph(work: Callable[[], Tensor]) -> Tensor:
    """What `work` results in when it is replayed, after it ran once."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            result = work()
        finally:
            graph.capture_end()
        graph.replay()
    stream.synchronize()
    return result.clone()


def seconds_of(work: Callable[[], object], at_least_s: float = 0.01) -> float:
    """How long the device is busy with `work`, without what launching it costs.

    By replays of a CUDA graph, by calls where it cannot be captured: the median of three times.
    """
    for _ in range(2):
        work()
    torch.cuda.synchronize()
    again = _captured(work)
    one = _timed(again, 1)
    n = max(1, min(10_000, round(at_least_s / max(1e-7, one))))
    return statistics.median(_timed(again, n) for _ in range(3))


def _captured(work: Callable[[], object]) -> Callable[[], object]:
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    try:
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            work()
    except RuntimeError:
        torch.cuda.synchronize()
        return work
    return graph.replay


def _timed(work: Callable[[], object], n: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(n):
        work()
    end.record()
    end.synchronize()
    return 1e-3 * start.elapsed_time(end) / n
