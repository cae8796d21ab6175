"""The header of one GGUF file: metadata, and where each tensor lies.

Layout: "GGUF" specification, version 3 (ggml-org/ggml, docs/gguf.md). Magic, u32 version, u64
tensor count, u64 key count; keys (string, u32 type, value); tensors (string, u32 dimension
count, u64 dimensions with the fastest first, u32 type, u64 offset); padding; tensor data.
Version 2 has the same layout; version 1 had 32-bit counts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from mmap import mmap
from pathlib import Path
from typing import Final

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from gguf_pp.errors import FormatError, UnsupportedError
from gguf_pp.gguf.cursor import Cursor

VERSIONS: Final = (2, 3)
DEFAULT_ALIGNMENT: Final = 32
_MAX_ALIGNMENT: Final = 65536
MAX_DIMS: Final = 4
# Far above any model; an entry takes some 15 times its bytes once parsed.
MAX_ENTRIES: Final = 1 << 18
_MIN_KEY_BYTES: Final = 8 + 4 + 1
_MIN_TENSOR_BYTES: Final = 8 + 4 + 8 + 4 + 8
_REMOVED_TYPES: Final = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies; `shape` is in numpy order, the reverse of the order in the file.

    `offset` counts bytes from the start of shard `i_shard`.
    """

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    n_bytes: int
    i_shard: int
    offset: int

    @property
    def n_rows(self) -> int:
        """Product of all dimensions but the last."""
        return math.prod(self.shape[:-1])


@dataclass(frozen=True, slots=True)
class Header:
    """What one file says of itself; `tensors` in the order of the file.

    `data_start` is the byte at which the tensors' data begins.
    """

    version: int
    values: dict[str, object]
    tensors: dict[str, TensorInfo]
    data_start: int


def parse_header(data: mmap | bytes, path: Path, i_shard: int = 0) -> Header:
    """Parse and check the header of a whole file `data`; `path` is for messages.

    Raises FormatError or UnsupportedError.
    """
    cursor = Cursor(data, path, pos=4)
    version = _version(cursor)
    n_tensors = _entries(cursor, _MIN_TENSOR_BYTES, "tensors")
    n_keys = _entries(cursor, _MIN_KEY_BYTES, "metadata keys")
    values = _values(cursor, n_keys)
    infos: dict[str, TensorInfo] = {}
    for _ in range(n_tensors):
        info = _tensor(cursor, i_shard)
        if info.name in infos:
            raise FormatError(f"{path}: tensor {info.name!r} occurs twice")
        infos[info.name] = info
    alignment = _alignment(values, path)
    data_start = _aligned(cursor.pos, alignment)
    tensors = {info.name: _placed(info, data_start, alignment, path) for info in infos.values()}
    _check_extents(list(tensors.values()), data_start, len(data), alignment, path)
    _check_single(data, list(tensors.values()), cursor.pos, alignment, path)
    return Header(version, values, tensors, data_start)


