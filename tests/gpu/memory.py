"""The ladder on a real allocator: what it refuses is freed, and the next rung fits."""

import gc
from collections.abc import Callable
from typing import Any

import torch

from gguf_pp.backend.base import OutOfMemory
from gguf_pp.backend.cuda import open_cuda
from gguf_pp.config import Device
from gguf_pp.errors import PlacementError
from gguf_pp.pipeline.memory import Rung, climb_down
from gguf_pp.pipeline.ring import Ring
from tests.gpu.harness import Report

ROWS, COLS = 1 << 13, 1 << 13
COPY_BYTES = 4 * ROWS * COLS
LADDER = [Rung(n, 32, 512) for n in (5, 4, 3, 2)]
HERE = Device("cuda:0", "cuda", 0)


def cap_torch(n_bytes: int | None) -> None:
    """Have torch's allocator refuse to hold more than `n_bytes`, whatever is free."""
    total = torch.cuda.mem_get_info(0)[1]
    torch.cuda.set_per_process_memory_fraction(1.0 if n_bytes is None else n_bytes / total, 0)


def check(
    part: str, report: Report, api: Any = torch, cap: Callable[[int | None], None] = cap_torch
) -> None:
    """Copies of 256 MiB: under a limit of our own, and under one that the allocator springs."""
    baseline = _allocated(api)
    (limited,) = open_cuda([HERE], limit_bytes={0: 3 * COPY_BYTES}, api=api)
    rung, ring = climb_down(LADDER, _attempt(limited), lambda: None)
    report.tell(under_a_limit=rung.n_copies)
    report.require(rung.n_copies == 3, f"{rung.n_copies} copies in a limit for 3")
    ring.release()

    (sprung,) = open_cuda([HERE], api=api)
    cap(_reserved(api) + 3 * COPY_BYTES + COPY_BYTES // 2)
    try:
        rung, ring = climb_down(LADDER, _attempt(sprung), lambda: None)
        report.tell(under_a_refusal=rung.n_copies)
        report.require(rung.n_copies == 3, f"{rung.n_copies} copies where 3 are allowed")
        held = _allocated(api) - baseline
        report.require(held == ring.n_bytes, f"{held} bytes held for {ring.n_bytes} of copies")
        ring.release()
        _refuses_all(report, sprung)
    finally:
        cap(None)
    left = _allocated(api) - baseline
    report.tell(left_bytes=left)
    report.require(left == 0, f"{left} bytes are still held at the end")


def _attempt(backend: Any) -> Callable[[Rung], Ring]:
    return lambda rung: Ring(backend, rung.n_copies, ROWS, COLS, inp=True, out=False)


def _refuses_all(report: Report, backend: Any) -> None:
    """Where no rung fits, the error says what was asked at each."""
    try:
        climb_down([Rung(5, 32, 512), Rung(4, 32, 512)], _attempt(backend), lambda: None)
    except PlacementError as exc:
        report.require(str(exc).count("n_copies=") == 2, f"the error is {exc}")
    else:
        report.fault("5 or 4 copies were made where 3 are allowed")
    try:
        backend.reserve(1 << 60, "what nothing has")
    except OutOfMemory as exc:
        report.require(0 < exc.free_bytes < 1 << 60, f"the error is {exc}")
    else:
        report.fault("2^60 bytes were reserved")


def _allocated(api: Any) -> int:
    gc.collect()
    api.cuda.synchronize(0)
    return int(api.cuda.memory_allocated(0))


def _reserved(api: Any) -> int:
    api.cuda.empty_cache()
    return int(api.cuda.memory_reserved(0))
