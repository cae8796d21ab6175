"""Which experts serve a row, and the sum of what they make of it, in Triton; `mixture_torch` has
the same functions in torch."""

from functools import cache

import torch
from torch import Tensor

from gguf_pp.triton import mixture_kernels as kernels
from gguf_pp.triton.launching import Launch, cdiv, power_of_2
from gguf_pp.triton.mixture_torch import Chosen

SUM_BLOCK = 256
"""Columns that a program adds up: few, as there may be one row only."""


@cache
def best_launch(n_experts: int) -> Launch:
    """How `best_experts` is compiled."""
    block = max(32, power_of_2(n_experts))
    return Launch({"BLOCK": block}, _options(min(8, max(1, block // 256))))


@cache
def sum_launch() -> Launch:
    """How `weighted_sum` is compiled."""
    return Launch({"BLOCK": SUM_BLOCK}, _options(2))


def best_experts(logits: Tensor, n_used: int) -> Chosen:
    """As `mixture_torch.best_experts`."""
    n_rows, n_experts = logits.shape
    chosen = Chosen(
        torch.empty(n_rows, n_used, dtype=torch.int32, device=logits.device),
        logits.new_empty(n_rows, n_used),
    )
    best_launch(n_experts)(kernels.best_experts, (n_rows,), logits, *chosen, n_experts, n_used)
    return chosen


def weighted_sum(y: Tensor, weights: Tensor, out: Tensor, *, add: Tensor | None) -> Tensor:
    """As `mixture_torch.weighted_sum`, bit for bit."""
    n_rows, n_used = weights.shape
    grid = n_rows, cdiv(n_cols := out.shape[1], SUM_BLOCK)
    sum_launch()(kernels.weighted_sum, grid, y, weights, add, out, n_cols, n_used)
    return out


def _options(n_warps: int) -> dict[str, int | bool]:
    return {"num_warps": n_warps, "num_stages": 1, "enable_fp_fusion": False}
