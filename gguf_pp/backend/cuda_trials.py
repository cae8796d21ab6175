"""What a CUDA device does, tried on the device itself: how fast it copies, whether a copy runs
beside a computation, whether a graph replays. `api` is the torch module, or a double of it."""

from collections.abc import Callable
from typing import Any

from gguf_pp.backend.cuda_edges import Current, Mode, Pinned, copy_between

COPY_BYTES = 64 << 20
N_COPIES = 8
MATRIX_SIZE = 4096
N_PRODUCTS = 16


class Span:
    """Two points in a stream, the device's time between them."""

    def __init__(self, api: Any) -> None:
        self.start, self.end = (api.cuda.Event(enable_timing=True) for _ in range(2))

    def around(self, stream: Any, work: Callable[[], object]) -> None:
        """Queue `work` between the two."""
        self.start.record(stream)
        work()
        self.end.record(stream)

    def seconds(self) -> float:
        """Wait for the end and say how long it took."""
        self.end.synchronize()
        return 1e-3 * float(self.start.elapsed_time(self.end))


def copy_bytes_per_s(api: Any, source: int, target: int, mode: Mode) -> float:
    """Bytes per second of large copies along an edge, or, if `source` is `target`, within it."""
    cuda = api.cuda
    x, d = cuda.Stream(device=source), cuda.Stream(device=target)
    src = api.empty((COPY_BYTES,), dtype=api.uint8, device=f"cuda:{source}")
    dst = api.empty((COPY_BYTES,), dtype=api.uint8, device=f"cuda:{target}")
    pinned = Pinned(api, (COPY_BYTES,), api.uint8) if mode == "host" else None

    def copies() -> None:
        for _ in range(N_COPIES):
            copy_between(cuda, x, d, dst, src, pinned)

    copies()  # the first is slower, and is not counted
    return _rate(api, x, copies)


def host_bytes_per_s(api: Any, index: int) -> tuple[float, float]:
    """Bytes per second of large copies from pinned memory to a device, and back."""
    cuda = api.cuda
    stream = cuda.Stream(device=index)
    here = api.empty((COPY_BYTES,), dtype=api.uint8, pin_memory=True)
    there = api.empty((COPY_BYTES,), dtype=api.uint8, device=f"cuda:{index}")

    def copies(dst: Any, src: Any) -> None:
        with Current(cuda, stream):
            for _ in range(N_COPIES):
                dst.copy_(src, non_blocking=True)

    copies(there, here)
    up = _rate(api, stream, lambda: copies(there, here))
    return up, _rate(api, stream, lambda: copies(here, there))


def _rate(api: Any, stream: Any, copies: Callable[[], None]) -> float:
    span = Span(api)
    span.around(stream, copies)
    return N_COPIES * COPY_BYTES / max(1e-9, span.seconds())


def overlap(api: Any, index: int) -> float:
    """The share of the shorter of a computation and a copy in which both ran, by timestamps."""
    cuda = api.cuda
    compute, transfer = cuda.Stream(device=index), cuda.Stream(device=index, priority=-1)
    shape = (MATRIX_SIZE, MATRIX_SIZE)
    a, b = (api.empty(shape, dtype=api.float32, device=f"cuda:{index}") for _ in range(2))
    here = api.empty((COPY_BYTES,), dtype=api.uint8, pin_memory=True)
    there = api.empty((COPY_BYTES,), dtype=api.uint8, device=f"cuda:{index}")

    def products() -> None:
        with Current(cuda, compute):
            a.fill_(0)
            for _ in range(N_PRODUCTS):
                api.mm(a, a, out=b)

    def copies() -> None:
        with Current(cuda, transfer):
            for _ in range(N_COPIES):
                here.copy_(there, non_blocking=True)

    for _ in range(2):  # the first loads libraries between the two
        origin, one, two = cuda.Event(enable_timing=True), Span(api), Span(api)
        origin.record(compute)
        transfer.wait_event(origin)
        one.around(compute, products)
        two.around(transfer, copies)
        shorter = min(one.seconds(), two.seconds())
    start, end = (
        pick(float(origin.elapsed_time(getattr(span, name))) for span in (one, two))
        for name, pick in (("start", max), ("end", min))
    )
    return max(0.0, 1e-3 * (end - start)) / max(1e-9, shorter)


def graph_replays(api: Any, index: int) -> bool:
    """Whether work captured on a stream of the device is done when it is replayed, each time."""
    cuda = api.cuda
    stream = cuda.Stream(device=index)
    value = api.empty((1,), dtype=api.int32, device=f"cuda:{index}")
    graph = cuda.CUDAGraph()
    with Current(cuda, stream):
        value.fill_(0)
        value.add_(1)  # what is captured has run before: modules are loaded by then
        # Without a stream torch captures on that of another device; other threads may be at work.
        with cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            value.add_(1)
        graph.replay()
        graph.replay()
        got = api.empty((1,), dtype=api.int32)
        got.copy_(value)
    return not bool((got != 3).any())
