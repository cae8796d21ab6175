"""Reading a file's header without believing any length in it.

Layout of values: "GGUF" specification, version 3 (ggml-org/ggml, docs/gguf.md). All numbers are
little-endian; a string is a u64 byte count and that many bytes of UTF-8; an array is a u32 item
type, a u64 item count and the items.
"""

import struct
from mmap import mmap
from pathlib import Path
from typing import Any, Final

import numpy as np
from gguf import GGUFValueType

from gguf_pp.errors import FormatError

_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")

_DTYPES: Final[dict[GGUFValueType, np.dtype[Any]]] = {
    GGUFValueType.UINT8: np.dtype("u1"),
    GGUFValueType.INT8: np.dtype("i1"),
    GGUFValueType.UINT16: np.dtype("<u2"),
    GGUFValueType.INT16: np.dtype("<i2"),
    GGUFValueType.UINT32: np.dtype("<u4"),
    GGUFValueType.INT32: np.dtype("<i4"),
    GGUFValueType.UINT64: np.dtype("<u8"),
    GGUFValueType.INT64: np.dtype("<i8"),
    GGUFValueType.FLOAT32: np.dtype("<f4"),
    GGUFValueType.FLOAT64: np.dtype("<f8"),
    GGUFValueType.BOOL: np.dtype("u1"),
}
_MIN_STRING_BYTES: Final = 8
_MIN_ARRAY_BYTES: Final = 12
# Arrays of arrays are in the specification; no known model goes deeper than two.
_MAX_ARRAY_DEPTH: Final = 4


class Cursor:
    """A position in `data`; every read is checked against its end first.

    Raises FormatError, with the bytes needed and left, for whatever does not fit.
    """

    def __init__(self, data: mmap | bytes, path: Path, pos: int = 0) -> None:
        self.data = data
        self.path = path
        self.pos = pos
        self.end = len(data)

    def take(self, n_bytes: int, what: str) -> int:
        """Step over `n_bytes` and return where they start."""
        start, left = self.pos, self.end - self.pos
        if n_bytes > left:
            raise FormatError(
                f"{self.path}: truncated: {what} needs {n_bytes} bytes at byte {start}, "
                f"and {left} are left of {self.end}",
                hint="the download was cut short, or the file is damaged: fetch it again",
            )
        self.pos = start + n_bytes
        return start

    def u32(self, what: str) -> int:
        """Read an unsigned 32-bit number."""
        number: int = _U32.unpack_from(self.data, self.take(4, what))[0]
        return number

    def u64(self, what: str) -> int:
        """Read an unsigned 64-bit number."""
        number: int = _U64.unpack_from(self.data, self.take(8, what))[0]
        return number

    def count(self, min_item_bytes: int, what: str) -> int:
        """Read how many items follow, each at least `min_item_bytes` long."""
        n_items = self.u64(f"the number of {what}")
        left = self.end - self.pos
        if n_items * min_item_bytes > left:
            raise FormatError(
                f"{self.path}: truncated: {n_items} {what} need at least "
                f"{n_items * min_item_bytes} bytes at byte {self.pos}, "
                f"and {left} are left of {self.end}",
                hint="the download was cut short, or the file is damaged: fetch it again",
            )
        return n_items

    def name(self, what: str) -> str:
        """Read a string that must be valid UTF-8."""
        n_bytes = self.u64(f"the length of {what}")
        start = self.take(n_bytes, what)
        raw = self.data[start : self.pos]
        try:
            return raw.decode()
        except UnicodeDecodeError as exc:
            raise FormatError(f"{self.path}: {what} at byte {start} is not UTF-8") from exc

    def value(self, kind: GGUFValueType, what: str) -> object:
        """Read one metadata value.

        Numbers become int, float or bool; strings become str, with U+FFFD for bytes that are not
        UTF-8; arrays of numbers become read-only numpy arrays, other arrays lists.
        """
        if kind is GGUFValueType.STRING:
            return self._strings(1, what)[0]
        if kind is GGUFValueType.ARRAY:
            return self._array(what, 1)
        return self._numbers(kind, 1, what).item()

    def kind(self, what: str) -> GGUFValueType:
        """Read the type of a value."""
        number = self.u32(f"the type of {what}")
        try:
            return GGUFValueType(number)
        except ValueError as exc:
            raise FormatError(f"{self.path}: {what} has the unknown type {number}") from exc

    def _array(self, what: str, depth: int) -> object:
        if depth > _MAX_ARRAY_DEPTH:
            raise FormatError(
                f"{self.path}: {what} has arrays nested more than {_MAX_ARRAY_DEPTH} deep"
            )
        kind = self.kind(f"the items of {what}")
        items = f"items of {what}"
        if kind is GGUFValueType.STRING:
            return self._strings(self.count(_MIN_STRING_BYTES, items), what)
        if kind is GGUFValueType.ARRAY:
            n_items = self.count(_MIN_ARRAY_BYTES, items)
            # Lists within lists: a numpy array a piece would weigh ten times what the file does.
            rows = (self._array(what, depth + 1) for _ in range(n_items))
            return [row.tolist() if isinstance(row, np.ndarray) else row for row in rows]
        return self._numbers(kind, self.count(_DTYPES[kind].itemsize, items), what)

    def _numbers(self, kind: GGUFValueType, n_items: int, what: str) -> np.ndarray[Any, Any]:
        dtype = _DTYPES[kind]
        start = self.take(n_items * dtype.itemsize, what)
        numbers = np.frombuffer(self.data[start : self.pos], dtype)
        if kind is GGUFValueType.BOOL:
            if numbers.size and numbers.max() > 1:
                raise FormatError(f"{self.path}: {what} holds a bool that is neither 0 nor 1")
            return numbers.view(np.bool_)
        return numbers

    def _strings(self, n_items: int, what: str) -> list[str]:
        # A vocabulary has 262,144 of these: no calls but the three that do the work.
        data, pos, end = self.data, self.pos, self.end
        unpack = _U64.unpack_from
        strings = []
        for _ in range(n_items):
            start = pos + 8
            if start > end:
                self.pos = pos
                self.take(8, f"the length of a string of {what}")
            pos = start + unpack(data, pos)[0]
            if pos > end:
                self.pos = start
                self.take(pos - start, f"a string of {what}")
            strings.append(str(data[start:pos], "utf-8", "replace"))
        self.pos = pos
        return strings
