"""Frames byte by byte: what goes in comes out, and nothing else gets in."""

import json
import math
import struct
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gguf_pp.wire import (
    HEADER,
    MAX_CHUNK_BYTES,
    MAX_META_BYTES,
    MAX_SMALL_META_BYTES,
    REQUESTS,
    Fields,
    ProtocolError,
    Verb,
    pack_header,
    pack_json,
    pack_offset,
    pack_range,
    pack_seconds,
    unpack_header,
    unpack_json,
    unpack_offset,
    unpack_range,
    unpack_seconds,
)
from tests.peak import peak_bytes

U32 = st.integers(0, 2**32 - 1)
LONG = (Verb.OPEN, Verb.SUBMIT, Verb.OK)
BULK = (Verb.TENSOR, Verb.SINK, Verb.OK)
DATA = (Verb.SUBMIT, Verb.RESULT, Verb.LOGITS)


def most_meta(verb):
    return MAX_META_BYTES if verb in LONG else MAX_SMALL_META_BYTES


def most_payload(verb):
    return MAX_CHUNK_BYTES if verb in BULK else 1 << 40 if verb in DATA else 0


def test_the_layout_of_a_header_is_fixed():
    assert pack_header(Verb.SUBMIT, 0x01020304, 5, 6).hex() == (
        "1e000000" + "04030201" + "05000000" + "0600000000000000"
    )
    assert HEADER.size == 20


def test_numbers_of_verbs_never_change():
    assert {verb.name: verb.value for verb in Verb} == {
        "PING": 1,
        "OK": 2,
        "ERROR": 3,
        "PROGRESS": 4,
        "INFO": 10,
        "OPEN": 11,
        "ALLOCATE": 12,
        "RELEASE": 13,
        "LOAD": 14,
        "LINK_IN": 15,
        "LINK_OUT": 16,
        "SEND": 17,
        "SINK": 18,
        "TENSOR": 19,
        "JOIN": 20,
        "SUBMIT": 30,
        "CREDIT": 31,
        "RESULT": 32,
        "LOGITS": 33,
        "DONE": 34,
        "FAIL": 35,
    }
    assert {Verb.INFO, Verb.OPEN, Verb.LOAD, Verb.JOIN} < REQUESTS
    assert not REQUESTS & {Verb.PING, Verb.OK, Verb.ERROR, Verb.PROGRESS, Verb.SUBMIT, Verb.TENSOR}


@given(st.sampled_from(Verb), U32, st.data())
def test_a_header_comes_back_as_it_was_packed(verb, id_, data):
    n_meta = data.draw(st.integers(0, most_meta(verb)))
    n_payload = data.draw(st.integers(0, most_payload(verb)))
    header = verb, id_, n_meta, n_payload
    assert unpack_header(pack_header(*header)) == header


@pytest.mark.parametrize("verb", Verb)
def test_lengths_beyond_what_a_verb_may_carry_are_refused(verb):
    unpack_header(pack_header(verb, 0, most_meta(verb), most_payload(verb)))
    for n_meta, n_payload in ((most_meta(verb) + 1, 0), (0, most_payload(verb) + 1)):
        with pytest.raises(ProtocolError, match=verb.name):
            unpack_header(pack_header(verb, 0, n_meta, n_payload))


@given(st.binary(min_size=HEADER.size, max_size=HEADER.size))
@settings(max_examples=200)
def test_any_twenty_bytes_are_a_header_within_bounds_or_a_protocol_error(raw):
    try:
        verb, id_, n_meta, n_payload = unpack_header(raw)
    except ProtocolError:
        return
    assert (raw[0], raw[4:]) == (verb, pack_header(verb, id_, n_meta, n_payload)[4:])
    assert n_meta <= most_meta(verb)
    assert n_payload <= most_payload(verb)


def test_an_unknown_verb_is_named():
    with pytest.raises(ProtocolError, match="a frame of unknown kind 77"):
        unpack_header(bytes([77]) + bytes(19))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(st.dictionaries(st.text(), JSON, max_size=6))
def test_a_body_comes_back_as_it_was_packed(body):
    assert unpack_json(pack_json(body)).values() == body


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_body_holds_no_number_that_json_lacks(number):
    with pytest.raises(ValueError, match="JSON"):
        pack_json({"x": number})


HOSTILE = [
    b"",
    b"null",
    b"[]",
    b"3",
    b'"text"',
    b"{",
    b'{"a":}',
    b"\xff\xfe{}",
    b"\x00" * 100,
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"9" * 100_000,
    b'{"a":' + b"9" * 5000 + b"}",
    b'{"a":1e999}',
    b'{"a":NaN}',
    b'{"a":"\xed\xa0\x80"}',
]
GETTERS = [
    lambda f: f.has("a"),
    lambda f: f.integer("a", 0, 10),
    lambda f: f.number("a"),
    lambda f: f.flag("a"),
    lambda f: f.text("a", 10),
    lambda f: f.choice("a", "x", "y"),
    lambda f: f.items("a", 3),
    lambda f: f.integers("a", 3, 0, 10),
    lambda f: f.objects("a", 3),
    lambda f: f.object("a"),
]


def read_all(meta):
    """Read field "a" in every way there is: values, or None where that is refused."""
    read = []
    for get in GETTERS:
        try:
            read.append(get(unpack_json(meta)))
        except ProtocolError as exc:
            assert len(str(exc)) < 200
            read.append(None)
    return read


