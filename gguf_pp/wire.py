"""Frames of the remote protocol: what crosses a connection, byte by byte. No sockets here.

A frame is a fixed header, then `n_meta` bytes that say what it is about, then `n_payload` bytes of
data that go straight into a buffer made beforehand. Integers are little-endian. The verbs are these
and no others; what each may carry is bounded here before anything is allocated, and everything
inside is checked against the stage that was declared before it is used.

    client -> worker                               worker -> client
    INFO, OPEN, ALLOCATE, RELEASE, LOAD,           OK or ERROR with the request's id,
    LINK_IN, LINK_OUT, SEND       requests         PROGRESS while one is worked on
    TENSOR, SINK                  bulk data
    SUBMIT                        a ubatch         CREDIT, RESULT, LOGITS, DONE, FAIL
    JOIN, SUBMIT                  from a worker to the next one, which answers CREDIT
    PING                          both ways, whenever nothing else was sent for a while

A sender may have as many SUBMITs on the way as there are copies; a CREDIT says that one more input
copy is free. RESULT has the hidden states of a ubatch and LOGITS some rows of its logits; DONE ends
a ubatch with the seconds that each stage took, or FAIL with what went wrong.
"""

import json
import math
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from gguf_pp.batch import Span, UBatch

VERSION = 1
"""Of the frames. A peer speaks every version from its MIN_VERSION to its VERSION."""
MIN_VERSION = 1

HEADER = struct.Struct("<BxxxIIQ")
"""verb, id, n_meta, n_payload."""

MAX_META_BYTES = 1 << 20
"""Of OPEN, SUBMIT and OK; of all others MAX_SMALL_META_BYTES. As JSON 30 MiB once it is read."""
MAX_SMALL_META_BYTES = 1 << 16
MAX_CHUNK_BYTES = 4 << 20
"""Bytes of a tensor, or of a measurement, in one frame."""
MAX_ROWS = 1 << 16
MAX_SPANS = 1 << 12


class ProtocolError(Exception):
    """The other side sent what no peer of ours sends; its connection ends, nothing else does."""


class Verb(IntEnum):
    """What a frame is."""

    PING = 1
    OK = 2
    ERROR = 3
    PROGRESS = 4
    INFO = 10
    OPEN = 11
    ALLOCATE = 12
    RELEASE = 13
    LOAD = 14
    LINK_IN = 15
    LINK_OUT = 16
    SEND = 17
    SINK = 18
    TENSOR = 19
    JOIN = 20
    SUBMIT = 30
    CREDIT = 31
    RESULT = 32
    LOGITS = 33
    DONE = 34
    FAIL = 35


REQUESTS = frozenset(
    {
        Verb.INFO,
        Verb.OPEN,
        Verb.ALLOCATE,
        Verb.RELEASE,
        Verb.LOAD,
        Verb.LINK_IN,
        Verb.LINK_OUT,
        Verb.SEND,
        Verb.SINK,
        Verb.JOIN,
    }
)
"""Verbs that are answered by OK or ERROR with their id."""

_LONG = frozenset({Verb.OPEN, Verb.SUBMIT, Verb.OK})
_BULK = frozenset({Verb.TENSOR, Verb.SINK, Verb.OK})
_DATA = frozenset({Verb.SUBMIT, Verb.RESULT, Verb.LOGITS})


class Frame(NamedTuple):
    """A frame without its payload, which lies where the receiver wanted it."""

    verb: Verb
    id: int
    meta: bytes
    n_payload: int


def pack_header(verb: Verb, id_: int, n_meta: int, n_payload: int) -> bytes:
    """The bytes before meta and payload."""
    return HEADER.pack(verb, id_, n_meta, n_payload)


def unpack_header(raw: bytes | bytearray | memoryview) -> tuple[Verb, int, int, int]:
    """verb, id, n_meta, n_payload; raises ProtocolError for a verb or a length that is not ours.

    The payload of SUBMIT, RESULT and LOGITS is bounded by whoever knows the stage.
    """
    number, id_, n_meta, n_payload = HEADER.unpack(raw)
    try:
        verb = Verb(number)
    except ValueError:
        raise ProtocolError(f"a frame of unknown kind {number}") from None
    most = MAX_META_BYTES if verb in _LONG else MAX_SMALL_META_BYTES
    if n_meta > most:
        raise ProtocolError(f"{verb.name} with {n_meta} bytes about it, at most {most}")
    most = MAX_CHUNK_BYTES if verb in _BULK else (1 << 40) if verb in _DATA else 0
    if n_payload > most:
        raise ProtocolError(f"{verb.name} with a payload of {n_payload} bytes, at most {most}")
    return verb, id_, n_meta, n_payload


