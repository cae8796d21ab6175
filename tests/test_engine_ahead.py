"""Running ahead on real models and threads: the same text as when the host waits for each token."""

import shutil

import numpy as np
import pytest
from gguf import GGUFReader

import gguf_pp
from gguf_pp.engine import Engine
from gguf_pp.sampling import SamplingParams
from tests.test_cuda_pipeline import OPTIONS, now
from tests.test_cuda_pipeline import PLACES as CUDA_PLACES
from tests.test_engine import EXACT, GREEDY, new_engine, run
from tests.tiny import write_tiny
from tests.workers import workers

cuda_now = now
PLACES = ["cpu", "cpu:0,cpu:1", "cpu:0,cpu:1,cpu:2"]
PROMPTS = [[1 + (7 * i + 3 * j) % 150 for j in range(1 + 2 * i)] for i in range(7)]
PARAMS = [
    GREEDY,
    SamplingParams(seed=1, temperature=1.5, top_k=0, top_p=1, min_p=0),
    SamplingParams(seed=2, top_k=9),
    SamplingParams(seed=3, temperature=2, top_p=0.7),
    SamplingParams(seed=4, temperature=2, min_p=0.2),
    SamplingParams(seed=5, repeat_penalty=1.4, repeat_last_n=4, ignore_eos=True),
    SamplingParams(seed=6, frequency_penalty=0.5, presence_penalty=0.7, repeat_last_n=-1),
]
BROKEN = 155
MAX_TOKENS = [1, 2, 3, 12, 4, 9, 12]
WORK = list(zip(PROMPTS, PARAMS, MAX_TOKENS, strict=True))
MIX = [
    {"temperature": 0.0},
    {"temperature": 1.2, "seed": 1},
    {"temperature": 0.9, "seed": 2, "top_k": 5, "top_p": 0.8, "min_p": 0.1},
    {"temperature": 0.0, "repeat_penalty": 1.3},  # which the host chooses
    {"temperature": 0.0, "ignore_eos": True},
    {"temperature": 1.0, "seed": 3, "presence_penalty": 0.5},
]
ends = pytest.mark.parametrize("run_ahead", [1, 2])


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_tiny("llama", tmp_path_factory.mktemp("tiny") / "llama.gguf")


@pytest.fixture(scope="module")
def eog_ids(path):
    """Tokens that end some of the sequences in the middle."""
    texts = [text for text, _ in answers(new_engine(path), WORK)]
    return [texts[3][5], texts[6][8]]


def answers(engine, work, eog_ids=()):
    """Texts and reasons of all of `work`, which runs side by side; closes the engine's pipeline."""
    engine = Engine(engine.pipeline, eog_ids)
    requests = [engine.add(*each) for each in work]
    run(engine)
    engine.pipeline.close()
    return [(request.generated, request.finish_reason) for request in requests]


@pytest.fixture(scope="module")
def wanted(path, eog_ids):
    return answers(new_engine(path), WORK, eog_ids)


@ends
@pytest.mark.parametrize("parallel", [1, 2, 5])
@pytest.mark.parametrize("device", PLACES)
def test_whatever_chooses_tokens_the_text_is_the_same(
    path, eog_ids, wanted, device, parallel, run_ahead
):
    engine = new_engine(path, device=device, parallel=parallel, run_ahead=run_ahead, ubatch_size=4)
    assert answers(engine, WORK, eog_ids) == wanted
    assert {reason for _, reason in wanted} == {"stop", "length"}


@ends
@pytest.mark.parametrize("device", PLACES)
def test_after_cancelling_at_any_step_the_cache_is_right(path, device, run_ahead):
    engine = new_engine(path, device=device, parallel=2, run_ahead=run_ahead)
    whole = answers(new_engine(path), [(PROMPTS[5], GREEDY, 20)])[0][0]
    other = engine.add(PROMPTS[2], GREEDY, 100)
    for n in range(8):
        request = engine.add(PROMPTS[5], GREEDY, 20)
        for _ in range(n + 1):
            engine.step()
        engine.cancel(request)
        assert request.generated == whole[: len(request.generated)]
        again = engine.add([*PROMPTS[5], *request.generated], GREEDY, 5)
        while again.finish_reason is None:
            engine.step()
        assert again.generated == whole[len(request.generated) :][:5]
        if request.generated:
            assert again.n_cached == len(request.tokens) - 1
    engine.cancel(other)
    run(engine)
    engine.pipeline.close()


@ends
def test_parcels_are_counted_and_given_back(path, run_ahead):
    plain, ahead = (
        new_engine(path, device="cpu:0,cpu:1", parallel=3, run_ahead=n) for n in (0, run_ahead)
    )
    n_parcels = len(ahead.pipeline.parcels())
    assert n_parcels == 3 * (1 + run_ahead) + 2 + 2
    for before, after in zip(plain.pipeline.uses(), ahead.pipeline.uses(), strict=True):
        assert after.buffer_bytes - before.buffer_bytes == 4 * 3 * n_parcels
    budget = ahead.pipeline.stages[0].backend._budget
    used = budget.used_bytes
    ahead.pipeline._release()
    assert ahead.pipeline.parcels() == []
    assert used - budget.used_bytes >= 2 * 4 * 3 * n_parcels
    for engine in (plain, ahead):
        engine.pipeline.close()


