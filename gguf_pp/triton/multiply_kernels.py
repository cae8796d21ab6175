"""y = x Wᵀ on blocks that are decoded as they are read; `multiply` launches these kernels.

Parameters that all share: the planes of W (see `planes`) with `n_rows` rows of `n_blocks` blocks,
`n_chunks` chunks a row, and the constants of its type (see `decode_kernels`). Results go to `out`,
float32, whose rows are `stride` elements apart; where they are not None, `bias` [n_rows] and `add`,
laid out as `out`, are added, in this order. T is the number of rows of x.

W may be the matrices of many experts, `n_rows` rows each. Then T is the number of pairs of a row of
x and an expert, pair i has row i // `n_share` of x and row i of `out`, and its expert is `experts`
[i] (int32), with one pair to a program, or the one of its tile in `gemm`.

A row of the result depends on its row of x alone, bit for bit, as long as the same kernel computes
it: no sum runs over rows of x, the columns of W fold in one fixed order whatever the tile sizes
below are, and contraction is left to the `fma` that are written here (compiled without fusion).
For `gemm` this supposes that tensor cores sum a tile of 16 rows as they do one of 64.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import triton
import triton.language as tl

from gguf_pp.triton.decode_kernels import dot4, number, words


@triton.jit
def _clamped(start, size: tl.constexpr, stop):
    """`size` indexes from `start` on, the last one that there is in place of those behind it."""
    return tl.minimum(start + tl.arange(0, size), stop - 1).to(tl.int64)


@triton.jit
def _run(c, p: tl.constexpr, PARTS: tl.constexpr, SPAN: tl.constexpr):
    """The run of 16 weights that is part p of chunks c."""
    return c // SPAN * (SPAN * PARTS) + (p * SPAN + c % SPAN)


@triton.jit
def _quarters(tile):
    """[N, C, 4] as four tiles [N, C]."""
    even, odd = tl.split(tl.reshape(tile, (tile.shape[0], tile.shape[1], 2, 2)))
    t0, t2 = tl.split(even)
    t1, t3 = tl.split(odd)
    return t0, t1, t2, t3


@triton.jit
def _corner(experts, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The first row and column of `out` for a program of a `gemv`.

    Programs that start one after another have the same columns of several pairs: of those that
    share an expert, one finds in the cache the weights that another has read.
    """
    if experts is not None:
        return tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    return tl.program_id(1) * BLOCK_M, tl.program_id(0) * BLOCK_N


