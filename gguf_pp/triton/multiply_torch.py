"""y = x Wᵀ of quantized weights in torch; `multiply` has the same functions in Triton.

Each writes `out` [T, n_rows], whose rows may be further apart than n_rows, and adds `bias`
[n_rows] and `add`, with the strides of `out`, where they are given. All are float32.

With `pairs` or `tiles`, W has the matrices of many experts, stacked, and `out` [P, n_rows] takes a
row for each pair of a row of x and an expert.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from gguf_pp.triton.planes import Planes
from gguf_pp.triton.quantize_torch import HalfRows, Int8Rows, transposed

PIECE_WEIGHTS = 1 << 22
"""As many are dequantized at a time: what that takes beside the result is up to 9 bytes each."""


class Pairs(NamedTuple):
    """Pair i is of row i // `n_share` of x and of the expert `experts` [i], int32 [P]."""

    experts: Tensor
    n_share: int


class Tiles(NamedTuple):
    """Pairs of the same expert, `size` at a time.

    Row (expert, first, stop) of `table`, int32 [n_tiles, 3], has the first `size` of the pairs
    `order` [first, stop), int64 [P], which may be none.
    """

    table: Tensor
    order: Tensor
    size: int


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
    values = x.codes.float().view(len(x.codes), -1, 32) * x.scales.unsqueeze(-1)
    return finished(_product(values.view(x.codes.shape), _weights(w), out, pairs), out, bias, add)


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
    return finished(_product(transposed(x), _weights(w), out, pairs), out, bias, add)


def gemv_plain(
    x: Tensor,
    w: Planes,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    add: Tensor | None = None,
    pairs: Pairs | None = None,
) -> Tensor:
    """Times float32 x, for weights that are plain numbers."""
    return finished(_product(x, _weights(w), out, pairs), out, bias, add)


def gemm(
    x: HalfRows, w: Planes, out: Tensor, *, bias: Tensor | None = None, add: Tensor | None = None
) -> Tensor:
    """Times x in float16 and `transposed`, by weights rounded to float16."""
    weights = (_weights(w) * w.gain).half().float()
    y = transposed(x.values).float() @ weights.t() * (x.scales / w.gain).unsqueeze(-1)
    return finished(y, out, bias, add)


def gemm_tiles(x: HalfRows, w: Planes, out: Tensor, tiles: Tiles, n_share: int) -> Tensor:
    """As `gemm`, of pairs i of rows i // `n_share` of x. Waits for the device."""
    weights = (_weights(w) * w.gain).half().float().view(-1, out.shape[1], w.n_cols)
    values, scales = transposed(x.values).float(), x.scales / w.gain
    for expert, first, stop in tiles.table.tolist():
        at = tiles.order[first : min(stop, first + tiles.size)]
        rows = at // n_share
        out[at] = values[rows] @ weights[expert].t() * scales[rows].unsqueeze(-1)
    return out


def dequantize(w: Planes, out: Tensor, *, ids: Tensor | None = None, gain: float = 1.0) -> Tensor:
    """Rows `ids` (int64 [T]), or all, `gain` times too large, to `out` [T, n_cols] of any dtype."""
    n_rows = max(1, PIECE_WEIGHTS // w.n_cols)
    is_float = out.dtype == torch.float32
    room = out if is_float else torch.empty(min(n_rows, len(out)), w.n_cols, device=out.device)
    for first in range(0, len(out), n_rows):
        stop = min(first + n_rows, len(out))
        piece, theirs = (w.rows(first, stop), None) if ids is None else (w, ids[first:stop])
        values = piece.dequantize(out[first:stop] if is_float else room[: stop - first], theirs)
        if gain != 1.0:
            values.mul_(gain)
        if not is_float:
            out[first:stop] = values
    return out


def _weights(w: Planes) -> Tensor:
    return w.dequantize(w.blocks().new_empty(w.n_rows, w.n_cols, dtype=torch.float32))


def _product(x: Tensor, weights: Tensor, out: Tensor, pairs: Pairs | None) -> Tensor:
    if pairs is None:
        return x @ weights.t()
    x = x.repeat_interleave(pairs.n_share, 0).unsqueeze(-1)
    theirs = weights.view(-1, out.shape[1], weights.shape[1])[pairs.experts]
    return (theirs @ x).squeeze(-1)


def finished(y: Tensor, out: Tensor, bias: Tensor | None, add: Tensor | None) -> Tensor:
    """Put y, with what is to be added, into `out`; returns `out`."""
    if bias is not None:
        y += bias
    if add is not None:
        y += add
    return out.copy_(y)
