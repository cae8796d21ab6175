import pytest
from hypothesis import given
from hypothesis import strategies as st

from gguf_pp.batch import Span, UBatch, cut, prompt_ubatches


@given(st.integers(0, 300), st.integers(1, 70))
def test_a_cut_keeps_every_token_once_in_full_parts(n_tokens, size):
    parts = list(cut(n_tokens, size))
    assert [i for part in parts for i in part] == list(range(n_tokens))
    assert all(len(part) == size for part in parts[:-1])
    assert all(1 <= len(part) <= size for part in parts)


def test_a_prompt_is_cut_at_its_own_positions():
    assert list(prompt_ubatches(3, 10, [7, 8, 9], 2)) == [
        UBatch((7, 8), (Span(3, 10, 2),), ()),
        UBatch((9,), (Span(3, 12, 1),), (0,)),
    ]


@pytest.mark.parametrize(
    ("outputs", "rows"),
    [("last", [(), (), (0,)]), ("all", [(0, 1), (0, 1), (0,)]), ("none", [(), (), ()])],
)
def test_only_the_rows_that_were_asked_for_want_logits(outputs, rows):
    parts = list(prompt_ubatches(0, 0, range(5), 2, outputs))
    assert [part.outputs for part in parts] == rows


def test_a_last_ubatch_that_is_full_has_the_last_row():
    *_, last = prompt_ubatches(0, 0, range(6), 3)
    assert last.outputs == (2,)


def test_nothing_makes_no_ubatch():
    assert list(prompt_ubatches(0, 0, [], 4)) == []


@given(st.integers(0, 5), st.integers(0, 99), st.lists(st.integers(0, 9)), st.integers(1, 9))
def test_spans_follow_each_other_without_a_gap(slot, start, tokens, size):
    at = start
    for ubatch in prompt_ubatches(slot, start, tokens, size, "all"):
        (span,) = ubatch.spans
        assert span == Span(slot, at, ubatch.n_rows)
        assert ubatch.tokens == tuple(tokens[at - start : at - start + span.n_rows])
        at += span.n_rows
    assert at == start + len(tokens)
