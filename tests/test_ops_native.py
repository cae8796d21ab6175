import math
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gguf_pp.batch import Span, UBatch
from gguf_pp.errors import UnsupportedError
from gguf_pp.native import kernels, start_team
from gguf_pp.ops.base import Attention, Rope
from gguf_pp.ops.native import NativeLayerKV, NativeOps
from gguf_pp.ops.torch_ops import TorchOps

pytestmark = pytest.mark.skipif(kernels() is None, reason="the native kernels were not built")

N_SLOTS, N_CELLS = 3, 203
NAN = float("nan")


@pytest.fixture(scope="module")
def ops():
    return NativeOps(1, exact=True)


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
        self.cells = {}  # (slot, position) -> k, v [K, D]

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
            k_row = self.turn(k[i], spec.k_norm, position).to(self.kv_type)
            self.cells[slot, position] = k_row, v[i].to(self.kv_type)
        return torch.stack([self.row(q[i], *place) for i, place in enumerate(places)])

    def row(self, q, slot, position):
        spec = self.spec
        first = max(0, position - spec.window + 1) if spec.window else 0
        seen = [self.cells[slot, p] for p in range(first, position + 1)]
        k, v = (torch.stack(t).double().transpose(0, 1) for t in zip(*seen, strict=True))
        q = self.turn(q, spec.q_norm, position).view(spec.n_kv_heads, -1, spec.head_size)
        scores = q @ k.transpose(1, 2) * spec.scale  # [K, G, cells]
        if spec.softcap:
            scores = spec.softcap * (scores / spec.softcap).tanh()
        return (scores.softmax(-1) @ v).flatten()


def worst(y, expected):
    return ((y.double() - expected).abs().max() / expected.abs().max()).item()


STEPS = (
    ((0, 0, 5), (2, 0, 70)),
    ((2, 70, 1), (0, 5, 1), (1, 0, 1)),
    ((1, 1, 68), (0, 6, 23), (2, 71, 1)),
)


@settings(max_examples=40, deadline=None)
@given(spec=attentions(), seed=st.integers(0, 2**30))
def test_attention_of_mixed_spans_is_that_of_float64(ops, spec, seed):
    kv, exact = poisoned(spec), Exact(spec)
    for i, step in enumerate(map(ubatch, *zip(*[STEPS], strict=True)) if False else STEPS):
        batch = ubatch(*step)
        qkv = random_rows(batch.n_rows, spec, seed + i)
        assert worst(ops.attention(qkv, kv, batch, spec), exact.attend(qkv, batch)) < 2e-6
