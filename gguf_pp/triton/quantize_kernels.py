"""Rows of x made ready for the kernels of `multiply_kernels`; `quantize` launches these.

Parameters that all share: x float32 [T, n_cols]; a `weight` [n_cols] and `eps` if rows are normed
first; ACTIVATE, one of the functions below, if x is [T, 2 n_cols] and ACTIVATE(left) * right comes
first. The first axis of programs has the rows; the programs of the second share the columns of a
row, BLOCK by BLOCK.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import triton
import triton.language as tl


@triton.jit
def silu(x):
    """x / (1 + exp(-x)), by an exponential that does not overflow."""
    small = tl.exp(-tl.abs(x))
    return x * tl.div_rn(tl.where(x < 0, small, 1.0), 1.0 + small)


@triton.jit
def gelu_tanh(x):
    """As `Ops.gated` defines it. That 1 + tanh cancels left of 0 is part of that."""
    inside = tl.abs(x) < 10
    short = tl.where(inside, x, 0.0).to(tl.float16).to(tl.float32)
    argument = 0.7978845608028654 * short * (1.0 + 0.044715 * short * short)
    small = tl.exp(-2.0 * tl.abs(argument))
    tanh = tl.div_rn(1.0 - small, 1.0 + small)
    tanh = tl.where(argument < 0, -tanh, tanh)
    y = (0.5 * short * (1.0 + tanh)).to(tl.float16).to(tl.float32)
    return tl.where(inside, y, tl.where(x < 0, 0.0, x))


@triton.jit
def gelu_erf(x):
    """x times the normal distribution function."""
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _columns(x, weight, factor, row, first, n_cols, ACTIVATE: tl.constexpr, BLOCK: tl.constexpr):
    """Columns [first, first + BLOCK) of a row as they are before they are rounded; 0 behind it."""
    k = first + tl.arange(0, BLOCK)
    inside = k < n_cols
    if ACTIVATE is not None:
        at = x + row * (2 * n_cols) + k
        gate = tl.load(at, mask=inside, other=0)
        value = ACTIVATE(gate) * tl.load(at + n_cols, mask=inside, other=0)
    else:
        value = tl.load(x + row * n_cols + k, mask=inside, other=0)
        if weight is not None:
            value = value * factor * tl.load(weight + k, mask=inside, other=0)
    return value


@triton.jit
def _factor(x, weight, row, n_cols, eps, BLOCK: tl.constexpr):
    """1 / sqrt(mean of squares + eps) where there is a weight."""
    factor = 1.0
    if weight is not None:
        squares = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, n_cols, BLOCK):
            value = _columns(x, None, 1.0, row, first, n_cols, None, BLOCK)
            squares = tl.fma(value, value, squares)
        mean = tl.div_rn(tl.sum(squares, axis=0), n_cols.to(tl.float32))
        factor = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    return factor


@triton.jit
def _turned(k, TRANSPOSED: tl.constexpr):
    """Where column k goes: 4 t + b of each 16 to 4 b + t if TRANSPOSED."""
    if TRANSPOSED:
        return k // 16 * 16 + (k % 4 * 4 + k // 4 % 4)
    return k


@triton.jit
def float_rows(
    x, weight, add, out, n_cols, eps,
    TRANSPOSED: tl.constexpr, ACTIVATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Float32 [T, n_cols], plus `add` [T, n_cols] where that is not None."""
    row = tl.program_id(0).to(tl.int64)
    factor = _factor(x, weight, row, n_cols, eps, BLOCK)
    for first in range(tl.program_id(1) * BLOCK, n_cols, tl.num_programs(1) * BLOCK):
        value = _columns(x, weight, factor, row, first, n_cols, ACTIVATE, BLOCK)
        k = first + tl.arange(0, BLOCK)
        at = row * n_cols + _turned(k, TRANSPOSED)
        if add is not None:
            value += tl.load(add + at, mask=k < n_cols, other=0)
        tl.store(out + at, value, mask=k < n_cols)


@triton.jit
def _store_int8(value, codes, scales, sums, row, first, n_cols, BLOCK: tl.constexpr):
    """Round to multiples of a 127th of the largest of each 32; halves go up."""
    tile = tl.reshape(value, (BLOCK // 32, 2, 16))
    largest = tl.max(tl.max(tl.abs(tile), axis=2), axis=1)
    # Below, 127 / largest would overflow: a group this small counts as 0.
    largest = tl.where(largest > 1e-36, largest, 0.0)
    scale = tl.div_rn(largest, 127.0)
    inverse = tl.where(largest > 0, tl.div_rn(127.0, tl.where(largest > 0, largest, 1.0)), 0.0)
    code = tl.floor(tl.fma(tile, inverse[:, None, None], 0.5))
    total = tl.sum(code, axis=2) * scale[:, None]
    group = first // 32 + tl.arange(0, BLOCK // 32)
    inside = group < n_cols // 32
    k = group[:, None, None] * 32 + (tl.arange(0, 2)[:, None] * 16 + tl.arange(0, 16))[None, :, :]
    tl.store(codes + row * n_cols + k, code.to(tl.int8), mask=inside[:, None, None])
    tl.store(scales + row * (n_cols // 32) + group, scale, mask=inside)
    run = group[:, None] * 2 + tl.arange(0, 2)[None, :]
    tl.store(sums + row * (n_cols // 16) + run, total, mask=inside[:, None])


@triton.jit
def quantize_int8(
    x, weight, codes, scales, sums, n_cols, eps, ACTIVATE: tl.constexpr, BLOCK: tl.constexpr
):
    """To int8, with a scale per 32 and the sum of x as rounded per 16."""
    row = tl.program_id(0).to(tl.int64)
    factor = _factor(x, weight, row, n_cols, eps, BLOCK)
    for first in range(tl.program_id(1) * BLOCK, n_cols, tl.num_programs(1) * BLOCK):
        value = _columns(x, weight, factor, row, first, n_cols, ACTIVATE, BLOCK)
        _store_int8(value, codes, scales, sums, row, first, n_cols, BLOCK)


@triton.jit
def quantize_half(
    x, weight, out, scales, n_cols, eps,
    TRANSPOSED: tl.constexpr, ACTIVATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """To float16 of below 4 in absolute value, by one program a row.

    `scales` [T] takes the powers of two that undo it. TRANSPOSED swaps column 4 t + b of each 16
    with column 4 b + t.
    """
    row = tl.program_id(0).to(tl.int64)
    factor = _factor(x, weight, row, n_cols, eps, BLOCK)
    largest = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, n_cols, BLOCK):
        value = _columns(x, weight, factor, row, first, n_cols, ACTIVATE, BLOCK)
        largest = tl.maximum(largest, tl.abs(value))
    exponent = tl.max(largest, axis=0).to(tl.int32, bitcast=True) >> 23
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    tl.store(scales + row, (exponent << 23).to(tl.float32, bitcast=True))
    for first in range(0, n_cols, BLOCK):
        value = _columns(x, weight, factor, row, first, n_cols, ACTIVATE, BLOCK) * inverse
        k = first + tl.arange(0, BLOCK)
        at = row * n_cols + _turned(k, TRANSPOSED)
        tl.store(out + at, value.to(tl.float16), mask=k < n_cols)
