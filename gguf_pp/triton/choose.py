"""Tokens chosen where the logits are, in plain torch; `draw` does it with Triton, but for Kind.ALL.

The steps are `sampling.Sampler`'s: of the largest logits, equal ones in index order, a share by
top-k, top-p and min-p; of these one, at a place in the cumulative sum of their tempered weights.
Nothing waits for the device, and no shape depends on what is there.
"""

import math
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from gguf_pp.batch import Choice
from gguf_pp.sampling import NO_TOKEN

N_PARAMS = 6
"""Temperature, top-k, top-p, min-p, number, whether ends are banned."""


ROWS_AT_A_TIME = 8
"""Rows of which all logits are sorted at once: that takes 60 bytes for each of them."""


class Kind(IntEnum):
    """How many of a row's largest logits may be chosen."""

    BEST = 1
    TOP = 64
    ALL = 0


def kind_of(choices: Sequence[Choice | None]) -> Kind:
    """What is enough for all of `choices`; None among them wants nothing."""
    wanted = [_reach(choice) for choice in choices if choice is not None]
    most = max(wanted, default=1.0)
    return Kind.BEST if most <= Kind.BEST else Kind.TOP if most <= Kind.TOP else Kind.ALL


def pack(choices: Sequence[Choice | None], n_rows: int) -> Tensor:
    """Float64 [n_rows, N_PARAMS] on the host, as `choose` wants it on the device.

    Steps that are off have values that keep everything, greed is a top-k of 1. Rows without a
    choice, and those beyond, are greedy.
    """
    rows = np.tile([1.0, 1.0, math.inf, 0.0, 0.0, 0.0], (n_rows, 1))
    for row, choice in zip(rows, choices, strict=False):
        if choice is not None:
            row[-1] = choice.bans_ends
            if choice.temperature > 0:
                top_p = choice.top_p if choice.top_p < 1 else math.inf
                row[:-1] = choice.temperature, _reach(choice), top_p, choice.min_p, choice.number
    return torch.from_numpy(rows)


def _reach(choice: Choice) -> float:
    """How many of the largest logits it may choose from."""
    if choice.temperature <= 0:
        return 1
    return choice.top_k or math.inf


def choose(logits: Tensor, params: Tensor, ends: Tensor, kind: Kind) -> Tensor:
    """Tokens int32 [n] from `logits` float32 [n, V], which are left as they are.

    `params` float64 [n, N_PARAMS] are packed choices of at most `kind`; `ends` int64 [n_ends] are
    the ids that some of them ban. NO_TOKEN where the largest logit is not a finite number.
    """
    if kind is Kind.ALL and len(logits) > ROWS_AT_A_TIME:
        firsts = range(0, len(logits), ROWS_AT_A_TIME)
        parts = [slice(first, first + ROWS_AT_A_TIME) for first in firsts]
        return torch.cat([choose(logits[part], params[part], ends, kind) for part in parts])
    x = logits + 0.0  # -0.0 becomes 0.0, and stands where its index says
    is_end = x.new_zeros(x.shape[1], dtype=torch.bool).index_fill_(0, ends, True)
    x.masked_fill_(torch.logical_and(params[:, 5:], is_end), -math.inf)
    if kind is Kind.BEST:
        top, tokens = x.max(dim=1, keepdim=True)
    else:
        values, ids = x.sort(dim=1, descending=True, stable=True)
        values, top = values[:, : kind or None].double(), values[:, :1]
        tokens = ids.gather(1, _draw(values, params))
    return tokens.masked_fill_((top - top).ne(0), NO_TOKEN).int().squeeze(1)


def _draw(values: Tensor, params: Tensor) -> Tensor:
    """Places int64 [n, 1] in the rows of `values` float64 [n, K], each in descending order.

    A row of what is not finite gets a place as well, of no meaning.
    """
    temperature, top_k, top_p, min_p, number = params[:, :5, None].unbind(1)
    n_values = values.shape[1]
    gaps = values - values[:, :1]
    ranks = torch.arange(n_values, device=values.device)
    weights = gaps.exp().masked_fill_(ranks >= top_k, 0)
    shares = weights.cumsum(dim=1)
    shares = shares / shares[:, -1:]
    keep = (1 + (shares < top_p).sum(dim=1, keepdim=True)).minimum(top_k)
    keep = keep.minimum(n_values - (weights < min_p).sum(dim=1, keepdim=True))
    weights = (gaps / temperature).exp().masked_fill_(ranks >= keep, 0)
    sums = weights.cumsum(dim=1)
    place: Tensor = (sums <= number * sums[:, -1:]).sum(dim=1, keepdim=True).minimum(keep - 1)
    return place.long()
