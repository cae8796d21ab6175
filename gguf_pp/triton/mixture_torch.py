"""Which experts serve a row, and the sum of what they make of it, in torch; `mixture` has it in
Triton.

A pair is a row and one of the experts that serve it. Pairs are counted by row, and in a row by
expert. Nothing here waits for the device.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from gguf_pp.ops.mixture import choose_experts
from gguf_pp.triton.multiply_torch import Tiles

TILE_SIZES = (16, 32)
"""The least and the most pairs of a tile: what tensor cores want, and what leaves room for where
pairs go: with 64, some types spill registers.
"""


class Chosen(NamedTuple):
    """Experts that serve each row, int32 [T, n_used], ascending, and their weights [T, n_used]."""

    experts: Tensor
    weights: Tensor


def best_experts(logits: Tensor, n_used: int) -> Chosen:
    """The `n_used` greatest of each row of `logits` [T, n_experts], of equal ones the first."""
    experts, weights = choose_experts(logits, n_used)
    experts, order = experts.sort(dim=-1)
    return Chosen(experts.int(), weights.gather(1, order))


def weighted_sum(y: Tensor, weights: Tensor, out: Tensor, *, add: Tensor | None) -> Tensor:
    """Rows of y [T n_used, E] times `weights` [T, n_used], added in order to `add` or 0, into `out`
    [T, E]; all contiguous float32.
    """
    n_rows, n_used = weights.shape
    y = y.view(n_rows, n_used, -1)
    if add is None:
        out.zero_()
    else:
        out.copy_(add)
    for i in range(n_used):
        out += y[:, i] * weights[:, i, None]
    return out


def tiles_of(experts: Tensor, n_experts: int) -> Tiles:
    """Put pairs of the same expert together; `experts` int32 [P] are theirs.

    There are as many tiles as there can be at most, so that the host need not know how many are
    filled.
    """
    n_pairs = len(experts)
    size = _tile_size(n_pairs, n_experts)
    n_tiles = (n_pairs + min(n_pairs, n_experts) * (size - 1)) // size
    device = experts.device
    in_order, order = experts.sort(stable=True)
    every = torch.arange(n_experts + 1, dtype=torch.int32, device=device)
    starts = torch.searchsorted(in_order, every, out_int32=True)
    n_filled = (starts.diff() + (size - 1)).div(size, rounding_mode="floor")
    ends = n_filled.cumsum(0, dtype=torch.int32)
    first_of_all = torch.sub(starts[:-1], ends - n_filled, alpha=size)  # were tile 0 the expert's
    i_tile = torch.arange(n_tiles, dtype=torch.int32, device=device)
    # Tiles behind the last one that is filled are the last expert's, and begin behind its pairs.
    expert = torch.searchsorted(ends, i_tile, right=True, out_int32=True).clamp(max=n_experts - 1)
    first = first_of_all.index_select(0, expert).add(i_tile, alpha=size)
    table = torch.stack((expert, first, starts[1:].index_select(0, expert)), dim=1)
    return Tiles(table, order, size)


def _tile_size(n_pairs: int, n_experts: int) -> int:
    """A power of two near to the pairs of an expert on average."""
    least, most = TILE_SIZES
    return min(most, max(least, 1 << (n_pairs // n_experts).bit_length()))