@pytest.mark.parametrize(
    "options", [{"run_ahead": 0}, {"run_ahead": 2, "device": "cpu:0,cpu:1", "n_copies": 1}]
)
def test_without_parcels_or_taking_turns_the_host_waits_for_every_token(path, options):
    engine = new_engine(path, **options)
    submit, seen = engine.pipeline.executor.submit, []
    engine.pipeline.executor.submit = lambda ubatch, take: (
        seen.append(ubatch) or submit(ubatch, take)
    )
    engine.add(PROMPTS[3], GREEDY, 5)
    run(engine)
    engine.pipeline.close()
    assert len(seen) == 5
    assert all(not ubatch.late and ubatch.parcel is None for ubatch in seen)


@pytest.mark.parametrize("devices", [["cpu"], ["cpu:0", "cpu:1"]])
def test_a_stop_string_ends_the_text_and_a_conversation_goes_on_from_its_cells(chat_model, devices):
    texts = []
    for run_ahead in (0, 1, 2):
        with gguf_pp.load(chat_model, devices, ctx_size=128, run_ahead=run_ahead, **EXACT) as llm:
            whole = llm.generate("Hello", max_tokens=24, temperature=0).completion().text
            stop = whole[9:11]
            first = llm.generate("Hello", max_tokens=24, temperature=0, stop=[stop])
            ids = [*llm.tokenize("Hello"), *first.completion().ids]
            second = llm.generate([*ids, 40], max_tokens=9, temperature=0)
            texts.append((first.completion().text, second.completion().text))
            assert first.completion().finish_reason == "stop"
            assert second._request.n_cached >= len(ids) - 1
    assert texts[0] == texts[1] == texts[2]


def test_with_a_worker_between_the_ends_of_the_model_the_text_is_the_same(chat_model, tmp_path):
    options = {"ctx_size": 128, "parallel": 3, **EXACT}
    prompts = ["The", "A longer prompt, of several words", "x" * 40]
    sampling = {"max_tokens": 12, "temperature": 1.2, "seed": 5}
    with gguf_pp.load(chat_model, ["cpu"], **options) as llm:
        wanted = [c.text for c in llm.generate_batch(prompts, **sampling)]
    with workers(1, tmp_path) as [worker]:
        for devices in (["cpu:0", worker.device, "cpu:1"], [worker.device, "cpu"]):
            with gguf_pp.load(chat_model, devices, run_ahead=1, **options) as llm:
                for _ in range(2):  # the second time much of it is in the caches
                    assert [c.text for c in llm.generate_batch(prompts, **sampling)] == wanted
                    cut = llm.generate(prompts[1], **sampling)
                    next(cut)
                    cut.cancel()


@pytest.fixture(scope="module")
def broken_path(path, tmp_path_factory):
    """The model, but the embedding of token BROKEN is no number."""
    broken = tmp_path_factory.mktemp("broken") / "llama.gguf"
    shutil.copy(path, broken)
    embedding = next(t for t in GGUFReader(broken, "r+").tensors if t.name == "token_embd.weight")
    embedding.data[BROKEN] = np.nan
    embedding.data.base.flush()
    return broken


@pytest.mark.parametrize(
    ("devices", "run_ahead"),
    [(["cpu"], 0), (["cpu:0", "cpu:1"], 2), (["cuda:0", "cuda:1"], 1), (["cuda:0"], 0)],
    ids=str,
)
def test_logits_that_are_no_numbers_end_one_sequence_and_none_beside_it(
    path, broken_path, cuda_now, devices, run_ahead
):
    options = {**OPTIONS, "device": ",".join(devices), "parallel": 3, "run_ahead": run_ahead}
    [(wanted, _)] = answers(new_engine(path), [(PROMPTS[2], GREEDY, 12)])
    engine = new_engine(broken_path, **options)
    good = engine.add(PROMPTS[2], GREEDY, 12)
    bad = [engine.add([5, BROKEN, 9, 2], params, 12) for params in (GREEDY, PARAMS[1])]
    run(engine)
    assert good.generated == wanted
    for request in bad:
        assert request.finish_reason == "error" and request.generated == []
        assert "logits that are not numbers" in str(request.error)
    afresh = engine.add([5, BROKEN, 9, 2], GREEDY, 1)
    others = [engine.add(PROMPTS[2], GREEDY, 12), engine.add([5, *PROMPTS[2]], GREEDY, 1)]
    run(engine)
    assert afresh.n_cached == 0 and afresh.finish_reason == "error"
    assert others[0].generated == wanted and others[1].finish_reason == "length"
    engine.pipeline.close()


def mixed(model, devices, run_ahead):
    """Texts of MIX side by side, and how many rows were queued before their tokens were known."""
    with gguf_pp.load(model, devices, parallel=3, run_ahead=run_ahead, **OPTIONS) as llm:
        submit, late = llm._pipeline.executor.submit, []
        llm._pipeline.executor.submit = lambda ubatch, take: (
            late.extend(ubatch.late) or submit(ubatch, take)
        )
        prompts = ["The", "A longer one", "x" * 20] * 2
        streams = [
            llm.generate(prompt, max_tokens=6, **sampling)
            for prompt, sampling in zip(prompts, MIX, strict=True)
        ]
        return [stream.completion().ids for stream in streams], len(late)


@pytest.fixture(scope="module")
def chosen_by_samplers(chat_model):
    return mixed(chat_model, ["cpu"], 0)[0]


@pytest.mark.parametrize(("place", "run_ahead"), [("one", 2), ("two", 1), ("behind a CPU", 1)])
def test_tokens_that_cuda_devices_choose_are_those_that_samplers_choose(
    chat_model, cuda_now, chosen_by_samplers, place, run_ahead
):
    made, n_late = mixed(chat_model, CUDA_PLACES[place], run_ahead)
    assert made == chosen_by_samplers
    assert n_late > 6
