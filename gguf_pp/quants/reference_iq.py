"""Types whose codes are entries of a codebook, 256 weights a block.

Layouts are those of ggml; conventions as in `reference_legacy`. Codebooks and the table of sign
codes come from the gguf package.
"""

import torch
from torch import Tensor

from gguf_pp.quants.unpack import (
    code_values,
    fields,
    grid,
    i32,
    lookup,
    planes,
    scale,
    sign_bytes,
    sign_codes,
    split_last,
    u16,
)


def iq2_xxs(blocks: Tensor, out: Tensor) -> None:
    """Scale; per 32 weights four indices, then a word of four sign codes and a 4-bit scale."""
    words = i32(blocks[:, 2:]).view(-1, 8, 2)
    index = words[..., 0].contiguous().view(torch.uint8)
    db = scale(blocks, 0) * (0.5 + _top_nibble(words[..., 1])) * 0.25
    values = lookup(grid("IQ2_XXS", out.device), index)
    _store(db, values, _coded_signs(words[..., 1]), out)


def iq2_xs(blocks: Tensor, out: Tensor) -> None:
    """Scale; 32 words of 9 bits of index and 7 of sign code; sixteen 4-bit scales."""
    words = u16(blocks[:, 2:66])
    db = scale(blocks, 0) * (0.5 + fields(blocks[:, 66:], 4).float()) * 0.25
    values = lookup(grid("IQ2_XS", out.device), words & 511)
    _store(db, values, lookup(sign_codes(out.device), words >> 9), out)


def iq2_s(blocks: Tensor, out: Tensor) -> None:
    """Scale; 32 low bytes of indices; 32 of signs; 8 of index bits 8-9; sixteen 4-bit scales."""
    index = blocks[:, 2:34].int() | (fields(blocks[:, 66:74], 2).int() << 8)
    db = scale(blocks, 0) * (0.5 + fields(blocks[:, 74:], 4).float()) * 0.25
    values = lookup(grid("IQ2_S", out.device), index)
    _store(db, values, lookup(sign_bytes(out.device), blocks[:, 34:66]), out)


def iq3_xxs(blocks: Tensor, out: Tensor) -> None:
    """Scale; 64 indices; per 32 weights a word of four sign codes and a 4-bit scale."""
    words = i32(blocks[:, 66:])
    db = scale(blocks, 0) * (0.5 + _top_nibble(words)) * 0.5
    values = lookup(grid("IQ3_XXS", out.device), blocks[:, 2:66])
    _store(db, values, _coded_signs(words), out)


def iq3_s(blocks: Tensor, out: Tensor) -> None:
    """Scale; 64 low bytes of indices; their 64 ninth bits; 32 bytes of signs; 4-bit scales."""
    index = blocks[:, 2:66].int() | (fields(blocks[:, 66:74], 1).int() << 8)
    db = scale(blocks, 0) * (1.0 + 2.0 * fields(blocks[:, 106:], 4).float())
    values = lookup(grid("IQ3_S", out.device), index)
    _store(db, values, lookup(sign_bytes(out.device), blocks[:, 74:106]), out)


def iq1_s(blocks: Tensor, out: Tensor) -> None:
    """Scale; 32 low bytes of indices; per 32 weights a word of four upper index bits (3 each),
    a 3-bit scale and the sign of the shift of 1/8.
    """
    words = u16(blocks[:, 34:])
    index = blocks[:, 2:34].int() | ((_thirds(words) & 7) << 8)
    dl = scale(blocks, 0) * (2 * ((words >> 12) & 7) + 1).float()
    delta = 0.125 - 0.25 * (words >> 15).float()
    values = lookup(grid("IQ1_S", out.device), index).view(-1, 8, 32)
    torch.mul(values + delta.unsqueeze(-1), dl.unsqueeze(-1), out=out.view(-1, 8, 32))


def iq1_m(blocks: Tensor, out: Tensor) -> None:
    """32 low bytes of indices; 32 nibbles of upper index bits (3) and shift sign; four words of
    four 3-bit scales, whose top nibbles are the float16 scale.
    """
    words = u16(blocks[:, 48:])
    nibbles = words >> 12
    bits = nibbles[:, 0] | nibbles[:, 1] << 4 | nibbles[:, 2] << 8 | nibbles[:, 3] << 12
    d = bits.short().view(torch.float16).float().unsqueeze(-1)
    dl = d * (2 * (_thirds(words) & 7) + 1).float()
    high = fields(blocks[:, 32:48], 4).int()
    index = blocks[:, :32].int() | ((high & 7) << 8)
    delta = 0.125 - 0.25 * (high >> 3).float()
    values = lookup(grid("IQ1_M", out.device), index).view(-1, 32, 8) + delta.unsqueeze(-1)
    torch.mul(values.view(-1, 16, 16), dl.unsqueeze(-1), out=out.view(-1, 16, 16))


def iq4_xs(blocks: Tensor, out: Tensor) -> None:
    """Scale, eight 6-bit scales offset by 32, 16 bytes of IQ4_NL codes per 32 weights."""
    low, high = fields(blocks[:, 4:8], 4), fields(blocks[:, 2:4], 2)
    scales = (low | (high << 4)).sub_(32).view(torch.int8)
    dl = scale(blocks, 0) * scales.float()
    codes = planes(split_last(blocks[:, 8:], 8, 16), 4)
    values = lookup(code_values("IQ4_NL", out.device), codes)
    target = out.view(-1, 8, 32)
    torch.mul(values.view_as(target), dl.unsqueeze(-1), out=target)


def _top_nibble(words: Tensor) -> Tensor:
    return ((words >> 28) & 15).float()


def _coded_signs(words: Tensor) -> Tensor:
    """Four 7-bit sign codes of each word of int32 [n, m]: float32 [n * m * 4, 8]."""
    shifts = torch.arange(0, 28, 7, dtype=torch.int32, device=words.device)
    return lookup(sign_codes(words.device), (words.unsqueeze(-1) >> shifts) & 127)


def _thirds(words: Tensor) -> Tensor:
    """Each word of int32 [n, m] shifted by 0, 3, 6 and 9 bits: [n, 4 m]."""
    shifts = torch.arange(0, 12, 3, dtype=torch.int32, device=words.device)
    return (words.unsqueeze(-1) >> shifts).flatten(1)


def _store(scales: Tensor, values: Tensor, signs: Tensor, out: Tensor) -> None:
    """(scale * value) * sign, each scale [n, m] for an equal run of the block."""
    runs = out.view(*scales.shape, -1)
    torch.mul(values.view_as(runs), scales.unsqueeze(-1), out=runs)
    runs.mul_(signs.view_as(runs))


KERNELS = {
    "IQ2_XXS": iq2_xxs,
    "IQ2_XS": iq2_xs,
    "IQ2_S": iq2_s,
    "IQ3_XXS": iq3_xxs,
    "IQ3_S": iq3_s,
    "IQ1_S": iq1_s,
    "IQ1_M": iq1_m,
    "IQ4_XS": iq4_xs,
}
