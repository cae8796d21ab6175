import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from gguf_pp.batch import Choice
from gguf_pp.sampling import NO_TOKEN, Sampler, SamplingParams
from gguf_pp.triton.choose import N_PARAMS, Kind, choose, kind_of, pack
from gguf_pp.triton.ops import DeviceOps
from tests.choices import (
    NEARLY_ONE,
    ON_THE_EDGE,
    assert_like_host,
    batches,
    choices,
    chosen,
    enough_kinds,
    host_token,
)

SIZES = (st.integers(1, 12), st.integers(13, 200), st.integers(60, 70), st.integers(900, 1000))
GREEDY = Choice(0.0, 40, 0.95, 0.05, 0.0, False)
DEFAULT = Choice(0.8, 40, 0.95, 0.05, 0.4, False)
WIDE = DEFAULT._replace(top_k=0)
OF_KIND = {Kind.BEST: GREEDY, Kind.TOP: DEFAULT, Kind.ALL: WIDE}


@settings(max_examples=150)
@given(batches(SIZES, max_k=None))
def test_tokens_are_those_of_the_host(batch):
    for kind in enough_kinds(batch[1]):
        assert_like_host(chosen(choose, *batch, kind), *batch)


@settings(max_examples=50)
@given(batches(SIZES))
def test_tokens_of_a_small_top_k_are_those_of_the_host(batch):
    assert kind_of(batch[1]) is not Kind.ALL
    for kind in enough_kinds(batch[1]):
        assert_like_host(chosen(choose, *batch, kind), *batch)


@settings(max_examples=50)
@given(batches(SIZES, max_k=None))
def test_a_token_does_not_depend_on_the_other_rows(batch):
    logits, drawn, ends = batch
    kind = kind_of(drawn)
    together = chosen(choose, logits, drawn, ends, kind)
    for row in range(len(drawn)):
        alone = chosen(choose, logits[row : row + 1], drawn[row : row + 1], ends, kind)
        assert alone.tolist() == together[row : row + 1].tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("penalties", [{}, {"repeat_last_n": 0, "repeat_penalty": 1.5}], ids=str)
def test_a_sequence_reads_the_same_whoever_chooses(temperature, penalties):
    params = SamplingParams(temperature=temperature, seed=3, ignore_eos=True, **penalties)
    here, there = Sampler(params, {5, 7}, [1]), Sampler(params, {5, 7}, [1])
    rng = np.random.default_rng(1)
    for step in range(60):
        logits = rng.normal(0, 2, (1, 300)).astype(np.float32)
        logits[0, 5] = 50
        if step % 3:
            token = chosen(choose, logits, [there.choice()], [5, 7]).item()
        else:
            token = there(logits[0])
        assert token == here(logits[0]) not in (5, 7)


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf])
def test_logits_that_are_not_numbers_choose_no_token(kind, bad):
    logits = np.zeros((4, 100), dtype=np.float32)
    logits[0, 7], logits[2] = bad, -math.inf
    tokens = chosen(choose, logits, [OF_KIND[kind]] * 4, [], kind).tolist()
    assert [token == NO_TOKEN for token in tokens] == [True, False, True, False]


@pytest.mark.parametrize("kind", Kind)
def test_what_is_banned_may_be_anything(kind):
    logits = np.zeros((3, 100), dtype=np.float32)
    logits[:, 3], logits[:, 9] = math.nan, math.inf
    one = OF_KIND[kind]
    banned = one._replace(bans_ends=True)
    tokens = chosen(choose, logits, [banned, one, banned], [3, 9], kind).tolist()
    expected = host_token(logits[0], banned, [3, 9])
    assert tokens == [expected, NO_TOKEN, expected] and expected >= 0


@pytest.mark.parametrize("kind", [Kind.TOP, Kind.ALL])
def test_what_is_exactly_on_an_edge_falls_where_it_does_on_the_host(kind):
    logits = np.zeros((len(ON_THE_EDGE), 4), dtype=np.float32)
    tokens = chosen(choose, logits, ON_THE_EDGE, [], kind).tolist()
    assert tokens == [host_token(logits[0], choice, []) for choice in ON_THE_EDGE]
    assert tokens == [1, 2, 3, 3, 0, 1, 2, 3, 0]


