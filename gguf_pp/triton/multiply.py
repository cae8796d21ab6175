"""y = x Wᵀ of quantized weights in Triton; `multiply_torch` has the same functions in torch.

How many rows of W a program takes follows from the size of W and the number of rows of x. The
order in which columns are summed does not: see `multiply_kernels`. So a pair of a row and an expert
has the same product, bit for bit, as the row and the expert's matrix alone.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from gguf_pp.triton import is_interpreted
from gguf_pp.triton import multiply_kernels as kernels
from gguf_pp.triton.decode_kernels import DECODERS
from gguf_pp.triton.multiply_torch import Pairs, Tiles, finished
from gguf_pp.triton.planes import Planes
from gguf_pp.triton.quantize_torch import HalfRows, Int8Rows

MAX_GEMV_ROWS = 8
MAX_GEMM_ROWS = 64
GEMM_PROGRAMS = 512
"""Programs of `gemm` below which the columns of W are split among several."""
MIN_GEMM_LOOPS = 8
"""Steps along the columns that a program takes at least."""
MANY_ROWS = 2048
"""Rows of W from which on several per program still fill a large device."""

_NO_PAIRS = {"experts": None, "n_share": 1}
_NO_TILES = {"tiles": None, "order": None, "n_share": 1}


class Launch(NamedTuple):
    """Constants of a kernel, and what the compiler is told besides them."""

    constants: dict[str, Any]
    options: dict[str, int | bool]


def gemv_launch(
    type: GGMLQuantizationType, t_rows: int, n_rows: int, *, of_pairs: bool = False
) -> Launch:
    """How `gemv_int8` and `gemv_exact` are compiled.

    One warp whose lanes stand side by side in a row of W: no sum crosses a warp.
    """
    sizes = _gemv_sizes(t_rows, n_rows, of_pairs)
    if type is GGMLQuantizationType.Q3_K and sizes["BLOCK_M"] == 4:  # would spill on 100 and 120
        sizes["BLOCK_N"] = min(2, sizes["BLOCK_N"])
    return Launch(_decoder(type) | sizes, _options(n_warps=1, n_stages=1))


def plain_launch(t_rows: int, n_rows: int, *, of_pairs: bool = False) -> Launch:
    """How `gemv_plain` is compiled."""
    return Launch(_gemv_sizes(t_rows, n_rows, of_pairs), _options(n_warps=1, n_stages=1))


def gemm_launch(type: GGMLQuantizationType, t_rows: int, *, of_tiles: bool = False) -> Launch:
    """How `gemm` is compiled: steps are of 256 columns, for which x takes 32 KiB of memory.

    Left to itself, ptxas would spill registers to fit three programs where two do well.
    """
    # Of the types with the smallest groups, 64 rows take more tensor memory than 100 has.
    most = 32 if type in (GGMLQuantizationType.Q2_K, GGMLQuantizationType.Q3_K) else MAX_GEMM_ROWS
    block_m = min(most, max(16, triton.next_power_of_2(t_rows)))
    sizes = {"BLOCK_M": block_m, "BLOCK_N": 64, "BLOCK_C": 16 // DECODERS[type].PARTS}
    constants = _decoder(type) | sizes | ({} if of_tiles else _NO_TILES)
    return Launch(constants, _options(n_warps=4, n_stages=2) | {"maxnreg": 224})


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
    kernels.gemv_int8[_gemv_grid(launch, out, pairs)](
        *_planes(w), x.codes.view(torch.int32), x.scales, x.sums, out, bias, add,
        *out.shape, *_extent(w), out.stride(0), **_named(pairs),
        **launch.constants, **launch.options,
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
    launch = gemv_launch(w.type, *out.shape, of_pairs=pairs is not None)
    kernels.gemv_exact[_gemv_grid(launch, out, pairs)](
        *_planes(w), x, out, bias, add,
        *out.shape, *_extent(w), out.stride(0), **_named(pairs),
        **launch.constants, **launch.options,
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
    kernels.gemv_plain[_gemv_grid(launch, out, pairs)](
        w.planes["q"], x, out, bias, add,
        *out.shape, w.n_cols // 8, out.stride(0), **_named(pairs),
        **launch.constants, **launch.options,
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
    n_splits = triton.cdiv(n_chunks, step)
    if n_splits == 1:
        target, addends = out, (bias, add)
    else:
        target, addends = x.scales.new_empty(n_splits, t_rows, w.n_rows), (None, None)
    kernels.gemm[(*_grid(launch, *out.shape), n_splits)](
        *_planes(w), *x, target, *addends, t_rows, w.n_rows, n_blocks, n_chunks,
        target.stride(-2), w.gain, step, **launch.constants, **launch.options,
    )  # fmt: skip
    return out if n_splits == 1 else finished(target.sum(0), out, bias, add)


def gemm_tiles(x: HalfRows, w: Planes, out: Tensor, tiles: Tiles, n_share: int) -> Tensor:
    """As `gemm`, of pairs i of rows i // `n_share` of x. Programs do not split the columns of W:
    experts are many.
    """
    launch = gemm_launch(w.type, tiles.size, of_tiles=True)
    n_blocks, n_chunks = _extent(w)
    grid = (triton.cdiv(out.shape[1], launch.constants["BLOCK_N"]), len(tiles.table))
    kernels.gemm[grid](
        *_planes(w), *x, out, None, None, *out.shape, n_blocks, n_chunks,
        out.stride(0), w.gain, n_chunks, tiles.table, tiles.order, n_share,
        **launch.constants, **launch.options,
    )  # fmt: skip
    return out


def dequantize(w: Planes, out: Tensor, *, ids: Tensor | None = None, gain: float = 1.0) -> Tensor:
    """Rows `ids` (int64 [T]), or all, `gain` times too large, to `out` [T, n_cols] of any dtype."""
    launch = dequantize_launch(w.type)
    n_blocks, n_chunks = _extent(w)
    sizes = launch.constants
    grid = (triton.cdiv(len(out), sizes["BLOCK_N"]), triton.cdiv(n_chunks, sizes["BLOCK_C"]))
    kernels.dequantize[grid](
        *_planes(w), ids, out, len(out), n_blocks, n_chunks, gain,
        **launch.constants, **launch.options,
    )  # fmt: skip
    return out


def _gemv_sizes(t_rows: int, n_rows: int, of_pairs: bool) -> dict[str, Any]:
    """Tile sizes of one warp. With more than 16 sums to a thread some types spill registers, and,
    for 90 and 100, with 8 rows of x and one of W."""
    block_m = 1 if of_pairs else min(MAX_GEMV_ROWS, triton.next_power_of_2(t_rows))
    n_many = t_rows * n_rows if of_pairs else n_rows
    block_n = min(4, 16 // block_m)
    if n_many < MANY_ROWS and block_m < MAX_GEMV_ROWS:
        block_n = 1
    sizes = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_C": 32}
    return sizes if of_pairs else sizes | _NO_PAIRS


@cache
def _decoder(type: GGMLQuantizationType) -> dict[str, Any]:
    return DECODERS[type]._asdict() | {"ASM": not is_interpreted()}


def _options(*, n_warps: int, n_stages: int) -> dict[str, int | bool]:
    return {"num_warps": n_warps, "num_stages": n_stages, "enable_fp_fusion": False}


def _planes(w: Planes) -> tuple[Tensor, ...]:
    """The planes in the order of the kernels' parameters; codes stand in for what there is not."""
    return tuple(w.planes.get(name, w.planes["q"]) for name in ("q", "high", "scales", "d"))


