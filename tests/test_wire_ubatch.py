"""Ubatches byte by byte, and what keeps a hostile one from indexing outside the stage."""

import struct
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gguf_pp.batch import Span, UBatch
from gguf_pp.wire import (
    MAX_META_BYTES,
    MAX_ROWS,
    MAX_SPANS,
    ProtocolError,
    check_ubatch,
    pack_ubatch,
    unpack_ubatch,
)
from tests.peak import peak_bytes

U32 = st.integers(0, 2**32 - 1)


@st.composite
def ubatches(draw):
    """UBatches that a stage could be asked to run."""
    n_each = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    slots = draw(st.permutations(range(len(n_each))))
    starts = draw(st.lists(st.integers(0, 100), min_size=len(n_each), max_size=len(n_each)))
    spans = tuple(Span(*span) for span in zip(slots, starts, n_each, strict=True))
    n_rows = sum(n_each)
    outputs = draw(st.sets(st.integers(0, n_rows - 1)))
    tokens = draw(st.lists(st.integers(0, 999), min_size=n_rows, max_size=n_rows))
    return UBatch(tuple(tokens), spans, tuple(sorted(outputs)))


@given(ubatches(), st.booleans())
def test_a_ubatch_comes_back_as_it_was_packed(ubatch, tokens):
    back = unpack_ubatch(pack_ubatch(ubatch, tokens=tokens), tokens=tokens)
    assert (back.spans, back.outputs) == (ubatch.spans, ubatch.outputs)
    assert back.tokens == (ubatch.tokens if tokens else (0,) * ubatch.n_rows)
    check_ubatch(back, max_rows=54, n_slots=6, n_cells=109, n_vocab=1000)


def test_the_layout_of_a_ubatch_is_fixed():
    ubatch = UBatch((7, 8), (Span(2, 5, 2),), (1,))
    words = struct.pack("<9I", 2, 1, 1, 2, 5, 2, 1, 7, 8)
    assert pack_ubatch(ubatch, tokens=True) == words
    assert pack_ubatch(ubatch, tokens=False) == words[:-8]


@given(st.binary(max_size=100) | st.lists(st.integers(0, 9) | U32, max_size=30).map(
    lambda numbers: struct.pack(f"<{len(numbers)}I", *numbers)), st.booleans())  # fmt: skip
@example(struct.pack("<3I", MAX_ROWS, MAX_SPANS, MAX_ROWS), True)
@example(struct.pack("<3I", 2**32 - 1, 2**32 - 1, 2**32 - 1), True)
@settings(max_examples=200)
def test_any_bytes_as_a_ubatch_are_one_that_packs_to_the_same_or_a_protocol_error(meta, tokens):
    try:
        ubatch = unpack_ubatch(meta, tokens=tokens)
    except ProtocolError:
        return
    assert pack_ubatch(ubatch, tokens=tokens) == meta


@given(ubatches(), st.data())
@settings(max_examples=200)
def test_a_changed_number_of_a_ubatch_is_refused_or_still_fits_the_stage(ubatch, data):
    """Nothing that passes indexes outside the slots, cells, rows or vocabulary of the stage."""
    meta = bytearray(pack_ubatch(ubatch, tokens=True))
    place = 4 * data.draw(st.integers(0, len(meta) // 4 - 1))
    meta[place : place + 4] = struct.pack("<I", data.draw(st.integers(0, 12) | U32))
    try:
        changed = unpack_ubatch(bytes(meta), tokens=True)
        check_ubatch(changed, max_rows=30, n_slots=6, n_cells=109, n_vocab=1000)
    except ProtocolError:
        return
    assert changed.n_rows <= 30
    assert sum(span.n_rows for span in changed.spans) == changed.n_rows
    assert len({span.slot for span in changed.spans}) == len(changed.spans)
    for span in changed.spans:
        assert 0 <= span.slot < 6
        assert span.n_rows > 0
        assert span.start >= 0
        assert span.start + span.n_rows <= 109
    assert sorted(set(changed.outputs)) == list(changed.outputs)
    assert all(0 <= output < changed.n_rows for output in changed.outputs)
    assert all(0 <= token < 1000 for token in changed.tokens)


FITTING = {"max_rows": 4, "n_slots": 2, "n_cells": 10, "n_vocab": 100}


@pytest.mark.parametrize(
    ("ubatch", "complaint"),
    [
        (UBatch((0,) * 5, (Span(0, 0, 5),), ()), "5 rows, at most 4"),
        (UBatch((0, 0), (Span(0, 0, 1),), ()), "do not add up"),
        (UBatch((0, 0), (Span(0, 0, 1), Span(0, 1, 1)), ()), r"slots \[0, 0\], of 2"),
        (UBatch((0,), (Span(2, 0, 1),), ()), r"slots \[2\], of 2"),
        (UBatch((0,), (Span(0, 10, 1),), ()), "1 rows from cell 10, of 10"),
        (UBatch((0, 0), (Span(0, 9, 2),), ()), "2 rows from cell 9, of 10"),
        (UBatch((0,), (Span(0, 0, 1), Span(1, 0, 0)), ()), "0 rows from cell 0, of 10"),
        (UBatch((0, 0), (Span(0, 0, 2),), (1, 0)), "not ascending rows"),
        (UBatch((0, 0), (Span(0, 0, 2),), (1, 1)), "not ascending rows"),
        (UBatch((0, 0), (Span(0, 0, 2),), (2,)), "not ascending rows"),
        (UBatch((100,), (Span(0, 0, 1),), ()), "token 100 of a vocabulary of 100"),
    ],
)
def test_a_ubatch_that_does_not_fit_a_stage_is_refused(ubatch, complaint):
    with pytest.raises(ProtocolError, match=complaint):
        check_ubatch(ubatch, **FITTING)


def test_a_ubatch_that_just_fits_a_stage_is_let_in():
    check_ubatch(UBatch((99,) * 4, (Span(1, 8, 2), Span(0, 8, 2)), (0, 3)), **FITTING)


def test_the_largest_ubatch_takes_bounded_memory_and_time():
    tokens = (1,) * MAX_ROWS
    spans = (Span(0, 0, MAX_ROWS - MAX_SPANS + 1), *(Span(i, 0, 1) for i in range(1, MAX_SPANS)))
    meta = pack_ubatch(UBatch(tokens, spans, tuple(range(MAX_ROWS))), tokens=True)
    assert len(meta) <= MAX_META_BYTES

    def read():
        ubatch = unpack_ubatch(meta, tokens=True)
        check_ubatch(ubatch, max_rows=MAX_ROWS, n_slots=MAX_SPANS, n_cells=1 << 17, n_vocab=2)

    before = time.perf_counter()
    read()
    assert time.perf_counter() - before < 10
    assert peak_bytes(read) < 32 << 20
