"""Kernels of mixtures of experts, interpreted, against the library, their twins and float64."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests import interpreted  # noqa: F401

# isort: split
from gguf_pp import arch
from gguf_pp.batch import Span, UBatch
from gguf_pp.gguf import ModelFile
from gguf_pp.pipeline.load import DeviceLoader
from gguf_pp.triton import experts as device_experts
from gguf_pp.triton import mixture, mixture_torch, multiply, multiply_torch, quantize_torch
from gguf_pp.triton.linear import Limits
from gguf_pp.triton.matrix import DeviceExperts
from gguf_pp.triton.multiply_torch import Pairs
from gguf_pp.triton.ops import DeviceOps
from tests.experts import expert_raw, mixture_of, reference, relative_error, weights_of
from tests.quantized import T, random_x, width, worst
from tests.test_triton_kernels import among_nan, assert_unharmed, framed, near
from tests.tiny import golden, write_tiny

N_EXPERTS, N_ROWS = 3, 6  # of W: one program and a half
EXPERTS = [2, 0, 2, 1]
TYPES = [T.Q4_K, T.Q6_K, T.Q8_0, T.MXFP4]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """Interpreting a program takes 0.2 s: have each take the most rows that it ever does."""
    monkeypatch.setattr(multiply, "MANY_ROWS", 0)


def planes_of(raw):
    ((_, _, part),) = DeviceExperts([raw], "cpu").parts()
    return part


def of_expert(w, i):
    return w.rows(i * N_ROWS, (i + 1) * N_ROWS)


def guarded(w):
    return replace(w, planes={name: among_nan(plane) for name, plane in w.planes.items()})


FORMS = {
    "gemv_int8": quantize_torch.quantize_int8,
    "gemv_exact": quantize_torch.transposed,
    "gemv_plain": lambda x: x,
    "gemm": lambda x: quantize_torch.quantize_half(x, is_transposed=True),
}


@pytest.mark.parametrize(
    ("kernel", "type", "n_share", "limit"),
    [
        *(("gemv_int8", type, 2, 1e-2) for type in TYPES),
        ("gemv_int8", T.Q5_1, 1, 1e-2),
        *(("gemv_exact", type, 2, 2e-6) for type in (T.Q4_K, T.MXFP4)),
        *(("gemv_plain", type, 2, 2e-6) for type in (T.F16, T.F32)),
        ("gemv_plain", T.BF16, 1, 2e-6),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_pair_is_multiplied_as_its_row_by_its_expert_alone(kernel, type, n_share, limit):
    n_cols = 168 if kernel == "gemv_plain" else width(type, 160)
    raw = expert_raw(type, N_EXPERTS, N_ROWS, n_cols)
    w, made = planes_of(raw), FORMS[kernel]
    x = random_x(len(EXPERTS) // n_share, raw.n_cols)
    pairs = Pairs(torch.tensor(EXPERTS, dtype=torch.int32), n_share)
    whole, out = framed(len(EXPERTS), N_ROWS)
    multiplied, twin = getattr(multiply, kernel), getattr(multiply_torch, kernel)
    multiplied(made(x), guarded(w), out, pairs=pairs)
    assert_unharmed(whole)
    assert near(out, twin(made(x), w, torch.empty(out.shape), pairs=pairs))
    for i, expert in enumerate(EXPERTS):
        row = x[i // n_share : i // n_share + 1]
        assert worst(out[i : i + 1], row, weights_of(raw)[expert]) < limit
    alone = multiplied(made(x[-1:]), of_expert(w, EXPERTS[-1]), torch.empty(1, N_ROWS))
    assert torch.equal(out[-1:], alone)


@pytest.mark.parametrize(("type", "most"), [*((type, 16) for type in TYPES), (T.Q8_0, 32)], ids=str)
def test_pairs_of_an_expert_are_multiplied_in_tiles(monkeypatch, type, most):
    monkeypatch.setattr(mixture_torch, "TILE_SIZES", (16, most))
    experts = torch.tensor([0] * 19 + [2] * 3 + [0, 2] * 13, dtype=torch.int32)  # none of expert 1
    raw = expert_raw(type, N_EXPERTS, N_ROWS, width(type, 160))
    w, x = planes_of(raw), random_x(len(experts) // 2, raw.n_cols)
    tiles, rows = mixture_torch.tiles_of(experts, N_EXPERTS), FORMS["gemm"](x)
    assert tiles.size == (16 if most == 16 else 32)
    whole, out = framed(len(experts), N_ROWS)
    multiply.gemm_tiles(rows._replace(values=among_nan(rows.values)), guarded(w), out, tiles, 2)
    assert_unharmed(whole)
    assert near(out, multiply_torch.gemm_tiles(rows, w, torch.empty(out.shape), tiles, 2))
    for expert in (0, 2):
        at = (experts == expert).nonzero().flatten()
        assert worst(out[at], x[at // 2], weights_of(raw)[expert]) < 3e-4
    theirs = FORMS["gemm"](x[at // 2])
    alone = multiply.gemm(theirs, of_expert(w, 2), torch.empty(len(at), N_ROWS))
    # In the interpreter a tile of another size is summed in another order.
    assert torch.equal(out[at], alone) if tiles.size == 16 else near(out[at], alone)


@pytest.mark.parametrize(("n_experts", "n_used"), [(1, 1), (5, 5), (40, 6), (128, 8)])
def test_the_best_experts_are_those_of_the_twin(n_experts, n_used):
    logits = torch.randn(4, n_experts, generator=torch.Generator().manual_seed(n_experts))
    logits[1] = logits[1].round()  # many are equal
    logits[2] = torch.tensor([0.0, -0.0]).repeat(n_experts)[:n_experts]
    logits[3, 1:] = -torch.inf
    got, wanted = mixture.best_experts(logits, n_used), mixture_torch.best_experts(logits, n_used)
    assert torch.equal(got.experts, wanted.experts)
    torch.testing.assert_close(got.weights, wanted.weights)


def test_logits_that_are_no_numbers_choose_experts_that_there_are():
    logits = torch.full((3, 5), torch.nan)
    logits[1] *= -1
    logits[2, :3] = torch.tensor([1.0, -torch.inf, 2.0])
    got, wanted = (module.best_experts(logits, 2) for module in (mixture, mixture_torch))
    assert torch.equal(got.experts, wanted.experts)


@pytest.mark.parametrize("n_cols", [32, 300])
def test_the_sum_is_that_of_the_twin_bit_for_bit(n_cols):
    y, weights = torch.randn(6, n_cols), torch.rand(2, 3)
    for add in (None, torch.randn(2, n_cols)):
        whole = torch.full((4, n_cols), -12345.0)
        got = mixture.weighted_sum(y, weights, whole[1:3], add=add)
        assert torch.equal(got, mixture_torch.weighted_sum(y, weights, got.clone(), add=add))
        assert (whole[::3] == -12345.0).all()


@pytest.fixture
def wide_programs(monkeypatch):
    """Each product of a pair in few programs."""
    sizes = multiply._gemv_sizes
    monkeypatch.setattr(multiply, "_gemv_sizes", lambda *args: (sizes(*args)[0], 32))


def case(types, n_rows, n_ff=32, n_embd=32, n_experts=4):
    """x, logits and tensors of gate, up and down."""
    gate, up = (expert_raw(type, n_experts, n_ff, n_embd, i) for i, type in enumerate(types[:2]))
    random = torch.Generator().manual_seed(7)
    x = torch.randn(n_rows, n_embd, generator=random)
    logits = torch.randn(n_rows, n_experts, generator=random)
    return x, logits, gate, up, expert_raw(types[2], n_experts, n_embd, n_ff, 2)


LIMITS = {False: 8e-2, True: 1e-5}  # random scales leave few weights that count
WAYS = {
    "one row": ((T.Q8_0, T.Q8_0, T.Q4_0), 1, False),
    "one row, exact": ((T.Q8_0, T.Q4_0, T.Q5_0), 1, True),
    "several types": ((T.Q8_0, T.F16, T.Q4_1), 2, False),
    "plain": ((T.F32, T.F32, T.F16), 2, False),
    "tiles": ((T.Q4_0, T.Q4_0, T.Q8_0), 11, False),
    "tiles and pairs": ((T.Q8_0, T.Q8_0, T.F16), 9, False),
}


@pytest.mark.parametrize(("types", "n_rows", "exact"), WAYS.values(), ids=WAYS)
def test_a_mixture_is_that_of_the_reference(wide_programs, types, n_rows, exact):
    x, logits, *raws = case(types, n_rows)
    ops, add = DeviceOps("cpu", exact=exact), torch.randn(n_rows, 32)
    activation = "gelu_erf" if exact else "silu"
    spec = mixture_of(ops, *raws, 2, activation)
    wanted = reference(x, logits, *raws, 2, activation) + add
    assert relative_error(ops.mixture(x, logits, spec, add=add), wanted) < LIMITS[exact]


def test_types_without_kernels_go_the_way_of_torch(wide_programs):
    x, logits, *raws = case((T.IQ2_XS, T.IQ2_XS, T.Q8_0), 1, n_embd=256)
    ops = DeviceOps("cpu", exact=False)
    got = ops.mixture(x, logits, mixture_of(ops, *raws, 2))
    assert relative_error(got, reference(x, logits, *raws, 2)) < LIMITS[False]


@pytest.mark.parametrize(("n_rows", "exact"), [(2, False), (2, True), (9, False)])
def test_a_row_does_not_depend_on_others_or_their_turn(monkeypatch, wide_programs, n_rows, exact):
    x, logits, *raws = case((T.Q8_0, T.Q8_0, T.Q4_0), n_rows)
    ops = DeviceOps("cpu", exact=exact)
    if n_rows > 2:
        ops._products.limits = Limits(gemv=0)
        monkeypatch.setattr(device_experts, "MAX_GEMV_PAIRS", 0)
    spec = mixture_of(ops, *raws, 2)
    together = ops.mixture(ops.gated(torch.cat((x, x), 1), "silu"), logits, spec)
    alone = ops.mixture(ops.gated(torch.cat((x, x), 1)[1:2], "silu"), logits[1:2], spec)
    assert torch.equal(alone, together[1:2])
    if n_rows == 2:
        monkeypatch.setattr(device_experts, "PAIRS_BYTES", 1)
        in_turns = ops.mixture(ops.gated(torch.cat((x, x), 1), "silu"), logits, spec)
        assert torch.equal(in_turns, together)


@pytest.mark.parametrize("name", ["llama-moe", "qwen3moe"])
def test_a_whole_model_gives_what_llama_cpp_does(monkeypatch, tmp_path, name):
    sizes = multiply._gemv_sizes
    monkeypatch.setattr(multiply, "_gemv_sizes", lambda *args: (sizes(*args)[0], 256))
    (first, second, third, *_), wanted = golden(name)
    ops = DeviceOps("cpu", exact=True)
    with ModelFile.open(write_tiny(name, tmp_path / "model.gguf")) as file:
        model = arch.build(file.metadata)
        load = DeviceLoader(file, 64, ops, lambda n_bytes: None)
        table, head = model.load_embedding(load), model.load_head(load)
        layers = [model.load_layer(load, i) for i in range(model.hp.n_layers)]
    hp = model.hp
    caches = [ops.layer_kv(1, 64, hp.n_kv_heads, hp.head_size, "f32", "f32") for _ in layers]
    for tokens, start in (((first, second), 0), ((third,), 2)):
        rows = UBatch(tokens, (Span(0, start, len(tokens)),), ())
        x = model.embed(ops, table, ops.ids(tokens))
        for layer, cache in zip(layers, caches, strict=True):
            x = model.layer(ops, layer, x, cache, rows)
        error = model.logits(ops, head, x).numpy() - wanted[start : start + len(tokens)]
        assert np.linalg.norm(error) < 1e-4 * np.linalg.norm(wanted[start : start + len(tokens)])
