"""y = x Wᵀ of quantized weights in Triton; `multiply_torch` has the same functions in torch.

How many rows of W a program takes follows from the size of W and the number of rows of x. The
order in which columns are summed does not: see `multiply_kernels`. So a pair of a row and an expert
has the same product, bit for bit, as the row and the expert's matrix alone.
"""

from functools import cache
from typing import Any

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from gguf_pp.triton import is_interpreted
from gguf_pp.triton import multiply_kernels as kernels
from gguf_pp.triton.decode_kernels import DECODERS
from gguf_pp.triton.launching import Launch, cdiv, power_of_2
from gguf_pp.triton.multiply_torch import Pairs, Tiles, finished
from gguf_pp.triton.planes import Planes
from gguf_pp.triton.quantize_torch import HalfRows, Int8Rows

MAX_GEMV_ROWS = 8
MAX_GEMM_ROWS = 64
GEMM_PROGRAMS = 512
"""Programs of `gemm` below which the columns of W are split among several."""
MIN_GEMM_LOOPS = 8
"""Steps along the columns that a program takes at least."""
SMALLEST_GROUPS = (GGMLQuantizationType.Q2_K, GGMLQuantizationType.Q3_K)
"""Of 16 weights: with a scale to each, their kernels take the most registers."""
MANY_ROWS = 2048
"""Rows of W from which on several per program still fill a large device."""

_NO_PAIRS = (None, 1)
_NO_TILES = (None, None, 1)


