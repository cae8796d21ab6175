"""Norm, rotation and store without Triton against float64, and the cases the kernel shares."""

import numpy as np
import pytest
import torch

from gguf_pp.ops.base import Attention, Rope, RopeParams
from gguf_pp.ops.rope import make_rope
from gguf_pp.triton import rope_torch
from tests.test_triton_attention_torch import fenced, fences_stand

N_SLOTS, N_CELLS = 3, 12
ROWS = [(2, 5), (2, 6), (0, 0), (0, -1), (1, 11)]
SHAPES = {  # heads, kv heads, head size, turned, neox, norms
    "neox": (4, 2, 64, 64, True, False),
    "interleaved": (4, 2, 64, 64, False, False),
    "neox, a part": (2, 1, 80, 32, True, True),
    "interleaved, a part": (2, 1, 96, 20, False, True),
    "wide": (3, 3, 128, 128, True, True),
    "wider": (4, 1, 256, 256, True, True),
}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
dtypes = pytest.mark.parametrize("dtype", [torch.float16, torch.float32])


class Case:
    """Random rows and a cache that holds its own indexes."""

    def __init__(self, shape, dtype, rows=ROWS):
        n_heads, n_kv_heads, head_size, n_rot, neox, has_norms = shape
        rng = torch.Generator().manual_seed(3)
        q_norm, k_norm = (fenced(torch.rand(head_size, generator=rng) + 0.5)[0] for _ in range(2))
        rope = make_rope(RopeParams(n_rot, 1e4, neox, magnitude=1.25), N_CELLS)
        rope = Rope(fenced(rope.cos)[0], fenced(rope.sin)[0], neox)
        self.spec = Attention(
            n_heads, n_kv_heads, head_size, 1.0, rope,
            q_norm=q_norm if has_norms else None, k_norm=k_norm if has_norms else None, eps=0.01,
        )  # fmt: skip
        n_cached = N_SLOTS * n_kv_heads * N_CELLS * head_size
        cached = (torch.arange(n_cached) % 2000).to(dtype).view(N_SLOTS, n_kv_heads, N_CELLS, -1)
        slots, positions = (torch.tensor(x, dtype=torch.int32) for x in zip(*rows, strict=True))
        qkv = torch.randn(len(rows), (n_heads + 2 * n_kv_heads) * head_size, generator=rng)
        tensors = {
            "qkv": qkv, "k": cached, "v": cached, "slots": slots, "positions": positions,
            "q": torch.zeros(len(rows), n_heads, head_size),
        }  # fmt: skip
        fences = {name: fenced(t) for name, t in tensors.items()}
        self.tensors = {name: inner for name, (inner, _) in fences.items()}
        self._buffers = [buffer for _, buffer in fences.values()]
        self.cached, self.rows = cached, rows

    def run(self, store):
        """Queries, keys and values afterwards, with no trace left anywhere else."""
        store(**self.tensors, spec=self.spec)
        assert all(map(fences_stand, self._buffers))
        return tuple(self.tensors[n] for n in ("q", "k", "v"))

    def expected(self):
        """The same in float64."""
        spec = self.spec
        heads = self.tensors["qkv"].double().numpy().reshape(len(self.rows), -1, spec.head_size)
        q = np.zeros((len(self.rows), spec.n_heads, spec.head_size))
        k, v = self.cached.double().numpy(), self.cached.double().numpy()
        n_heads, n_kv_heads = spec.n_heads, spec.n_kv_heads
        for i, (slot, position) in enumerate(self.rows):
            if position < 0:
                continue
            for j in range(n_heads):
                q[i, j] = turned(heads[i, j], spec.q_norm, spec, position)
            for j in range(n_kv_heads):
                k[slot, j, position] = turned(heads[i, n_heads + j], spec.k_norm, spec, position)
                v[slot, j, position] = heads[i, n_heads + n_kv_heads + j]
        return q, k, v


def turned(x, weight, spec, position):
    """A head under its norm, its pairs turned as complex numbers."""
    if weight is not None:
        x = x / np.sqrt((x * x).mean() + spec.eps) * weight.double().numpy()
    turn = spec.rope.cos[position].double().numpy() + 1j * spec.rope.sin[position].double().numpy()
    n_rot = 2 * len(turn)
    at = np.arange(n_rot).reshape((2, -1) if spec.rope.neox else (-1, 2))
    first, second = at if spec.rope.neox else at.T
    pairs = (x[first] + 1j * x[second]) * turn
    y = x.copy()
    y[first], y[second] = pairs.real, pairs.imag
    return y


def check(store, shape, dtype):
    case = Case(shape, dtype)
    is_real = np.array([p >= 0 for _, p in case.rows])
    got, expected = case.run(store), case.expected()
    assert np.isfinite(got[0].numpy()).all()
    assert np.abs(got[0].double().numpy() - expected[0])[is_real].max() < 3e-6
    for slab, wanted in zip(got[1:], expected[1:], strict=True):
        assert slab.dtype == dtype
        written = wanted != case.cached.double().numpy()
        assert written.any()
        error = np.abs(slab.double().numpy() - wanted)
        assert (error[~written] == 0).all()
        assert error[written].max() < (3e-6 if dtype == torch.float32 else 4e-3)


@dtypes
@shapes
def test_heads_are_turned_and_stored(shape, dtype):
    check(rope_torch.rope_store, shape, dtype)


def test_nothing_is_stored_of_padding_alone():
    case = Case(SHAPES["neox"], torch.float16, [(0, -1), (1, -1)])
    _, k, v = case.run(rope_torch.rope_store)
    assert torch.equal(k, case.cached) and torch.equal(v, case.cached)


def test_padding_beside_a_row_at_the_start_of_its_slot_does_not_touch_it():
    case = Case(SHAPES["neox"], torch.float32, [(0, -1), (0, 0), (0, -1)])
    _, k, _ = case.run(rope_torch.rope_store)
    assert np.abs(k.numpy() - case.expected()[1]).max() < 3e-6
