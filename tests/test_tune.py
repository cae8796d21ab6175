"""The split that tune finds, on devices in virtual time, and times of a small real model."""

from collections.abc import Sequence
from contextlib import closing
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gguf_pp.config import Options, resolve
from gguf_pp.errors import PlacementError
from gguf_pp.gguf import ModelFile
from gguf_pp.probe import ModelProbe
from gguf_pp.tune import Comparison, Costs, Job, fastest_split, probe_costs
from tests.simulated import Run

PROMPT = Job("prefill", 80, 10)
STREAMS = Job("decode", 8, 4)


class UnevenDevices:
    """Device d takes `seconds[d]` for a layer of kind 1, twice that for one of kind 2."""

    def __init__(self, seconds: Sequence[float], kinds: Sequence[int], head: float = 0.0) -> None:
        self.seconds, self.kinds, self.head = seconds, kinds, head
        self.timed: list[list[int]] = []
        self.i_head = len(seconds) - 1

    def layers_s(self, layers: Sequence[int], job: Job) -> list[float]:
        self.timed.append(list(layers))
        return [s * self.kinds[layers[0]] for s in self.seconds]

    def head_s(self, job: Job) -> list[float]:
        return [s * self.head for s in self.seconds]

    def edges_s(self, job: Job) -> list[float]:
        return [0.0] * (len(self.seconds) - 1)


def makespan(costs: Costs, split: Sequence[range], n_ubatches: int) -> float:
    """Seconds of the real schedule over stages that take these times."""
    run = Run([[s] * n_ubatches for s in costs.stages_s(split)], 2)
    return run.world.makespan_s


def counts(split: Sequence[range]) -> list[int]:
    return [len(part) for part in split]


def test_a_throttled_device_gets_fewer_layers_and_the_schedule_is_faster_for_it():
    kinds = [1] * 12
    costs = probe_costs(UnevenDevices([1.0, 3.0], kinds), kinds, PROMPT)
    split = fastest_split([costs])
    assert counts(split) == [9, 3]
    even = [range(6), range(6, 12)]
    assert (makespan(costs, even, 8), makespan(costs, split, 8)) == (6 + 8 * 18, 9 * 9)


def test_predicted_speed_is_that_of_the_schedule():
    kinds = [1] * 4 + [2] * 4
    costs = probe_costs(UnevenDevices([1.0, 0.5, 2.0], kinds, head=3.0), kinds, PROMPT)
    for split in ([range(3), range(3, 6), range(6, 8)], fastest_split([costs])):
        seconds = makespan(costs, split, PROMPT.n_ubatches)
        assert costs.tokens_per_s(split) == pytest.approx(PROMPT.n_tokens / seconds)


def test_decoding_groups_wait_for_the_slowest_stage_or_for_the_round():
    def speed(first: float, second: float, job: Job) -> float:
        costs = Costs(job, ((first, 0.0), (0.0, second)), (0.0, 0.0), (0.0,))
        return costs.tokens_per_s([range(1), range(1, 2)])

    assert speed(2.0, 2.0, STREAMS) == 8 / 4
    assert speed(1.0, 3.0, STREAMS) == 8 / 6
    assert speed(2.0, 2.0, Job("decode", 1, 1)) == 1 / 4


def test_heavy_layers_and_the_head_count():
    kinds = [2, 2, 1, 1, 1, 1, 1, 1]
    probe = UnevenDevices([1.0, 1.0], kinds, head=2.0)
    assert counts(fastest_split([probe_costs(probe, kinds, PROMPT)])) == [4, 4]
    assert probe.timed == [[0, 1], [2, 3, 4, 5, 6, 7]]


def test_at_most_eight_layers_of_a_kind_are_timed_from_all_over_the_model():
    probe = UnevenDevices([1.0, 1.0], [1] * 32)
    probe_costs(probe, [1] * 32, PROMPT)
    assert probe.timed == [[0, 4, 8, 12, 16, 20, 24, 28]]