def gemv_launch(
    type: GGMLQuantizationType,
    t_rows: int,
    n_rows: int,
    *,
    exact: bool = False,
    of_pairs: bool = False,
) -> Launch:
    """How `gemv_int8`, or if `exact` `gemv_exact`, is compiled.

    One warp whose lanes stand side by side in a row of W: no sum crosses a warp.
    """
    most = 4 if exact else MAX_GEMV_ROWS  # of 8 some would spill, whatever is done about it
    block_m, block_n = _gemv_sizes(t_rows, n_rows, of_pairs, most)
    if exact or type in SMALLEST_GROUPS:  # of more sums some spill on 100, 120, or with Triton 3.6
        block_n = min(8 // block_m, block_n)
    return _gemv_launch(type, block_m, block_n)


def plain_launch(t_rows: int, n_rows: int, *, of_pairs: bool = False) -> Launch:
    """How `gemv_plain` is compiled."""
    return _gemv_launch(None, *_gemv_sizes(t_rows, n_rows, of_pairs, MAX_GEMV_ROWS))


def gemm_launch(type: GGMLQuantizationType, t_rows: int) -> Launch:
    """How `gemm` is compiled: steps are of 256 columns, for which x takes 32 KiB of memory.

    Left to itself, ptxas would spill registers to fit three programs where two do well.
    """
    # Of these, 64 rows take more tensor memory than 100 has.
    most = 32 if type in SMALLEST_GROUPS else MAX_GEMM_ROWS
    block_m = min(most, max(16, power_of_2(t_rows)))
    return _gemm_launch(type, block_m)


@cache
def dequantize_launch(type: GGMLQuantizationType) -> Launch:
    """How `dequantize` is compiled."""
    return Launch(_decoder(type) | {"BLOCK_N": 4, "BLOCK_C": 32}, _options(n_warps=4, n_stages=1))


def gemv_int8(
    x: Int8Rows,
    w: Planes,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    add: Tensor | None = None,
    pairs: Pairs | None = None,
) -> Tensor:
    """Times x as `quantize_int8` rounds it."""
    launch = gemv_launch(w.type, *out.shape, of_pairs=pairs is not None)
    launch(
        kernels.gemv_int8, _gemv_grid(launch, out, pairs),
        *w.operands, x.codes.view(torch.int32), x.scales, x.sums, out, bias, add,
        *out.shape, *_extent(w), out.stride(0), *(pairs or _NO_PAIRS),
    )  # fmt: skip
    return out


def gemv_exact(
    x: Tensor,
    w: Planes,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    add: Tensor | None = None,
    pairs: Pairs | None = None,
) -> Tensor:
    """Times float32 x that is `transposed`."""
    launch = gemv_launch(w.type, *out.shape, exact=True, of_pairs=pairs is not None)
    launch(
        kernels.gemv_exact, _gemv_grid(launch, out, pairs),
        *w.operands, x, out, bias, add,
        *out.shape, *_extent(w), out.stride(0), *(pairs or _NO_PAIRS),
    )  # fmt: skip
    return out


def gemv_plain(
    x: Tensor,
    w: Planes,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    add: Tensor | None = None,
    pairs: Pairs | None = None,
) -> Tensor:
    """Times float32 x, for weights that are plain numbers, in rows of a multiple of 8."""
    launch = plain_launch(*out.shape, of_pairs=pairs is not None)
    launch(
        kernels.gemv_plain, _gemv_grid(launch, out, pairs),
        w.planes["q"], x, out, bias, add,
        *out.shape, w.n_cols // 8, out.stride(0), *(pairs or _NO_PAIRS),
    )  # fmt: skip
    return out


def gemm(
    x: HalfRows, w: Planes, out: Tensor, *, bias: Tensor | None = None, add: Tensor | None = None
) -> Tensor:
    """Times x in float16 and `transposed`, by weights rounded to float16."""
    t_rows = len(x.values)
    launch = gemm_launch(w.type, t_rows)
    n_blocks, n_chunks = _extent(w)
    step = _split_chunks(launch, w.n_rows, n_chunks)
    n_splits = cdiv(n_chunks, step)
    if n_splits == 1:
        target, addends = out, (bias, add)
    else:
        target, addends = x.scales.new_empty(n_splits, t_rows, w.n_rows), (None, None)
    launch(
        kernels.gemm, (*_grid(launch, *out.shape), n_splits),
        *w.operands, *x, target, *addends, t_rows, w.n_rows, n_blocks, n_chunks,
        target.stride(-2), w.gain, step, *_NO_TILES,
    )  # fmt: skip
    return out if n_splits == 1 else finished(target.sum(0), out, bias, add)


def gemm_tiles(x: HalfRows, w: Planes, out: Tensor, tiles: Tiles, n_share: int) -> Tensor:
    """As `gemm`, of pairs i of rows i // `n_share` of x. Programs do not split the columns of W:
    experts are many.
    """
    launch = gemm_launch(w.type, tiles.size)
    n_blocks, n_chunks = _extent(w)
    launch(
        kernels.gemm, (cdiv(out.shape[1], launch.constants["BLOCK_N"]), len(tiles.table)),
        *w.operands, *x, out, None, None, *out.shape, n_blocks, n_chunks,
        out.stride(0), w.gain, n_chunks, tiles.table, tiles.order, n_share,
    )  # fmt: skip
    return out


def dequantize(w: Planes, out: Tensor, *, ids: Tensor | None = None, gain: float = 1.0) -> Tensor:
    """Rows `ids` (int64 [T]), or all, `gain` times too large, to `out` [T, n_cols] of any dtype."""
    launch = dequantize_launch(w.type)
    n_blocks, n_chunks = _extent(w)
    n_rows, sizes = out.shape[0], launch.constants
    launch(
        kernels.dequantize, (cdiv(n_rows, sizes["BLOCK_N"]), cdiv(n_chunks, sizes["BLOCK_C"])),
        *w.operands, ids, out, n_rows, n_blocks, n_chunks, gain,
    )  # fmt: skip
    return out


@cache
def _gemv_launch(type: GGMLQuantizationType | None, block_m: int, block_n: int) -> Launch:
    sizes = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_C": 32}
    decoder = {} if type is None else _decoder(type)
    options = _options(n_warps=1, n_stages=1)
    if (block_m, block_n) == (MAX_GEMV_ROWS, 2):
        options["maxnreg"] = 255  # left to itself, ptxas would spill to fit more programs
    return Launch(decoder | sizes, options)


@cache
def _gemm_launch(type: GGMLQuantizationType, block_m: int) -> Launch:
    sizes = {"BLOCK_M": block_m, "BLOCK_N": 64, "BLOCK_C": 16 // DECODERS[type].PARTS}
    options = _options(n_warps=4, n_stages=2) | {"maxnreg": 224}
    return Launch(_decoder(type) | sizes, options)


def _gemv_sizes(t_rows: int, n_rows: int, of_pairs: bool, most: int) -> tuple[int, int]:
    """Rows of x, at `most`, and of W that one warp takes. With more than 16 sums to a thread some
    types spill registers, and, for 90 and 100, with 8 rows of x and one of W."""
    block_m = 1 if of_pairs else min(most, power_of_2(t_rows))
    n_many = t_rows * n_rows if of_pairs else n_rows
    block_n = min(4, 16 // block_m)
    if n_many < MANY_ROWS and block_m < MAX_GEMV_ROWS:
        block_n = 1
    return block_m, block_n


@cache
def _decoder(type: GGMLQuantizationType) -> dict[str, Any]:
    return DECODERS[type]._asdict() | {"ASM": not is_interpreted()}


def _options(*, n_warps: int, n_stages: int) -> dict[str, int | bool]:
    return {"num_warps": n_warps, "num_stages": n_stages, "enable_fp_fusion": False}


def _extent(w: Planes) -> tuple[int, int]:
    """Blocks and chunks of a row."""
    n_blocks = w.n_cols // GGML_QUANT_SIZES[w.type][0]
    return n_blocks, w.n_cols // (16 * DECODERS[w.type].PARTS)


def _split_chunks(launch: Launch, n_rows: int, n_chunks: int) -> int:
    """Chunks of a row per program: few enough that a small W fills a large device as well.

    Says nothing of the rows of x, so neither does the order of a sum depend on them.
    """
    block_n, block_c = launch.constants["BLOCK_N"], launch.constants["BLOCK_C"]
    n_splits = max(1, GEMM_PROGRAMS // cdiv(n_rows, block_n))
    n_loops = max(MIN_GEMM_LOOPS, cdiv(cdiv(n_chunks, block_c), n_splits))
    return int(n_loops * block_c)


def _grid(launch: Launch, t_rows: int, n_rows: int) -> tuple[int, int]:
    sizes = launch.constants
    return cdiv(n_rows, sizes["BLOCK_N"]), cdiv(t_rows, sizes["BLOCK_M"])


def _gemv_grid(launch: Launch, out: Tensor, pairs: Pairs | None) -> tuple[int, int]:
    along_w, along_x = _grid(launch, *out.shape)
    return (along_w, along_x) if pairs is None else (along_x, along_w)
