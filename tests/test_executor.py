import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gguf_pp.pipeline.executor import Executor
from gguf_pp.pipeline.plan import bubble
from tests.simulated import Run, expected, ubatches

SECONDS = st.floats(0.1, 3.0)


@st.composite
def workloads(draw):
    n_stages = draw(st.integers(1, 5))
    n_ubatches = draw(st.integers(1, 12))
    row = st.lists(SECONDS, min_size=n_ubatches, max_size=n_ubatches)
    return draw(st.lists(row, min_size=n_stages, max_size=n_stages))


@settings(max_examples=150, deadline=None)
@given(workloads(), st.integers(1, 4), st.integers(0, 1 << 30), st.floats(0, 2), st.booleans())
def test_any_schedule_gives_what_stages_in_turn_give(seconds, n_copies, seed, copy_s, pipelined):
    run = Run(seconds, n_copies, seed=seed, copy_s=copy_s, pipelined=pipelined)
    assert run.world.races == []
    for i, ubatch in enumerate(ubatches(len(seconds[0]))):
        assert run.results[i] == expected(ubatch, len(seconds))


@settings(max_examples=50, deadline=None)
@given(workloads(), st.integers(1, 4), st.integers(0, 1 << 30))
def test_pipelined_the_host_never_waits_while_it_submits(seconds, n_copies, seed):
    assert Run(seconds, n_copies, seed=seed).n_waits_while_submitting == 0


def test_not_pipelined_devices_take_turns():
    run = Run([[1.0] * 6] * 3, 1, pipelined=False)
    assert run.world.makespan_s == 6 * 3


@pytest.mark.parametrize("n_copies", [1, 2, 4])
def test_equal_stages_overlap_up_to_the_bubble(n_copies):
    n_stages, n_ubatches = 3, 32
    run = Run([[1.0] * n_ubatches] * n_stages, n_copies)
    assert run.world.makespan_s == pytest.approx(
        n_ubatches / (1 - bubble(n_stages, n_ubatches)), rel=1e-9
    )


def test_two_copies_absorb_jitter_and_a_slow_link():
    jitter = [[0.5, 1.5, 1.5, 0.5] * 8, [1.5, 0.5, 0.5, 1.5] * 8, [0.5, 0.5, 1.5, 1.5] * 8]
    one, two, four = (Run(jitter, n, copy_s=0.3).world.makespan_s for n in (1, 2, 4))
    serial = sum(map(sum, jitter)) + 2 * 32 * 0.3
    assert serial > one > two >= four
    assert two < 1.2 * four


def test_a_copy_is_reused_only_after_its_reader_is_through():
    # The last stage is slow: the others run ahead, but by no more than their copies allow.
    run = Run([[0.1] * 12, [0.1] * 12, [5.0] * 12], 2)
    assert run.world.races == []
    assert run.world.makespan_s == pytest.approx(0.2 + 12 * 5.0)


@given(st.integers(0, 2), st.integers(0, 5), st.integers(0, 100))
@settings(max_examples=40, deadline=None)
def test_a_failing_ubatch_fails_alone(i_stage, i_ubatch, seed):
    run = Run([[1.0] * 6] * 3, 2, seed=seed, fails=(i_stage, i_ubatch))
    assert list(run.errors) == [i_ubatch]
    assert str(run.errors[i_ubatch]) == f"stage {i_stage} broke"
    assert all(i_ubatch not in stage.seen for stage in run.stages[i_stage + 1 :])
    for i, ubatch in enumerate(ubatches(6)):
        if i != i_ubatch:
            assert run.results[i] == expected(ubatch, 3)


def without(stream_of, event_of):
    """An executor that forgets one wait: `stream_of(stage)` for `event_of(copy, next copy)`."""

    class Forgetful(Executor):
        def submit(self, ubatch, take):
            i_copy = self.n_submitted % self.n_copies
            forgotten = []
            for stage, following in zip(self.stages, [*self.stages[1:], None], strict=True):
                copy = stage.ring.copies[i_copy]
                after = None if following is None else following.ring.copies[i_copy]
                stream = stream_of(stage)
                if stream is not None and (event := event_of(copy, after)) is not None:
                    forgotten.append((stream, event))
            originals = [(stream, stream.wait) for stream, _ in forgotten]
            for stream, event in forgotten:
                wait = stream.wait
                stream.wait = lambda e, wait=wait, event=event: e is event or wait(e)
            try:
                return super().submit(ubatch, take)
            finally:
                for stream, wait in reversed(originals):
                    stream.wait = wait

    return Forgetful


MUTANTS = {
    "the output is there": (lambda s: s.transfer, lambda copy, after: copy.done),
    "the next input is free": (lambda s: s.transfer, lambda copy, after: after and after.free),
    "the input is there": (lambda s: s.compute, lambda copy, after: copy.filled),
    "the last output was shipped": (
        lambda s: s.compute,
        lambda copy, after: after and after.filled,
    ),
}


@pytest.mark.parametrize("wait", MUTANTS)
def test_each_wait_is_needed(wait):
    mutant = without(*MUTANTS[wait])
    uneven = [[1.0, 0.2, 2.0, 0.1] * 3, [0.3, 1.5, 0.2, 1.0] * 3, [2.0, 0.1, 0.4, 1.7] * 3]
    runs = [Run(uneven, 2, seed=seed, copy_s=0.5, executor=mutant) for seed in range(10)]
    assert any(run.world.races for run in runs)
    runs = [Run(uneven, 2, seed=seed, copy_s=0.5) for seed in range(10)]
    assert not any(run.world.races for run in runs)


def test_without_the_host_waiting_there_are_no_results():
    class Impatient(Executor):
        def submit(self, ubatch, take):
            ticket = super().submit(ubatch, take)
            ticket.done = self.stages[0].backend.event()
            return ticket

    assert Run([[1.0] * 3] * 2, 2, executor=Impatient).results == {}