def _extent(w: Planes) -> tuple[int, int]:
    """Blocks and chunks of a row."""
    n_blocks = w.n_cols // GGML_QUANT_SIZES[w.type][0]
    return n_blocks, w.n_cols // (16 * DECODERS[w.type].PARTS)


def _split_chunks(launch: Launch, n_rows: int, n_chunks: int) -> int:
    """Chunks of a row per program: few enough that a small W fills a large device as well.

    Says nothing of the rows of x, so neither does the order of a sum depend on them.
    """
    block_n, block_c = launch.constants["BLOCK_N"], launch.constants["BLOCK_C"]
    n_splits = max(1, GEMM_PROGRAMS // triton.cdiv(n_rows, block_n))
    n_loops = max(MIN_GEMM_LOOPS, triton.cdiv(triton.cdiv(n_chunks, block_c), n_splits))
    return int(n_loops * block_c)


def _grid(launch: Launch, t_rows: int, n_rows: int) -> tuple[int, int]:
    sizes = launch.constants
    return triton.cdiv(n_rows, sizes["BLOCK_N"]), triton.cdiv(t_rows, sizes["BLOCK_M"])


def _gemv_grid(launch: Launch, out: Tensor, pairs: Pairs | None) -> tuple[int, int]:
    along_w, along_x = _grid(launch, *out.shape)
    return (along_w, along_x) if pairs is None else (along_x, along_w)


def _named(pairs: Pairs | None) -> dict[str, Any]:
    return {} if pairs is None else pairs._asdict()
