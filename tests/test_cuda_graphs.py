"""Steps as CUDA graphs, on a stand-in that does again what was captured, in place."""

import gc
import logging
import weakref
from functools import partial

import pytest
import torch

import gguf_pp
from gguf_pp.backend import cuda
from gguf_pp.quants.reference import SUPPORTED, dequantize
from gguf_pp.triton import ops as device_ops
from gguf_pp.triton.ops import DeviceOps
from tests.cuda_graph import Capture
from tests.cuda_now import Now
from tests.quantized import random_raw

PROMPTS = ["The", "A longer prompt, of several words", "x" * 100]
GREEDY = {"max_tokens": 12, "temperature": 0.0}
SEEDED = {"max_tokens": 12, "temperature": 0.9, "top_k": 7, "top_p": 0.9, "seed": 3}
OPTIONS = {"kernels": "torch", "ctx_size": 256, "ubatch_size": 16, "exact": True}


@pytest.fixture
def now(monkeypatch):
    now = Now()
    monkeypatch.setattr(cuda, "open_cuda", partial(cuda.open_cuda, api=now))

    class OnHost(DeviceOps):
        def __init__(self, device, *, exact, is_torch_only):
            super().__init__("cpu", exact=exact, is_torch_only=is_torch_only)

    monkeypatch.setattr(device_ops, "DeviceOps", OnHost)
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # many small operations, for which threads only wait for each other
    yield now
    torch.set_num_threads(n_threads)


def texts(model, devices, params, **options):
    with gguf_pp.load(model, devices=devices, parallel=3, **{**OPTIONS, **options}) as llm:
        return [c.ids for c in llm.generate_batch(PROMPTS, **params)]


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("devices", [["cuda:0"], ["cuda:0", "cuda:1"], ["cuda:0", "cpu"]])
def test_replayed_steps_give_the_tokens_of_a_cpu(chat_model, now, devices, params):
    assert texts(chat_model, devices, params) == texts(chat_model, ["cpu"], params)
    assert now.log.count("replay") > 6 * sum("cuda" in name for name in devices)


def test_a_context_that_outgrows_its_graph_gets_another(chat_model, now):
    def ids(device):
        with gguf_pp.load(chat_model, devices=[device], **{**OPTIONS, "ctx_size": 1024}) as llm:
            prompt = (llm.tokenize("x" * 400) * 2)[:250]
            return llm.generate(prompt, **GREEDY, ignore_eos=True).completion().ids

    assert len(ids("cpu")) == GREEDY["max_tokens"]
    assert ids("cuda:0") == ids("cpu")
    # A full part of the prompt; decode steps for 256 cells, and for 512.
    assert now.log.count("capture") == 3


