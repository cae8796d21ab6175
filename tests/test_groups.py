import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gguf_pp.pipeline.groups import (
    auto_ubatch_size,
    choose_groups,
    fit_stage_time,
)


def test_one_stage_has_no_bubble_to_fill():
    assert auto_ubatch_size(10_000, 1, 16, 512) == 512
    assert auto_ubatch_size(1, 1, 16, 64) == 64


@pytest.mark.parametrize(
    ("n_tokens", "n_stages", "limit", "size"),
    [
        (1024, 2, 512, 128),  # sqrt(1024 * 16) = 128
        (1024, 5, 512, 64),  # sqrt(1024 * 16 / 4) = 64
        (1 << 20, 2, 512, 512),
        (1, 2, 512, 8),
        (0, 4, 512, 8),
        (1024, 2, 4, 4),
        (1024, 2, 100, 100),
    ],
)
def test_ubatches_grow_with_the_root_of_the_prompt(n_tokens, n_stages, limit, size):
    assert auto_ubatch_size(n_tokens, n_stages, 16, limit) == size


def test_ubatches_grow_with_what_a_call_costs():
    assert auto_ubatch_size(1024, 2, 4, 512) == 64
    assert auto_ubatch_size(1024, 2, 64, 512) == 256


def prompt_time(n_tokens, n_stages, size):
    return (math.ceil(n_tokens / size) + n_stages - 1) * (size + 16)


@given(st.integers(64, 8192), st.integers(2, 6))
def test_no_other_ubatch_size_is_much_faster(n_tokens, n_stages):
    size = auto_ubatch_size(n_tokens, n_stages, 16, 4096)
    best = min(prompt_time(n_tokens, n_stages, s) for s in range(8, 4097, 8))
    assert prompt_time(n_tokens, n_stages, size) <= 1.25 * best


@pytest.mark.parametrize(
    ("n", "n_stages", "a", "b", "host_s", "groups"),
    [
        (8, 1, 1.0, 0.1, 0.0, 1),  # one device: cutting only reads the weights more often
        (8, 2, 1.0, 0.0, 0.0, 1),  # rows are free: one group is as fast, and simpler
        (8, 2, 0.0, 1.0, 0.0, 2),  # rows are all: devices share them
        (8, 4, 0.0, 1.0, 0.0, 4),
        (8, 2, 0.1, 1.0, 0.0, 2),
        (4, 2, 0.0, 1.0, 1.0, 3),  # one more hides the host: 4 against 5
        (4, 2, 2.0, 1.0, 1.0, 2),  # but not if reading weights costs more: 9 against 10
        (1, 3, 0.0, 1.0, 0.0, 1),
        (3, 4, 0.0, 1.0, 0.0, 3),
        (0, 2, 1.0, 1.0, 1.0, 1),
    ],
)
def test_groups_are_as_many_as_keep_the_devices_busy(n, n_stages, a, b, host_s, groups):
    assert choose_groups(n, n_stages, a, b, host_s) == groups


@given(st.integers(0, 50), st.integers(1, 5), *[st.floats(0, 1)] * 3)
def test_groups_are_never_more_than_sequences_or_twice_the_stages(n, n_stages, a, b, host_s):
    groups = choose_groups(n, n_stages, a, b, host_s)
    assert 1 <= groups <= max(1, min(n, 2 * n_stages))


def test_a_straight_line_is_found():
    a, b = fit_stage_time((n, 0.5 + 0.25 * n) for n in (1, 2, 3, 9))
    assert (a, b) == pytest.approx((0.5, 0.25))


def test_samples_of_one_size_say_nothing_of_rows():
    for samples in ([], [(4, 1.0)], [(4, 1.0), (4, 3.0)]):
        assert fit_stage_time(samples) is None


@pytest.mark.parametrize(
    ("samples", "fit"),
    [
        ([(1, 3.0), (3, 1.0)], (2.0, 0.0)),  # falling: the best level
        ([(1, 0.0), (3, 4.0)], (0.0, 1.2)),  # below 0 at 0 rows: the best line through 0
        ([(1, 0.0), (2, 0.0)], (0.0, 0.0)),
    ],
)
def test_neither_part_of_the_time_is_negative(samples, fit):
    assert fit_stage_time(samples) == pytest.approx(fit)


def squares(samples, a, b):
    return math.fsum((a + b * x - y) ** 2 for x, y in samples)


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(0, 10)), min_size=2, max_size=20))
def test_no_other_line_fits_better(samples):
    found = fit_stage_time(samples)
    if found is None:
        return
    assert min(found) >= 0
    a, b = found
    best = squares(samples, a, b)
    for da in (-1e-3, 0, 1e-3):
        for db in (-1e-3, 0, 1e-3):
            if a + da >= 0 and b + db >= 0:
                assert best <= squares(samples, a + da, b + db) + 1e-9