def pack_json(body: dict[str, Any]) -> bytes:
    """The meta of requests and their answers."""
    return json.dumps(body, allow_nan=False, separators=(",", ":")).encode()


def unpack_json(meta: bytes) -> "Fields":
    """Raises ProtocolError for anything but an object."""
    try:
        body = json.loads(meta)
    except (ValueError, RecursionError) as exc:
        raise ProtocolError("not JSON") from exc
    if not isinstance(body, dict):
        raise ProtocolError("not a JSON object")
    return Fields(body)


class Fields:
    """A JSON object of the other side: each getter raises ProtocolError unless the field is there,
    has the type, and lies within bounds."""

    def __init__(self, body: dict[str, Any]) -> None:
        self._body = body

    def has(self, name: str) -> bool:
        """Whether the field is there and not null: how optional fields of newer peers begin."""
        return self._body.get(name) is not None

    def integer(self, name: str, low: int = 0, high: int = 1 << 62) -> int:
        """A whole number in [low, high]."""
        value = self._body.get(name)
        if type(value) is not int or not low <= value <= high:
            raise ProtocolError(f"{name} is {_shown(value)}, not a number from {low} to {high}")
        return value

    def number(self, name: str) -> float:
        """A finite number."""
        value = self._body.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not _finite(value):
            raise ProtocolError(f"{name} is {_shown(value)}, not a number")
        return float(value)

    def flag(self, name: str) -> bool:
        """True or false."""
        value = self._body.get(name)
        if type(value) is not bool:
            raise ProtocolError(f"{name} is {_shown(value)}, not true or false")
        return value

    def text(self, name: str, most: int = 1024) -> str:
        """A string of at most `most` characters."""
        value = self._body.get(name)
        if not isinstance(value, str) or len(value) > most:
            raise ProtocolError(f"{name} is {_shown(value)}, not a text of up to {most} characters")
        return value

    def choice(self, name: str, *allowed: str) -> str:
        """One of `allowed`."""
        value = self.text(name)
        if value not in allowed:
            raise ProtocolError(f"{name} is {_shown(value)}, not one of {', '.join(allowed)}")
        return value

    def items(self, name: str, most: int) -> list[Any]:
        """An array of at most `most` items, of whatever type."""
        value = self._body.get(name)
        if not isinstance(value, list) or len(value) > most:
            raise ProtocolError(f"{name} is {_shown(value)}, not a list of up to {most}")
        return value

    def integers(self, name: str, most: int, low: int = 0, high: int = 1 << 62) -> tuple[int, ...]:
        """An array of whole numbers in [low, high]."""
        items = self.items(name, most)
        for item in items:
            if type(item) is not int or not low <= item <= high:
                raise ProtocolError(f"{name} has {_shown(item)}, not from {low} to {high}")
        return tuple(items)

    def objects(self, name: str, most: int) -> "list[Fields]":
        """An array of objects."""
        items = self.items(name, most)
        if not all(isinstance(item, dict) for item in items):
            raise ProtocolError(f"{name} has an item that is not an object")
        return [Fields(item) for item in items]

    def object(self, name: str) -> "Fields":
        """An object."""
        value = self._body.get(name)
        if not isinstance(value, dict):
            raise ProtocolError(f"{name} is {_shown(value)}, not an object")
        return Fields(value)

    def values(self) -> dict[str, Any]:
        """All fields as they came."""
        return self._body


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


_SIZES = struct.Struct("<III")


def pack_ubatch(ubatch: UBatch, *, tokens: bool) -> bytes:
    """The meta of SUBMIT: sizes, spans, outputs, and the tokens for a worker that embeds them."""
    spans = [number for span in ubatch.spans for number in span]
    own = ubatch.tokens if tokens else ()
    numbers = (*spans, *ubatch.outputs, *own)
    sizes = _SIZES.pack(ubatch.n_rows, len(ubatch.spans), len(ubatch.outputs))
    return sizes + struct.pack(f"<{len(numbers)}I", *numbers)


