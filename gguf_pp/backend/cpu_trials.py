"""What the CPU does, tried: how fast it copies, whether threads stay where they are put, whether a
copy runs beside a computation."""

import os
import threading
import time
from collections.abc import Callable

import torch

from gguf_pp.backend.cpu import Budget, CpuBackend, CpuStream

COPY_BYTES = 64 << 20
N_COPIES = 5
N_PIECES = 20
N_TRIES = 3
PATIENCE_S = 20.0


def ram_bytes_per_s() -> float:
    """Bytes read and written per second by the threads of the calling thread."""
    src, dst = (torch.zeros(COPY_BYTES, dtype=torch.uint8) for _ in range(2))
    times = []
    for _ in range(N_COPIES):
        start = time.perf_counter()
        dst.copy_(src)
        times.append(time.perf_counter() - start)
    return 2 * COPY_BYTES / min(times)


def stray_cores(core: int) -> int:
    """Cores on which a thread of a device that owns `core` may run beside that one."""
    backend = CpuBackend(f"cpu:{core}", frozenset({core}), 1, Budget(0))
    found: list[set[int]] = []
    try:
        stream = backend.stream("trial")
        stream.run(lambda: found.append(os.sched_getaffinity(0)))
    finally:
        backend.close()
    return len(found[0] - {core})


def overlap(backend: CpuBackend) -> float:
    """The share of the shorter of a computation and of copies in which both ran, by timestamps.

    Raises RuntimeError if the two do not meet: one waited for the other. How large the share is,
    the best of several tries, depends on what other processes do.
    """
    streams = backend.stream("trial compute", compute=True), backend.stream("trial transfer")
    return max(_shared(backend, *streams) for _ in range(N_TRIES))


def _shared(backend: CpuBackend, compute: CpuStream, transfer: CpuStream) -> float:
    meet = threading.Barrier(2, timeout=PATIENCE_S)
    a, b = torch.zeros(256, 256), torch.zeros(1 << 20)
    one, two = _timed(compute, meet, lambda: a @ a), _timed(transfer, meet, lambda: b.clone())
    for stream in (compute, transfer):
        done = backend.event()
        stream.record(done)
        done.synchronize()
    shared = min(one[1], two[1]) - max(one[0], two[0])
    return max(0.0, shared) / min(one[1] - one[0], two[1] - two[0])


def _timed(stream: CpuStream, meet: threading.Barrier, work: Callable[[], object]) -> list[float]:
    """Queue `work` several times between two meetings: its start and end, filled in later."""
    times: list[float] = []

    def run() -> None:
        meet.wait()
        times.append(time.perf_counter())
        for _ in range(N_PIECES):
            work()
        times.append(time.perf_counter())
        meet.wait()

    stream.run(run)
    return times
