"""Rows of x made ready for the multiplying kernels, in Triton; `quantize_torch` has the twins.

What is done to x before it is rounded, as `before` says it there, is done in the same launch.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from gguf_pp.triton import quantize_kernels as kernels
from gguf_pp.triton.quantize_torch import Before, HalfRows, Int8Rows

MIN_BLOCK, MAX_BLOCK = 1024, 4096
"""Columns that a program reads at once. GELU of twice as many would need every register."""

COLUMNS_PER_WARP = 256

ACTIVATIONS = {
    "silu": kernels.silu,
    "gelu_tanh": kernels.gelu_tanh,
    "gelu_erf": kernels.gelu_erf,
}


class Launch(NamedTuple):
    """Programs to a row, constants of a kernel, and what the compiler is told besides them."""

    n_programs: int
    constants: dict[str, Any]
    options: dict[str, int | bool]


def launch(before: Before, n_cols: int, *, is_whole: bool = False) -> Launch:
    """How rows of `n_cols` columns are made.

    A program has a row to itself where its result hangs on the whole row (a norm, or `is_whole`),
    and reads as much of it at once as it can: each further step would wait for memory anew. So the
    order of a sum follows from the number of columns, and from nothing else.
    """
    is_alone = is_whole or isinstance(before, tuple)
    widest = MAX_BLOCK if is_alone else MIN_BLOCK
    block = max(MIN_BLOCK, min(widest, triton.next_power_of_2(n_cols)))
    n_warps = min(16, block // COLUMNS_PER_WARP)
    return Launch(
        1 if is_alone else triton.cdiv(n_cols, block),
        {"ACTIVATE": ACTIVATIONS[before] if isinstance(before, str) else None, "BLOCK": block},
        {"num_warps": n_warps, "num_stages": 1, "enable_fp_fusion": False},
    )


def float_rows(
    x: Tensor, before: Before = None, *, add: Tensor | None = None, is_transposed: bool = False
) -> Tensor:
    """As `quantize_torch.float_rows`; bit for bit where nothing comes before."""
    how = launch(before, n_cols := _width(x, before))
    out = x.new_empty(len(x), n_cols)
    weight, eps = _norm(before)
    kernels.float_rows[len(x), how.n_programs](
        x, weight, add, out, n_cols, eps, TRANSPOSED=is_transposed, **how.constants, **how.options
    )
    return out


def quantize_int8(x: Tensor, before: Before = None) -> Int8Rows:
    """As `quantize_torch.quantize_int8`; bit for bit where nothing comes before."""
    how = launch(before, n_cols := _width(x, before))
    rows = Int8Rows(
        x.new_empty(len(x), n_cols, dtype=torch.int8),
        x.new_empty(len(x), n_cols // 32),
        x.new_empty(len(x), n_cols // 16),
    )
    weight, eps = _norm(before)
    kernels.quantize_int8[len(x), how.n_programs](
        x, weight, *rows, n_cols, eps, **how.constants, **how.options
    )
    return rows


def quantize_half(x: Tensor, before: Before = None, *, is_transposed: bool) -> HalfRows:
    """As `quantize_torch.quantize_half`; bit for bit where nothing comes before."""
    how = launch(before, n_cols := _width(x, before), is_whole=True)
    rows = HalfRows(x.new_empty(len(x), n_cols, dtype=torch.float16), x.new_empty(len(x)))
    weight, eps = _norm(before)
    kernels.quantize_half[len(x), how.n_programs](
        x, weight, *rows, n_cols, eps, TRANSPOSED=is_transposed, **how.constants, **how.options
    )
    return rows


def _width(x: Tensor, before: Before) -> int:
    """Columns of the result."""
    return x.shape[1] // 2 if isinstance(before, str) else x.shape[1]


def _norm(before: Before) -> tuple[Tensor | None, float]:
    return before if isinstance(before, tuple) else (None, 0.0)
