"""Which experts serve a row, and the sum of what they make of it; `mixture` launches these."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import triton
import triton.language as tl

_LEAST = tl.constexpr(-(1 << 63))


@triton.jit
def best_experts(logits, experts, weights, n_experts, n_used, BLOCK: tl.constexpr):
    """Of each row of `logits` [T, n_experts], the indexes of the `n_used` greatest, of equal ones
    the first, ascending in `experts` int32 [T, n_used]; their softmax in `weights` [T, n_used].
    """
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < n_experts
    value = tl.load(logits + row * n_experts + i, mask=inside, other=0)
    # As numbers of 64 bits with the index below the value, no two are equal: NaN is the greatest.
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    bits = tl.where(value == value, bits, 0x7FC00000)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    left = tl.where(inside, (ordered << 32) | (BLOCK - i), _LEAST)
    for _ in range(n_used):
        left = tl.where(left == tl.max(left, axis=0), _LEAST, left)
    chosen = inside & (left == _LEAST)
    below = value - tl.max(tl.where(inside, value, -float("inf")), axis=0)
    power = tl.where(chosen, tl.exp(tl.where(chosen, below, 0.0)), 0.0)
    at = row * n_used + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    tl.store(experts + at, i, mask=chosen)
    tl.store(weights + at, tl.div_rn(power, tl.sum(power, axis=0)), mask=chosen)


@triton.jit
def weighted_sum(y, weights, add, out, n_cols, n_used, BLOCK: tl.constexpr):
    """Add to `add` [T, n_cols], or to 0 if None, each of the `n_used` rows of y [T n_used, n_cols]
    that belong to a row of `out`, times its weight, one after the other.
    """
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = k < n_cols
    total = tl.zeros((BLOCK,), tl.float32)
    if add is not None:
        total = tl.load(add + row * n_cols + k, mask=inside, other=0)
    for pair in range(row * n_used, row * n_used + n_used):
        value = tl.load(y + pair * n_cols + k, mask=inside, other=0)
        total += value * tl.load(weights + pair)
    tl.store(out + row * n_cols + k, total, mask=inside)
