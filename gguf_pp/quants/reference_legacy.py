"""Types of 32 weights a block: a float16 scale, perhaps a minimum, and packed codes.

Layouts are those of ggml. Every function takes blocks, uint8 [n, type_size], and writes float32
[n, block_size]. Where speed matters, a mask or a conversion runs over whole blocks, scales
included, because torch is several times faster on flat memory than on many short rows. High
nibbles are not shifted: they stay 16 times too large and a scale 16 times smaller makes up for
it, exactly.
"""

import torch
from torch import Tensor

from gguf_pp.quants.unpack import (
    byte_scales,
    code_values,
    halves,
    lookup,
    planes,
    sign_bytes,
    split_last,
)


def q4_0(blocks: Tensor, out: Tensor) -> None:
    """16-bit scale, 16 bytes of which low nibbles come first; codes are offset by 8."""
    target = out.view(-1, 2, 16)
    d = halves(blocks)[:, :1]
    codes = blocks & 0x0F
    values = codes.sub_(8).view(torch.int8).float()
    torch.mul(values[:, 2:], d, out=target[:, 0])
    torch.bitwise_and(blocks, 0xF0, out=codes)
    values.copy_(codes.bitwise_xor_(0x80).view(torch.int8))
    torch.mul(values[:, 2:], d * 0.0625, out=target[:, 1])


def q4_1(blocks: Tensor, out: Tensor) -> None:
    """Scale, minimum, nibbles as in Q4_0."""
    target = out.view(-1, 2, 16)
    scales = halves(blocks)
    d, m = scales[:, :1], scales[:, 1:2]
    codes = blocks & 0x0F
    values = codes.float()
    torch.mul(values[:, 4:], d, out=target[:, 0])
    torch.bitwise_and(blocks, 0xF0, out=codes)
    values.copy_(codes)
    torch.mul(values[:, 4:], d * 0.0625, out=target[:, 1])
    out.add_(m)


def q5_0(blocks: Tensor, out: Tensor) -> None:
    """Scale, 32 high bits, nibbles as in Q4_0; codes are offset by 16."""
    d = halves(blocks)[:, :1]
    _five_bits(blocks, 2, out)
    out.sub_(16.0).mul_(d)


def q5_1(blocks: Tensor, out: Tensor) -> None:
    """Scale, minimum, 32 high bits, nibbles as in Q4_0."""
    scales = halves(blocks)
    _five_bits(blocks, 4, out)
    out.mul_(scales[:, :1]).add_(scales[:, 1:2])


def q8_0(blocks: Tensor, out: Tensor) -> None:
    """Scale and 32 signed bytes."""
    d = halves(blocks)[:, :1]
    torch.mul(blocks.view(torch.int8).float()[:, 2:], d, out=out)


def mxfp4(blocks: Tensor, out: Tensor) -> None:
    """A power of two in one byte, nibbles as in Q4_0 that code E2M1 floats."""
    d = lookup(byte_scales("MXFP4", blocks.device), blocks[:, 0])
    codes = planes(blocks[:, 1:], 4)
    values = lookup(code_values("MXFP4", blocks.device), codes)
    torch.mul(values.view_as(out), d.unsqueeze(-1), out=out)


def nvfp4(blocks: Tensor, out: Tensor) -> None:
    """Four E4M3 scales, each of 16 weights in 8 bytes, low nibbles first."""
    d = lookup(byte_scales("NVFP4", blocks.device), blocks[:, :4])
    codes = planes(split_last(blocks[:, 4:], 4, 8), 4)
    values = lookup(code_values("NVFP4", blocks.device), codes)
    torch.mul(values.view(-1, 16), d.unsqueeze(-1), out=out.view(-1, 16))


def iq4_nl(blocks: Tensor, out: Tensor) -> None:
    """As Q4_0, with codes that mean the entries of a table."""
    values = lookup(code_values("IQ4_NL", blocks.device), planes(blocks[:, 2:], 4))
    torch.mul(values.view_as(out), halves(blocks)[:, :1], out=out)


def _five_bits(blocks: Tensor, first: int, out: Tensor) -> None:
    """Codes 0 to 31, from 4 bytes of high bits at `first` and the nibbles behind them."""
    target = out.view(-1, 2, 16)
    high = blocks[:, first : first + 4].int().view(-1)
    torch.index_select(_high_bits(blocks.device), 0, high, out=out.view(-1, 8))
    codes = blocks & 0x0F
    values = codes.float()
    target[:, 0].add_(values[:, first + 4 :])
    torch.bitwise_and(blocks, 0xF0, out=codes)
    values.copy_(codes)
    target[:, 1].add_(values[:, first + 4 :], alpha=0.0625)


def _high_bits(device: torch.device) -> Tensor:
    """The bits of each byte, worth 16 each: float32 [256, 8]."""
    return 8.0 - 8.0 * sign_bytes(device)


KERNELS = {
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q5_0": q5_0,
    "Q5_1": q5_1,
    "Q8_0": q8_0,
    "MXFP4": mxfp4,
    "NVFP4": nvfp4,
    "IQ4_NL": iq4_nl,
}
