"""Logits and choices that are hard to choose from, and the tokens that the host's sampler takes."""

from itertools import product
from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import strategies as st

from gguf_pp.batch import Choice
from gguf_pp.sampling import Sampler, SamplingParams
from gguf_pp.triton.choose import Kind, kind_of, pack

NEARLY_ONE = 1 - 2.0**-53
SLACK = 1e-12
"""Of the largest weight: many times what the rounding of a thousand exponentials adds up to."""

SPECIAL = [0.0, -0.0, 1.0, -1.0, 1e-40, -1e-40, 3e38, -3e38, -np.inf]
BAD = [np.inf, np.nan, -np.nan]


PLAIN = Choice(1.0, 64, 1.0, 0.0, 0.0, False)
ON_THE_EDGE = [
    *(PLAIN._replace(number=u) for u in (0.25, 0.5, 0.75, NEARLY_ONE)),
    *(PLAIN._replace(top_p=p, number=NEARLY_ONE) for p in (0.25, 0.5, 0.75)),
    PLAIN._replace(min_p=1.0, number=NEARLY_ONE),
    PLAIN._replace(top_k=2, top_p=0.5, number=NEARLY_ONE),
]
"""Choices from four equal logits, of which every sum is exact: so are their tokens."""


@st.composite
def rows(draw, n_vocab):
    """Float32 [n_vocab]: ties, numbers of all sizes, now and then what is not finite."""
    if n_vocab <= 12:
        values = draw(st.lists(st.sampled_from(SPECIAL), min_size=n_vocab, max_size=n_vocab))
        return np.array(values, dtype=np.float32)
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    kinds = {
        "normal": lambda: rng.normal(0, 3, n_vocab),
        "flat": lambda: np.full(n_vocab, -7.0),
        "ties": lambda: rng.integers(-2, 3, n_vocab),
        "one": lambda: np.eye(1, n_vocab, int(rng.integers(n_vocab)))[0] * 50,
        "huge": lambda: rng.normal(0, 1e37, n_vocab),
        "special": lambda: rng.choice(SPECIAL, n_vocab),
        "bad": lambda: rng.choice([*SPECIAL, *BAD], n_vocab, p=[0.11] * 9 + [0.01 / 3] * 3),
        "nothing": lambda: np.full(n_vocab, -np.inf),
    }
    return kinds[draw(st.sampled_from(["normal", *kinds]))]().astype(np.float32)


@st.composite
def choices(draw, max_k):
    """Any, with top-k of 1 to `max_k`, or with None also 0 and more than there are tokens."""
    top_k = st.integers(1, max_k) if max_k else st.sampled_from([0, 1, 2, 40, 64, 65, 100_000])
    return Choice(
        draw(st.sampled_from([0.0, -1.0, 5e-324, 1e-3, 0.8, 1.0, 1.7, 1e300])),
        draw(top_k),
        draw(st.sampled_from([0.0, 0.3, 0.95, 1.0])),
        draw(st.sampled_from([0.0, 0.05, 0.9, 1.0])),
        draw(st.sampled_from([0.0, 0.25, 0.5, NEARLY_ONE]) | st.floats(0, 1, exclude_max=True)),
        draw(st.booleans()),
    )


@st.composite
def batches(draw, sizes, max_k=64, max_rows=5):
    """Logits [n, V], n choices, and the ids of ends."""
    n_vocab = draw(st.one_of(sizes))
    n_rows = draw(st.integers(1, max_rows))
    logits = np.stack([draw(rows(n_vocab)) for _ in range(n_rows)])
    ends = draw(st.lists(st.integers(0, n_vocab - 1), max_size=3, unique=True))
    return logits, [draw(choices(max_k)) for _ in range(n_rows)], sorted(ends)


def host_token(logits, choice, ends):
    """What Sampler takes from [V] when chance says `choice.number`."""
    params = SamplingParams(
        temperature=choice.temperature, top_k=choice.top_k, top_p=choice.top_p,
        min_p=choice.min_p, ignore_eos=choice.bans_ends, seed=0,
    )  # fmt: skip
    sampler = Sampler(params, ends, ())
    sampler._random = SimpleNamespace(random=lambda: choice.number)
    return sampler(logits)


def neighbours(choice):
    """Choices that differ by less than roundings might."""
    steps = (0.0, -SLACK, SLACK)
    for p, m, u in product(steps, steps, steps):
        # A step that is off stays off, one that keeps nothing but the largest stays as well.
        yield choice._replace(
            top_p=min(choice.top_p + p, 1 - SLACK) if 0 < choice.top_p < 1 else choice.top_p,
            min_p=choice.min_p + m if 0 < choice.min_p < 1 else choice.min_p,
            number=min(max(0.0, choice.number + u), NEARLY_ONE),
        )


def assert_like_host(tokens, logits, batch, ends):
    """Every token is the host's, or one that the host takes for a choice next to it."""
    for token, row, choice in zip(tokens.tolist(), logits, batch, strict=True):
        expected = host_token(row, choice, ends)
        if token != expected:
            near = {host_token(row, other, ends) for other in neighbours(choice)}
            assert token in near and len(near) > 1, (choice, token, expected, near)


def chosen(choose, logits, batch, ends, kind=None):
    """Tokens of `choose`, given what it wants as tensors."""
    kind = kind_of(batch) if kind is None else kind
    given = torch.from_numpy(logits.copy())
    tokens = choose(given, pack(batch, len(logits)), torch.tensor(ends, dtype=torch.int64), kind)
    assert tokens.dtype == torch.int32 and tokens.shape == (len(logits),)
    assert np.array_equal(given.numpy(), logits, equal_nan=True), "logits are left as they are"
    return tokens


def enough_kinds(batch):
    """The kind of a batch and those that do more than is needed."""
    order = [Kind.BEST, Kind.TOP, Kind.ALL]
    return order[order.index(kind_of(batch)) :]
