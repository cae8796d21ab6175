"""Types of 256 weights a block, whose sub-blocks have quantized scales, and the ternary types.

Layouts are those of ggml; conventions as in `reference_legacy`. Codes are cut out of machine
words, several to an operation, wherever the block size is a multiple of the word.
"""

from functools import cache

import torch
from torch import Tensor

from gguf_pp.quants.unpack import halves, planes, scale, split_last

_NIBBLES = 0x0F0F0F0F
_SIX_BITS = 0x3F3F3F3F
_HIGH_PAIRS = 0x30303030


def q2_k(blocks: Tensor, out: Tensor) -> None:
    """16 bytes of 4-bit scale and minimum, 64 bytes of 2-bit codes, scale and minimum."""
    scales = planes(blocks[:, :16], 4).float()
    dl = scale(blocks, 80) * scales[:, 0]
    ml = scale(blocks, 82) * scales[:, 1]
    target = out.view(-1, 16, 16)
    target.copy_(planes(split_last(blocks[:, 16:80], 2, 32), 2).view_as(target))
    target.mul_(dl.unsqueeze(-1)).sub_(ml.unsqueeze(-1))


def q3_k(blocks: Tensor, out: Tensor) -> None:
    """32 bytes of high bits, 64 of low pairs, 12 of 6-bit scales offset by 32, scale.

    A code is 4 smaller when its high bit is clear.
    """
    low = planes(blocks[:, 96:104], 4).flatten(1)
    high = planes(blocks[:, 104:108], 2).flatten(1)
    scales = (low | (high << 4)).sub_(32).view(torch.int8)
    dl = scale(blocks, 108) * scales.float()
    codes = planes(split_last(blocks[:, 32:96], 2, 32), 2).flatten(1)
    codes |= planes(blocks[:, :32], 1).flatten(1) << 2
    target = out.view(-1, 16, 16)
    target.copy_(codes.sub_(4).view(torch.int8).view_as(target))
    target.mul_(dl.unsqueeze(-1))


def q4_k(blocks: Tensor, out: Tensor) -> None:
    """Scale and minimum, 12 bytes of 6-bit ones, 128 bytes; 32 low nibbles, then 32 high ones."""
    dl, ml = _scales_and_minima(blocks)
    target = out.view(-1, 4, 2, 32)
    codes = blocks & 0x0F
    values = codes.float()
    packed = split_last(values[:, 16:], 4, 32)
    torch.mul(packed, dl[:, 0::2].unsqueeze(-1), out=target[:, :, 0])
    torch.bitwise_and(blocks, 0xF0, out=codes)
    values.copy_(codes)
    torch.mul(packed, (dl[:, 1::2] * 0.0625).unsqueeze(-1), out=target[:, :, 1])
    out.view(-1, 8, 32).sub_(ml.unsqueeze(-1))


def q5_k(blocks: Tensor, out: Tensor) -> None:
    """As Q4_K, with 32 bytes before the nibbles: bit i is the high bit of sub-block i."""
    dl, ml = _scales_and_minima(blocks)
    words = blocks.view(torch.int32)
    high = words[:, None, 4:12] >> torch.arange(8, dtype=torch.int32, device=out.device)[:, None]
    high = high.bitwise_and_(0x01010101).mul_(16).view(-1, 4, 2, 8)
    nibbles = split_last(words[:, 12:], 4, 8)
    high[:, :, 0] |= nibbles & _NIBBLES
    high[:, :, 1] |= (nibbles >> 4).bitwise_and_(_NIBBLES)
    out.copy_(high.view(torch.uint8).view_as(out))
    out.view(-1, 8, 32).mul_(dl.unsqueeze(-1)).sub_(ml.unsqueeze(-1))


def q6_k(blocks: Tensor, out: Tensor) -> None:
    """128 bytes of nibbles, 64 of high pairs, 16 signed 8-bit scales, scale; offset 32.

    Of each half block, 64 bytes hold 64 low nibbles and then 64 high ones, and 32 bytes hold
    the pairs of four runs of 32 weights, lowest first.
    """
    words = blocks.view(torch.int16)
    low = split_last((words & 0x0F0F)[:, :64], 2, 2, 16)
    high = split_last(((words >> 4) & 0x0F0F)[:, :64], 2, 2, 16)
    pairs = split_last(words[:, 64:96], 2, 16)
    codes = torch.empty(len(blocks), 2, 4, 16, dtype=torch.int16, device=out.device)
    for i, shifted in enumerate((pairs << 4, pairs << 2, pairs, pairs >> 2)):
        nibbles = (low if i < 2 else high)[:, :, i % 2]
        torch.bitwise_or(shifted & 0x3030, nibbles, out=codes[:, :, i])
    out.copy_(codes.view(torch.int8).view_as(out).sub_(32))
    scales = blocks[:, 192:208].view(torch.int8).float() * halves(blocks)[:, 104:]
    out.view(-1, 16, 16).mul_(scales.unsqueeze(-1))


@cache
def _powers_of_3(device: torch.device) -> Tensor:
    """Uint8 [5, 1], brought to the device once: it would be waited for every time."""
    return torch.tensor([[1], [3], [9], [27], [81]], dtype=torch.uint8, device=device)


def tq1_0(blocks: Tensor, out: Tensor) -> None:
    """Trits, five to a byte as a fraction of 256, in runs of 32 and 16; four to a byte; scale.

    A trit is the integer part of three times the fraction; multiplying by powers of three,
    modulo 256, brings each to the front.
    """
    powers = _powers_of_3(out.device)
    runs = (blocks[:, :32], powers), (blocks[:, 32:48], powers), (blocks[:, 48:52], powers[:4])
    shifted = torch.cat([(run.unsqueeze(1) * by).flatten(1) for run, by in runs], dim=1)
    out.copy_((shifted.short().mul_(3) >> 8).sub_(1))
    out.mul_(scale(blocks, 52))


def tq2_0(blocks: Tensor, out: Tensor) -> None:
    """64 bytes of 2-bit codes offset by 1, scale."""
    codes = planes(split_last(blocks[:, :64], 2, 32), 2)
    out.copy_(codes.sub_(1).view(torch.int8).view_as(out))
    out.mul_(scale(blocks, 64))


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Of Q4_K and Q5_K: both float32 [n, 8].

    The twelve bytes are three words of four: six bits of scales 0-3, of minima 0-3, and nibbles
    of scales and minima 4-7, whose upper pairs sit on top of the first two words.
    """
    words = blocks.view(torch.int32)
    scales, minima, nibbles = words[:, 1], words[:, 2], words[:, 3]
    packed = torch.stack(
        (
            scales & _SIX_BITS,
            (nibbles & _NIBBLES) | ((scales >> 2) & _HIGH_PAIRS),
            minima & _SIX_BITS,
            ((nibbles >> 4) & _NIBBLES) | ((minima >> 2) & _HIGH_PAIRS),
        ),
        dim=1,
    )
    values = packed.view(torch.uint8).float()
    d = halves(blocks)
    return values[:, :8] * d[:, :1], values[:, 8:] * d[:, 1:2]


KERNELS = {
    "Q2_K": q2_k,
    "Q3_K": q3_k,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
    "TQ1_0": tq1_0,
    "TQ2_0": tq2_0,
}
