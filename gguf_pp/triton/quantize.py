"""Rows of x made ready for the multiplying kernels, in Triton; `quantize_torch` has the twins.

What is done to x before it is rounded, as `before` says it there, is done in the same launch.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from gguf_pp.triton import quantize_kernels as kernels
from gguf_pp.triton.launching import Launch, cdiv, power_of_2
from gguf_pp.triton.quantize_torch import Before, HalfRows, Int8Rows

MIN_BLOCK, MAX_BLOCK = 1024, 4096
"""Columns that a program reads at once. GELU of twice as many would need every register."""

COLUMNS_PER_WARP = 256
ACTIVATED_PER_WARP = 128
"""An activation takes registers of its own."""

ACTIVATIONS = {
    "silu": kernels.silu,
    "gelu_tanh": kernels.gelu_tanh,
    "gelu_erf": kernels.gelu_erf,
}


class Sharing(NamedTuple):
    """How many programs share a row, and how they are compiled."""

    n_programs: int
    launch: Launch


def sharing(before: Before, n_cols: int, *, is_whole: bool = False, **order: bool) -> Sharing:
    """How rows of `n_cols` columns are made, by kernels that also take the constants `order`.

    A program has a row to itself where its result hangs on the whole row (a norm, or `is_whole`),
    and reads as much of it at once as it can: each further step would wait for memory anew. So the
    order of a sum follows from the number of columns, and from nothing else.
    """
    is_alone = is_whole or isinstance(before, tuple)
    activation = before if isinstance(before, str) else None
    return _sharing(activation, n_cols, is_alone, **order)


@cache
def _sharing(activation: str | None, n_cols: int, is_alone: bool, **order: bool) -> Sharing:
    widest = MAX_BLOCK if is_alone else MIN_BLOCK
    block = max(MIN_BLOCK, min(widest, power_of_2(n_cols)))
    return Sharing(1 if is_alone else cdiv(n_cols, block), _launch(activation, block, **order))


@cache
def _launch(activation: str | None, block: int, **order: bool) -> Launch:
    n_warps = min(16, block // (ACTIVATED_PER_WARP if activation else COLUMNS_PER_WARP))
    activate = ACTIVATIONS[activation] if activation else None
    options = {"num_warps": n_warps, "num_stages": 1, "enable_fp_fusion": False}
    if n_warps == 16:
        options["maxnreg"] = 128  # or ptxas would spill some to fit three programs
    return Launch(order | {"ACTIVATE": activate, "BLOCK": block}, options)


def float_rows(
    x: Tensor, before: Before = None, *, add: Tensor | None = None, is_transposed: bool = False
) -> Tensor:
    """As `quantize_torch.float_rows`; bit for bit where nothing comes before."""
    n_rows, n_cols = x.shape[0], _width(x, before)
    how = sharing(before, n_cols, TRANSPOSED=is_transposed)
    out = x.new_empty(n_rows, n_cols)
    weight, eps = _norm(before)
    grid = n_rows, how.n_programs
    how.launch(kernels.float_rows, grid, x, weight, add, out, n_cols, eps)
    return out


def quantize_int8(x: Tensor, before: Before = None) -> Int8Rows:
    """As `quantize_torch.quantize_int8`; bit for bit where nothing comes before."""
    n_rows, n_cols = x.shape[0], _width(x, before)
    how = sharing(before, n_cols)
    rows = Int8Rows(
        x.new_empty(n_rows, n_cols, dtype=torch.int8),
        x.new_empty(n_rows, n_cols // 32),
        x.new_empty(n_rows, n_cols // 16),
    )
    weight, eps = _norm(before)
    grid = n_rows, how.n_programs
    how.launch(kernels.quantize_int8, grid, x, weight, *rows, n_cols, eps)
    return rows


def quantize_half(x: Tensor, before: Before = None, *, is_transposed: bool) -> HalfRows:
    """As `quantize_torch.quantize_half`; bit for bit where nothing comes before."""
    n_rows, n_cols = x.shape[0], _width(x, before)
    how = sharing(before, n_cols, is_whole=True, TRANSPOSED=is_transposed)
    rows = HalfRows(x.new_empty(n_rows, n_cols, dtype=torch.float16), x.new_empty(n_rows))
    weight, eps = _norm(before)
    grid = n_rows, how.n_programs
    how.launch(kernels.quantize_half, grid, x, weight, *rows, n_cols, eps)
    return rows


def _width(x: Tensor, before: Before) -> int:
    """Columns of the result."""
    return x.shape[1] // 2 if isinstance(before, str) else x.shape[1]


def _norm(before: Before) -> tuple[Tensor | None, float]:
    return before if isinstance(before, tuple) else (None, 0.0)
