"""Attention over the cache as Triton kernels; `attention` launches them.

Softmax is taken block by block with a running maximum (Milakov and Gimelshein 2018; Dao et al.
2022), over several parts of a long row at once for decoding (Dao et al. 2023, "Flash-Decoding").

A row's bits depend on its own keys, values and position only. Blocks and chunks of cells begin at
fixed multiples, whatever the row, the batch or the grid, and are folded in ascending order; a
block that a row does not see leaves its sums exactly as they were. Sizes and slices that differ
from call to call are not specialized on: another compilation might sum in another order.

f16 keys and values meet the queries and weights, which are f32, as f16 on tensor cores. With EXACT
these are the sum of two f16 terms, 22 bits together, at the price of a second product.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
NO_MAXIMUM = tl.constexpr(-1e30)
"""Below any score, and finite, so that a difference of two is 0 and not NaN."""


@triton.jit
def _product(a, b, total, EXACT: tl.constexpr):
    """Total + a b, for a [M, N] f32 and b [N, D] f16 or f32."""
    high = a.to(b.dtype)
    if EXACT and b.dtype == tl.float16:
        total = tl.dot((a - high.to(tl.float32)).to(tl.float16), b, total)
    return tl.dot(high, b, total, input_precision="ieee")


@triton.jit
def _capped(score, softcap):
    """Softcap * tanh(score / softcap): neither libdevice nor the interpreter is asked for tanh."""
    return softcap - 2 * softcap / (tl.exp2(score * (2 * LOG2_E / softcap)) + 1)


@triton.jit
def _fold(q, k, v, seen, scale, softcap, top, mass, total, EXACT: tl.constexpr):
    """Fold cells k, v [N, D], as far as `seen` [M, N], into the running softmax of q [M, D].

    `top` [M] is the largest score so far in units of ln 2, `mass` [M] the sum of 2^(score - top)
    and `total` [M, D] that of the values weighted by the same.
    """
    score = _product(q, tl.trans(k), tl.zeros(seen.shape, tl.float32), EXACT) * scale
    if softcap is not None:
        score = _capped(score, softcap)
    score = tl.where(seen, score * LOG2_E, float("-inf"))
    new_top = tl.maximum(top, tl.max(score, 1))
    weight = tl.exp2(score - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    mass = mass * shrink + tl.sum(weight, 1)
    total = _product(weight, v, total * shrink[:, None], EXACT)
    return new_top, mass, total


@triton.jit
def _cells(slab, slot, i_kv_head, cells, loaded, n_cells, N_KV_HEADS: tl.constexpr,
           HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Read cells [N, D] of a slab; those not `loaded` are 0, whatever lies there."""
    base = slab + (slot * N_KV_HEADS + i_kv_head) * n_cells * HEAD_SIZE
    d = tl.arange(0, BLOCK_D)
    inside = loaded[:, None] & (d < HEAD_SIZE)[None, :]
    return tl.load(base + cells[:, None] * HEAD_SIZE + d[None, :], mask=inside, other=0.0)


