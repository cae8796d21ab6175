"""GGUF files written byte by byte, so that tests can write them wrong."""

import struct
from collections.abc import Sequence
from typing import Any

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
FORMATS = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B"}
FORMATS |= {U64: "Q", I64: "q", F64: "d"}


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def payload(kind: int, value: Any) -> bytes:
    """Bytes of a value without its type; an array is given as (item type, items)."""
    if kind == STRING:
        return string(value)
    if kind == ARRAY:
        item, items = value
        body = b"".join(payload(item, each) for each in items)
        return struct.pack("<IQ", item, len(items)) + body
    return struct.pack("<" + FORMATS[kind], value)


def key(name: str | bytes, kind: int, value: Any) -> bytes:
    return string(name) + struct.pack("<I", kind) + payload(kind, value)


def tensor(name: str | bytes, dims: Sequence[int], kind: int = 0, offset: int = 0) -> bytes:
    """Entry of a tensor; `dims` in file order, fastest first; type 0 is F32."""
    body = struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
    return string(name) + body


def gguf(
    keys: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    n_tensors: int | None = None,
    n_keys: int | None = None,
    alignment: int = 32,
) -> bytes:
    counts = (
        len(tensors) if n_tensors is None else n_tensors,
        len(keys) if n_keys is None else n_keys,
    )
    head = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data
