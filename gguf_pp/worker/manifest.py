"""What a client says about its model, checked before anything is made of it.

All functions raise ProtocolError for what no client of ours says. No name from here ever becomes
part of a path.
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from gguf_pp.errors import FormatError
from gguf_pp.gguf import Identity, Metadata, TensorInfo
from gguf_pp.gguf.header import MAX_DIMS, MAX_ENTRIES, tensor_bytes
from gguf_pp.wire import ProtocolError

MAX_NAME_BYTES: Final = 1024
_MAX_SHARDS: Final = 65535
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


def check_identity(identity: Identity) -> Identity:
    """Return `identity` if its digest is one, and its sizes are those of files."""
    if not _DIGEST.fullmatch(identity.digest):
        raise ProtocolError("the digest of a model is not 64 lower-case hex digits")
    if not 0 < len(identity.sizes) <= _MAX_SHARDS or min(identity.sizes) < 1:
        raise ProtocolError(f"a model in {len(identity.sizes)} shards, or one of no bytes")
    return identity


def check_metadata(values: Mapping[str, object], path: Path) -> Metadata:
    """Return metadata of scalars, and lists of scalars of one type; `path` is for messages."""
    for key, value in values.items():
        items = value if isinstance(value, list) else [value]
        if not all(map(_is_scalar, items)) or len(set(map(type, items))) > 1:
            raise ProtocolError(f"the metadata key {key[:80]!r} has a value that no file has")
    return Metadata(values, path)


def _is_scalar(value: object) -> bool:
    if type(value) is int:
        return -(1 << 63) <= value < 1 << 64
    if type(value) is float:
        return math.isfinite(value)
    return type(value) in (bool, str)


def check_tensors(declared: Sequence[Any], identity: Identity) -> tuple[TensorInfo, ...]:
    """Return the tensors declared as [name, ggml type id, shape in numpy order, n_bytes], in order.

    Together they are no larger than the model's files. Raises UnsupportedError for a type that
    this version of the gguf package does not know.
    """
    if not 0 < len(declared) <= MAX_ENTRIES:
        raise ProtocolError(f"{len(declared)} tensors, not 1 to {MAX_ENTRIES}")
    infos = tuple(_checked(i, item) for i, item in enumerate(declared))
    if len({info.name for info in infos}) < len(infos):
        raise ProtocolError("a tensor is declared twice")
    n_bytes, size = sum(info.n_bytes for info in infos), sum(identity.sizes)
    if n_bytes > size:
        raise ProtocolError(f"tensors of {n_bytes} bytes in a model of {size}")
    return infos


def _checked(i_tensor: int, item: Any) -> TensorInfo:
    what = f"tensor {i_tensor}"
    if not isinstance(item, list | tuple) or len(item) != 4:
        raise ProtocolError(f"{what} is not a name, a type, a shape and a size")
    name, number, shape, n_bytes = item
    if not isinstance(name, str) or not 0 < _n_bytes_of(name, what) <= MAX_NAME_BYTES:
        raise ProtocolError(f"{what} has no name of up to {MAX_NAME_BYTES} bytes")
    if not isinstance(shape, list | tuple) or not 0 < len(shape) <= MAX_DIMS:
        raise ProtocolError(f"{what} has a shape that is not 1 to {MAX_DIMS} numbers")
    if not all(type(n) is int and 0 <= n < 1 << 63 for n in (number, n_bytes, *shape)):
        raise ProtocolError(f"{what} has a type, a dimension or a size that is no 63-bit number")
    try:
        kind, wanted = tensor_bytes(number, shape[::-1], what)
    except FormatError as exc:
        raise ProtocolError(str(exc)) from exc
    if n_bytes != wanted:
        raise ProtocolError(f"{what} has {n_bytes} bytes, and its type and shape take {wanted}")
    return TensorInfo(name, kind, tuple(shape), n_bytes, i_shard=0, offset=0)


def _n_bytes_of(name: str, what: str) -> int:
    try:
        return len(name.encode())
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can say
        raise ProtocolError(f"{what} has a name that is not text") from None
