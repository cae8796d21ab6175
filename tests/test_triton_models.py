"""Whole models through Triton's kernels, in their interpreter, on the stand-in for CUDA."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

import gguf_pp
import tests.interpreted  # noqa: F401
from gguf_pp import arch
from gguf_pp.backend import cuda
from gguf_pp.batch import Span, UBatch
from gguf_pp.gguf import ModelFile
from gguf_pp.pipeline.load import DeviceLoader
from gguf_pp.triton import multiply
from gguf_pp.triton import ops as device_ops
from gguf_pp.triton.ops import DeviceOps
from tests.cuda_now import Now
from tests.mixed import KINDS, N_VOCAB, write_mixed

SEEDS = {"llama": 29, "gemma3": 4, "qwen2": 16, "mixtral": 4}
"""With these prompts no choice of a token is a close one."""
GREEDY = {"max_tokens": 3, "temperature": 0.0, "ignore_eos": True}
WAYS = {
    "exact": {"exact": True, "cache_type_k": "f32", "cache_type_v": "f32"},
    "rounded": {"exact": False},
}
LIMITS = {"exact": 1e-4, "rounded": 1e-2}
"""Gemma's GELU is defined on float16, where a last bit of x can move the result by a thousandth."""
MARGIN = 0.1
"""Of the best choice over the second, in standard deviations of the logits."""


QUICK = ("llama", "rounded")
ALL = [
    pytest.param(name, way, marks=() if (name, way) == QUICK else pytest.mark.slow)
    for name in KINDS
    for way in WAYS
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixed")
    return {name: write_mixed(name, folder / f"{name}.gguf") for name in KINDS}


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    """Programs take all rows of W at once: the interpreter is slow per program, not per number."""
    for name in ("gemv_launch", "plain_launch", "dequantize_launch"):
        monkeypatch.setattr(multiply, name, partial(widened, getattr(multiply, name)))


def widened(launch, *arguments, **options):
    made = launch(*arguments, **options)
    return replace(made, constants=made.constants | {"BLOCK_N": 256})


@pytest.fixture
def now(monkeypatch):
    now = Now()
    monkeypatch.setattr(cuda, "open_cuda", partial(cuda.open_cuda, api=now))

    class OnHost(DeviceOps):
        def __init__(self, device, *, exact, is_torch_only):
            super().__init__("cpu", exact=exact, is_torch_only=is_torch_only)

    monkeypatch.setattr(device_ops, "DeviceOps", OnHost)
    return now


def load(path, **options):
    return gguf_pp.load(path, ctx_size=64, ubatch_size=16, parallel=3, **options)


def wanted(path, prompts):
    """What the reference generates, and its logits of the first prompt."""
    with load(path, devices=["cpu"], kernels="torch", **WAYS["exact"]) as llm:
        found = [c.ids for c in llm.generate_batch(prompts, **GREEDY)]
        for prompt, ids in zip(prompts, found, strict=True):
            steps = llm.logits(prompt + ids[:-1])[len(prompt) - 1 :]
            second, first = np.sort(steps)[:, -2:].T
            assert ((first - second) / steps.std() > MARGIN).all()
        return found, llm.logits(prompts[0])


@pytest.mark.parametrize(("name", "way"), ALL)
def test_a_model_generates_what_the_reference_does(models, now, name, way):
    random = np.random.default_rng(SEEDS[name])
    prompts = [random.integers(0, N_VOCAB, n).tolist() for n in (12, 4, 1)]
    tokens, logits = wanted(models[name], prompts)
    with load(models[name], devices=["cuda:0", "cuda:1"], **WAYS[way]) as llm:
        assert [stage.kernels for stage in llm._pipeline.stages] == ["triton", "triton"]
        error = np.linalg.norm(llm.logits(prompts[0]) - logits) / np.linalg.norm(logits)
        assert error < LIMITS[way]
        assert [c.ids for c in llm.generate_batch(prompts, **GREEDY)] == tokens
        assert llm.generate(prompts[1], **GREEDY).completion().ids == tokens[1]


@pytest.mark.parametrize(("name", "way"), ALL)
def test_a_row_of_a_step_has_the_same_bits_alone_and_in_a_group(models, name, way):
    ops = DeviceOps("cpu", exact=way == "exact")
    with ModelFile.open(models[name]) as file:
        model = arch.build(file.metadata)
        loader = DeviceLoader(file, 64, ops, lambda n_bytes: None)
        table, head = model.load_embedding(loader), model.load_head(loader)
        layer = model.load_layer(loader, 0)
    hp, random = model.hp, torch.Generator().manual_seed(5)
    cache = ops.layer_kv(3, 64, hp.n_kv_heads, hp.head_size, "f16", "f16")
    for kept in (cache.k, cache.v):
        kept.copy_(torch.randn(kept.shape, generator=random))

    def step(*rows):
        tokens, spans = (7, 8, 9), (Span(0, 40, 1), Span(1, 3, 1), Span(2, 21, 1))
        ubatch = UBatch(tuple(tokens[i] for i in rows), tuple(spans[i] for i in rows), ())
        x = model.embed(ops, table, ops.ids(ubatch.tokens))
        return model.logits(ops, head, model.layer(ops, layer, x, cache, ubatch))

    together = step(0, 1, 2)
    for i in range(3):
        assert torch.equal(step(i)[0], together[i])
