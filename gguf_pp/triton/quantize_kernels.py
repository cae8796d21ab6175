"""Rows of x made ready for the kernels of `multiply_kernels`; `quantize` launches these."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import triton
import triton.language as tl


@triton.jit
def _load(x, weight, factor, row, first, n_cols, BLOCK: tl.constexpr):
    """Columns [first, first + BLOCK) of a row, times factor and weight where there are any."""
    k = first + tl.arange(0, BLOCK)
    value = tl.load(x + row * n_cols + k, mask=k < n_cols, other=0)
    if weight is not None:
        value = value * factor * tl.load(weight + k, mask=k < n_cols, other=0)
    return value


@triton.jit
def _rms_factor(x, row, n_cols, eps, BLOCK: tl.constexpr):
    """1 / sqrt(mean of squares + eps), summed in one order whatever the number of rows."""
    squares = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, n_cols, BLOCK):
        value = _load(x, None, 1.0, row, first, n_cols, BLOCK)
        squares = tl.fma(value, value, squares)
    mean = tl.div_rn(tl.sum(squares, axis=0), n_cols.to(tl.float32))
    return tl.div_rn(1.0, tl.sqrt_rn(mean + eps))


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
def quantize_int8(x, codes, scales, sums, n_cols, BLOCK: tl.constexpr):
    """x float32 [T, n_cols] to int8, with a scale per 32 and the sum of x as rounded per 16."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    value = _load(x, None, 1.0, row, first, n_cols, BLOCK)
    _store_int8(value, codes, scales, sums, row, first, n_cols, BLOCK)


@triton.jit
def norm_quantize_int8(x, weight, codes, scales, sums, n_cols, eps, BLOCK: tl.constexpr):
    """As `quantize_int8`, of x / rms(x) * weight."""
    row = tl.program_id(0).to(tl.int64)
    factor = _rms_factor(x, row, n_cols, eps, BLOCK)
    for first in range(0, n_cols, BLOCK):
        value = _load(x, weight, factor, row, first, n_cols, BLOCK)
        _store_int8(value, codes, scales, sums, row, first, n_cols, BLOCK)


@triton.jit
def quantize_half(
    x, weight, out, scales, n_cols, eps, TRANSPOSED: tl.constexpr, BLOCK: tl.constexpr
):
    """x, or x / rms(x) * weight where there is a weight, to float16 of below 4 in absolute value.

    `scales` [T] takes the powers of two that undo it. TRANSPOSED swaps column 4 t + b of each 16
    with column 4 b + t.
    """
    row = tl.program_id(0).to(tl.int64)
    factor = 1.0
    if weight is not None:
        factor = _rms_factor(x, row, n_cols, eps, BLOCK)
    largest = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, n_cols, BLOCK):
        value = _load(x, weight, factor, row, first, n_cols, BLOCK)
        largest = tl.maximum(largest, tl.abs(value))
    exponent = tl.max(largest, axis=0).to(tl.int32, bitcast=True) >> 23
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    tl.store(scales + row, (exponent << 23).to(tl.float32, bitcast=True))
    for first in range(0, n_cols, BLOCK):
        value = _load(x, weight, factor, row, first, n_cols, BLOCK) * inverse
        k = first + tl.arange(0, BLOCK)
        at = k
        if TRANSPOSED:
            at = k // 16 * 16 + (k % 4 * 4 + k // 4 % 4)
        tl.store(out + row * n_cols + at, value.to(tl.float16), mask=k < n_cols)
