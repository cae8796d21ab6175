"""All that a model asks of a device, in plain torch on the CPU, against the reference."""

import logging
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

import gguf_pp
from gguf_pp.batch import Span, UBatch
from gguf_pp.ops.base import Attention, Rope
from gguf_pp.ops.check import check_kernels, random_matrix, weight_types
from gguf_pp.ops.torch_ops import TorchOps
from gguf_pp.pipeline import build
from gguf_pp.triton import ops as device_ops
from gguf_pp.triton.matrix import DeviceExperts, DeviceMatrix
from gguf_pp.triton.ops import DeviceOps, Piece, pieces_of
from tests.tiny import NAMES, golden, write_tiny

GREEDY = {"max_tokens": 12, "temperature": 0.0}
EXACT = {"exact": True, "cache_type_k": "f32", "cache_type_v": "f32"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return {name: write_tiny(name, folder / f"{name}.gguf") for name in NAMES}


@pytest.fixture
def as_device(monkeypatch):
    """Let CPU devices compute as CUDA devices without Triton do."""

    def make(backend, kernels, *, exact):
        return DeviceOps("cpu", exact=exact, is_torch_only=True)

    monkeypatch.setattr(build, "make_ops_on", make)


def logits(path, ids, **options):
    with gguf_pp.load(path, kernels="torch", ctx_size=64, **options) as llm:
        return llm.logits([int(i) for i in ids])


def relative_error(a, b):
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def limit_for(name, limit):
    """Gemma's activation is rounded to float16, where one last bit becomes a thousand others."""
    return 1e-3 if "gemma" in name else limit


def ubatch(*spans):
    return UBatch((0,) * sum(n for _, _, n in spans), tuple(Span(*s) for s in spans), ())


def attention(window=0):
    angles = torch.outer(torch.arange(64.0), torch.tensor([1.0, 0.1, 0.01, 0.001]))
    return Attention(4, 2, 8, 8**-0.5, Rope(angles.cos(), angles.sin(), True), window=window)


@pytest.mark.parametrize("ubatch_size", [1, 7])
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_llama_cpp(tiny, as_device, name, ubatch_size):
    ids, wanted = golden(name)
    options = {**EXACT, "devices": ["cpu:0", "cpu:1"], "ubatch_size": ubatch_size}
    assert relative_error(logits(tiny[name], ids, **options), wanted) < limit_for(name, 1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_exact_logits_are_those_of_the_reference(tiny, name, as_device, monkeypatch):
    ids, _ = golden(name)
    ours = logits(tiny[name], ids, **EXACT)
    monkeypatch.undo()
    assert relative_error(ours, logits(tiny[name], ids, **EXACT)) < limit_for(name, 1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_rounded_logits_are_near_those_of_the_reference(tiny, name, as_device, monkeypatch):
    ids, _ = golden(name)
    ours = logits(tiny[name], ids)
    monkeypatch.undo()
    assert relative_error(ours, logits(tiny[name], ids, **EXACT)) < 1e-2


def test_a_pipeline_of_devices_generates_what_the_reference_does(
    chat_model, as_device, monkeypatch
):
    prompts = ["The", "A longer prompt, of several words", "x" * 100]

    def answers(**options):
        with gguf_pp.load(chat_model, kernels="torch", ctx_size=256, parallel=3, **options) as llm:
            return [c.ids for c in llm.generate_batch(prompts, **GREEDY)]

    ours = answers(devices=["cpu:0", "cpu:1", "cpu:2"], n_copies=2, ubatch_size=16)
    monkeypatch.undo()
    assert ours == answers(devices=["cpu"])


@pytest.mark.parametrize("is_exact", [True, False])
def test_products_of_every_type_are_right(is_exact):
    make = lambda exact: DeviceOps("cpu", exact=is_exact, is_torch_only=True)  # noqa: E731
    assert [check for check in check_kernels(make, n_rows=9) if check.fault] == []


def test_single_rows_attend_together_and_spans_one_by_one():
    spans = ((3, 9, 1), (0, 4, 1), (1, 0, 5), (2, 7, 2), (4, 0, 1))
    assert list(pieces_of(ubatch(*spans))) == [
        Piece(0, 2, 10, True),
        Piece(2, 7, 5, False),
        Piece(7, 9, 9, False),
        Piece(9, 10, 1, True),
    ]
    assert list(pieces_of(ubatch())) == []


@pytest.mark.parametrize("window", [0, 3])
def test_rows_of_several_slots_attend_as_in_the_reference(window):
    ours, reference = DeviceOps("cpu", exact=True, is_torch_only=True), TorchOps()
    spec, random = attention(window), torch.Generator().manual_seed(3)
    caches = [ops.layer_kv(4, 50, 2, 8, "f32", "f16") for ops in (ours, reference)]
    for cache in caches:
        cache.k.fill_(torch.nan)
        cache.v.fill_(torch.nan)
    for spans in (((1, 0, 20),), ((3, 0, 17), (0, 0, 1), (1, 20, 1)), ((0, 1, 30), (3, 17, 33))):
        rows = ubatch(*spans)
        qkv = torch.randn(rows.n_rows, 64, generator=random)
        got, wanted = (
            ops.attention(qkv.clone(), cache, rows, spec)
            for ops, cache in zip((ours, reference), caches, strict=True)
        )
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("span", [(2, 0, 1), (-1, 0, 1), (0, -1, 2), (0, 9, 2), (1, 10, 1)])
def test_cells_that_are_not_there_are_refused_before_the_device_sees_them(span):
    ops = DeviceOps("cpu", exact=True, is_torch_only=True)
    cache = ops.layer_kv(2, 10, 2, 8, "f16", "f16")
    rows = ubatch(span)
    with pytest.raises(ValueError, match="in 2 slots of 10"):
        ops.attention(torch.zeros(rows.n_rows, 64), cache, rows, attention())


class Sent:
    """Uploads that only count."""

    def __init__(self, n_bytes):
        self.n_bytes, self.values = n_bytes, []

    def send(self, values, out):
        assert values.is_contiguous() and values.device.type == "cpu"
        assert (values.shape, values.dtype) == (out.shape, out.dtype)
        assert out.device.type == "meta"
        self.values.append(values.tolist())


class Blind(DeviceOps):
    """On a device whose values nobody can see: to look at one raises."""

    def __init__(self, likes_halves=False, exact=False):
        super().__init__("meta", exact=exact, is_torch_only=True)
        self._products._likes_halves = likes_halves

    def matrix(self, parts):
        return DeviceMatrix.of([blinded(part) for _, part in DeviceMatrix(parts, "cpu").parts()])

    def experts(self, parts):
        seen = DeviceExperts(parts, "cpu")
        seen._parts = tuple(blinded(part) for _, _, part in seen.parts())
        return seen


def blinded(part):
    return replace(part, planes={name: plane.to("meta") for name, plane in part.planes.items()})


@pytest.fixture
def uploads(monkeypatch):
    made = []

    def make(api, n_slots, n_bytes):
        made.append(Sent(n_bytes))
        return made[-1]

    monkeypatch.setattr(device_ops, "Uploads", make)
    return made


def test_where_rows_stand_is_brought_to_the_device_once_for_all_layers(uploads):
    ops, spec = Blind(), attention()
    caches = [ops.layer_kv(2, 50, 2, 8, "f16", "f16") for _ in range(3)]
    for rows in (ubatch((1, 4, 2), (0, 7, 1)), ubatch((1, 6, 1))):
        for cache in caches:
            ops.attention(torch.empty(rows.n_rows, 64, device="meta"), cache, rows, spec)
    (sent,) = uploads
    assert sent.values == [[[1, 1, 0], [4, 5, 7]], [[1], [6]]]
    assert len(ops._ropes) == len(ops._specs) == 1


def test_pinned_memory_grows_with_what_is_brought(uploads):
    ops = Blind()
    table = ops.matrix([random_matrix(weight_types()[0], 4, 256)[0]])
    for n_rows in (1, 20_000, 2):
        assert ops.embed(table, ops.ids([3] * n_rows)).shape == (n_rows, 256)
    assert [len(each.values) for each in uploads] == [1, 2]
    assert [each.n_bytes for each in uploads] == [device_ops.UPLOAD_BYTES, 320_000]


@pytest.mark.parametrize("n_rows", [1, 100])
@pytest.mark.parametrize("likes_halves", [False, True])
def test_no_product_waits_for_the_device(n_rows, likes_halves):
    ops = Blind(likes_halves)
    for type in weight_types():
        matrix = ops.matrix([random_matrix(type, 8, 512)[0]])
        assert ops.linear(torch.empty(n_rows, 512, device="meta"), matrix).shape == (n_rows, 8)


@pytest.mark.parametrize("name", NAMES)
def test_no_layer_waits_for_the_device(tiny, name, uploads):
    from gguf_pp import arch
    from gguf_pp.gguf import ModelFile
    from gguf_pp.pipeline.load import DeviceLoader

    with ModelFile.open(tiny[name]) as file:
        model = arch.build(file.metadata)
        ops = Blind()
        ops.vector = partial(vector_seen, ops)
        load = DeviceLoader(file, 64, ops, lambda n_bytes: None)
        table, layers = model.load_embedding(load), [model.load_layer(load, i) for i in range(2)]
        head, hp = model.load_head(load), model.hp
        caches = [ops.layer_kv(2, 64, hp.n_kv_heads, hp.head_size, "f16", "f16") for _ in layers]
        for rows in (ubatch((0, 0, 5), (1, 3, 1)), ubatch((0, 5, 1), (1, 4, 1))):
            x = model.embed(ops, table, ops.ids(rows.tokens))
            for layer, cache in zip(layers, caches, strict=True):
                x = model.layer(ops, layer, x, cache, rows)
            assert model.logits(ops, head, x).shape[0] == rows.n_rows


def vector_seen(ops, raw):
    """Factors of rotation are read on the host, while weights are loaded."""
    if raw.name == "rope_freqs.weight":
        return DeviceOps("cpu", exact=True, is_torch_only=True).vector(raw)
    return DeviceOps.vector(ops, raw)


def test_why_torch_computes_is_said_once_per_device(caplog):
    caplog.set_level(logging.INFO, "gguf_pp")
    device_ops._announce.cache_clear()
    for _ in range(2):
        device_ops._announce(torch.device("cuda:1"), "no compiler")
        device_ops._announce(torch.device("cuda:0"), None)
    assert caplog.messages == [
        "cuda:1 computes with torch alone: no compiler",
        "cuda:0 computes with Triton kernels",
    ]
    device_ops._announce.cache_clear()