@triton.jit
def _operands(
    experts, n_share, first_m, first_n, t_rows, n_rows, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The rows [M] of x and [N] of W that a program of a `gemv` multiplies."""
    m, n = _clamped(first_m, BLOCK_M, t_rows), _clamped(first_n, BLOCK_N, n_rows)
    if experts is not None:
        n += tl.load(experts + m).to(tl.int64) * n_rows
        m = m // n_share
    return m, n


@triton.jit
def _store(y, out, bias, add, m, inside_m, first_n, n_rows, stride):
    """Store y [M, N], with bias and addend, as rows m, if `inside_m`, and columns `first_n`..."""
    n = first_n + tl.arange(0, y.shape[1])
    inside = inside_m[:, None] & (n < n_rows)[None, :]
    at = m.to(tl.int64)[:, None] * stride + n[None, :]
    if bias is not None:
        y += tl.load(bias + n, mask=n < n_rows, other=0)[None, :]
    if add is not None:
        y += tl.load(add + at, mask=inside, other=0)
    tl.store(out + at, y, mask=inside)


@triton.jit
def gemv_int8(
    q, high, scales, d, x, x_scales, x_sums, out, bias, add,
    t_rows, n_rows, n_blocks, n_chunks, stride, experts, n_share,
    PARTS: tl.constexpr, SPAN: tl.constexpr, MINIMUM: tl.constexpr, LOAD: tl.constexpr,
    CODES: tl.constexpr, SCALES: tl.constexpr, ASM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Few rows of x as `quantize` makes them: words of codes, a scale per 32, a sum per 16."""
    first_m, first_n = _corner(experts, BLOCK_M, BLOCK_N)
    m, n = _operands(experts, n_share, first_m, first_n, t_rows, n_rows, BLOCK_M, BLOCK_N)
    n_runs = n_chunks * PARTS
    acc = tl.zeros((BLOCK_M, BLOCK_N, BLOCK_C), tl.float32)
    for first in range(0, n_chunks, BLOCK_C):
        index = first + tl.arange(0, BLOCK_C)
        inside = (index < n_chunks)[None, :]
        c = tl.minimum(index, n_chunks - 1)
        w, more = LOAD(q, high, n, c, n_blocks)
        for p in tl.static_range(PARTS):
            run = _run(c, p, PARTS, SPAN)
            scale, minimum = SCALES(q, scales, d, n, c, p, n_blocks)
            x_at = m[:, None] * n_runs + run[None, :]
            x_scale = tl.load(x_scales + m[:, None] * (n_runs // 2) + (run // 2)[None, :])
            x_scale = tl.where(inside, x_scale, 0)
            w0, w1, w2, w3 = _quarters(CODES(w, more, c, p, ASM))
            x0, x1, x2, x3 = _quarters(words(x, m * (n_runs * 4), run * 4))
            total = dot4(w0[None, :, :], x0[:, None, :], 0, ASM)
            total = dot4(w1[None, :, :], x1[:, None, :], total, ASM)
            total = dot4(w2[None, :, :], x2[:, None, :], total, ASM)
            total = dot4(w3[None, :, :], x3[:, None, :], total, ASM)
            acc = tl.fma(total.to(tl.float32) * x_scale[:, None, :], scale[None, :, :], acc)
            if MINIMUM:
                x_sum = tl.where(inside, tl.load(x_sums + x_at), 0)
                acc = tl.fma(x_sum[:, None, :], minimum[None, :, :], acc)
    y = tl.sum(acc, axis=2)
    at = first_m + tl.arange(0, BLOCK_M)
    _store(y, out, bias, add, at, at < t_rows, first_n, n_rows, stride)


@triton.jit
def _weights(codes, scale, minimum, b: tl.constexpr, MINIMUM: tl.constexpr):
    """The weights that byte b of `codes` stands for, float32."""
    value = number(codes, b)
    if MINIMUM:
        return tl.fma(value, scale, minimum)
    return value * scale


@triton.jit
def _add_product(acc, codes, scale, minimum, x, b: tl.constexpr, MINIMUM: tl.constexpr):
    """Add to `acc` [M, N, C] the weights of byte b of `codes` [N, C] times x [M, C]."""
    value = _weights(codes, scale, minimum, b, MINIMUM)
    return tl.fma(value[None, :, :], x[:, None, :], acc)


@triton.jit
def gemv_exact(
    q, high, scales, d, x, out, bias, add,
    t_rows, n_rows, n_blocks, n_chunks, stride, experts, n_share,
    PARTS: tl.constexpr, SPAN: tl.constexpr, MINIMUM: tl.constexpr, LOAD: tl.constexpr,
    CODES: tl.constexpr, SCALES: tl.constexpr, ASM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Few rows of x, float32 with every 16 columns transposed as 4 by 4 (`quantize.transposed`).

    So the four weights that the same byte of four words holds meet four neighbours of x.
    """
    first_m, first_n = _corner(experts, BLOCK_M, BLOCK_N)
    m, n = _operands(experts, n_share, first_m, first_n, t_rows, n_rows, BLOCK_M, BLOCK_N)
    row = m * (n_chunks * (PARTS * 16))
    acc = tl.zeros((BLOCK_M, BLOCK_N, BLOCK_C), tl.float32)
    for first in range(0, n_chunks, BLOCK_C):
        index = first + tl.arange(0, BLOCK_C)
        inside = (index < n_chunks)[None, :]
        c = tl.minimum(index, n_chunks - 1)
        w, more = LOAD(q, high, n, c, n_blocks)
        for p in tl.static_range(PARTS):
            run = _run(c, p, PARTS, SPAN)
            scale, minimum = SCALES(q, scales, d, n, c, p, n_blocks)
            scale, minimum = tl.where(inside, scale, 0), tl.where(inside, minimum, 0)
            w0, w1, w2, w3 = _quarters(CODES(w, more, c, p, ASM))
            for b in tl.static_range(4):
                x0, x1, x2, x3 = _quarters(words(x, row, run * 16 + 4 * b))
                acc = _add_product(acc, w0, scale, minimum, x0, b, MINIMUM)
                acc = _add_product(acc, w1, scale, minimum, x1, b, MINIMUM)
                acc = _add_product(acc, w2, scale, minimum, x2, b, MINIMUM)
                acc = _add_product(acc, w3, scale, minimum, x3, b, MINIMUM)
    y = tl.sum(acc, axis=2)
    at = first_m + tl.arange(0, BLOCK_M)
    _store(y, out, bias, add, at, at < t_rows, first_n, n_rows, stride)


@triton.jit
def _halves(plane, row, c):
    """Elements 8 c to 8 c + 7 of rows that begin at `row` [N], float32: even and odd [N, C, 4]."""
    i = tl.arange(0, 8)
    tile = tl.load(plane + row[:, None, None] + (c[None, :, None] * 8 + i[None, None, :]))
    tile = tile.to(tl.float32)
    return tl.split(tl.reshape(tile, (tile.shape[0], tile.shape[1], 4, 2)))


@triton.jit
def _add_products(acc, w, x):
    """Add to `acc` [M, N, C] the four products of w [N, C, 4] and x [M, C, 4]."""
    w0, w1, w2, w3 = _quarters(w)
    x0, x1, x2, x3 = _quarters(x)
    acc = tl.fma(w0[None, :, :], x0[:, None, :], acc)
    acc = tl.fma(w1[None, :, :], x1[:, None, :], acc)
    acc = tl.fma(w2[None, :, :], x2[:, None, :], acc)
    return tl.fma(w3[None, :, :], x3[:, None, :], acc)


@triton.jit
def gemv_plain(
    q, x, out, bias, add, t_rows, n_rows, n_chunks, stride, experts, n_share,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Few rows of x, float32 as they are, times weights that are plain numbers, 8 to a chunk."""
    first_m, first_n = _corner(experts, BLOCK_M, BLOCK_N)
    m, n = _operands(experts, n_share, first_m, first_n, t_rows, n_rows, BLOCK_M, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N, BLOCK_C), tl.float32)
    for first in range(0, n_chunks, BLOCK_C):
        index = first + tl.arange(0, BLOCK_C)
        inside = (index < n_chunks)[None, :, None]
        c = tl.minimum(index, n_chunks - 1)
        w_even, w_odd = _halves(q, n * (n_chunks * 8), c)
        x_even, x_odd = _halves(x, m * (n_chunks * 8), c)
        acc = _add_products(acc, w_even, tl.where(inside, x_even, 0))
        acc = _add_products(acc, w_odd, tl.where(inside, x_odd, 0))
    y = tl.sum(acc, axis=2)
    at = first_m + tl.arange(0, BLOCK_M)
    _store(y, out, bias, add, at, at < t_rows, first_n, n_rows, stride)


@triton.jit
def gemm(
    q, high, scales, d, x, x_scales, out, bias, add,
    t_rows, n_rows, n_blocks, n_chunks, stride, gain, n_split_chunks, tiles, order, n_share,
    PARTS: tl.constexpr, SPAN: tl.constexpr, MINIMUM: tl.constexpr, LOAD: tl.constexpr,
    CODES: tl.constexpr, SCALES: tl.constexpr, ASM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Rows of x in float16, transposed as for `gemv_exact`, each with a power of two in
    `x_scales`; weights become float16 `gain` times too large.

    Weights are the left operand: a warp has rows of W for itself, and each is decoded once for
    all BLOCK_M rows of x. Programs i of the third axis do `n_split_chunks` chunks each, and leave
    their parts of the sum in `out` [i]: [T, n_rows], rows `stride` apart.

    A program of the second axis takes BLOCK_M rows or, as its row of `tiles` (expert, first, stop;
    int32) says, up to BLOCK_M pairs `order` [first, stop) (int64) of one expert; it may find none.
    """
    first_m, first_n = tl.program_id(1) * BLOCK_M, tl.program_id(0) * BLOCK_N
    n = _clamped(first_n, BLOCK_N, n_rows)
    i_split = tl.program_id(2)
    start = i_split * n_split_chunks
    stop = tl.minimum(start + n_split_chunks, n_chunks)
    if tiles is not None:
        tile = tiles + tl.program_id(1) * 3
        first_m, stop_m = tl.load(tile + 1), tl.load(tile + 2)
        n += tl.load(tile).to(tl.int64) * n_rows
        at_m = tl.load(order + _clamped(first_m, BLOCK_M, t_rows))
        inside_m = first_m + tl.arange(0, BLOCK_M) < stop_m
        m = at_m // n_share
        stop = tl.where(first_m < stop_m, stop, start)
    else:
        m = _clamped(first_m, BLOCK_M, t_rows)
        at_m = first_m + tl.arange(0, BLOCK_M)
        inside_m = at_m < t_rows
    row = m * (n_chunks * (PARTS * 16))
    k = tl.arange(0, 4 * BLOCK_C)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for first in range(start, stop, BLOCK_C):
        c = tl.minimum(first + tl.arange(0, BLOCK_C), n_chunks - 1)
        k_chunk = first + k // 4
        inside = k_chunk < n_chunks
        w, more = LOAD(q, high, n, c, n_blocks)
        for p in tl.static_range(PARTS):
            scale, minimum = SCALES(q, scales, d, n, c, p, n_blocks)
            scale, minimum = (scale * gain)[:, :, None], (minimum * gain)[:, :, None]
            codes = CODES(w, more, c, p, ASM)
            run = _run(k_chunk, p, PARTS, SPAN)
            for b in tl.static_range(4):
                value = _weights(codes, scale, minimum, b, MINIMUM)
                # Triton 3.6 does not compile what is rounded first for capability 100.
                value = tl.reshape(value, (BLOCK_N, 4 * BLOCK_C)).to(tl.float16)
                at = run * 16 + (4 * b + k % 4)
                xs = tl.load(x + row[None, :] + at[:, None], mask=inside[:, None], other=0)
                acc = tl.dot(value, xs, acc)
    y = tl.trans(acc) * (tl.load(x_scales + m) / gain)[:, None]
    out += i_split.to(tl.int64) * t_rows * stride
    _store(y, out, bias, add, at_m, inside_m, first_n, n_rows, stride)


@triton.jit
def dequantize(
    q, high, scales, d, ids, out, t_rows, n_blocks, n_chunks, gain,
    PARTS: tl.constexpr, SPAN: tl.constexpr, MINIMUM: tl.constexpr, LOAD: tl.constexpr,
    CODES: tl.constexpr, SCALES: tl.constexpr, ASM: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Rows `ids` (int64 [T]), or all of the first T if None, `gain` times too large, to `out`
    [T, n_cols] of any float type.
    """
    i = _clamped(tl.program_id(0) * BLOCK_N, BLOCK_N, t_rows)
    n = i
    if ids is not None:
        n = tl.load(ids + i)
    c = _clamped(tl.program_id(1) * BLOCK_C, BLOCK_C, n_chunks).to(tl.int32)
    row = i * (n_chunks * (PARTS * 16))
    w, more = LOAD(q, high, n, c, n_blocks)
    lane = tl.arange(0, 16)
    for p in tl.static_range(PARTS):
        scale, minimum = SCALES(q, scales, d, n, c, p, n_blocks)
        scale, minimum = (scale * gain)[:, :, None], (minimum * gain)[:, :, None]
        codes = CODES(w, more, c, p, ASM)
        w0 = _weights(codes, scale, minimum, 0, MINIMUM)
        w1 = _weights(codes, scale, minimum, 1, MINIMUM)
        w2 = _weights(codes, scale, minimum, 2, MINIMUM)
        w3 = _weights(codes, scale, minimum, 3, MINIMUM)
        value = tl.join(tl.join(w0, w2), tl.join(w1, w3))
        value = tl.reshape(value, (BLOCK_N, BLOCK_C, 16))
        at = row[:, None, None] + (_run(c, p, PARTS, SPAN) * 16)[None, :, None]
        tl.store(out + (at + lane[None, None, :]), value.to(out.dtype.element_ty))
