"""Two real models against llama.cpp's numbers for them (tests/data/real).

`exact` there is llama.cpp with weights dequantized to float32, `native` its own int8 kernels.
"""

import json
from pathlib import Path

import numpy as np
import pytest

import gguf_pp
from gguf_pp.native import kernels
from tests.real import real

GOLDEN = {
    name: json.loads((Path(__file__).parent / f"data/real/{name}.json").read_text())
    for name in ("smollm2-135m", "gemma3-270m")
}
EXACT = {"exact": True, "cache_type_k": "f32", "cache_type_v": "f32", "ctx_size": 256}
needs_native = pytest.mark.skipif(kernels() is None, reason="the native kernels were not built")

LAYOUTS = [
    {"devices": ["cpu:0", "cpu:1"], "ubatch_size": 7},
    {"devices": ["cpu:0", "cpu:1"], "n_copies": 4},
    {"devices": ["cpu:0", "cpu:1"], "n_copies": 1, "ubatch_size": 64},
    {"devices": ["cpu:0", "cpu:1", "cpu:2"], "ubatch_size": 1},
    {"ubatch_size": 512},
]


def log_softmax(logits):
    values = logits.astype(np.float64)
    values -= values.max(axis=-1, keepdims=True)
    return values - np.log(np.exp(values).sum(axis=-1, keepdims=True))


def differences(llm, name, n_positions=None):
    """Of our log-probabilities from those listed: float64 [positions, 10]."""
    golden = GOLDEN[name]["exact"]
    ours = log_softmax(llm.logits(golden["text_ids"][:n_positions]))
    top = np.array(golden["top10"][:n_positions])
    ids, values = top[..., 0].astype(int), top[..., 1]
    return np.take_along_axis(ours, ids, axis=1) - values


# Largest and mean difference. SmolLM2's is float32 rounding. Gemma's GELU goes through float16
# (ops/base.py): where a sum in another order crosses a rounding boundary, one activation moves by
# 0.05 %, so any two float32 implementations differ by about 5e-4 on average and 5e-3 at most
# (torch and native differ as much from each other as each from llama.cpp).
TOLERANCE = {"smollm2-135m": (3e-4, 3e-5), "gemma3-270m": (1e-2, 1e-3)}


@pytest.mark.parametrize(
    ("kernel", "n_positions"), [("torch", 48), pytest.param("native", None, marks=needs_native)]
)
@pytest.mark.parametrize("name", GOLDEN)
def test_log_probabilities_equal_llama_cpp(name, kernel, n_positions):
    worst, mean = TOLERANCE[name]
    with gguf_pp.load(real(name), kernels=kernel, **EXACT) as llm:
        off = np.abs(differences(llm, name, n_positions))
    assert off.max() < worst
    assert off.mean() < mean


@needs_native
@pytest.mark.parametrize("name", GOLDEN)
def test_perplexity_equals_llama_cpp(name):
    golden = GOLDEN[name]["exact"]
    with gguf_pp.load(real(name), **EXACT) as llm:
        of_next, _, _ = llm.log_probabilities(golden["text_ids"])
    assert -of_next.mean() == pytest.approx(golden["nll"], abs=3e-4)


@needs_native
@pytest.mark.parametrize("name", GOLDEN)
def test_the_best_token_is_llama_cpps_where_it_is_sure(name):
    with gguf_pp.load(real(name), devices=["cpu:0", "cpu:1"], **EXACT) as llm:
        for case in GOLDEN[name]["exact"]["greedy"]:
            logits = llm.logits(case["prompt_ids"] + case["ids"][:-1])
            best = logits[len(case["prompt_ids"]) - 1 :].argmax(axis=-1)
            sure = np.array(case["margin"]) > 0.01
            assert np.array_equal(best[sure], np.array(case["ids"])[sure]), case["prompt"]


@needs_native
@pytest.mark.parametrize("name", GOLDEN)
def test_greedy_text_equals_llama_cpp(name):
    cases = GOLDEN[name]["exact"]["greedy"]
    with gguf_pp.load(real(name), devices=["cpu:0", "cpu:1"], parallel=4, **EXACT) as llm:
        prompts = [case["prompt_ids"] for case in cases]
        done = llm.generate_batch(prompts, max_tokens=32, temperature=0)
        n_compared = 0
        for case, completion in zip(cases, done, strict=True):
            unsure = (i for i, margin in enumerate(case["margin"]) if margin <= 0.01)
            n = min(next(unsure, 32), len(completion.ids))
            n_compared += n
            assert completion.ids[:n] == case["ids"][:n], case["prompt"]
        assert n_compared > 32


@needs_native
def test_text_does_not_depend_on_how_far_the_host_runs_ahead():
    prompts = [case["prompt_ids"] for case in GOLDEN["smollm2-135m"]["exact"]["greedy"]]
    texts = []
    for devices, run_ahead in ((["cpu"], 0), (["cpu"], 1), (["cpu:0", "cpu:1"], 2)):
        options = {"ctx_size": 256, "parallel": 3, "run_ahead": run_ahead}
        with gguf_pp.load(real("smollm2-135m"), devices, **options) as llm:
            greedy = llm.generate_batch(prompts, max_tokens=16, temperature=0)
            drawn = llm.generate_batch(prompts, max_tokens=16, seed=3, repeat_penalty=1.1)
            texts.append([completion.ids for completion in (*greedy, *drawn)])
    assert texts[0] == texts[1] == texts[2]


@needs_native
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", GOLDEN)
def test_bits_do_not_depend_on_devices_copies_or_ubatches(name, exact):
    ids = GOLDEN[name]["exact"]["text_ids"][:72]
    options = {**EXACT, "exact": exact}
    with gguf_pp.load(real(name), **options) as llm:
        whole = llm.logits(ids)
    for layout in LAYOUTS:
        with gguf_pp.load(real(name), **options, **layout) as llm:
            assert np.array_equal(llm.logits(ids), whole), layout


@needs_native
@pytest.mark.parametrize("name", GOLDEN)
def test_int8_activations_stay_closer_to_exact_than_llama_cpp(name):
    golden = GOLDEN[name]
    exact, theirs = (
        {(i, int(t)): v for i, row in enumerate(golden[kind]["top10"]) for t, v in row}
        for kind in ("exact", "native")
    )
    off = np.array([abs(theirs[key] - value) for key, value in exact.items() if key in theirs])
    with gguf_pp.load(real(name), ctx_size=256) as llm:
        ours = np.abs(differences(llm, name))
    assert ours.mean() < off.mean()
    assert ours.max() < off.max()
