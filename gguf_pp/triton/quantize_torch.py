"""Rows of x made ready for the multiplying kernels, in torch; `quantize` has it in Triton.

What x is before it is rounded, `before` says: x itself if None; the RMS norm of x for a weight
[K] and an epsilon; activation(gate) * up of x [T, 2K], gate first, for the name of an activation.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from gguf_pp.ops.base import Activation
from gguf_pp.ops.torch_ops import gated, rms_norm

Before = tuple[Tensor, float] | Activation | None

SMALLEST = 1e-36
"""A group of 32 whose largest value is not above this counts as 0: its inverse overflows."""


class Int8Rows(NamedTuple):
    """x [T, K] as codes int8 [T, K] times scales float32 [T, K / 32].

    `sums` float32 [T, K / 16] are those of 16 neighbours, of x as rounded.
    """

    codes: Tensor
    scales: Tensor
    sums: Tensor


class HalfRows(NamedTuple):
    """x [T, K] as float16 [T, K], below 4 in absolute value, times powers of two [T]."""

    values: Tensor
    scales: Tensor


def float_rows(
    x: Tensor, before: Before = None, *, add: Tensor | None = None, is_transposed: bool = False
) -> Tensor:
    """Float32 [T, K], plus `add` [T, K]; see `transposed`."""
    y = _made(x, before)
    if is_transposed:
        y = transposed(y)
    return y if add is None else y + add


def quantize_int8(x: Tensor, before: Before = None) -> Int8Rows:
    """Round to multiples of a 127th of the largest of each 32; halves go up."""
    x = _made(x, before)
    groups = x.view(len(x), -1, 32)
    largest = groups.abs().amax(-1)
    largest = torch.where(largest > SMALLEST, largest, 0.0)
    scales = largest / 127.0
    # Not 127.0 / largest, which torch takes for 127 times the reciprocal.
    inverse = torch.where(largest > 0, torch.full_like(largest, 127.0) / largest, 0.0)
    # In float64 up to one rounding at the end, which is what a fused multiply-add does.
    codes = (groups.double() * inverse.double().unsqueeze(-1) + 0.5).float().floor()
    sums = codes.view(len(x), -1, 2, 16).sum(-1) * scales.unsqueeze(-1)
    return Int8Rows(codes.to(torch.int8).view_as(x), scales, sums.flatten(1))


def quantize_half(x: Tensor, before: Before = None, *, is_transposed: bool) -> HalfRows:
    """Round to float16; see `transposed`."""
    x = _made(x, before)
    exponent = (x.abs().amax(-1).view(torch.int32) >> 23).clamp(1, 253)
    values = (x * ((254 - exponent) << 23).view(torch.float32).unsqueeze(-1)).half()
    scales = (exponent << 23).view(torch.float32)
    return HalfRows(transposed(values) if is_transposed else values, scales)


def transposed(x: Tensor) -> Tensor:
    """[T, K] with column 4 t + b of each 16 swapped with column 4 b + t."""
    return x.view(len(x), -1, 4, 4).transpose(2, 3).reshape(x.shape)


def _made(x: Tensor, before: Before) -> Tensor:
    if before is None:
        return x
    return gated(x, before) if isinstance(before, str) else rms_norm(x, *before)