@pytest.mark.parametrize("kind", Kind)
def test_zeros_of_either_sign_are_equal(kind):
    logits = np.array([[-1.0, -0.0, 0.0, -0.0, 0.0]], dtype=np.float32)
    first = OF_KIND[kind]._replace(top_k=0 if kind is Kind.ALL else 1, top_p=0.0)
    assert chosen(choose, logits, [first], [], kind).tolist() == [1]


def test_the_kind_is_what_the_most_demanding_choice_wants():
    assert kind_of([]) is kind_of([None, GREEDY, DEFAULT._replace(top_k=1)]) is Kind.BEST
    assert kind_of([GREEDY._replace(top_k=0), None]) is Kind.BEST
    assert kind_of([GREEDY, DEFAULT, None]) is kind_of([DEFAULT._replace(top_k=64)]) is Kind.TOP
    assert kind_of([DEFAULT._replace(top_k=65), GREEDY]) is kind_of([DEFAULT, WIDE]) is Kind.ALL


def test_rows_without_a_choice_are_greedy():
    logits = np.random.default_rng(0).normal(0, 1, (6, 50)).astype(np.float32)
    params = pack([None, WIDE, None], 6)
    assert params.shape == (6, N_PARAMS) and params.dtype == torch.float64
    tokens = choose(torch.from_numpy(logits), params, torch.empty(0, dtype=torch.int64), Kind.ALL)
    best = logits.argmax(axis=1).tolist()
    assert tokens.tolist() == [best[0], host_token(logits[1], WIDE, []), *best[2:]]


@given(choices(None))
def test_packed_numbers_are_not_rounded(choice):
    (row,) = pack([choice], 1).tolist()
    if choice.temperature > 0:
        assert row[0] == choice.temperature and row[3:5] == [choice.min_p, choice.number]
    assert row[5] == choice.bans_ends


VIEWS = ("view", "slice", "select", "unsqueeze", "squeeze", "unbind", "alias")
WAITS = (
    "_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2",
    "bincount", "lift_fresh", "scalar_tensor", "where",
)  # fmt: skip
"""With a number, `where` copies it from the host."""


class Launches(TorchDispatchMode):
    """Counts operations that compute, and refuses those that wait for a device or read it."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        assert name not in WAITS, f"{name} waits for the device"
        if name in ("index", "index_put", "index_put_"):
            assert all(i is None or i.dtype != torch.bool for i in args[1]), "a boolean index"
        if name.removesuffix("_") not in VIEWS:
            self.names.append(name)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(("kind", "at_most"), [(Kind.BEST, 10), (Kind.TOP, 38), (Kind.ALL, 38)])
def test_choosing_does_not_wait_for_the_device(kind, at_most):
    logits, params = torch.randn(3, 100), pack([OF_KIND[kind]] * 3, 3)
    ends = torch.tensor([3])
    with Launches() as launches:
        choose(logits, params, ends, kind)
    assert len(launches.names) <= at_most, launches.names


@pytest.mark.parametrize("wait", [lambda x: x.item(), lambda x: x[x > 0], lambda x: x.nonzero()])
def test_waiting_would_be_noticed(wait):
    with Launches(), pytest.raises(AssertionError):
        wait(torch.ones(1))


@pytest.mark.parametrize("kind", Kind)
def test_choosing_stays_on_the_device(kind):
    """Of tensors that have no values, nothing can be read."""
    with torch.device("meta"):
        logits, params = torch.empty(3, 100), torch.empty(3, N_PARAMS, dtype=torch.float64)
        ends = torch.empty(2, dtype=torch.int64)
    tokens = choose(logits, params, ends, kind)
    assert tokens.device.type == "meta" and tokens.shape == (3,)


def test_the_operations_of_a_device_choose():
    logits = np.random.default_rng(4).normal(0, 2, (3, 200)).astype(np.float32)
    ops = DeviceOps("cpu", exact=False, is_torch_only=True)
    ends = [2, int(logits[0].argmax())]
    ops.set_ends(ends)
    batch = [GREEDY._replace(bans_ends=True), WIDE, DEFAULT._replace(number=NEARLY_ONE)]
    tokens = ops.choose(torch.from_numpy(logits), pack(batch, 3), kind_of(batch)).tolist()
    assert tokens == [host_token(*row, ends) for row in zip(logits, batch, strict=True)]
