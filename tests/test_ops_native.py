import math
import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from gguf_pp.batch import Span, UBatch
from gguf_pp.errors import UnsupportedError
from gguf_pp.native import kernels, start_team
from gguf_pp.ops.base import Attention, Rope
from gguf_pp.ops.native import NativeLayerKV, NativeOps
from gguf_pp.ops.torch_ops import TorchOps
from gguf_pp.quants.raw import RawTensor

pytestmark = pytest.mark.skipif(kernels() is None, reason="the native kernels were not built")

N_SLOTS, N_CELLS = 3, 203
NAN = float("nan")


@pytest.fixture(scope="module")
def ops():
    return NativeOps(1, exact=True)


@pytest.fixture(autouse=True, scope="module")
def one_torch_thread():
    """The references are small: sharing them costs more than computing them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def ubatch(*spans):
    n_rows = sum(n for _, _, n in spans)
    return UBatch(tokens=(0,) * n_rows, spans=tuple(Span(*s) for s in spans), outputs=())


def rope(n_rot, neox, n_positions=N_CELLS):
    angles = torch.outer(
        torch.arange(n_positions, dtype=torch.float64),
        10000.0 ** (-2 * torch.arange(n_rot // 2, dtype=torch.float64) / max(n_rot, 1)),
    )
    return Rope((1.1 * angles.cos()).float(), (1.1 * angles.sin()).float(), neox)


def attention(n_heads=4, n_kv_heads=2, head_size=16, n_rot=None, neox=True, **rest):
    n_rot = head_size // 2 * 2 if n_rot is None else n_rot
    rest.setdefault("scale", head_size**-0.5)
    return Attention(n_heads, n_kv_heads, head_size, rope=rope(n_rot, neox), **rest)


@st.composite
def attentions(draw):
    n_kv_heads = draw(st.integers(1, 3))
    head_size = draw(st.sampled_from([4, 8, 10, 16, 20, 64, 80, 96, 100, 128, 256]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**30)))
    norms = [1 + 0.1 * torch.randn(head_size, generator=generator) for _ in range(2)]
    return attention(
        n_heads=n_kv_heads * draw(st.integers(1, 8)),
        n_kv_heads=n_kv_heads,
        head_size=head_size,
        n_rot=2 * draw(st.integers(0, head_size // 2)),
        neox=draw(st.booleans()),
        window=draw(st.sampled_from([0, 0, 1, 5, 64, 70])),
        softcap=draw(st.sampled_from([0.0, 0.0, 2.0, 50.0])),
        q_norm=norms[0] if draw(st.booleans()) else None,
        k_norm=norms[1] if draw(st.booleans()) else None,
        eps=1e-6,
    )


def random_rows(n_rows, spec, seed=0):
    n_cols = (spec.n_heads + 2 * spec.n_kv_heads) * spec.head_size
    return torch.randn(n_rows, n_cols, generator=torch.Generator().manual_seed(seed))


def poisoned(spec, k_type="f32", v_type="f32"):
    kv = NativeLayerKV(N_SLOTS, N_CELLS, spec.n_kv_heads, spec.head_size, k_type, v_type)
    kv.k.fill_(NAN)
    kv.v.fill_(NAN)
    return kv


class Exact:
    """Attention in float64, one row and head at a time."""

    def __init__(self, spec, kv_type=torch.float32):
        self.spec, self.kv_type = spec, kv_type
        shape = (N_SLOTS, spec.n_kv_heads, N_CELLS, spec.head_size)
        self.k, self.v = (torch.full(shape, NAN, dtype=torch.float64) for _ in range(2))

    def turn(self, x, norm, position):
        x = x.double()
        if norm is not None:
            x = x / (x.square().mean(-1, keepdim=True) + self.spec.eps).sqrt() * norm.double()
        cos, sin = (t[position].double() for t in (self.spec.rope.cos, self.spec.rope.sin))
        n = len(cos)
        first = slice(0, n) if self.spec.rope.neox else slice(0, 2 * n, 2)
        second = slice(n, 2 * n) if self.spec.rope.neox else slice(1, 2 * n, 2)
        y = x.clone()
        y[..., first] = x[..., first] * cos - x[..., second] * sin
        y[..., second] = x[..., first] * sin + x[..., second] * cos
        return y

    def attend(self, qkv, ubatch):
        spec = self.spec
        places = [(s.slot, s.start + i) for s in ubatch.spans for i in range(s.n_rows)]
        rows = qkv.view(len(places), -1, spec.head_size)
        q, k, v = rows.split([spec.n_heads, spec.n_kv_heads, spec.n_kv_heads], dim=1)
        for i, (slot, position) in enumerate(places):
            self.k[slot, :, position] = self.turn(k[i], spec.k_norm, position).to(self.kv_type)
            self.v[slot, :, position] = v[i].to(self.kv_type)
        return torch.stack([self.row(q[i], *place) for i, place in enumerate(places)])

    def row(self, q, slot, position):
        spec = self.spec
        first = max(0, position - spec.window + 1) if spec.window else 0
        k, v = (cells[slot, :, first : position + 1] for cells in (self.k, self.v))
        q = self.turn(q, spec.q_norm, position).view(spec.n_kv_heads, -1, spec.head_size)
        scores = q @ k.transpose(1, 2) * spec.scale  # [K, G, cells]
        if spec.softcap:
            scores = spec.softcap * (scores / spec.softcap).tanh()
        return (scores.softmax(-1) @ v).flatten()


def worst(y, expected):
    return ((y.double() - expected).abs().max() / expected.abs().max()).item()


STEPS = (
    ubatch((0, 0, 5), (2, 0, 66)),
    ubatch((2, 66, 1), (0, 5, 1), (1, 0, 1)),
    ubatch((1, 1, 11), (0, 6, 23), (2, 67, 1)),
)


@settings(max_examples=12, deadline=None)
@given(spec=attentions(), seed=st.integers(0, 2**30))
def test_attention_of_mixed_spans_is_that_of_float64(ops, spec, seed):
    kv, exact = poisoned(spec), Exact(spec)
    for i, batch in enumerate(STEPS):
        qkv = random_rows(batch.n_rows, spec, seed + i)
        assert worst(ops.attention(qkv, kv, batch, spec), exact.attend(qkv, batch)) < 2e-6


@pytest.mark.parametrize(("k_type", "v_type"), [("f16", "f16"), ("f32", "f16"), ("f16", "f32")])
def test_a_half_precision_cache_attends_to_rounded_values(ops, k_type, v_type):
    spec = attention(n_rot=0, head_size=20)
    kv, exact = poisoned(spec, k_type, v_type), Exact(spec, torch.float16)
    for i, batch in enumerate(STEPS):
        qkv = random_rows(batch.n_rows, spec, i)
        heads = qkv.view(batch.n_rows, -1, spec.head_size)
        for part, kind in ((heads[:, -4:-2], k_type), (heads[:, -2:], v_type)):
            if kind == "f32":
                part.copy_(part.half())
        assert worst(ops.attention(qkv, kv, batch, spec), exact.attend(qkv, batch)) < 2e-6


def test_halves_are_stored_as_torch_rounds_them(ops):
    floats = torch.arange(-(2**31), 2**31, 60013).to(torch.int32).view(torch.float32)
    edges = torch.tensor([65519.9, 65520.0, 2.0**-24, 2.0**-25, 1.5 * 2.0**-25, 2049.0, 2051.0])
    values = torch.cat((floats[~floats.isnan()], edges, -edges))
    n_rows = len(values) // 256
    values = values[-n_rows * 256 :].view(n_rows, 256)
    table = torch.ones(n_rows, 0)
    spec = Attention(1, 1, 256, scale=1.0, rope=Rope(table, table, True))
    kv = NativeLayerKV(1, n_rows, 1, 256, "f16", "f16")
    qkv = torch.cat((torch.zeros_like(values), values, values), dim=1)
    ops.attention(qkv, kv, ubatch((0, 0, n_rows)), spec)
    k = kv.k[0, 0].transpose(1, 2).flatten(0, 1)[:n_rows]
    for stored in (k, kv.v[0, 0]):
        assert torch.equal(stored.view(torch.int16), values.half().view(torch.int16))


@settings(max_examples=40, deadline=None)
@given(spec=attentions(), kind=st.sampled_from(["f32", "f16"]), n_rows=st.integers(60, 150))
def test_a_prompt_in_pieces_gives_the_same_bits_as_the_whole(ops, spec, kind, n_rows):
    qkv = random_rows(n_rows, spec)
    whole_kv, kv = poisoned(spec, kind, kind), poisoned(spec, kind, kind)
    whole = ops.attention(qkv, whole_kv, ubatch((1, 0, n_rows)), spec)
    edges = [0, 1, 6, 37, n_rows - 1, n_rows]
    pieces = [
        ops.attention(qkv[first:stop], kv, ubatch((2, first, stop - first)), spec)
        for first, stop in pairwise(edges)
    ]
    assert torch.equal(torch.cat(pieces), whole)
    assert torch.equal(kv.k[2].nan_to_num(), whole_kv.k[1].nan_to_num())


@settings(max_examples=10, deadline=None)
@given(spec=attentions())
def test_two_threads_give_the_same_bits_as_one(ops, spec):
    two = NativeOps(2, exact=True)
    kv, other = poisoned(spec), poisoned(spec)
    for i, batch in enumerate((*STEPS, ubatch((0, 29, 170)), ubatch((0, 199, 1)))):
        qkv = random_rows(batch.n_rows, spec, i)
        y = ops.attention(qkv, kv, batch, spec)
        assert torch.equal(two.attention(qkv, other, batch, spec), y)


@settings(max_examples=20, deadline=None)
@given(spec=attentions())
def test_rows_beside_a_row_do_not_change_its_bits(ops, spec):
    alone, together = poisoned(spec), poisoned(spec)
    qkv = random_rows(70, spec)
    for kv in (alone, together):
        ops.attention(qkv, kv, ubatch((0, 0, 70)), spec)
    rows = random_rows(4, spec, 1)
    single = ops.attention(rows[1:2], alone, ubatch((0, 70, 1)), spec)
    beside = ops.attention(rows, together, ubatch((1, 0, 1), (0, 70, 1), (2, 0, 2)), spec)
    assert torch.equal(beside[1:2], single)


@pytest.mark.parametrize("kind", ["f32", "f16"])
def test_values_that_a_row_does_not_see_cannot_spoil_it(ops, kind):
    spec = attention(window=7)
    qkv = random_rows(80, spec)
    clean = ops.attention(qkv, poisoned(spec, kind, kind), ubatch((0, 0, 80)), spec)
    qkv[40, -4 * spec.head_size :] = math.inf
    y = ops.attention(qkv, poisoned(spec, kind, kind), ubatch((0, 0, 80)), spec)
    spoiled = torch.zeros(80, dtype=torch.bool)
    spoiled[40:47] = True
    assert torch.equal(y[~spoiled], clean[~spoiled])
    assert not y[spoiled].isfinite().all(-1).any()


def inside_nan(shape):
    """A tensor with NaN in it and 64 times before and after it, and a view of it all."""
    around = torch.full((math.prod(shape) + 128,), NAN)
    return around[64:-64].view(shape), around


def test_only_the_cells_of_the_spans_and_the_rows_of_the_result_are_written():
    n_rows, spec = 9, attention(head_size=24, n_heads=6, n_kv_heads=3)
    kv, qkv, table = poisoned(spec), random_rows(n_rows, spec), spec.rope
    tensors = [inside_nan(shape) for shape in (kv.k.shape, kv.v.shape, (n_rows, 6 * 24))]
    k, v, out = (tensor for tensor, _ in tensors)
    kernels().attention(
        start_team(1),
        (Span(1, 0, 9),),
        qkv.data_ptr(),
        out.data_ptr(),
        n_rows,
        (k.data_ptr(), v.data_ptr(), False, False, N_SLOTS, N_CELLS),
        (6, 3, 24),
        (table.cos.data_ptr(), table.sin.data_ptr(), True, N_CELLS, 24),
        (0, 0, 0.0),
        0,
        1.0,
        0.0,
    )
    assert out.isfinite().all()
    for _, around in tensors:
        assert around[:64].isnan().all() and around[-64:].isnan().all()
    written = torch.zeros(N_SLOTS, 3, N_CELLS, dtype=torch.bool)
    written[1, :, :9] = True
    for cells in (k.transpose(-1, -2).flatten(2, 3)[:, :, :N_CELLS], v):
        assert torch.equal(cells.isfinite().all(-1), written)
        assert torch.equal(cells.isfinite().any(-1), written)


def test_large_scores_do_not_overflow_and_scores_of_minus_infinity_weigh_nothing(ops):
    table = torch.ones(70, 0)
    spec = Attention(1, 1, 8, scale=1.0, rope=Rope(table, table, True))
    qkv = torch.zeros(70, 24)
    qkv[:, 0] = 100.0
    qkv[:, 8] = torch.arange(70) * 10.0  # scores rise by 1000 per cell
    qkv[:, 16] = torch.arange(70)
    y = ops.attention(qkv, poisoned(spec), ubatch((0, 0, 70)), spec)
    assert torch.equal(y[:, 0], torch.arange(70.0))
    qkv[:, 8] = -math.inf
    qkv[3, 8] = qkv[68, 8] = 1.0
    y = ops.attention(qkv, poisoned(spec), ubatch((0, 0, 70)), spec)
    assert torch.equal(y[3:68, 0], torch.full((65,), 3.0))
    assert torch.equal(y[68:, 0], torch.full((2,), 35.5))


BAD_SPANS = [
    ((3, 0, 2),),
    ((-1, 0, 2),),
    ((0, -1, 2),),
    ((0, N_CELLS - 1, 2),),
    ((0, 2**62, 2),),
    ((0, 0, 1),),
    ((0, 0, 2), (1, 0, 1)),
    ((0, 0, 0), (1, 0, 2)),
]


@pytest.mark.parametrize("spans", BAD_SPANS)
def test_spans_that_leave_the_cache_or_the_batch_are_refused(ops, spans):
    spec = attention()
    batch = UBatch(tokens=(0, 0), spans=tuple(Span(*s) for s in spans), outputs=())
    with pytest.raises(ValueError, match="span"):
        ops.attention(random_rows(2, spec), poisoned(spec), batch, spec)


def test_positions_beyond_the_rotation_tables_are_refused(ops):
    spec = replace(attention(), rope=rope(16, True, n_positions=10))
    with pytest.raises(ValueError, match="10 positions"):
        ops.attention(random_rows(2, spec), poisoned(spec), ubatch((0, 9, 2)), spec)


def test_attention_of_what_does_not_fit_together_is_refused(ops):
    spec = attention()
    kv, batch, qkv = poisoned(spec), ubatch((0, 0, 2)), random_rows(2, spec)
    odd = attention(n_heads=3)
    short = Rope(spec.rope.cos, spec.rope.sin[:3], True)
    for rows, bad in (
        (qkv[:, :-1], spec),
        (qkv, replace(spec, n_kv_heads=1)),
        (qkv, replace(spec, q_norm=torch.ones(15))),
        (qkv, replace(spec, rope=short)),
        (qkv, replace(spec, rope=rope(32, True))),
        (random_rows(2, odd), odd),
    ):
        with pytest.raises(ValueError, match=r"wanted|heads"):
            ops.attention(rows, kv, batch, bad)


def test_heads_wider_than_the_kernel_has_room_for_are_unsupported(ops):
    with pytest.raises(UnsupportedError, match="heads of 520 elements"):
        ops.layer_kv(1, 8, 1, 520, "f32", "f32")


def test_native_and_torch_operations_agree(ops):
    reference = TorchOps()
    spec = attention(n_heads=9, n_kv_heads=3, head_size=64, neox=False, softcap=20.0, window=40)
    native_kv = ops.layer_kv(N_SLOTS, N_CELLS, 3, 64, "f32", "f32")
    torch_kv = reference.layer_kv(N_SLOTS, N_CELLS, 3, 64, "f32", "f32")
    for i, batch in enumerate(STEPS):
        qkv = random_rows(batch.n_rows, spec, i)
        y = reference.attention(qkv, torch_kv, batch, spec)
        torch.testing.assert_close(ops.attention(qkv, native_kv, batch, spec), y)


@pytest.mark.parametrize("n_rows", [1, 3])
def test_matrices_are_embedded_and_multiplied_as_torch_does(ops, n_rows):
    weights = np.random.default_rng(0).standard_normal((24, 64), dtype=np.float32)
    raw = RawTensor("w", GGMLQuantizationType.F32, (24, 64), weights.view(np.uint8))
    reference = TorchOps()
    matrix, same = ops.matrix([raw]), reference.matrix([raw])
    x, bias, add = torch.randn(n_rows, 64), torch.randn(24), torch.randn(n_rows, 24)
    expected = reference.linear(x, same, bias=bias, add=add)
    torch.testing.assert_close(ops.linear(x, matrix, bias=bias, add=add), expected)
    ids = ops.ids([3, 23, 3])
    assert torch.equal(ops.embed(matrix, ids), reference.embed(same, ids))
    vector = RawTensor("v", GGMLQuantizationType.F32, (64,), weights.view(np.uint8)[:1])
    assert torch.equal(ops.vector(vector), torch.from_numpy(weights[0]))


@pytest.mark.skipif("GGUF_PP_ISA" in os.environ, reason="these are the kernels asked for")
def test_portable_kernels_pass_the_same_tests():
    files = [__file__, str(Path(__file__).with_name("test_ops_native_rows.py"))]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
        env={**os.environ, "GGUF_PP_ISA": "portable"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:]
