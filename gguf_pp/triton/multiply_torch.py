"""y = x Wᵀ of quantized weights in torch; `multiply` has the same functions in Triton.

Each writes `out` [T, n_rows], whose rows may be further apart than n_rows, and adds `bias`
[n_rows] and `add`, with the strides of `out`, where they are given. All are float32.
"""

import torch
from torch import Tensor

from gguf_pp.triton.planes import Planes
from gguf_pp.triton.quantize_torch import HalfRows, Int8Rows, transposed


def gemv_int8(
    x: Int8Rows, w: Planes, out: Tensor, *, bias: Tensor | None = None, add: Tensor | None = None
) -> Tensor:
    """Times x as `quantize_int8` rounds it."""
    values = x.codes.float().view(len(x.codes), -1, 32) * x.scales.unsqueeze(-1)
    return finished(values.view(x.codes.shape) @ _weights(w).t(), out, bias, add)


def gemv_exact(
    x: Tensor, w: Planes, out: Tensor, *, bias: Tensor | None = None, add: Tensor | None = None
) -> Tensor:
    """Times float32 x that is `transposed`."""
    return finished(transposed(x) @ _weights(w).t(), out, bias, add)


def gemv_plain(
    x: Tensor, w: Planes, out: Tensor, *, bias: Tensor | None = None, add: Tensor | None = None
) -> Tensor:
    """Times float32 x, for weights that are plain numbers."""
    return finished(x @ _weights(w).t(), out, bias, add)


def gemm(
    x: HalfRows, w: Planes, out: Tensor, *, bias: Tensor | None = None, add: Tensor | None = None
) -> Tensor:
    """Times x in float16 and `transposed`, by weights rounded to float16."""
    weights = (_weights(w) * w.gain).half().float()
    y = transposed(x.values).float() @ weights.t() * (x.scales / w.gain).unsqueeze(-1)
    return finished(y, out, bias, add)


def dequantize(w: Planes, out: Tensor, *, ids: Tensor | None = None, gain: float = 1.0) -> Tensor:
    """Rows `ids` (int64 [T]), or all, `gain` times too large, to `out` [T, n_cols] of any dtype."""
    if out.dtype == torch.float32:
        w.dequantize(out, ids)
        return out if gain == 1.0 else out.mul_(gain)
    values = torch.empty(out.shape, device=out.device)
    return out.copy_(w.dequantize(values, ids).mul_(gain))


def _weights(w: Planes) -> Tensor:
    return w.dequantize(w.blocks().new_empty(w.n_rows, w.n_cols, dtype=torch.float32))


def finished(y: Tensor, out: Tensor, bias: Tensor | None, add: Tensor | None) -> Tensor:
    """Put y, with what is to be added, into `out`; returns `out`."""
    if bias is not None:
        y += bias
    if add is not None:
        y += add
    return out.copy_(y)
