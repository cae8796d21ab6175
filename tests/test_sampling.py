import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gguf_pp.errors import ConfigError
from gguf_pp.sampling import NO_TOKEN, Sampler, SamplingParams

PLAIN = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)


def params(**changes):
    plain = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1}
    return SamplingParams(**{**plain, **changes})


def logits(*values):
    return np.array(values, dtype=np.float32)


def draws(p, values, n, prompt=(), eog=()):
    """`n` first draws from as many seeds would be slow: one sampler with nothing to remember."""
    sampler = Sampler(p, eog, prompt)
    return [sampler(values) for _ in range(n)]


def penalized(p, values, recent):
    """Penalties, one token at a time, in float64."""
    values = [float(v) for v in values]
    for token in set(recent):
        times = list(recent).count(token)
        v = values[token]
        v = v * p.repeat_penalty if v <= 0 else v / p.repeat_penalty
        values[token] = v - times * p.frequency_penalty - p.presence_penalty
    return values


def distribution(p, values):
    """The probability of every token: the chain, step by step, in float64."""
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    kept = order[: p.top_k] if p.top_k else order

    def softmax(ids, temperature=1.0):
        top = max(values[i] for i in ids)
        weights = [math.exp((values[i] - top) / temperature) for i in ids]
        return [w / math.fsum(weights) for w in weights]

    if p.top_p < 1:
        total, n = 0.0, 0
        for probability in softmax(kept):
            total, n = total + probability, n + 1
            if total >= p.top_p:
                break
        kept = kept[:n]
    if p.min_p > 0:
        probabilities = softmax(kept)
        floor = p.min_p * max(probabilities)
        kept = [i for i, q in zip(kept, probabilities, strict=True) if q >= floor or i == kept[0]]
    return dict(zip(kept, softmax(kept, p.temperature), strict=True))


def assert_follows(counts, expected, n):
    """Chi-square against its mean plus six standard deviations, and nothing outside."""
    assert set(counts) <= set(expected)
    common = {i: q for i, q in expected.items() if n * q >= 5}
    chi = sum((counts.get(i, 0) - n * q) ** 2 / (n * q) for i, q in common.items())
    df = len(common)
    assert chi <= df + 6 * math.sqrt(2 * df) + 6


CHAINS = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 3},
    {"top_k": 1},
    {"top_k": 100},
    {"top_p": 0.7},
    {"top_p": 0.0},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 6, "top_p": 0.8, "min_p": 0.1, "temperature": 1.7},
]


@pytest.mark.parametrize("chain", CHAINS, ids=str)
def test_draws_follow_the_distribution_of_the_chain(chain):
    values = np.random.default_rng(5).normal(0, 1.5, 12).astype(np.float32)
    p = params(seed=11, **chain)
    drawn = draws(p, values, 4000)
    ids, counts = np.unique(drawn, return_counts=True)
    expected = distribution(p, values.astype(np.float64).tolist())
    assert_follows(dict(zip(ids.tolist(), counts.tolist(), strict=True)), expected, 4000)


def test_filters_see_the_logits_before_the_temperature():
    # At temperature 10 token 1 would reach half of token 0, but it is filtered at 1.
    p = params(min_p=0.5, temperature=10.0)
    assert set(draws(p, logits(0, -2), 200)) == {0}
    p = params(top_p=0.6, temperature=10.0)
    assert set(draws(p, logits(0, -2), 200)) == {0}


def test_top_p_counts_within_top_k():
    # Of all, token 0 has a third; of the two largest it has more than half.
    values = logits(1.0, 0.5, *[-0.2] * 6)
    assert set(draws(params(top_k=2, top_p=0.55), values, 200)) == {0}
    assert set(draws(params(top_p=0.55), values, 400)) > {0, 1}


def test_top_p_takes_the_token_that_reaches_it_and_no_other():
    quarter = logits(0, 0, 0, 0)  # exactly representable: cumulative 0.25, 0.5, 0.75, 1
    assert set(draws(params(top_p=0.5), quarter, 300)) == {0, 1}
    assert set(draws(params(top_p=0.500001), quarter, 300)) == {0, 1, 2}
    assert set(draws(params(top_p=0.25), quarter, 300)) == {0}
    assert set(draws(params(top_p=0.999999), quarter, 300)) == {0, 1, 2, 3}