def unpack_ubatch(meta: bytes, *, tokens: bool) -> UBatch:
    """Undo `pack_ubatch`; without tokens those of the result are zeros. Raises ProtocolError.

    The numbers are consistent among each other; `check_ubatch` holds them against a stage.
    """
    if len(meta) < _SIZES.size:
        raise ProtocolError("a ubatch without its sizes")
    n_rows, n_spans, n_outputs = _SIZES.unpack_from(meta)
    if not (0 < n_rows <= MAX_ROWS and 0 < n_spans <= MAX_SPANS and n_outputs <= n_rows):
        raise ProtocolError(f"a ubatch of {n_rows} rows, {n_spans} spans, {n_outputs} outputs")
    n_numbers = 3 * n_spans + n_outputs + (n_rows if tokens else 0)
    if len(meta) != _SIZES.size + 4 * n_numbers:
        raise ProtocolError(f"a ubatch of {len(meta)} bytes, {_SIZES.size + 4 * n_numbers} wanted")
    numbers = struct.unpack_from(f"<{n_numbers}I", meta, _SIZES.size)
    spans = tuple(Span(*numbers[i : i + 3]) for i in range(0, 3 * n_spans, 3))
    outputs = numbers[3 * n_spans : 3 * n_spans + n_outputs]
    own = numbers[3 * n_spans + n_outputs :] if tokens else (0,) * n_rows
    return UBatch(own, spans, outputs)


def check_ubatch(
    ubatch: UBatch, *, max_rows: int, n_slots: int, n_cells: int, n_vocab: int
) -> None:
    """Raise ProtocolError unless `ubatch` fits a stage made for these sizes."""
    n_rows = ubatch.n_rows
    if n_rows > max_rows:
        raise ProtocolError(f"a ubatch of {n_rows} rows, at most {max_rows}")
    if sum(span.n_rows for span in ubatch.spans) != n_rows:
        raise ProtocolError("the spans of a ubatch do not add up to its rows")
    slots = [span.slot for span in ubatch.spans]
    if len(set(slots)) != len(slots) or max(slots) >= n_slots:
        raise ProtocolError(f"a ubatch for the slots {slots[:8]}, of {n_slots}")
    for span in ubatch.spans:
        if not span.n_rows or span.start + span.n_rows > n_cells:
            raise ProtocolError(f"{span.n_rows} rows from cell {span.start}, of {n_cells}")
    if any(b <= a for a, b in zip(ubatch.outputs, ubatch.outputs[1:], strict=False)) or (
        ubatch.outputs and ubatch.outputs[-1] >= n_rows
    ):
        raise ProtocolError("the outputs of a ubatch are not ascending rows of it")
    if max(ubatch.tokens) >= n_vocab:
        raise ProtocolError(f"token {max(ubatch.tokens)} of a vocabulary of {n_vocab}")


def pack_seconds(seconds: Sequence[float]) -> bytes:
    """The meta of DONE: how long each stage took."""
    return struct.pack(f"<{len(seconds)}f", *seconds)


def unpack_seconds(meta: bytes, n_stages: int) -> tuple[float, ...]:
    """Undo `pack_seconds`; raises ProtocolError for another number, or none that is finite."""
    if len(meta) != 4 * n_stages:
        raise ProtocolError(f"{len(meta)} bytes of times for {n_stages} stages")
    seconds: tuple[float, ...] = struct.unpack(f"<{n_stages}f", meta)
    if not all(math.isfinite(s) and s >= 0 for s in seconds):
        raise ProtocolError("a time that is none")
    return seconds


_RANGE = struct.Struct("<II")


def pack_range(rows: range) -> bytes:
    """The meta of LOGITS: which outputs they belong to."""
    return _RANGE.pack(rows.start, rows.stop)


def unpack_range(meta: bytes, n_outputs: int) -> range:
    """Undo `pack_range`; raises ProtocolError unless within [0, n_outputs) and not empty."""
    if len(meta) != _RANGE.size:
        raise ProtocolError("logits without their range")
    start, stop = _RANGE.unpack(meta)
    if not start < stop <= n_outputs:
        raise ProtocolError(f"logits of outputs {start} to {stop}, of {n_outputs}")
    return range(start, stop)


_PLACE = struct.Struct("<Q")


def pack_offset(offset: int) -> bytes:
    """The meta of TENSOR: where its payload belongs."""
    return _PLACE.pack(offset)


def unpack_offset(meta: bytes) -> int:
    """Undo `pack_offset`; raises ProtocolError."""
    if len(meta) != _PLACE.size:
        raise ProtocolError("a piece of a tensor without its offset")
    offset: int = _PLACE.unpack(meta)[0]
    return offset
