from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gguf_pp.errors import ConfigError, PlacementError
from gguf_pp.pipeline.split import (
    Part,
    parts_of,
    ranges_of,
    split_by_shares,
    split_evenly,
    split_exact,
)

SHARES = st.lists(st.floats(1e-3, 1e12), min_size=1, max_size=6)


def sizes(ranges):
    return [len(layers) for layers in ranges]


def is_partition(ranges, n_layers):
    return [i for layers in ranges for i in layers] == list(range(n_layers))


def test_each_edge_ends_one_range_and_starts_the_next():
    assert ranges_of([2, 1, 3]) == [range(0, 2), range(2, 3), range(3, 6)]


@pytest.mark.parametrize(
    ("n_layers", "shares", "counts"),
    [
        (30, (1, 1, 1), [10, 10, 10]),
        (32, (3, 1), [24, 8]),
        (32, (0.3, 0.1), [24, 8]),
        (10, (1, 1, 1), [4, 3, 3]),  # 3.33 each: equal remainders go by order
        (11, (1, 1, 1), [4, 4, 3]),
        (61, (24, 8, 8, 8), [31, 10, 10, 10]),  # 30.5, 10.17, 10.17, 10.17
        (10, (1, 2, 7), [1, 2, 7]),
        (7, (5, 3, 2), [4, 2, 1]),  # 3.5, 2.1, 1.4
        (100, (9.5, 0.25, 0.25), [95, 3, 2]),
        (1, (7,), [1]),
    ],
)
def test_shares_are_rounded_by_largest_remainder(n_layers, shares, counts):
    assert sizes(split_by_shares(n_layers, shares)) == counts


@given(st.integers(1, 200), SHARES)
def test_shares_lose_no_layer_and_miss_none_by_more_than_one(n_layers, shares):
    try:
        ranges = split_by_shares(n_layers, shares)
    except PlacementError:
        # Only if some stage's fair part is less than one layer.
        assert min(n_layers * share / sum(shares) for share in shares) < 1
        return
    assert is_partition(ranges, n_layers)
    for layers, share in zip(ranges, shares, strict=True):
        assert abs(len(layers) - n_layers * share / sum(shares)) < 1 + 1e-9


@given(st.integers(1, 200), st.lists(st.integers(1, 1000), min_size=1, max_size=6))
def test_only_proportions_of_shares_count(n_layers, shares):
    def split(factor):
        try:
            return split_by_shares(n_layers, [factor * share for share in shares])
        except PlacementError as exc:
            return str(exc)

    assert split(1) == split(2) == split(0.125)


def test_a_share_too_small_for_a_layer_is_refused():
    with pytest.raises(PlacementError, match="stage 0 of 2 would get none of the 4 layers") as e:
        split_by_shares(4, (0.01, 1))
    assert e.value.hint == "raise its share, or give it 0 to leave the device out"


def test_exact_counts_are_taken_as_they_are():
    assert split_exact(30, (10, 12, 8), 3) == [range(0, 10), range(10, 22), range(22, 30)]


@pytest.mark.parametrize(
    ("counts", "n_devices", "says"),
    [
        ((15, 15), 3, "--layers has 2 numbers for 3 devices"),
        ((10, 12, 9), 3, "--layers adds up to 31, but the model has 30 layers"),
        ((10, 12, 7), 3, "--layers adds up to 29, but the model has 30 layers"),
    ],
)
def test_exact_counts_must_fit_with_both_numbers_named(counts, n_devices, says):
    with pytest.raises(ConfigError) as caught:
        split_exact(30, counts, n_devices)
    assert str(caught.value) == says


@pytest.mark.parametrize(
    ("costs", "capacities", "ends", "counts"),
    [
        ([1] * 30, (1, 1, 1), (0, 0), [10, 10, 10]),
        ([1] * 31, (1, 1), (0, 0), [15, 16]),  # the odd layer goes to the later stage
        ([1] * 32, (1, 1, 1), (0, 0), [10, 11, 11]),
        ([1] * 32, (3, 1), (0, 0), [24, 8]),
        ([10] * 8, (1, 1), (20, 0), [3, 5]),
        ([10] * 8, (1, 1), (0, 40), [6, 2]),
        ([10] * 8, (1, 1), (1000, 0), [1, 7]),  # never no layer, whatever the embedding weighs
        ([7, 1, 1, 1, 1, 1], (1, 1), (0, 0), [1, 5]),
        ([5], (1,), (3, 3), [1]),
        ([0] * 4, (1, 1), (0, 0), [1, 3]),
    ],
)
def test_costs_are_spread_evenly(costs, capacities, ends, counts):
    assert sizes(split_evenly(costs, capacities, extras(*ends, len(capacities)))) == counts


