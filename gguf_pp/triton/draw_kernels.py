"""Tokens chosen from the largest logits; `draw` launches these.

A key, an int64, is a logit with its index: keys are in the order of logits, and equal logits in the
order in which their indexes fall.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import triton
import triton.language as tl

LOWEST = tl.constexpr(-0x7FFFFFFFFFFFFFFF)


@triton.jit
def _ordered(bits):
    """From the bits of a float32 to an int32 in the order of the numbers, and back."""
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _key(x, index):
    """-0.0 counts as 0.0; what is not a number is above all."""
    order = _ordered(tl.where(x == 0, 0, x.to(tl.int32, bitcast=True)))
    order = tl.where(x != x, 0x7FFFFFFF, order)
    return (order.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def _value(key):
    return _ordered((key >> 32).to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def _index(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _turns(N_BITS: tl.constexpr, BIT: tl.constexpr):
    """A bit of each index in a cube, which has an axis of 2 for each of N_BITS bits, bit 0 last."""
    return tl.reshape(tl.arange(0, 2), [1] * (N_BITS - 1 - BIT) + [2] + [1] * BIT)


@triton.jit
def _sorted(keys, turn, N_BITS: tl.constexpr, LENGTH: tl.constexpr):
    """Sort runs of 1 << LENGTH keys of a cube: they fall where `turn` is 0, and rise where it is 1.

    Before, each falls and then rises, or rises and then falls.
    """
    for i in tl.static_range(N_BITS - LENGTH, N_BITS):
        # What stands across: sums wrap around, so that nothing is lost.
        other = tl.sum(keys, axis=i, keep_dims=True) - keys
        side = tl.reshape(tl.arange(0, 2), [1] * i + [2] + [1] * (N_BITS - 1 - i))
        keys = tl.where(side == turn, tl.maximum(keys, other), tl.minimum(keys, other))
    return keys


@triton.jit
def _largest(keys, turn, N_BITS: tl.constexpr, K_BITS: tl.constexpr):
    """The 1 << K_BITS largest keys of a cube, whose runs of so many fall and rise in turn.

    Of a run that falls and one that rises, the larger of each two at the same place are the largest
    of both, and they rise once and fall once.
    """
    for i in tl.static_range(1, N_BITS - K_BITS):
        keys = tl.max(keys, axis=N_BITS - i - K_BITS)
        keys = _sorted(keys, _turns(N_BITS - i, K_BITS), N_BITS - i, K_BITS)
    return _sorted(tl.max(keys, axis=0), turn, K_BITS, K_BITS)


@triton.jit
def candidates(
    logits, choices, ends, keys, n_vocab, n_ends,
    N_PARAMS: tl.constexpr, K_BITS: tl.constexpr, N_BITS: tl.constexpr,
):  # fmt: skip
    """The K largest of each block of 1 << N_BITS logits: `keys` int64 [n, n_blocks, K], sorted,
    those of every second block in ascending order. K is 1 << K_BITS.
    """
    K: tl.constexpr = 1 << K_BITS
    BLOCK: tl.constexpr = 1 << N_BITS
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    index = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * n_vocab + index, mask=index < n_vocab, other=float("-inf"))
    if tl.load(choices + row * N_PARAMS + 5) != 0:
        for i in range(n_ends):
            x = tl.where(index == tl.load(ends + i).to(tl.int32), float("-inf"), x)
    keys += (row * tl.num_programs(1) + block) * K
    if K_BITS == 0:
        tl.store(keys, tl.max(_key(x, index), axis=0))
    else:
        best = tl.reshape(_key(x, index), [2] * N_BITS)
        for i in tl.static_range(1, K_BITS + 1):
            best = _sorted(best, _turns(N_BITS, i), N_BITS, i)
        best = _largest(best, block % 2, N_BITS, K_BITS)
        tl.store(keys + tl.arange(0, K), tl.reshape(best, (K,)))


@triton.jit
def _some(keys, first, n_keys, N_BITS: tl.constexpr):
    """1 << N_BITS keys, with what is below all keys for those that are not there."""
    i = first + tl.arange(0, 1 << N_BITS)
    return tl.load(keys + i, mask=i < n_keys, other=LOWEST)


@triton.jit
def _place(values, top, choices, n_vocab, K: tl.constexpr):
    """As `choose._draw`, one row of float32 [K]."""
    temperature, top_k, top_p = tl.load(choices), tl.load(choices + 1), tl.load(choices + 2)
    min_p, number = tl.load(choices + 3), tl.load(choices + 4)
    rank = tl.arange(0, K)
    gaps = values.to(tl.float64) - top.to(tl.float64)
    weights = tl.where(rank < top_k, tl.exp(gaps), 0.0)
    sums = tl.cumsum(weights, axis=0)
    total = tl.sum(tl.where(rank == K - 1, sums, 0.0), axis=0)
    keep = 1 + tl.sum((sums / total < top_p).to(tl.int32), axis=0)
    keep = tl.minimum(keep, K - tl.sum((weights < min_p).to(tl.int32), axis=0))
    keep = tl.minimum(keep, tl.minimum(top_k.to(tl.int32), n_vocab))
    weights = tl.where(rank < keep, tl.exp(gaps / temperature), 0.0)
    sums = tl.cumsum(weights, axis=0)
    total = tl.sum(tl.where(rank == K - 1, sums, 0.0), axis=0)
    place = tl.sum((sums <= number * total).to(tl.int32), axis=0)
    return tl.minimum(place, keep - 1)


@triton.jit
def draw(
    keys, choices, out, n_keys, n_vocab,
    N_PARAMS: tl.constexpr, NO_TOKEN: tl.constexpr, K_BITS: tl.constexpr, N_BITS: tl.constexpr,
):  # fmt: skip
    """A token int32 [n] for each row of `keys` [n, n_keys], which `candidates` made."""
    K: tl.constexpr = 1 << K_BITS
    row = tl.program_id(0).to(tl.int64)
    keys += row * n_keys
    if K_BITS == 0:
        top = tl.load(keys)
        for first in range(0, n_keys, 1 << N_BITS):
            top = tl.maximum(top, tl.max(_some(keys, first, n_keys, N_BITS), axis=0))
        token = _index(top)
    else:
        best = tl.full([2] * K_BITS, LOWEST, tl.int64)
        for first in range(0, n_keys, 1 << N_BITS):
            more = tl.reshape(_some(keys, first, n_keys, N_BITS), [2] * N_BITS)
            more = _largest(more, 1, N_BITS, K_BITS)
            best = _sorted(tl.maximum(best, more), 0, K_BITS, K_BITS)
        best = tl.reshape(best, (K,))
        top = tl.max(best, axis=0)
        place = _place(_value(best), _value(top), choices + row * N_PARAMS, n_vocab, K)
        token = tl.sum(tl.where(tl.arange(0, K) == place, _index(best), 0), axis=0)
    is_finite = tl.abs(_value(top)) < float("inf")
    tl.store(out + row, tl.where(is_finite, token, NO_TOKEN))
