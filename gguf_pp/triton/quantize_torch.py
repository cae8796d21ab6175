"""Rows of x made ready for the multiplying kernels, in torch; `quantize` has it in Triton."""

from typing import NamedTuple

import torch
from torch import Tensor

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


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension."""
    return x * (1.0 / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)) * weight


def quantize_int8(x: Tensor) -> Int8Rows:
    """Round float32 x [T, K] to multiples of a 127th of the largest of each 32; halves go up."""
    groups = x.view(len(x), -1, 32)
    largest = groups.abs().amax(-1)
    largest = torch.where(largest > SMALLEST, largest, 0.0)
    scales = largest / 127.0
    inverse = torch.where(largest > 0, 127.0 / largest, 0.0)
    # In float64 up to one rounding at the end, which is what a fused multiply-add does.
    codes = (groups.double() * inverse.double().unsqueeze(-1) + 0.5).float().floor()
    sums = codes.view(len(x), -1, 2, 16).sum(-1) * scales.unsqueeze(-1)
    return Int8Rows(codes.to(torch.int8).view_as(x), scales, sums.flatten(1))


def norm_quantize_int8(x: Tensor, weight: Tensor, eps: float) -> Int8Rows:
    """As `quantize_int8`, of `rms_norm`."""
    return quantize_int8(rms_norm(x, weight, eps))


def quantize_half(
    x: Tensor, *, weight: Tensor | None = None, eps: float = 0.0, is_transposed: bool
) -> HalfRows:
    """x, or its `rms_norm` where there is a weight, to float16; see `transposed`."""
    if weight is not None:
        x = rms_norm(x, weight, eps)
    exponent = (x.abs().amax(-1).view(torch.int32) >> 23).clamp(1, 253)
    values = (x * ((254 - exponent) << 23).view(torch.float32).unsqueeze(-1)).half()
    scales = (exponent << 23).view(torch.float32)
    return HalfRows(transposed(values) if is_transposed else values, scales)


def transposed(x: Tensor) -> Tensor:
    """[T, K] with column 4 t + b of each 16 swapped with column 4 b + t."""
    return x.view(len(x), -1, 4, 4).transpose(2, 3).reshape(x.shape)