def test_two_jobs_count_alike_however_long_their_ubatches_take():
    long = Costs(PROMPT, ((100.0,) * 8, (300.0,) * 8), (0.0, 0.0), (0.0,))
    short = Costs(STREAMS, ((0.01,) * 8, (0.01,) * 8), (0.0, 0.0), (0.0,))
    assert counts(fastest_split([long])) == [6, 2]
    assert counts(fastest_split([short])) == [4, 4]
    assert counts(fastest_split([long, short])) == [5, 3]


def test_memory_limits_the_split():
    kinds = [1] * 8
    costs = probe_costs(UnevenDevices([1.0, 3.0], kinds), kinds, PROMPT)
    assert counts(fastest_split([costs], lambda d, part: d > 0 or len(part) <= 3)) == [3, 5]
    with pytest.raises(PlacementError, match="no split of 8 layers fits the memory of 2 devices"):
        fastest_split([costs], lambda d, part: len(part) < 4)
    with pytest.raises(PlacementError):
        fastest_split([Costs(PROMPT, ((1.0,), (1.0,)), (0.0, 0.0), (0.0,))])


def test_a_comparison_goes_by_what_was_measured_only_if_it_is_more_than_noise():
    assert (Comparison(1.2).measured, Comparison(1.2).speedup) == (None, 1.2)
    steady = Comparison(1.2, (0.9, 0.91, 0.89))
    assert (steady.measured, steady.clear, steady.speedup) == (0.9, True, 0.9)
    assert steady.error == pytest.approx(4.30 * 0.01 / 3**0.5)
    noisy = Comparison(1.2, (0.9, 0.7, 1.3))
    assert (noisy.measured, noisy.clear, noisy.speedup) == (0.9, False, 1.2)
    assert not Comparison(1.2, (2.0,)).clear


def test_one_bad_round_makes_a_difference_unclear_and_never_turns_it():
    good = (1.3, 1.31, 1.29, 1.3, 1.3, 1.31)
    assert Comparison(1.0, good).clear
    spoiled = Comparison(1.0, (*good, 0.3))
    assert (spoiled.measured, spoiled.clear) == (1.3, False)


times = st.lists(st.floats(0.1, 9), min_size=6, max_size=6)


@given(st.lists(times, min_size=1, max_size=4), st.floats(0, 9))
def test_no_other_contiguous_split_has_a_faster_slowest_stage(layers, head):
    n = len(layers)
    costs = Costs(PROMPT, tuple(map(tuple, layers)), (head,) * n, (0.0,) * (n - 1))
    best = min(
        max(costs.stages_s([range(a, b) for a, b in pairwise((0, *inner, 6))]))
        for inner in combinations(range(1, 6), n - 1)
    )
    split = fastest_split([costs])
    assert max(costs.stages_s(split)) == pytest.approx(best)
    assert [i for part in split for i in part] == list(range(6))


def test_a_real_model_is_timed_and_leaves_no_memory_taken(chat_model, monkeypatch):
    monkeypatch.setattr("gguf_pp.probe.MIN_SECONDS", 0.0)
    config = resolve(Options(device="cpu:0,cpu:1", memory="1GiB"))
    with ModelFile.open(chat_model) as file, closing(ModelProbe(file, config, 256)) as probe:
        assert len(set(probe.kinds)) == 1
        for job in (Job("prefill", 64, 16), Job("decode", 8, 4)):
            costs = probe_costs(probe, probe.kinds, job)
            assert [len(device) for device in costs.layers] == [4, 4]
            assert min(*costs.layers[0], *costs.layers[1], *costs.heads, *costs.edges) > 0
        assert counts(probe.default_split()) == [2, 2]
        assert probe.fits(0, range(4))
        assert {b.memory().free_bytes for b in probe._backends} == {1 << 30}


def test_weights_that_do_not_fit_to_be_timed_are_an_error(chat_model):
    config = resolve(Options(device="cpu:0,cpu:1", memory="100KiB"))
    with (
        ModelFile.open(chat_model) as file,
        closing(ModelProbe(file, config, 256)) as probe,
        pytest.raises(PlacementError, match="to time"),
    ):
        probe_costs(probe, probe.kinds, PROMPT)
