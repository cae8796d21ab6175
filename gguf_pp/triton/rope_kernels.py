"""Norm, rotation and the store of keys and values as one Triton kernel; `rope` launches it."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import triton
import triton.language as tl


@triton.jit
def _turned(x, weight, cos, sin, eps, HEAD_SIZE: tl.constexpr, N_ROT: tl.constexpr,
            NEOX: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """The head at `x`, under its norm if there is a `weight`, turned by one row of the tables."""
    HALF: tl.constexpr = N_ROT // 2
    d = tl.arange(0, BLOCK_D)
    turns = d < N_ROT
    if NEOX:
        is_first = d < HALF
        partner = tl.where(is_first, d + HALF, d - HALF)
        pair = tl.where(is_first, d, d - HALF)
    else:
        is_first = d % 2 == 0
        partner = d ^ 1
        pair = d // 2
    a = tl.load(x + d, mask=d < HEAD_SIZE, other=0.0)
    b = tl.load(x + partner, mask=turns, other=0.0)
    if weight is not None:
        inverse = tl.rsqrt(tl.sum(a * a, 0) / HEAD_SIZE + eps)
        a = a * inverse * tl.load(weight + d, mask=d < HEAD_SIZE, other=0.0)
        b = b * inverse * tl.load(weight + partner, mask=turns, other=0.0)
    c = tl.load(cos + pair, mask=turns, other=1.0)
    s = tl.load(sin + pair, mask=turns, other=0.0)
    return a * c + tl.where(is_first, -s, s) * b


@triton.jit(do_not_specialize=["n_cells"], do_not_specialize_on_alignment=["slots", "positions"])
def rope_store(qkv, q, k, v, slots, positions, cos, sin, q_weight, k_weight, eps, n_cells,
               N_HEADS: tl.constexpr, N_KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr,
               N_ROT: tl.constexpr, NEOX: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """One head of one row: a query goes to q [T, H, D], a key or value to its cell.

    Grid (H + 2K, T). Padding rows, at position -1, store no key and no value.
    """
    i_head, i_row = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions + i_row)
    slot = tl.load(slots + i_row).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    inside = d < HEAD_SIZE
    x = qkv + (i_row * (N_HEADS + 2 * N_KV_HEADS) + i_head).to(tl.int64) * HEAD_SIZE
    turn = tl.maximum(position, 0).to(tl.int64) * (N_ROT // 2)
    i_kv_head = (i_head - N_HEADS) % N_KV_HEADS
    cell = ((slot * N_KV_HEADS + i_kv_head) * n_cells + position) * HEAD_SIZE
    if i_head < N_HEADS:
        y = _turned(x, q_weight, cos + turn, sin + turn, eps, HEAD_SIZE, N_ROT, NEOX, BLOCK_D)
        tl.store(q + (i_row * N_HEADS + i_head).to(tl.int64) * HEAD_SIZE + d, y, mask=inside)
    elif position >= 0:
        if i_head < N_HEADS + N_KV_HEADS:
            y = _turned(x, k_weight, cos + turn, sin + turn, eps, HEAD_SIZE, N_ROT, NEOX, BLOCK_D)
            tl.store(k + cell + d, y.to(k.dtype.element_ty), mask=inside)
        else:
            y = tl.load(x + d, mask=inside, other=0.0)
            tl.store(v + cell + d, y.to(v.dtype.element_ty), mask=inside)