def test_min_p_keeps_what_is_exactly_on_the_floor():
    assert set(draws(params(min_p=1.0), logits(2, 1, 2), 100)) == {0, 2}
    below = logits(2, np.nextafter(np.float32(2), np.float32(0)))
    assert set(draws(params(min_p=1.0), below, 100)) == {0}


def test_filters_never_leave_nothing():
    for chain in ({"top_p": 0.0}, {"min_p": 1.0}, {"top_k": 1}):
        assert draws(params(**chain), logits(-5, -1, -3), 20) == [1] * 20


def test_equal_logits_at_the_edge_of_top_k_go_by_index():
    values = logits(1, 3, 2, 2, 2, 0)
    assert set(draws(params(top_k=3), values, 300)) == {1, 2, 3}
    assert set(draws(params(top_k=2), logits(0, 0, 0, 0), 300)) == {0, 1}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(-3, 3), min_size=1, max_size=40),
    st.integers(0, 45),
    st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    st.sampled_from([0.0, 0.1, 0.9]),
    st.integers(0, (1 << 64) - 1),
)
def test_only_what_the_chain_keeps_is_drawn(values, top_k, top_p, min_p, seed):
    p = params(top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    slack = params(top_k=top_k, top_p=min(1.0, top_p + 1e-9), min_p=max(0.0, min_p - 1e-9))
    allowed = distribution(slack, [float(v) for v in values])
    assert set(draws(p, logits(*values), 20)) <= set(allowed)


def test_greedy_takes_the_first_of_the_largest():
    for temperature in (0.0, -1.0):
        assert Sampler(params(temperature=temperature), (), ())(logits(1, 4, 4, 2)) == 1


def test_a_small_temperature_is_nearly_greedy():
    assert set(draws(params(temperature=1e-3), logits(1, 1.5, 1.4), 200)) == {1}


PENALTIES = [
    {"repeat_penalty": 1.3},
    {"repeat_penalty": 0.5},
    {"frequency_penalty": 0.4},
    {"presence_penalty": 0.9},
    {"frequency_penalty": -0.7, "presence_penalty": -0.2},
    {"repeat_penalty": 1.7, "frequency_penalty": 0.3, "presence_penalty": 0.1},
]


@pytest.mark.parametrize("chain", PENALTIES, ids=str)
@pytest.mark.parametrize("repeat_last_n", [0, 1, 3, 64, -1])
def test_penalties_follow_the_last_tokens_of_prompt_and_answer(chain, repeat_last_n):
    rng = np.random.default_rng(3)
    p = params(temperature=0.0, repeat_last_n=repeat_last_n, **chain)
    seen = [1, 1, 5, 2, 1]
    sampler = Sampler(p, (), seen)
    for _ in range(60):
        values = rng.normal(0, 1, 8).astype(np.float32)
        window = seen if repeat_last_n < 0 else seen[len(seen) - min(repeat_last_n, len(seen)) :]
        expected = penalized(p, values, window)
        token = sampler(values)
        first, second = sorted(expected)[-1:-3:-1]
        assert first - second > 1e-5, "choose another seed: too close for float32"
        assert token == int(np.argmax(expected))
        seen.append(token)


def test_a_repeat_penalty_lowers_logits_of_either_sign():
    p = params(temperature=0.0, repeat_penalty=2.0)
    assert Sampler(p, (), [0])(logits(1.0, 0.6)) == 1  # 1.0 / 2 < 0.6
    assert Sampler(p, (), [0])(logits(-1.0, -1.5)) == 1  # -1.0 * 2 < -1.5


def test_the_prompt_counts_only_as_far_back_as_asked():
    p = params(temperature=0.0, presence_penalty=10.0, repeat_last_n=2)
    assert Sampler(p, (), [0, 1, 2])(logits(3, 2, 1)) == 0
    assert Sampler(p, (), [1, 0, 2])(logits(3, 2, 1)) == 1


def test_logits_are_left_as_they_are():
    values = logits(1, 2, 3)
    values.flags.writeable = False
    p = params(top_k=2, top_p=0.9, min_p=0.1, repeat_penalty=1.5, ignore_eos=True)
    Sampler(p, {2}, [0])(values)
    assert values.tolist() == [1, 2, 3]


def test_the_end_of_generation_can_be_ignored():
    for temperature in (0.0, 1.0):
        p = params(temperature=temperature, ignore_eos=True)
        assert set(draws(p, logits(9, 1, 9, 0), 200, eog={0, 2})) <= {1, 3}
        p = params(temperature=temperature)
        assert set(draws(p, logits(9, 1, 9, 0), 200, eog={0, 2})) & {0, 2}


def test_the_same_seed_gives_the_same_tokens():
    values = np.random.default_rng(0).normal(0, 1, 1000).astype(np.float32)
    first = draws(params(seed=(1 << 64) - 1), values, 50)
    assert first == draws(params(seed=(1 << 64) - 1), values, 50)
    assert first != draws(params(seed=0), values, 50)
    unseeded = draws(params(seed=None), values, 50)
    assert unseeded != draws(params(seed=None), values, 50)


def test_neighbouring_seeds_are_unrelated():
    values = np.zeros(1 << 16, dtype=np.float32)
    firsts = [Sampler(params(seed=seed), (), ())(values) for seed in range(64)]
    assert len(set(firsts)) > 60
    assert min(abs(a - b) for a, b in pairwise(sorted(firsts))) < 1 << 11


def test_one_random_number_is_used_per_token_drawn():
    values = logits(*[0.0] * 64)
    plain, filtered = Sampler(params(), (), ()), Sampler(params(top_k=1), (), ())
    expected = [plain(values) for _ in range(3)]
    other = Sampler(params(), (), ())
    other(values)
    filtered(values)
    assert [other(values), other(values)] == expected[1:]


@pytest.mark.parametrize("chain", [{}, {"temperature": 0.0}, {"top_k": 1}], ids=str)
def test_a_choice_uses_up_the_number_that_a_draw_would(chain):
    values = np.random.default_rng(2).normal(0, 1, 50).astype(np.float32)
    mixed, plain = Sampler(params(**chain), (), ()), Sampler(params(**chain), (), ())
    expected = [plain(values) for _ in range(6)]
    numbers = [mixed.choice().number for _ in range(3)]
    assert [mixed(values) for _ in range(3)] == expected[3:]
    assert len(set(numbers)) == (1 if chain.get("temperature") == 0 else 3)


def test_a_choice_says_what_the_parameters_say():
    p = params(temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, ignore_eos=True)
    *said, number, bans_ends = Sampler(p, {3}, ()).choice()
    assert said == [0.5, 7, 0.9, 0.1] and 0 <= number < 1 and bans_ends is True
    assert Sampler(params(temperature=-1.0), {3}, ()).choice()[4:] == (0.0, False)


@pytest.mark.parametrize("chain", PENALTIES, ids=str)
def test_penalties_are_left_to_the_host(chain):
    assert Sampler(params(**chain), (), ()).choice() is None
    assert Sampler(params(repeat_last_n=0, **chain), (), ()).choice() is not None


@pytest.mark.parametrize("temperature", [5e-324, 1e300])
def test_any_temperature_can_be_divided_by(temperature):
    values = np.random.default_rng(2).normal(0, 1, 50).astype(np.float32)
    drawn = draws(params(temperature=temperature), values, 50)
    assert len(set(drawn)) > 20 if temperature > 1 else set(drawn) == {values.argmax()}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("chain", [{"temperature": 0.0}, {"top_k": 40}, {}], ids=str)
def test_logits_that_are_not_numbers_are_said_and_not_sampled(chain, bad):
    values = np.zeros(100, dtype=np.float32)
    values[7] = bad
    assert Sampler(params(**chain), (), ())(values) == NO_TOKEN


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"temperature": math.nan}, "--temp cannot be nan"),
        ({"temperature": math.inf}, "--temp cannot be inf"),
        ({"top_k": -1}, "--top-k cannot be -1"),
        ({"top_p": 1.1}, "--top-p cannot be 1.1"),
        ({"top_p": -0.1}, "--top-p cannot be -0.1"),
        ({"top_p": math.nan}, "--top-p cannot be nan"),
        ({"min_p": 2.0}, "--min-p cannot be 2.0"),
        ({"repeat_penalty": 0.0}, "--repeat-penalty cannot be 0.0"),
        ({"repeat_last_n": -2}, "--repeat-last-n cannot be -2"),
        ({"frequency_penalty": math.inf}, "--frequency-penalty cannot be inf"),
        ({"presence_penalty": math.nan}, "--presence-penalty cannot be nan"),
        ({"seed": -1}, "--seed cannot be -1"),
        ({"seed": 1 << 64}, "--seed cannot be 18446744073709551616"),
    ],
)
def test_a_parameter_without_a_meaning_is_named(flags, says):
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**flags)
    assert str(caught.value) == says
