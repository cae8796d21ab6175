"""Quantized rows on a device, each field of the blocks in a plane of its own.

Blocks of 18 or 210 bytes begin at odd places, and a GPU reads 16 bytes at a time only where they
are aligned. So the codes of all blocks of a row lie back to back, then their scales, and so on: as
many bytes as in the file, in another order. Q4_K and Q5_K, whose blocks are multiples of 16 bytes,
stay as they are. Offsets are those of ggml's block structs.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from gguf_pp.quants.reference import PLAIN, dequantize

_Type = GGMLQuantizationType


class Field(NamedTuple):
    """Bytes [start, stop) of each block, kept as `dtype`."""

    name: str
    start: int
    stop: int
    dtype: torch.dtype


def _fields(*fields: tuple[str, int, int, torch.dtype]) -> tuple[Field, ...]:
    return tuple(Field(*field) for field in fields)


_WORDS, _HALVES, _BYTES, _SIGNED = torch.int32, torch.float16, torch.uint8, torch.int8

LAYOUTS: Mapping[GGMLQuantizationType, tuple[Field, ...]] = {
    _Type.Q4_0: _fields(("d", 0, 2, _HALVES), ("q", 2, 18, _WORDS)),
    _Type.Q4_1: _fields(("d", 0, 4, _WORDS), ("q", 4, 20, _WORDS)),
    _Type.Q5_0: _fields(("d", 0, 2, _HALVES), ("high", 2, 6, _WORDS), ("q", 6, 22, _WORDS)),
    _Type.Q5_1: _fields(("d", 0, 4, _WORDS), ("high", 4, 8, _WORDS), ("q", 8, 24, _WORDS)),
    _Type.Q8_0: _fields(("d", 0, 2, _HALVES), ("q", 2, 34, _WORDS)),
    _Type.IQ4_NL: _fields(("d", 0, 2, _HALVES), ("q", 2, 18, _WORDS)),
    _Type.MXFP4: _fields(("d", 0, 1, _BYTES), ("q", 1, 17, _WORDS)),
    _Type.IQ4_XS: _fields(("d", 0, 8, _WORDS), ("q", 8, 136, _WORDS)),
    _Type.Q2_K: _fields(("scales", 0, 16, _BYTES), ("q", 16, 80, _WORDS), ("d", 80, 84, _WORDS)),
    _Type.Q3_K: _fields(
        ("high", 0, 32, _WORDS),
        ("q", 32, 96, _WORDS),
        ("scales", 96, 108, _BYTES),
        ("d", 108, 110, _HALVES),
    ),
    _Type.Q4_K: _fields(("q", 0, 144, _WORDS)),
    _Type.Q5_K: _fields(("q", 0, 176, _WORDS)),
    _Type.Q6_K: _fields(
        ("q", 0, 128, _WORDS),
        ("high", 128, 192, _WORDS),
        ("scales", 192, 208, _SIGNED),
        ("d", 208, 210, _HALVES),
    ),
    _Type.F16: _fields(("q", 0, 2, torch.float16)),
    _Type.BF16: _fields(("q", 0, 2, torch.bfloat16)),
    _Type.F32: _fields(("q", 0, 4, torch.float32)),
}
"""The planes of each type that has kernels. Other types stay in one plane of bytes."""

# Where the float16 of a block begin, how many there are, and how many times the greatest of them
# a weight can be in absolute value, rounded up.
_LARGEST: Mapping[GGMLQuantizationType, tuple[int, int, int]] = {
    _Type.Q4_0: (0, 1, 8),
    _Type.Q4_1: (0, 2, 16),
    _Type.Q5_0: (0, 1, 16),
    _Type.Q5_1: (0, 2, 32),
    _Type.Q8_0: (0, 1, 128),
    _Type.IQ4_NL: (0, 1, 127),
    _Type.IQ4_XS: (0, 1, 32 * 127),
    _Type.Q2_K: (80, 2, 15 * 3 + 15),
    _Type.Q3_K: (108, 1, 32 * 4),
    _Type.Q4_K: (0, 2, 63 * 15 + 63),
    _Type.Q5_K: (0, 2, 63 * 31 + 63),
    _Type.Q6_K: (208, 1, 128 * 32),
}
_CHUNK_BYTES = 64 << 20


def has_kernels(type: GGMLQuantizationType) -> bool:
    """Whether there are kernels that read weights of `type`."""
    return type in LAYOUTS


@dataclass(frozen=True, slots=True)
class Planes:
    """Rows of one type: `planes[name]` is [n_rows, n], all on one device.

    `gain` is the power of two that brings the largest weight near to, and below, the largest
    float16: scaled by it, no weight overflows and few lose digits.
    """

    type: GGMLQuantizationType
    n_cols: int
    planes: Mapping[str, Tensor]
    gain: float

    @property
    def n_rows(self) -> int:
        """Rows of the matrix."""
        return len(next(iter(self.planes.values())))

    @property
    def n_bytes(self) -> int:
        """Bytes of all planes: those of the file."""
        return sum(plane.nbytes for plane in self.planes.values())

    def rows(self, first: int, stop: int) -> "Planes":
        """Rows [first, stop), on the same memory."""
        planes = {name: plane[first:stop] for name, plane in self.planes.items()}
        return Planes(self.type, self.n_cols, planes, self.gain)

    def blocks(self, ids: Tensor | None = None) -> Tensor:
        """Rows `ids` (int64 [T]), or all, as they were in the file: uint8 [T, row_bytes]."""
        fields = _layout(self.type)
        n = self.n_rows if ids is None else len(ids)
        parts = []
        for field in sorted(fields, key=lambda field: field.start):
            plane = self.planes[field.name]
            rows = plane if ids is None else plane.index_select(0, ids)
            parts.append(rows.view(torch.uint8).view(n, -1, field.stop - field.start))
        return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)).view(n, -1)

    def dequantize(self, out: Tensor, ids: Tensor | None = None) -> Tensor:
        """Rows `ids`, or all, into contiguous float32 [T, n_cols], through torch; returns `out`."""
        return dequantize(self.blocks(ids), self.type, out)


def to_planes(
    type: GGMLQuantizationType, n_cols: int, sources: list[Tensor], device: torch.device
) -> Planes:
    """Copy blocks, uint8 [n_i, row_bytes] on the CPU and stacked by rows, to planes on `device`.

    Takes at most one chunk of 64 MiB (or one row) more on the device than the planes do.
    """
    type_size = GGML_QUANT_SIZES[type][1]
    n_rows, row_bytes = sum(map(len, sources)), sources[0].shape[1]
    n_blocks = row_bytes // type_size
    planes = {
        field.name: torch.empty(
            n_rows, n_blocks * (field.stop - field.start), dtype=torch.uint8, device=device
        ).view(field.dtype)
        for field in _layout(type)
    }
    peak, at = 0.0, 0
    for chunk in _chunks(sources):
        blocks = chunk.to(device).view(len(chunk), n_blocks, type_size)
        for field in _layout(type):
            target = planes[field.name][at : at + len(chunk)].view(torch.uint8)
            target.view(len(chunk), n_blocks, -1).copy_(blocks[..., field.start : field.stop])
        peak = max(peak, _bound(blocks, type))
        at += len(chunk)
    return Planes(type, n_cols, planes, _gain(peak))


def _layout(type: GGMLQuantizationType) -> tuple[Field, ...]:
    return LAYOUTS.get(type) or _fields(("q", 0, GGML_QUANT_SIZES[type][1], _BYTES))


def _chunks(sources: list[Tensor]) -> Iterator[Tensor]:
    step = max(1, _CHUNK_BYTES // sources[0].shape[1])
    for source in sources:
        for first in range(0, len(source), step):
            yield source[first : first + step]


def _bound(blocks: Tensor, type: GGMLQuantizationType) -> float:
    """What no weight of uint8 [n, n_blocks, type_size] exceeds in absolute value."""
    if type in PLAIN:
        return float(blocks.contiguous().view(PLAIN[type]).abs().max())
    if type is _Type.MXFP4:
        return 6.0 * 2.0 ** (int(blocks[..., 0].max()) - 127)
    if type not in _LARGEST:
        return 0.0
    start, n_halves, factor = _LARGEST[type]
    halves = blocks[..., start : start + 2 * n_halves].contiguous().view(torch.float16)
    return float(halves.abs().max()) * factor


def _gain(peak: float) -> float:
    """The power of two that brings `peak` into [2^14, 2^15); 1 for 0 and what is not finite."""
    if not 0 < peak < float("inf"):
        return 1.0
    return 2.0 ** max(-126, min(15 - math.frexp(peak)[1], 126))
