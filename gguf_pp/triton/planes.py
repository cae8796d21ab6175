"""Quantized rows on a device, each field of the blocks in a plane of its own.

Blocks of 18 or 210 bytes begin at odd places, and a GPU reads 16 bytes at a time only where they
are aligned. So the codes of all blocks of a row lie back to back, then their scales, and so on: as
many bytes as in the file, in another order. Q4_K and Q5_K, whose blocks are multiples of 16 bytes,
stay as they are. Offsets are those of ggml's block structs.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from gguf_pp.backend.cuda_host import Uploads
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

OPERANDS = ("q", "high", "scales", "d")

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
CHUNK_BYTES = 32 << 20
"""How much of a file is on its way to a device at a time."""


def has_kernels(type: GGMLQuantizationType) -> bool:
    """Whether there are kernels that read weights of `type`."""
    return type in LAYOUTS


@dataclass(frozen=True)
class Planes:
    """Rows of one type: `planes[name]` is [n_rows, n], all on one device.

    `gain` is the power of two that brings the largest weight near to, and below, the largest
    float16: scaled by it, no weight overflows and few lose digits.
    """

    type: GGMLQuantizationType
    n_cols: int
    planes: Mapping[str, Tensor]
    gain: float

    @cached_property
    def n_rows(self) -> int:
        """Rows of the matrix."""
        return len(next(iter(self.planes.values())))

    @cached_property
    def operands(self) -> tuple[Tensor, ...]:
        """The planes in the order of the kernels' parameters; codes stand in for what there is
        not."""
        return tuple(self.planes.get(name, self.planes["q"]) for name in OPERANDS)

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
    type: GGMLQuantizationType,
    n_cols: int,
    sources: list[Tensor],
    device: torch.device,
    uploads: Uploads | None = None,
) -> Planes:
    """Copy blocks, uint8 [n_i, row_bytes] on the CPU and stacked by rows, to planes on `device`.

    They go there chunk by chunk, as large as `uploads` takes, and into planes there: that takes
    at most one chunk (or one row) more on the device than the planes do. Waits for the device
    once, at the end; `sources` may change then.
    """
    n_rows, row_bytes = sum(map(len, sources)), sources[0].shape[1]
    n_blocks = row_bytes // GGML_QUANT_SIZES[type][1]
    planes = {
        field.name: torch.empty(
            n_rows, n_blocks * (field.stop - field.start), dtype=torch.uint8, device=device
        ).view(field.dtype)
        for field in _layout(type)
    }
    whole, at = Planes(type, n_cols, planes, 1.0), 0
    peaks = []
    for pieces in _chunks(sources, CHUNK_BYTES if uploads is None else uploads.n_bytes):
        stop = at + sum(map(len, pieces))
        peaks.append(_fill(whole.rows(at, stop), _bring(pieces, device, uploads)))
        at = stop
    peak = 0.0
    for value in torch.stack(peaks).tolist():
        peak = max(peak, _bound(value, type))
    return replace(whole, gain=_gain(peak))


def _bring(pieces: list[Tensor], device: torch.device, uploads: Uploads | None) -> Tensor:
    """The rows of all pieces on the device."""
    n_rows, row_bytes = sum(map(len, pieces)), pieces[0].shape[1]
    if uploads is None or n_rows * row_bytes > uploads.n_bytes:
        return torch.cat(pieces).to(device)
    rows = torch.empty(n_rows, row_bytes, dtype=torch.uint8, device=device)
    uploads.send_pieces(pieces, rows)
    return rows


def _fill(target: Planes, rows: Tensor) -> Tensor:
    """Write blocks, uint8 [n, row_bytes], to the planes of as many rows. Returns what decides how
    large weights may be: float64 []."""
    type_size = GGML_QUANT_SIZES[target.type][1]
    blocks = rows.view(len(rows), -1, type_size)
    for field in _layout(target.type):
        plane = target.planes[field.name].view(torch.uint8).view(len(rows), blocks.shape[1], -1)
        plane.copy_(blocks[..., field.start : field.stop])
    return _peak(blocks, target.type)


def _layout(type: GGMLQuantizationType) -> tuple[Field, ...]:
    return LAYOUTS.get(type) or _fields(("q", 0, GGML_QUANT_SIZES[type][1], _BYTES))


def _chunks(sources: list[Tensor], n_bytes: int) -> Iterator[list[Tensor]]:
    """All rows in order, as many at a time as are in `n_bytes`, but at least one."""
    room = step = max(1, n_bytes // sources[0].shape[1])
    pieces: list[Tensor] = []
    for source in sources:
        first = 0
        while first < len(source):
            piece = source[first : first + room]
            pieces.append(piece)
            first, room = first + len(piece), room - len(piece)
            if not room:
                yield pieces
                pieces, room = [], step
    if pieces:
        yield pieces


def _peak(blocks: Tensor, type: GGMLQuantizationType) -> Tensor:
    """The largest scale in uint8 [n, n_blocks, type_size], or weight if they are plain: []."""
    if type in PLAIN:
        return _largest(blocks.view(PLAIN[type]))
    if type is _Type.MXFP4:
        return blocks[..., 0].max().double()
    if type not in _LARGEST:
        return torch.zeros((), dtype=torch.float64, device=blocks.device)
    start, n_halves, _ = _LARGEST[type]
    return _largest(blocks[..., start : start + 2 * n_halves].contiguous().view(torch.float16))


def _largest(values: Tensor) -> Tensor:
    """The largest absolute value, without a copy of all of them."""
    least, most = values.aminmax()
    return torch.maximum(-least, most).double()


def _bound(peak: float, type: GGMLQuantizationType) -> float:
    """What no weight exceeds in absolute value where `_peak` is that."""
    if type in PLAIN:
        return peak
    if type is _Type.MXFP4:
        return float(6.0 * 2.0 ** (peak - 127))
    return peak * _LARGEST[type][2] if type in _LARGEST else 0.0


def _gain(peak: float) -> float:
    """The power of two that brings `peak` into [2^14, 2^15); 1 for 0 and what is not finite."""
    if not 0 < peak < float("inf"):
        return 1.0
    return 2.0 ** max(-126, min(15 - math.frexp(peak)[1], 126))
