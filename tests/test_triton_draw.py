import tests.interpreted  # isort: skip

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gguf_pp.batch import Choice
from gguf_pp.sampling import NO_TOKEN
from gguf_pp.triton import draw
from gguf_pp.triton.choose import Kind, kind_of, pack
from gguf_pp.triton.ops import DeviceOps
from tests.choices import NEARLY_ONE, ON_THE_EDGE, assert_like_host, batches, chosen, host_token

assert tests.interpreted

GREEDY = Choice(0.0, 40, 0.95, 0.05, 0.0, False)
DEFAULT = Choice(0.8, 40, 0.95, 0.05, 0.4, False)
SIZES = (st.integers(1, 12), st.integers(60, 70), st.sampled_from([256, 257, 600]))


def choose(*arguments, block_bits=None):
    """What is infinite on a GPU makes numpy warn. Small blocks are many, without many logits."""
    with np.errstate(over="ignore", invalid="ignore"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(draw, "BLOCK_BITS", block_bits or draw.BLOCK_BITS)
        return draw.choose(*arguments)


def in_small_blocks(*arguments):
    return choose(*arguments, block_bits=8)


@settings(max_examples=8)
@given(batches(SIZES, max_rows=2))
def test_tokens_are_those_of_the_host(batch):
    assert_like_host(chosen(in_small_blocks, *batch, Kind.TOP), *batch)


@settings(max_examples=20)
@given(batches((st.integers(1, 12), st.integers(30, 130)), max_k=1, max_rows=2))
def test_the_best_tokens_are_those_of_the_host(batch):
    def choose_best(*arguments):
        return choose(*arguments, block_bits=5)

    assert_like_host(chosen(choose_best, *batch, Kind.BEST), *batch)


def test_candidates_of_more_blocks_than_are_read_at_once_are_merged():
    logits = np.random.default_rng(0).permutation(1300).astype(np.float32)[None] / 100
    for number in (0.0, 0.6, NEARLY_ONE):
        batch = [DEFAULT._replace(top_k=64, top_p=1.0, min_p=0.0, temperature=9.0, number=number)]
        assert_like_host(chosen(in_small_blocks, logits, batch, []), logits, batch, [])
    logits[0, 1290] = 99
    best = chosen(lambda *a: choose(*a, block_bits=5), logits, [GREEDY], [])
    assert best.tolist() == [1290]


def test_rows_of_all_sorts_in_blocks_as_they_are():
    logits = np.random.default_rng(0).normal(0, 3, (3, 2100)).astype(np.float32)
    logits[2, 2099] = -np.nan
    batch = [DEFAULT._replace(number=0.0), DEFAULT._replace(number=0.9, bans_ends=True), GREEDY]
    ends = [int(logits[0].argmax()), int(logits[1].argmax())]
    tokens = chosen(choose, logits, batch, ends)
    assert tokens[2] == NO_TOKEN
    assert_like_host(tokens, logits, batch, ends)


def test_what_is_exactly_on_an_edge_falls_where_it_does_on_the_host():
    logits = np.zeros((len(ON_THE_EDGE), 4), dtype=np.float32)
    assert chosen(in_small_blocks, logits, ON_THE_EDGE, []).tolist() == [1, 2, 3, 3, 0, 1, 2, 3, 0]


@pytest.mark.parametrize("kind", [Kind.BEST, Kind.TOP])
def test_zeros_of_either_sign_are_equal(kind):
    logits = np.array([[-1.0, -0.0, 0.0, -0.0, 0.0]], dtype=np.float32)
    first = DEFAULT._replace(top_k=1)
    assert chosen(in_small_blocks, logits, [first], [], kind).tolist() == [1]


@pytest.mark.parametrize("kind", [Kind.BEST, Kind.TOP])
def test_two_launches_choose(kind, monkeypatch):
    launched = []

    class Noted:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            launched.append(grid)
            return self.kernel[grid]

    for name in ("candidates", "draw"):
        monkeypatch.setattr(draw.kernels, name, Noted(getattr(draw.kernels, name)))
    chosen(choose, np.zeros((1, 2049), dtype=np.float32), [GREEDY], [], kind)
    assert launched == [(1, 2), (1,)]


def test_the_operations_of_a_device_choose():
    logits = np.random.default_rng(4).normal(0, 2, (2, 200)).astype(np.float32)
    ops = DeviceOps("cpu", exact=False)
    ends = [2, int(logits[0].argmax())]
    ops.set_ends(ends)
    for last in (DEFAULT, DEFAULT._replace(top_k=0)):
        batch = [GREEDY._replace(bans_ends=True), last]
        tokens = ops.choose(torch.from_numpy(logits), pack(batch, 2), kind_of(batch)).tolist()
        assert tokens == [host_token(*row, ends) for row in zip(logits, batch, strict=True)]
