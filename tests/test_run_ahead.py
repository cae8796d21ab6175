"""The host queues steps before it knows their tokens: in virtual time, in any legal order."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gguf_pp.sampling import SamplingParams
from gguf_pp.timeline import summarize
from tests.simulated_model import (
    CTX_SIZE,
    N_VOCAB,
    assert_cache_is_as_told,
    run,
    simulated_engine,
    text_of,
)

GREEDY = SamplingParams(temperature=0)
PARAMS = [
    GREEDY,
    SamplingParams(seed=7, temperature=1.5),
    SamplingParams(seed=8, top_k=3, top_p=0.9, min_p=0.1),
    SamplingParams(
        seed=9, repeat_penalty=1.3, repeat_last_n=5, frequency_penalty=0.2, presence_penalty=0.4
    ),
    replace(GREEDY, repeat_penalty=1.5, repeat_last_n=-1, ignore_eos=True),
]
COMMON = [3, 1, 4, 1, 5, 9, 2, 6]
"""What prompts begin with, some longer and some shorter."""


def prompts_of(rng, n):
    return [
        [*COMMON[: rng.randint(0, 8)], *(rng.randrange(N_VOCAB) for _ in range(rng.randint(1, 6)))]
        for _ in range(n)
    ]


def alone(n_stages, work, eog_ids):
    """What each prompt gives when nothing else runs and the host waits for every token."""
    return [text_of(n_stages, *each, eog_ids) for each in work]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 2),
    st.integers(1, 5),
    st.integers(0, 1 << 30),
)
def test_any_schedule_gives_what_waiting_for_every_token_gives(
    n_stages, n_copies, run_ahead, n_slots, seed
):
    rng = random.Random(seed)
    eog_ids = rng.sample(range(N_VOCAB), rng.randint(0, 2))
    work = [
        (prompt, rng.choice(PARAMS), rng.choice([1, 2, 3, 5, 9, -1]))
        for prompt in prompts_of(rng, rng.randint(1, 7))
    ]
    engine = simulated_engine(
        n_stages,
        n_copies=n_copies,
        n_slots=n_slots,
        run_ahead=run_ahead,
        eog_ids=eog_ids,
        seed=seed,
        copy_s=rng.choice([0.0, 0.5, 5.0]),
        spend=lambda: rng.choice([0.1, 1.0, 3.0]),
        pipelined=rng.random() < 0.8,
        own_stream=rng.random() < 0.7,
        n_parcels=rng.choice([1, 2, 32]),
    )
    if rng.random() < 0.5:
        force_groups(engine, rng.randint(1, 5))
    wanted = alone(n_stages, work, eog_ids)
    requests, cancelled = [], set()
    for each in work:
        requests.append(engine.add(*each))
        for _ in range(rng.choice([0, 0, 1, 3])):
            engine.step()
            if rng.random() < 0.1:
                victim = rng.choice(requests)
                if victim.finish_reason is None:
                    cancelled.add(victim)
                    engine.cancel(victim)
    run(engine)
    assert engine.pipeline.world.races == []
    assert [hole for stage in engine.pipeline.stages for hole in stage.holes] == []
    for request, (text, reason) in zip(requests, wanted, strict=True):
        assert request.error is None
        if request in cancelled:
            assert request.generated == text[: len(request.generated)]
        else:
            assert (request.generated, request.finish_reason) == (text, reason)
    assert_cache_is_as_told(engine)
    assert sorted(engine._free_parcels) == engine.pipeline.parcels()


def force_groups(engine, n):
    def groups(n_decoding):
        engine.n_groups = min(n, n_decoding)
        return engine.n_groups

    engine._groups = groups


def queued_by(engine):
    """The ubatches that are queued from now on."""
    submit, seen = engine.pipeline.executor.submit, []

    def noted(ubatch, take):
        seen.append(ubatch)
        return submit(ubatch, take)

    engine.pipeline.executor.submit = noted
    return seen


@pytest.mark.parametrize("run_ahead", [1, 2])
@pytest.mark.parametrize("n_stages", [1, 2, 4])
def test_every_step_after_the_prompt_is_queued_before_its_token_is_known(n_stages, run_ahead):
    engine = simulated_engine(n_stages, run_ahead=run_ahead)
    seen = queued_by(engine)
    engine.add(COMMON, GREEDY, 10)
    ahead = []
    while engine.step():
        ahead.append(sum(flight.decodes for flight in engine._flights))
    decodes = seen[-9:]
    assert all(len(ubatch.late) == 1 for ubatch in decodes)
    assert [u.spans[0].start for u in decodes] == list(range(8, 17))  # none past the limit
    assert max(ahead) == run_ahead


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4])
@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_no_more_steps_are_queued_than_there_are_tokens_to_make(run_ahead, max_tokens):
    engine = simulated_engine(2, run_ahead=run_ahead, n_slots=2)
    seen = queued_by(engine)
    engine.add(COMMON[:4], GREEDY, max_tokens)
    engine.add([3] * (CTX_SIZE - 2), GREEDY, -1)  # the context ends it
    run(engine)
    assert sum(u.n_rows for u in seen) == 4 + max_tokens - 1 + CTX_SIZE - 1


def test_steps_behind_the_end_of_a_sequence_are_skipped_and_their_cells_are_not_believed():
    [(text, _)] = alone(2, [(COMMON, GREEDY, 8)], ())
    engine = simulated_engine(2, run_ahead=2, eog_ids=[text[3]])
    first = text.index(text[3])
    request = engine.add(COMMON, GREEDY, 20)
    run(engine)
    assert (request.generated, request.finish_reason) == (text[: first + 1], "stop")
    known = engine._slot_tokens[0]
    assert [*COMMON, *text[:first]] == known[: len(COMMON) + first]
    assert_cache_is_as_told(engine)
    longer = engine.add([*known, 1, 2], GREEDY, 3)
    run(engine)
    assert longer.n_cached == len(known)
    assert longer.generated == alone(2, [([*known, 1, 2], GREEDY, 3)], [text[3]])[0][0]


def test_steps_behind_the_end_of_a_sequence_are_not_begun():
    [(text, _)] = alone(2, [(COMMON, GREEDY, 8)], ())
    begun = []
    engine = simulated_engine(
        2,
        run_ahead=2,
        eog_ids=[text[3]],
        fails=lambda i_stage, ubatch: begun.append(ubatch.spans[0].start) if not i_stage else None,
    )
    seen = queued_by(engine)
    request = engine.add(COMMON, GREEDY, 20)
    run(engine)
    last = len(request.tokens) - 1  # the end itself, whose step may be under way when it is seen
    assert max(ubatch.spans[0].start for ubatch in seen) == last + 1
    assert max(begun) <= last


@pytest.mark.parametrize("at", range(12))
@pytest.mark.parametrize("run_ahead", [1, 2])
def test_cancelled_at_any_step_a_sequence_leaves_a_cache_that_is_true(run_ahead, at):
    engine = simulated_engine(3, run_ahead=run_ahead, n_slots=2)
    other = engine.add(COMMON[2:], GREEDY, 14)
    request = engine.add(COMMON, GREEDY, 14)
    for _ in range(at):
        engine.step()
    engine.cancel(request)
    again = engine.add([*request.tokens, 7], GREEDY, 6)
    run(engine)
    assert_cache_is_as_told(engine)
    wanted = alone(3, [(COMMON[2:], GREEDY, 14), ([*request.tokens, 7], GREEDY, 6)], ())
    assert [other.generated, again.generated] == [text for text, _ in wanted]


def test_a_row_of_a_cancelled_sequence_that_goes_on_with_others_has_its_cells_before_it():
    """Its first steps in flight are its own, the next one is shared: none of them is skipped."""
    engine = simulated_engine(2, run_ahead=2, n_slots=2)
    force_groups(engine, 1)
    cancelled = engine.add(COMMON[:4], GREEDY, 20)
    other = engine.add(COMMON[:3], GREEDY, 9)
    engine.step()
    engine.step()
    assert [len(flight.requests) for flight in engine._flights] == [1, 1, 2]
    engine.cancel(cancelled)
    run(engine)
    assert [hole for stage in engine.pipeline.stages for hole in stage.holes] == []
    assert_cache_is_as_told(engine)
    assert other.finish_reason == "length"


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2), st.integers(0, 25), st.integers(1, 2), st.integers(0, 1 << 30))
def test_a_failing_step_fails_its_requests_and_no_others(i_stage, i_ubatch, run_ahead, seed):
    begun = [0] * 3

    def fails(i, ubatch):
        begun[i] += 1
        if (i, begun[i] - 1) == (i_stage, i_ubatch):
            raise ArithmeticError("a stage broke")

    engine = simulated_engine(3, run_ahead=run_ahead, n_slots=3, seed=seed, fails=fails)
    work = [(prompt, GREEDY, 9) for prompt in prompts_of(random.Random(seed), 5)]
    requests = [engine.add(*each) for each in work]
    run(engine)
    assert engine.pipeline.world.races == []
    assert_cache_is_as_told(engine)
    for request, (text, _) in zip(requests, alone(3, work, ()), strict=True):
        assert request.generated == text[: len(request.generated)]
        assert (request.error is None) == (request.generated == text)
    assert sum(request.error is not None for request in requests) <= 3


@pytest.mark.parametrize("can_run_ahead", [True, False])
def test_groups_that_were_torn_apart_come_together_again(can_run_ahead):
    engine = simulated_engine(1, run_ahead=1, n_slots=4, n_copies=1)
    if not can_run_ahead:
        engine._free_parcels.clear()
    seen = queued_by(engine)
    for i in range(4):  # they join one after the other
        engine.add([*COMMON[: i + 1]], GREEDY, 20)
        engine.step()
    run(engine)
    assert [u.n_rows for u in seen].count(4) >= 12


def test_prompts_get_their_turn_beside_steps_that_are_queued_ahead():
    engine = simulated_engine(1, run_ahead=2, n_slots=2, n_copies=1)
    engine.add(COMMON[:2], GREEDY, -1)
    for _ in range(4):
        engine.step()
    joining = engine.add(COMMON, GREEDY, 2)
    for _ in range(10):
        engine.step()
    assert joining.finish_reason == "length"


MUTANTS = {
    "the token is there": (lambda p: p.stages[0].compute, "filled"),
    "the tokens before were shipped": (lambda p: p.stages[-1].compute, "filled"),
    "the token is chosen": (lambda p: p.feedback_stream, "chosen"),
}


@pytest.mark.parametrize("wait", [None, *MUTANTS])
def test_each_wait_is_needed(wait):
    races = []
    for seed in range(10):
        engine = simulated_engine(3, run_ahead=1, n_slots=2, seed=seed, copy_s=4.0, n_parcels=1)
        if wait is not None:
            stream_of, kind = MUTANTS[wait]
            forget(stream_of(engine.pipeline), engine.pipeline.feedback, kind)
        for max_tokens in (1, 5, 1, 1, 4, 1):
            engine.add(COMMON, GREEDY, max_tokens)
            engine.add(COMMON[3:], GREEDY, 1)
        run(engine)
        races += engine.pipeline.world.races
    assert bool(races) == (wait is not None)


def forget(stream, feedback, kind):
    events = [getattr(parcel, kind) for parcel in feedback.parcels]
    wait = stream.wait
    stream.wait = lambda event: event in events or wait(event)


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_running_ahead_hides_what_the_host_takes(run_ahead):
    engine = simulated_engine(2, run_ahead=run_ahead)
    engine.add(COMMON[:1], GREEDY, 21)
    while engine.step():
        engine.pipeline.world.host_s += 1.0
    n_steps, step_s = 21, 2 * 1.0
    took_s = engine.pipeline.world.makespan_s
    assert took_s == pytest.approx(n_steps * step_s + (0 if run_ahead else n_steps - 1))


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_in_a_timeline_a_stage_that_waits_for_a_token_is_starved(run_ahead):
    engine = simulated_engine(2, run_ahead=run_ahead)
    engine.pipeline.executor.trace.enabled = True
    engine.add(COMMON[:1], GREEDY, 11)
    run(engine)
    summary = summarize(engine.pipeline.executor.trace.slices, 2)
    assert summary.span_s == pytest.approx(22)
    assert summary.busy_s == pytest.approx((11, 11))
    assert [waits.starved for waits in summary.waiting] == pytest.approx([11, 11])