def _aligned(n_bytes: int, alignment: int) -> int:
    return -(-n_bytes // alignment) * alignment


def _version(cursor: Cursor) -> int:
    version = cursor.u32("the version")
    if version in VERSIONS:
        return version
    if not version & 0xFFFF and version:
        raise UnsupportedError(
            f"{cursor.path}: the file is big-endian",
            hint="convert it with gguf-convert-endian, or download the little-endian file",
        )
    newer = version > max(VERSIONS)
    raise UnsupportedError(
        f"{cursor.path}: GGUF version {version}; versions 2 and 3 are supported",
        hint="upgrade gguf-pp" if newer else "convert the model again with a current llama.cpp",
    )


def _entries(cursor: Cursor, min_bytes: int, what: str) -> int:
    n_entries = cursor.count(min_bytes, what)
    if n_entries > MAX_ENTRIES:
        raise FormatError(f"{cursor.path}: {n_entries} {what}: more than {MAX_ENTRIES}")
    return n_entries


def _values(cursor: Cursor, n_keys: int) -> dict[str, object]:
    values: dict[str, object] = {}
    for i_key in range(n_keys):
        key = cursor.name(f"metadata key {i_key}")
        if key in values:
            raise FormatError(f"{cursor.path}: metadata key {key!r} occurs twice")
        what = f"metadata key {key!r}"
        values[key] = cursor.value(cursor.kind(what), what)
    return values


def _alignment(values: dict[str, object], path: Path) -> int:
    alignment = values.get("general.alignment", DEFAULT_ALIGNMENT)
    if (
        isinstance(alignment, bool)
        or not isinstance(alignment, int)
        or not 0 < alignment <= _MAX_ALIGNMENT
        or alignment & (alignment - 1)
    ):
        raise FormatError(
            f"{path}: general.alignment is {alignment!r}; "
            f"it must be a power of two up to {_MAX_ALIGNMENT}"
        )
    return alignment


def _tensor(cursor: Cursor, i_shard: int) -> TensorInfo:
    """Read a tensor's entry; its `offset` is still relative to the start of the data."""
    name = cursor.name("a tensor name")
    what = f"tensor {name!r}"
    n_dims = cursor.u32(what)
    if not 1 <= n_dims <= MAX_DIMS:
        raise FormatError(f"{cursor.path}: {what} has {n_dims} dimensions, not 1 to {MAX_DIMS}")
    dims = [cursor.u64(what) for _ in range(n_dims)]
    kind, n_bytes = tensor_bytes(cursor.u32(what), dims, f"{cursor.path}: {what}")
    return TensorInfo(name, kind, tuple(reversed(dims)), n_bytes, i_shard, cursor.u64(what))


def tensor_bytes(number: int, dims: Sequence[int], what: str) -> tuple[GGMLQuantizationType, int]:
    """The type with this number, and the bytes of a tensor of it; `dims` with the fastest first.

    Raises FormatError or UnsupportedError, with `what` at the start of the message.
    """
    if any(not 0 < dim < 1 << 63 for dim in dims):
        raise FormatError(f"{what} has dimensions {list(dims)}: each must be positive")
    if math.prod(dims) >= 1 << 63:
        raise FormatError(f"{what} has dimensions {list(dims)}: their product overflows")
    kind = _type(number, what)
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    if dims[0] % block_size:
        raise FormatError(
            f"{what} has rows of {dims[0]} elements, "
            f"not a multiple of the {block_size} in a block of {kind.name}"
        )
    return kind, math.prod(dims) // block_size * block_bytes


def _type(number: int, what: str) -> GGMLQuantizationType:
    if number in _REMOVED_TYPES:
        raise UnsupportedError(
            f"{what} has type {number} ({_REMOVED_TYPES[number]}), "
            "which was removed from the format",
            hint="download or convert the model in a current type, such as Q4_0",
        )
    try:
        return GGMLQuantizationType(number)
    except ValueError as exc:
        raise UnsupportedError(
            f"{what} has the unknown type {number}",
            hint="upgrade the gguf package and gguf-pp",
        ) from exc


def _placed(info: TensorInfo, data_start: int, alignment: int, path: Path) -> TensorInfo:
    if info.offset % alignment:
        raise FormatError(
            f"{path}: tensor {info.name!r} has offset {info.offset}, "
            f"not a multiple of the alignment {alignment}"
        )
    return replace(info, offset=data_start + info.offset)


def _check_extents(
    tensors: list[TensorInfo], data_start: int, file_bytes: int, alignment: int, path: Path
) -> None:
    """Check that tensors lie in the file, apart from each other."""
    if not tensors:
        return
    ordered = sorted(tensors, key=lambda info: info.offset)
    for before, after in pairwise(ordered):
        if before.offset + before.n_bytes > after.offset:
            raise FormatError(
                f"{path}: tensors {before.name!r} and {after.name!r} overlap at byte {after.offset}"
            )
    last = ordered[-1]
    end = last.offset + last.n_bytes
    if end <= file_bytes:
        return
    packed = data_start + sum(_aligned(info.n_bytes, alignment) for info in ordered[:-1])
    if packed + last.n_bytes <= file_bytes:
        raise FormatError(
            f"{path}: tensor {last.name!r} has its end at byte {end}, past the end of the file "
            f"at {file_bytes}, which is long enough for all tensors: the offset is wrong"
        )
    raise FormatError(
        f"{path}: truncated: its tensors need {end} bytes, and {file_bytes} are present "
        f"({end - file_bytes} are missing)",
        hint="the download was cut short: fetch the file again",
    )


def _check_single(
    data: mmap | bytes, tensors: list[TensorInfo], header_end: int, alignment: int, path: Path
) -> None:
    """Check that no second GGUF follows: `cat` does not join shards."""
    end = max((info.offset + info.n_bytes for info in tensors), default=header_end)
    for start in (end, _aligned(end, alignment)):
        if data[start : start + 4] == b"GGUF":
            raise FormatError(
                f"{path}: another GGUF file begins at byte {start}: these are concatenated shards",
                hint="keep the shards apart and give any of them, or join them with "
                "llama-gguf-split --merge",
            )