def extras(first, last, n_stages):
    return [first * (i == 0) + last * (i == n_stages - 1) for i in range(n_stages)]


def fullest(costs, capacities, first, last, edges):
    loads = [sum(costs[a:b]) for a, b in pairwise(edges)]
    loads[0] += first
    loads[-1] += last
    return max(load / capacity for load, capacity in zip(loads, capacities, strict=True))


@st.composite
def problems(draw):
    costs = draw(st.lists(st.integers(0, 50), min_size=1, max_size=9))
    n_stages = draw(st.integers(1, len(costs)))
    capacities = draw(st.lists(st.integers(1, 9), min_size=n_stages, max_size=n_stages))
    return costs, capacities, draw(st.integers(0, 60)), draw(st.integers(0, 60))


@settings(max_examples=150)
@given(problems())
def test_no_other_split_has_a_less_burdened_fullest_device(problem):
    costs, capacities, first, last = problem
    ranges = split_evenly(costs, capacities, extras(first, last, len(capacities)))
    assert is_partition(ranges, len(costs))
    assert all(ranges)
    edges = [0, *(layers.stop for layers in ranges)]
    found = fullest(costs, capacities, first, last, edges)
    others = (
        (0, *inner, len(costs)) for inner in combinations(range(1, len(costs)), len(capacities) - 1)
    )
    assert found == min(fullest(costs, capacities, first, last, other) for other in others)


@given(st.integers(1, 120), st.integers(1, 6))
def test_equal_layers_on_equal_devices_differ_by_one_at_most_and_grow(n_layers, n_stages):
    if n_stages > n_layers:
        return
    counts = sizes(split_evenly([3] * n_layers, [1.0] * n_stages))
    assert counts == sorted(counts)
    assert counts[-1] - counts[0] <= 1


def test_a_device_without_room_gets_as_little_as_can_be():
    assert sizes(split_evenly([10] * 8, (0, 100))) == [1, 7]


def test_more_devices_than_layers_are_refused():
    with pytest.raises(PlacementError, match="2 layers cannot be split over 3 devices"):
        split_evenly([1, 1], (1, 1, 1))


HERE, AWAY = True, False


def described(local, counts=(2, 1, 3)):
    """Stages as (device, layers, ends)."""
    layers = ranges_of(counts[: len(local)])
    return [
        (i, [*part.layers], "e" * part.embeds + "h" * part.heads + "t" * part.has_table)
        for i, part in parts_of(layers, local)
    ]


@pytest.mark.parametrize(
    ("local", "stages"),
    [
        ((HERE,), [(0, [0, 1], "eh")]),
        ((AWAY,), [(0, [0, 1], "eh")]),
        ((HERE, HERE), [(0, [0, 1], "e"), (1, [2], "h")]),
        ((AWAY, AWAY), [(0, [0, 1], "e"), (1, [2], "h")]),
        ((HERE, AWAY), [(0, [0, 1], "e"), (1, [2], ""), (0, [], "ht")]),
        ((AWAY, HERE), [(1, [], "e"), (0, [0, 1], ""), (1, [2], "ht")]),
        (
            (AWAY, HERE, AWAY),
            [(1, [], "e"), (0, [0, 1], ""), (1, [2], ""), (2, [3, 4, 5], ""), (1, [], "ht")],
        ),
        ((HERE, AWAY, HERE), [(0, [0, 1], "e"), (1, [2], ""), (2, [3, 4, 5], "h")]),
    ],
)
def test_both_ends_of_the_model_stay_on_this_machine_if_it_has_layers(local, stages):
    assert described(local) == stages


def test_a_part_without_layers_still_says_where_it_stands():
    *_, (_, head) = parts_of(ranges_of([2, 3]), (HERE, AWAY))
    assert head == Part(range(5, 5), embeds=False, heads=True, has_table=True)


def test_the_device_with_the_head_gets_fewer_layers_wherever_it_stands():
    assert sizes(split_evenly([10] * 8, (1, 1), [40, 0])) == [2, 6]