@pytest.mark.parametrize("devices", [["cuda:0"], ["cuda:0", "cuda:1"], ["cpu", "cuda:0", "cuda:1"]])
@pytest.mark.parametrize("n_tokens", [48, 49, 100])
def test_full_parts_of_a_prompt_are_replayed_wherever_they_stand(
    chat_model, now, devices, n_tokens
):
    def ids(devices):
        with gguf_pp.load(chat_model, devices=devices, parallel=2, **OPTIONS) as llm:
            prompts = [(llm.tokenize(text) * 90)[:n_tokens] for text in ("several words", "x y")]
            found = []
            for prompt in (*prompts, prompts[1], prompts[0]):  # other slots, other tokens
                found.append(llm.generate(prompt, max_tokens=1, temperature=0).completion().ids)
            return found

    wanted = ids(["cpu"])
    now.log.clear()
    assert ids(devices) == wanted
    n_cuda = sum("cuda" in name for name in devices)
    n_parts = 2 * ((n_tokens - 1) // OPTIONS["ubatch_size"])  # of prompts that are not repeated
    assert now.log.count("capture") >= n_cuda
    assert now.log.count("replay") >= n_cuda * (n_parts - 1)  # the first goes kernel by kernel


def test_a_full_part_that_wants_logits_is_not_replayed(chat_model, now):
    with gguf_pp.load(chat_model, devices=["cuda:0"], **OPTIONS) as llm:
        tokens = (llm.tokenize("several words") * 9)[:48]
        logits = llm.logits(tokens)
    with gguf_pp.load(chat_model, devices=["cpu"], **OPTIONS) as llm:
        torch.testing.assert_close(torch.tensor(logits), torch.tensor(llm.logits(tokens)))
    assert "replay" not in now.log


def test_a_step_is_captured_when_it_comes_for_the_second_time(chat_model, now):
    texts(chat_model, ["cuda:0"], GREEDY)
    assert 1 <= now.log.count("capture") < 6
    assert now.log.index("capture") < now.log.index("replay")


def test_what_cannot_be_captured_runs_kernel_by_kernel_and_is_told_once(chat_model, now, caplog):
    now.fails_at, now.failing = 5, 100
    caplog.set_level(logging.WARNING, "gguf_pp")
    assert texts(chat_model, ["cuda:0"], GREEDY) == texts(chat_model, ["cpu"], GREEDY)
    assert "replay" not in now.log
    told = [m for m in caplog.messages if "without a CUDA graph" in m]
    assert len(told) == 1
    assert "out of memory" in told[0]


def test_after_one_that_failed_others_are_captured(chat_model, now):
    now.fails_at, now.failing = 5, 1
    assert texts(chat_model, ["cuda:0"], GREEDY) == texts(chat_model, ["cpu"], GREEDY)
    assert "replay" in now.log


def test_one_that_failed_takes_nothing_from_those_that_are_replayed(chat_model, now):
    """A reset takes the memory that cuBLAS works in on this stream, in their graphs too."""
    with gguf_pp.load(chat_model, devices=["cuda:0"], parallel=3, **OPTIONS) as llm:
        alone = llm.generate(PROMPTS[0], **GREEDY).completion().ids
        now.fails_at, now.failing = 5, 1
        together = [c.ids for c in llm.generate_batch(PROMPTS, **GREEDY)]
        assert now.failing == 0
        assert llm.generate(PROMPTS[0], **GREEDY).completion().ids == alone == together[0]
    assert "replay" in now.log and "reset" not in now.log


def test_a_closed_model_leaves_nothing_for_the_garbage_collector(chat_model, now):
    gc.collect()
    gc.disable()
    try:
        with gguf_pp.load(chat_model, devices=["cuda:0", "cuda:1"], **OPTIONS) as llm:
            llm.generate(PROMPTS[2], **GREEDY).completion()
            stages = llm._pipeline.stages
            held = [each for stage in stages for each in (stage._steps, stage._kv[0].k)]
            held += [part.planes["q"] for stage in stages for part in _parts(stage)]
            kept = [weakref.ref(each) for each in held]
            del stages, held
        assert len(kept) > 4
        assert [ref for ref in kept if ref() is not None] == []
    finally:
        gc.enable()


def _parts(stage):
    """Planes of the first layer's matrices."""
    ffn = stage._weights[0].ffn
    return [part for each in (ffn.gate_up, ffn.down) for _, part in each.weight.parts()]


@pytest.mark.parametrize("type", sorted(SUPPORTED), ids=lambda type: type.name)
def test_weights_of_every_type_are_dequantized_inside_a_graph(type):
    raw = random_raw(type, 3, 512)
    blocks, out = torch.from_numpy(raw.data.copy()), torch.empty(3, 512)
    wanted = dequantize(blocks, type, out).clone()  # what is brought to a device once is there now
    with Capture():
        again = dequantize(blocks, type, torch.empty(3, 512))
    torch.testing.assert_close(again, wanted, rtol=0, atol=0, equal_nan=True)


def test_graphs_are_dropped_before_others_get_the_streams_they_were_captured_on(
    chat_model, now, monkeypatch
):
    left, real = [], cuda.cuda_streams.give_back
    with gguf_pp.load(chat_model, ["cuda:0", "cuda:1"], parallel=3, **OPTIONS) as llm:
        llm.generate_batch(PROMPTS, **GREEDY)
        steps = [stage._steps for stage in llm._pipeline.stages]
        assert all(s._graphs for s in steps)

        def give_back(api, index, stream, *, compute):
            left.append(len(steps[index]._graphs))
            real(api, index, stream, compute=compute)

        monkeypatch.setattr(cuda.cuda_streams, "give_back", give_back)
    assert len(left) >= 6 and set(left) == {0}


@pytest.mark.parametrize("devices", [["cuda:0", "cuda:1"], ["cuda:1", "cuda:1"]])
def test_each_stage_captures_on_its_own_compute_stream(chat_model, now, devices):
    with gguf_pp.load(chat_model, devices, parallel=3, **OPTIONS) as llm:
        llm.generate_batch(PROMPTS, **GREEDY)
        stages = llm._pipeline.stages
        own = [stage.compute.raw for stage in stages]
        n_captured = [stage._steps.n_captured for stage in stages]
        assert [now.captured_on.count(raw) for raw in own] == n_captured
    assert all(n_captured) and len(set(map(id, own))) == 2
    assert [raw.device_index for raw in own] == [int(name[-1]) for name in devices]


def test_graphs_can_be_left_out(chat_model, now):
    options = {"cuda_graphs": False}
    assert texts(chat_model, ["cuda:0"], GREEDY, **options) == texts(chat_model, ["cpu"], GREEDY)
    assert "capture" not in now.log


def test_tokens_that_end_a_text_are_banned_on_the_device_too(chat_model, now):
    first = texts(chat_model, ["cpu"], GREEDY)[0][0]

    def without(device):
        with gguf_pp.load(chat_model, devices=[device], **OPTIONS) as llm:
            llm.generate(PROMPTS[0], **GREEDY, ignore_eos=True).completion()
            llm._engine.eog_ids = frozenset([first])
            llm._engine.pipeline.set_ends([first])
            return llm.generate(PROMPTS[0], **GREEDY, ignore_eos=True).completion().ids

    ids = without("cuda:0")
    assert len(ids) == GREEDY["max_tokens"]
    assert first not in ids
    assert ids == without("cpu")
