"""The engine on a tiny model: joining, leaving, cancelling, grouping, and always the same text."""

import threading
from dataclasses import replace

import pytest

from gguf_pp.config import Options, resolve
from gguf_pp.engine import Engine, _fit_decode
from gguf_pp.errors import RequestError
from gguf_pp.gguf import ModelFile
from gguf_pp.pipeline.build import Pipeline
from gguf_pp.pipeline.executor import Ticket
from gguf_pp.sampling import SamplingParams
from tests.tiny import write_tiny

GREEDY = SamplingParams(temperature=0)
PROMPTS = [[1 + (7 * i + 3 * j) % 150 for j in range(3 + 5 * i)] for i in range(8)]
EXACT = {"exact": True, "cache_type_k": "f32", "cache_type_v": "f32"}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_tiny("llama", tmp_path_factory.mktemp("tiny") / "llama.gguf")


def new_engine(path, **options):
    config = resolve(Options(**{"ctx_size": 128, "threads": "1", **EXACT, **options}))
    pipeline = Pipeline(ModelFile.open(path), config, lambda done, total: None)
    return Engine(pipeline, eog_ids=())


def run(engine):
    while engine.step():
        pass


@pytest.fixture(scope="module")
def alone(path):
    """What each prompt gives by itself, on one device."""
    engine = new_engine(path)
    texts = []
    for prompt in PROMPTS:
        texts.append(engine.add(prompt, GREEDY, 12))
        run(engine)
    engine.pipeline.close()
    return [request.generated for request in texts]