@triton.jit(
    do_not_specialize=["n_cells", "window"], do_not_specialize_on_alignment=["slots", "positions"]
)
def decode_chunks(q, k, v, slots, positions, tops, masses, totals, n_cells, window, scale, softcap,
                  N_HEADS: tl.constexpr, N_KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr,
                  CHUNK: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr,
                  BLOCK_D: tl.constexpr):  # fmt: skip
    """Attend from one row to one chunk of cells, for BLOCK_G query heads of one kv head.

    Grid (chunks, K times tiles of a group, T). q [T, H, D] f32; leaves tops and masses
    [T, H, chunks] and totals [T, H, chunks, D] of `_fold`. Chunk 0 is the one with the first cell
    that the row sees; a chunk that it does not see is not written.
    """
    GROUP: tl.constexpr = N_HEADS // N_KV_HEADS
    N_TILES: tl.constexpr = (GROUP + BLOCK_G - 1) // BLOCK_G
    i_chunk, i_tile, i_row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n_chunks = tl.num_programs(0)
    i_kv_head = i_tile // N_TILES
    position = tl.load(positions + i_row)
    first_seen = tl.maximum(position - window + 1, 0)
    chunk = first_seen // CHUNK + i_chunk
    start = tl.maximum(chunk * CHUNK, first_seen // BLOCK_N * BLOCK_N)
    stop = tl.minimum((chunk + 1) * CHUNK, position + 1)
    if start >= stop:
        return
    slot = tl.load(slots + i_row).to(tl.int64)
    g = i_tile % N_TILES * BLOCK_G + tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    heads = i_row * N_HEADS + i_kv_head * GROUP + g
    inside = (g < GROUP)[:, None] & (d < HEAD_SIZE)[None, :]
    queries = tl.load(q + heads[:, None] * HEAD_SIZE + d[None, :], mask=inside, other=0.0)
    top = tl.full((BLOCK_G,), NO_MAXIMUM, tl.float32)
    mass = tl.zeros((BLOCK_G,), tl.float32)
    total = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    for first in range(start, stop, BLOCK_N):
        cells = first + tl.arange(0, BLOCK_N)
        seen = (cells >= first_seen) & (cells < stop)
        keys = _cells(k, slot, i_kv_head, cells, seen, n_cells, N_KV_HEADS, HEAD_SIZE, BLOCK_D)
        values = _cells(v, slot, i_kv_head, cells, seen, n_cells, N_KV_HEADS, HEAD_SIZE, BLOCK_D)
        seen_by_all = tl.broadcast_to(seen[None, :], (BLOCK_G, BLOCK_N))
        top, mass, total = _fold(
            queries, keys, values, seen_by_all, scale, softcap, top, mass, total, True
        )
    parts = heads.to(tl.int64) * n_chunks + i_chunk
    tl.store(tops + parts, top, mask=g < GROUP)
    tl.store(masses + parts, mass, mask=g < GROUP)
    tl.store(totals + parts[:, None] * HEAD_SIZE + d[None, :], total, mask=inside)


@triton.jit(do_not_specialize=["n_chunks", "window"], do_not_specialize_on_alignment=["positions"])
def decode_merge(tops, masses, totals, positions, sinks, out, n_chunks, window,
                 N_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, CHUNK: tl.constexpr,
                 BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Merge the chunks that a row sees, BLOCK_C at a time in ascending order. Grid (H, T)."""
    i_head, i_row = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions + i_row)
    first_seen = tl.maximum(position - window + 1, 0)
    n_seen = tl.where(position < 0, 0, position // CHUNK - first_seen // CHUNK + 1)
    d = tl.arange(0, BLOCK_D)
    head = (i_row * N_HEADS + i_head).to(tl.int64)
    if sinks is None:
        top = tl.full((), NO_MAXIMUM, tl.float32)
        mass = tl.zeros((), tl.float32)
    else:
        top = tl.load(sinks + i_head) * LOG2_E
        mass = tl.full((), 1.0, tl.float32)
    total = tl.zeros((BLOCK_D,), tl.float32)
    for first in range(0, n_seen, BLOCK_C):
        chunks = first + tl.arange(0, BLOCK_C)
        seen = chunks < n_seen
        parts = head * n_chunks + chunks
        part_top = tl.load(tops + parts, mask=seen, other=NO_MAXIMUM)
        part_mass = tl.load(masses + parts, mask=seen, other=0.0)
        inside = seen[:, None] & (d < HEAD_SIZE)[None, :]
        part_total = tl.load(
            totals + parts[:, None] * HEAD_SIZE + d[None, :], mask=inside, other=0.0
        )
        new_top = tl.maximum(top, tl.max(part_top, 0))
        weight = tl.exp2(part_top - new_top)
        shrink = tl.exp2(top - new_top)
        mass = mass * shrink + tl.sum(part_mass * weight, 0)
        total = total * shrink + tl.sum(part_total * weight[:, None], 0)
        top = new_top
    y = total / tl.where(mass > 0, mass, 1.0)
    tl.store(out + head * HEAD_SIZE + d, y, mask=d < HEAD_SIZE)


@triton.jit(
    do_not_specialize=["n_rows", "n_cells", "window"],
    do_not_specialize_on_alignment=["slots", "positions"],
)
def prefill_tiles(q, k, v, slots, positions, sinks, out, n_rows, n_cells, window, scale, softcap,
                  N_HEADS: tl.constexpr, N_KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr,
                  BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
                  EXACT: tl.constexpr):  # fmt: skip
    """Attend from BLOCK_M rows of one sequence, for one query head. Grid (tiles, H).

    q and out are [n_rows, H, D] f32. Late tiles see most cells, hence start first.
    """
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    i_head = tl.program_id(1)
    row = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    is_row = row < n_rows - first_row
    inside = is_row[:, None] & (d < HEAD_SIZE)[None, :]
    # One address and small offsets: addresses of all elements would take registers to the end.
    base = (first_row.to(tl.int64) * N_HEADS + i_head) * HEAD_SIZE
    at = row[:, None] * (N_HEADS * HEAD_SIZE) + d[None, :]
    queries = tl.load(q + base + at, mask=inside, other=0.0)
    position = tl.load(positions + first_row + row, mask=is_row, other=-1)
    first_seen = tl.maximum(position - window + 1, 0)
    stop = tl.max(position, 0) + 1
    lowest = tl.min(tl.where(position < 0, stop, first_seen), 0)
    slot = tl.load(slots).to(tl.int64)
    i_kv_head = i_head // (N_HEADS // N_KV_HEADS)
    if sinks is None:
        top = tl.full((BLOCK_M,), NO_MAXIMUM, tl.float32)
        mass = tl.zeros((BLOCK_M,), tl.float32)
    else:
        top = tl.zeros((BLOCK_M,), tl.float32) + tl.load(sinks + i_head) * LOG2_E
        mass = tl.full((BLOCK_M,), 1.0, tl.float32)
    total = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for first in range(lowest // BLOCK_N * BLOCK_N, stop, BLOCK_N):
        cells = first + tl.arange(0, BLOCK_N)
        filled = (cells >= lowest) & (cells < stop)
        keys = _cells(k, slot, i_kv_head, cells, filled, n_cells, N_KV_HEADS, HEAD_SIZE, BLOCK_D)
        values = _cells(v, slot, i_kv_head, cells, filled, n_cells, N_KV_HEADS, HEAD_SIZE, BLOCK_D)
        seen = (cells[None, :] >= first_seen[:, None]) & (cells[None, :] <= position[:, None])
        top, mass, total = _fold(
            queries, keys, values, seen, scale, softcap, top, mass, total, EXACT
        )
    y = total / tl.where(mass > 0, mass, 1.0)[:, None]
    tl.store(out + base + at, y, mask=inside)