def test_the_longest_json_takes_bounded_memory():
    item = b'{"":0}'
    n = (MAX_META_BYTES - 10) // (len(item) + 1)
    meta = b'{"a":[' + b",".join([item] * n) + b"]}"
    assert peak_bytes(unpack_json, meta) < 32 << 20


@pytest.mark.parametrize("meta", HOSTILE, ids=[repr(meta[:12]) for meta in HOSTILE])
def test_hostile_json_is_refused_or_read_within_bounds(meta):
    before = time.perf_counter()
    read_all(meta)
    assert time.perf_counter() - before < 10


@given(st.binary(max_size=60) | JSON.map(lambda v: json.dumps({"a": v}).encode()), st.data())
@settings(max_examples=200)
def test_any_bytes_as_json_give_values_of_the_asked_type_or_a_protocol_error(meta, data):
    mutated = bytearray(meta)
    for _ in range(data.draw(st.integers(0, 2)) if meta else 0):
        mutated[data.draw(st.integers(0, len(meta) - 1))] = data.draw(st.integers(0, 255))
    _, integer, number, flag, text, choice, items, integers, objects, fields = read_all(
        bytes(mutated)
    )
    assert integer is None or (type(integer) is int and 0 <= integer <= 10)
    assert number is None or (type(number) is float and math.isfinite(number))
    assert flag is None or type(flag) is bool
    assert text is None or (type(text) is str and len(text) <= 10)
    assert choice in (None, "x", "y")
    assert items is None or len(items) <= 3
    assert integers is None or all(type(i) is int and 0 <= i <= 10 for i in integers)
    assert objects is None or all(type(o) is Fields for o in objects)
    assert fields is None or type(fields) is Fields


@pytest.mark.parametrize(
    ("value", "getter", "complaint"),
    [
        (True, lambda f: f.integer("a"), "a is True, not a number from 0 to"),
        (-1, lambda f: f.integer("a"), "a is -1, not a number from 0 to"),
        (11, lambda f: f.integer("a", 0, 10), "a is 11, not a number from 0 to 10"),
        (1.0, lambda f: f.integer("a"), "a is 1.0, not a number"),
        (True, lambda f: f.number("a"), "a is True, not a number"),
        (10**400, lambda f: f.number("a"), "a is 1000"),
        (1, lambda f: f.flag("a"), "a is 1, not true or false"),
        ("xxx", lambda f: f.text("a", 2), "a is 'xxx', not a text of up to 2 characters"),
        ("z", lambda f: f.choice("a", "x", "y"), "a is 'z', not one of x, y"),
        ([1, 2], lambda f: f.items("a", 1), r"a is \[1, 2\], not a list of up to 1"),
        ([1, "2"], lambda f: f.integers("a", 2), "a has '2', not from 0"),
        ([{}, 1], lambda f: f.objects("a", 2), "a has an item that is not an object"),
        ([], lambda f: f.object("a"), r"a is \[\], not an object"),
        ("y" * 99, lambda f: f.flag("a"), r"a is 'y{36}\.\.\., not true or false"),
    ],
)
def test_a_field_of_another_type_is_named_with_what_it_is(value, getter, complaint):
    with pytest.raises(ProtocolError, match=complaint):
        getter(Fields({"a": value}))
    with pytest.raises(ProtocolError, match=r"a (is None|has)"):
        getter(Fields({}))


@given(st.lists(st.floats(0, 1e9, width=32), max_size=9))
def test_times_come_back_as_they_were_packed(seconds):
    assert unpack_seconds(pack_seconds(seconds), len(seconds)) == tuple(seconds)


@given(st.binary(max_size=20), st.integers(0, 5))
@example(struct.pack("<f", math.nan), 1)
@example(struct.pack("<f", -1), 1)
def test_any_bytes_as_times_are_finite_ones_or_a_protocol_error(meta, n_stages):
    try:
        seconds = unpack_seconds(meta, n_stages)
    except ProtocolError:
        return
    assert len(seconds) == n_stages
    assert all(0 <= s < math.inf for s in seconds)


@given(st.integers(0, 1000), st.integers(1, 1000))
def test_a_range_comes_back_as_it_was_packed(start, n):
    assert unpack_range(pack_range(range(start, start + n)), start + n) == range(start, start + n)


@given(st.binary(max_size=9) | st.tuples(U32, U32).map(lambda pair: struct.pack("<2I", *pair)))
def test_any_bytes_as_a_range_lie_within_the_outputs_or_are_a_protocol_error(meta):
    try:
        rows = unpack_range(meta, 1000)
    except ProtocolError:
        return
    assert 0 <= rows.start < rows.stop <= 1000


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (3, 2), (0, 6), (5, 6)])
def test_a_range_that_is_empty_or_too_long_is_refused(start, stop):
    with pytest.raises(ProtocolError, match=f"logits of outputs {start} to {stop}, of 5"):
        unpack_range(struct.pack("<2I", start, stop), 5)


@given(st.integers(0, 2**64 - 1))
def test_an_offset_comes_back_as_it_was_packed(offset):
    assert unpack_offset(pack_offset(offset)) == offset


@given(st.binary(max_size=20))
def test_any_bytes_as_an_offset_are_eight_or_a_protocol_error(meta):
    try:
        offset = unpack_offset(meta)
    except ProtocolError:
        assert len(meta) != 8
    else:
        assert pack_offset(offset) == meta
