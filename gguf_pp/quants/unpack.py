"""Small fields out of packed bytes, and the tables that some block formats index."""

from functools import cache
from typing import Any

import gguf.quants
import numpy as np
import torch
from torch import Tensor

_CLASSES: Any = gguf.quants


def halves(blocks: Tensor) -> Tensor:
    """All bytes of uint8 [n, 2m] read as float16: float32 [n, m].

    Converting a whole block is faster than picking the scales out first; what is no scale comes
    out as noise that nobody reads.
    """
    return blocks.view(torch.float16).float()


def scale(blocks: Tensor, first: int) -> Tensor:
    """The float16 at byte `first` of each block: float32 [n, 1]."""
    return blocks[:, first : first + 2].view(torch.float16).float()


def planes(src: Tensor, width: int) -> Tensor:
    """Fields of `width` bits, lowest first, of uint8 [..., m]: uint8 [..., 8 / width, m].

    All first fields come before all second ones.
    """
    return (src.unsqueeze(-2) >> _shifts(width, src.device).unsqueeze(-1)) & ((1 << width) - 1)


def fields(src: Tensor, width: int) -> Tensor:
    """Fields of `width` bits, lowest first, of uint8 [n, m]: uint8 [n, m * 8 / width].

    The fields of one byte stay together.
    """
    unpacked = (src.unsqueeze(-1) >> _shifts(width, src.device)) & ((1 << width) - 1)
    return unpacked.flatten(-2)


def split_last(src: Tensor, *sizes: int) -> Tensor:
    """A view of [..., m] as [..., *sizes]."""
    return src.view(*src.shape[:-1], *sizes)


def u16(src: Tensor) -> Tensor:
    """Little-endian 16-bit words of uint8 [n, 2m]: int32 [n, m], not negative."""
    return src.contiguous().view(torch.int16).int() & 0xFFFF


def i32(src: Tensor) -> Tensor:
    """Little-endian 32-bit words of uint8 [n, 4m]: int32 [n, m]."""
    # Always a copy: a word must not start between its multiples, and one row is contiguous.
    return src.clone(memory_format=torch.contiguous_format).view(torch.int32)


def lookup(table: Tensor, index: Tensor) -> Tensor:
    """Rows of `table` [k, ...] at `index` (any integer type, any shape): [index.numel(), ...]."""
    return table.index_select(0, index.reshape(-1).int())


@cache
def grid(name: str, device: torch.device) -> Tensor:
    """The codebook of an IQ type: float32 [entries, 4 or 8]."""
    owner = getattr(_CLASSES, name)
    owner.init_grid()
    return torch.from_numpy(owner.grid.reshape(owner.grid_shape).copy()).to(device)


@cache
def code_values(name: str, device: torch.device) -> Tensor:
    """The 16 values of a 4-bit code that is not linear: float32 [16]."""
    return torch.tensor(getattr(_CLASSES, name).kvalues, dtype=torch.float32, device=device)


@cache
def byte_scales(name: str, device: torch.device) -> Tensor:
    """What each byte means as a block scale of MXFP4 or NVFP4: float32 [256]."""
    owner = getattr(_CLASSES, name)
    decode = owner.e8m0_to_fp32_half if name == "MXFP4" else owner.ue4m3_to_fp32
    table = decode(np.arange(256, dtype=np.uint8)).astype(np.float32)
    return torch.from_numpy(table).to(device)


@cache
def sign_bytes(device: torch.device) -> Tensor:
    """The bits of each byte as signs, lowest first, 1 is negative: float32 [256, 8]."""
    bits = planes(torch.arange(256, dtype=torch.uint8).unsqueeze(-1), 1).squeeze(-1)
    return (1.0 - 2.0 * bits.float()).to(device)


@cache
def sign_codes(device: torch.device) -> Tensor:
    """Seven coded signs and the eighth that makes their product positive: float32 [128, 8]."""
    codes = torch.tensor(list(_CLASSES.IQ2_XXS.ksigns), dtype=torch.uint8)
    return lookup(sign_bytes(torch.device("cpu")), codes).to(device)


@cache
def _shifts(width: int, device: torch.device) -> Tensor:
    return torch.arange(0, 8, width, dtype=torch.uint8, device=device)
