"""Rows of x made ready for the multiplying kernels, in Triton; `quantize_torch` has the twins."""

import torch
import triton
from torch import Tensor

from gguf_pp.triton import quantize_kernels as kernels
from gguf_pp.triton.quantize_torch import HalfRows, Int8Rows

BLOCK = 1024
"""Columns that a program reads at once: as this is one number, so is the order of every sum."""

OPTIONS = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False}


def quantize_int8(x: Tensor) -> Int8Rows:
    """As `quantize_torch.quantize_int8`, bit for bit."""
    rows = _int8_rows(x)
    n_cols = x.shape[1]
    grid = (len(x), triton.cdiv(n_cols, BLOCK))
    kernels.quantize_int8[grid](x, *rows, n_cols, BLOCK=BLOCK, **OPTIONS)
    return rows


def norm_quantize_int8(x: Tensor, weight: Tensor, eps: float) -> Int8Rows:
    """RMS norm and `quantize_int8` in one launch."""
    rows = _int8_rows(x)
    kernels.norm_quantize_int8[(len(x),)](x, weight, *rows, x.shape[1], eps, BLOCK=BLOCK, **OPTIONS)
    return rows


def quantize_half(
    x: Tensor, *, weight: Tensor | None = None, eps: float = 0.0, is_transposed: bool
) -> HalfRows:
    """As `quantize_torch.quantize_half`; bit for bit where there is no weight."""
    rows = HalfRows(torch.empty_like(x, dtype=torch.float16), x.new_empty(len(x)))
    kernels.quantize_half[(len(x),)](
        x, weight, *rows, x.shape[1], eps, TRANSPOSED=is_transposed, BLOCK=BLOCK, **OPTIONS
    )
    return rows


def _int8_rows(x: Tensor) -> Int8Rows:
    n_rows, n_cols = x.shape
    return Int8Rows(
        torch.empty_like(x, dtype=torch.int8),
        x.new_empty(n_rows, n_cols // 32),
        x.new_empty(n_rows, n_cols // 16),
    )
