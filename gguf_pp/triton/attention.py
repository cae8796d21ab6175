"""Attention over the cache with Triton; `attention_torch` has the same functions without it.

Layouts: queries [T, H, D] and results [T, H D] float32, a layer's keys and values
[n_slots, K, n_cells, D] float16 or float32, all contiguous; `slots` and `positions` [T] int32. A
row at position p sees the cells (p - window, p] of its slot, which are already written; a row at
position -1 is padding, sees nothing and results in 0. The host checks slots and positions: here
they stay on the device, so that a CUDA graph can be replayed with others.
"""

from functools import cache
from typing import NamedTuple

from torch import Tensor

from gguf_pp.ops.base import Attention
from gguf_pp.triton import attention_kernels as kernels
from gguf_pp.triton.launching import Launch, cdiv, power_of_2

MIN_CHUNK = 128
MAX_CHUNKS = 256
UNLIMITED = 1 << 30
BLOCK_G = 16
MAX_HEAD_SIZE = 256
"""Beyond it a block's registers spill; the twin has no limit."""


class Heads(NamedTuple):
    """What all kernels are compiled for, by their names of it."""

    N_HEADS: int
    N_KV_HEADS: int
    HEAD_SIZE: int


def chunk_cells(n_cells: int) -> int:
    """Cells that one program of a decode step folds, for slots of `n_cells`.

    Depends on the cache alone, never on a batch. 128 cells keep every multiprocessor busy in short
    contexts; from 32768 cells on they grow, so that merging stays cheap.
    """
    return max(MIN_CHUNK, power_of_2(cdiv(n_cells, MAX_CHUNKS)))


def decode_launch(spec: Attention, n_bytes: int, n_cells: int) -> Launch:
    """The launch of `decode_chunks` for elements of `n_bytes` and slots of `n_cells`."""
    return _decode_launch(_heads(spec), n_bytes, chunk_cells(n_cells))


@cache
def _decode_launch(heads: Heads, n_bytes: int, chunk: int) -> Launch:
    block_d = power_of_2(heads.HEAD_SIZE)
    constants = {
        **heads._asdict(),
        "CHUNK": chunk,
        "BLOCK_G": BLOCK_G,
        "BLOCK_N": _block_cells(block_d, n_bytes),
        "BLOCK_D": block_d,
    }
    return Launch(constants, _options(_warps(block_d, n_bytes)))


def merge_launch(spec: Attention, n_cells: int) -> Launch:
    """The launch of `decode_merge`."""
    return _merge_launch(spec.n_heads, spec.head_size, chunk_cells(n_cells))


@cache
def _merge_launch(n_heads: int, head_size: int, chunk: int) -> Launch:
    constants = {
        "N_HEADS": n_heads,
        "HEAD_SIZE": head_size,
        "CHUNK": chunk,
        "BLOCK_C": 16,
        "BLOCK_D": power_of_2(head_size),
    }
    return Launch(constants, {**_options(4), "num_stages": 1})


def prefill_launch(spec: Attention, n_bytes: int, *, exact: bool) -> Launch:
    """The launch of `prefill_tiles`."""
    return _prefill_launch(_heads(spec), n_bytes, exact)


@cache
def _prefill_launch(heads: Heads, n_bytes: int, exact: bool) -> Launch:
    block_d = power_of_2(heads.HEAD_SIZE)
    constants = {
        **heads._asdict(),
        "BLOCK_M": 64 if n_bytes == 2 and not (exact and block_d > 64) else 32,
        # Of float32, more cells would spill with Triton 3.6.
        "BLOCK_N": _block_cells(block_d, n_bytes) if n_bytes == 2 else 16,
        "BLOCK_D": block_d,
        "EXACT": exact,
    }
    is_full = not exact and block_d != heads.HEAD_SIZE  # of masks, beside all else
    options = _options(8 if is_full else _warps(block_d, n_bytes))
    if n_bytes == 2 and options["num_warps"] == 8:
        options["maxnreg"] = 255  # or ptxas would spill some to fit more programs
    return Launch(constants, options)


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, slots: Tensor, positions: Tensor, spec: Attention,
    out: Tensor, *, n_cells: int, sinks: Tensor | None = None,
) -> None:  # fmt: skip
    """Attend from rows of any slots at any positions below `n_cells`; fills `out`.

    A row's bits depend neither on the other rows nor on `n_cells`. `sinks` [H] float32 are scores
    that take their share of the softmax and add nothing.
    """
    n_rows, slot_cells = q.shape[0], k.shape[2]
    launch = decode_launch(spec, max(k.itemsize, v.itemsize), slot_cells)
    merge = merge_launch(spec, slot_cells)
    n_chunks = _chunks_seen(n_cells, spec.window, chunk_cells(slot_cells))
    parts = (n_rows, spec.n_heads, n_chunks)
    tops, masses = (q.new_empty(parts) for _ in range(2))
    totals = q.new_empty((*parts, spec.head_size))
    window = spec.window or UNLIMITED
    n_tiles = spec.n_kv_heads * cdiv(spec.n_heads // spec.n_kv_heads, BLOCK_G)
    launch(
        kernels.decode_chunks, (n_chunks, n_tiles, n_rows),
        q, k, v, slots, positions, tops, masses, totals, slot_cells, window, spec.scale,
        spec.softcap or None,
    )  # fmt: skip
    merge(
        kernels.decode_merge, (spec.n_heads, n_rows),
        tops, masses, totals, positions, sinks, out, n_chunks, window,
    )  # fmt: skip


def prefill_attention(
    q: Tensor, k: Tensor, v: Tensor, slots: Tensor, positions: Tensor, spec: Attention,
    out: Tensor, *, n_cells: int, sinks: Tensor | None = None, exact: bool = False,
) -> None:  # fmt: skip
    """Attend from rows of the slot of row 0 at any positions below `n_cells`; fills `out`.

    Padding rows come last. Unless `exact`, queries and weights are rounded to float16 where keys
    and values are.
    """
    n_rows, slot_cells = q.shape[0], k.shape[2]
    launch = prefill_launch(spec, max(k.itemsize, v.itemsize), exact=exact)
    n_tiles = cdiv(n_rows, launch.constants["BLOCK_M"])
    launch(
        kernels.prefill_tiles, (n_tiles, spec.n_heads),
        q, k, v, slots, positions, sinks, out, n_rows, slot_cells, spec.window or UNLIMITED,
        spec.scale, spec.softcap or None,
    )  # fmt: skip


def _heads(spec: Attention) -> Heads:
    return Heads(spec.n_heads, spec.n_kv_heads, spec.head_size)


def _block_cells(block_d: int, n_bytes: int) -> int:
    """Cells of a block: two stages of keys and values take 64 KiB at most, a device has 99."""
    return max(16, min(128 // n_bytes, (16 << 10) // (block_d * n_bytes)))


def _warps(block_d: int, n_bytes: int) -> int:
    """What is wide is spread over more registers."""
    return 4 if block_d <= 128 and n_bytes == 2 else 8


def _options(n_warps: int) -> dict[str, int | bool]:
    """What the compiler is told."""
    return {"num_warps": n_warps, "num_stages": 2, "enable_fp_fusion": True}


def _chunks_seen(n_cells: int, window: int, chunk: int) -> int:
    """The most chunks that cells [0, n_cells) or a window lie in."""
    n_chunks = cdiv(n_cells, chunk)
    return min(n_chunks, cdiv(window - 1, chunk) + 1) if window else n_chunks