@pytest.fixture
def make_engine(path):
    made = []

    def make(**options):
        made.append(new_engine(path, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.drain()
        engine.pipeline.close()


@pytest.mark.parametrize("n_copies", [1, 2, 4])
@pytest.mark.parametrize("device", ["cpu:0", "cpu:0,cpu:1", "cpu:0,cpu:1,cpu:2"])
@pytest.mark.parametrize("parallel", [1, 3, 8])
def test_text_does_not_depend_on_company(make_engine, alone, device, n_copies, parallel):
    engine = make_engine(device=device, n_copies=n_copies, parallel=parallel)
    requests = [engine.add(prompt, GREEDY, 12) for prompt in PROMPTS]
    run(engine)
    assert [request.generated for request in requests] == alone


def test_sequences_join_between_steps(make_engine, alone):
    engine = make_engine(device="cpu:0,cpu:1", parallel=4)
    requests = []
    for prompt in PROMPTS:
        requests.append(engine.add(prompt, GREEDY, 12))
        engine.step()
        engine.step()
    run(engine)
    assert [request.generated for request in requests] == alone


def test_sampled_text_depends_on_the_seed_alone(make_engine):
    texts = []
    for options in ({}, {"device": "cpu:0,cpu:1", "parallel": 4}):
        engine = make_engine(**options)
        requests = [
            engine.add(p, SamplingParams(temperature=1.5, seed=i), 12)
            for i, p in enumerate(PROMPTS)
        ]
        run(engine)
        texts.append([request.generated for request in requests])
    assert texts[0] == texts[1]
    assert len({tuple(text) for text in texts[0]}) == len(PROMPTS)


def test_a_cancelled_request_gives_its_slot_to_the_next(make_engine, alone):
    engine = make_engine(device="cpu:0,cpu:1", parallel=1)
    first = engine.add(PROMPTS[0], GREEDY, 100)
    second = engine.add(PROMPTS[1], GREEDY, 12)
    while len(first.generated) < 3:
        engine.step()
    assert second.slot == -1
    engine.cancel(first)
    engine.step()
    assert second.slot == 0
    run(engine)
    assert first.finish_reason == "cancelled"
    assert second.generated == alone[1]


@pytest.mark.parametrize("device", ["cpu", "cpu:0,cpu:1"])
def test_cancelling_during_a_prompt_frees_its_slot_within_a_step(make_engine, alone, device):
    engine = make_engine(device=device, ubatch_size=4, parallel=1)
    long = engine.add([1 + i % 150 for i in range(120)], GREEDY, 4)
    engine.step()
    engine.cancel(long)
    next_ = engine.add(PROMPTS[0], GREEDY, 12)
    engine.step()
    engine.step()
    assert next_.slot == 0
    assert long.n_queued < 120
    run(engine)
    assert (long.generated, long.error) == ([], None)
    assert next_.generated == alone[0]


def test_cells_of_a_cancelled_prompt_are_not_believed_by_the_next_one(make_engine):
    prompt = [1 + i % 150 for i in range(120)]
    engine = make_engine(device="cpu:0,cpu:1", ubatch_size=4, parallel=1)
    engine.cancel(engine.add(prompt, GREEDY, 4))
    cut = engine.add(prompt, GREEDY, 4)
    engine.step()
    engine.cancel(cut)
    again = engine.add(prompt, GREEDY, 4)
    run(engine)
    fresh = make_engine(parallel=1)
    expected = fresh.add(prompt, GREEDY, 4)
    run(fresh)
    assert again.generated == expected.generated
    assert again.n_cached == 4  # of the ubatch that had landed


def test_others_in_the_ubatch_of_a_cancelled_request_go_on(make_engine, alone):
    engine = make_engine(device="cpu:0,cpu:1", parallel=4)
    requests = [engine.add(prompt, GREEDY, 12) for prompt in PROMPTS[:4]]
    while not all(request.generated for request in requests):
        engine.step()
    engine.cancel(requests[1])
    run(engine)
    kept = [request.generated for request in requests if request is not requests[1]]
    assert kept == [alone[0], alone[2], alone[3]]


def test_cancelling_what_waits_or_has_ended_changes_nothing_else(make_engine, alone):
    engine = make_engine(parallel=1)
    first, waiting = (engine.add(p, GREEDY, 12) for p in PROMPTS[:2])
    engine.cancel(waiting)
    run(engine)
    engine.cancel(first)
    assert (first.finish_reason, waiting.finish_reason) == ("length", "cancelled")
    assert first.generated == alone[0]


def test_a_prompt_that_begins_like_the_last_one_is_not_computed_again(make_engine):
    engine = make_engine(parallel=2)
    first = engine.add(PROMPTS[7], GREEDY, 6)
    run(engine)
    longer = [*first.tokens, 5, 6]
    again = engine.add(longer, GREEDY, 6)
    run(engine)
    assert again.n_cached == len(first.tokens) - 1  # the last token was never queued
    fresh = make_engine(parallel=1)
    expected = fresh.add(longer, GREEDY, 6)
    run(fresh)
    assert again.generated == expected.generated


def test_the_context_ends_a_sequence(make_engine):
    engine = make_engine(ctx_size=32)
    request = engine.add(PROMPTS[1], GREEDY, -1)
    run(engine)
    assert len(request.tokens) == 32
    assert request.finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([], "the prompt is empty"),
        ([1] * 128, "128 tokens, the context 128"),
        ([5, 160], "token id 160 is outside of the vocabulary of 160"),
        ([-1], "token id -1"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_refused_at_once(make_engine, prompt, says):
    with pytest.raises(RequestError, match=says):
        make_engine().add(prompt, GREEDY, 4)


def test_a_failure_in_a_stage_fails_its_requests_and_no_others(make_engine, alone):
    engine = make_engine(device="cpu:0,cpu:1", parallel=2, ubatch_size=64)
    stage = engine.pipeline.stages[1]
    good = engine.add(PROMPTS[0], GREEDY, 12)
    while len(good.generated) < 2:
        engine.step()
    forward = stage.forward

    def broken(copy, ubatch, take):
        if ubatch.n_rows == len(PROMPTS[3]):
            raise RuntimeError("a stage broke")
        forward(copy, ubatch, take)

    stage.forward = broken
    bad = engine.add(PROMPTS[3], GREEDY, 12)
    run(engine)
    assert bad.finish_reason == "error"
    assert str(bad.error) == "a stage broke"
    assert good.generated == alone[0]
    stage.forward = forward
    again = engine.add(PROMPTS[3], GREEDY, 12)
    run(engine)
    assert again.generated == alone[3]


def test_steps_that_compile_or_are_captured_do_not_decide_how_many_groups_there_are():
    slow = [(8, 8, 30.0), (8, 8, 5.0), (1, 1, 30.0), (1, 1, 5.0)]
    assert _fit_decode([*slow, *[(8, 8, 0.9)] * 3, (1, 1, 0.2)]) is None
    a, b = _fit_decode([*slow, *[(8, 8, 0.9), (1, 1, 0.2), (300, 1, 9.0)] * 3])
    assert (a, b) == pytest.approx((0.1, 0.1))


def test_two_devices_keep_two_groups_in_flight(make_engine):
    engine = make_engine(device="cpu:0,cpu:1", parallel=8)
    for prompt in PROMPTS:
        engine.add(prompt, GREEDY, 40)
    n_groups, in_flight = [], []
    while engine.step():
        n_groups.append(engine.n_groups)
        in_flight.append(sum(flight.decodes for flight in engine._flights))
    assert max(n_groups) >= 2
    assert max(in_flight) >= 1  # beside the one that step has just waited for


def test_every_sequence_gets_its_turn_when_ubatches_are_smaller_than_groups(make_engine):
    engine = make_engine(parallel=8, ubatch_size=2)
    requests = [engine.add([3 + i, 4, 5], GREEDY, 100) for i in range(8)]
    while min(len(request.generated) for request in requests) < 20:
        engine.step()
    assert max(len(request.generated) for request in requests) < 40


def test_a_host_interrupted_while_it_waits_can_go_on(make_engine, alone):
    engine = make_engine(device="cpu:0,cpu:1")
    request = engine.add(PROMPTS[0], GREEDY, 12)
    submit = engine.pipeline.executor.submit

    def interrupted_once(ubatch, take):
        ticket = submit(ubatch, take)
        wait = ticket.wait

        def interrupt():
            ticket.wait = wait
            raise KeyboardInterrupt

        ticket.wait = interrupt
        engine.pipeline.executor.submit = submit
        return ticket

    engine.pipeline.executor.submit = interrupted_once
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    run(engine)
    assert request.generated == alone[0]


def test_an_evaluation_that_is_interrupted_skips_what_has_not_begun(make_engine, alone):
    engine = make_engine(device="cpu:0,cpu:1", ubatch_size=1)
    begun, gate = [], threading.Event()
    stage = engine.pipeline.stages[0]
    forward = stage.forward

    def slow(copy, ubatch, take):
        begun.append(ubatch)
        gate.wait()
        forward(copy, ubatch, take)

    def interrupt(ticket):
        raise KeyboardInterrupt

    stage.forward = slow
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ticket, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.evaluate(list(range(1, 101)), lambda logits, rows: None)
    gate.set()
    stage.forward = forward
    request = engine.add(PROMPTS[0], GREEDY, 12)
    run(engine)
    assert len(begun) <= 1
    assert request.generated == alone[0]


def test_a_closed_engine_has_cancelled_all_and_takes_no_more(make_engine):
    engine = make_engine(device="cpu:0,cpu:1", parallel=1)
    requests = [engine.add(prompt, GREEDY, 50) for prompt in PROMPTS[:3]]
    engine.step()
    engine.close()
    assert [request.finish_reason for request in requests] == ["cancelled"] * 3
    assert not engine.step()
    with pytest.raises(RequestError, match="the model is closed"):
        engine.add(PROMPTS[0], GREEDY, 1)
    with pytest.raises(RequestError, match="the model is closed"):
        engine.evaluate(PROMPTS[0], lambda logits, rows: None)


def test_ends_of_generation_that_the_model_cannot_write_can_be_ignored(path):
    engine = new_engine(path)
    n_vocab = engine.pipeline.n_vocab
    engine = Engine(engine.pipeline, eog_ids=[2, n_vocab + 5])
    request = engine.add(PROMPTS[0], replace(GREEDY, ignore_eos=True), 4)
    run(engine)
    engine.pipeline.close()
    assert request.error is None
    assert len(request.generated) == 4
