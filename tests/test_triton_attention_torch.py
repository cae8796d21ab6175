"""Attention without Triton against float64, and the cases that its kernels share."""

import numpy as np
import pytest
import torch

from gguf_pp.backend.cuda_budget import MARGIN_BYTES
from gguf_pp.ops.base import Attention, Rope
from gguf_pp.triton import attention_torch
from tests.live import peak_bytes

N_SLOTS, N_CELLS = 3, 300
GUARD = 64
NO_ROPE = Rope(torch.empty(0, 0), torch.empty(0, 0), neox=True)
HEAD_SIZES = [64, 80, 96, 128, 256]


def spec_of(head_size=64, n_heads=4, n_kv_heads=2, **settings):
    settings = {"scale": head_size**-0.5, **settings}
    return Attention(n_heads, n_kv_heads, head_size, rope=NO_ROPE, **settings)


def fenced(values):
    """A copy in the middle of a larger buffer: the copy and the buffer.

    Around it lies what spoils a result that is made of it.
    """
    values = torch.as_tensor(values)
    spoil = torch.nan if values.is_floating_point() else -(1 << 20)
    buffer = torch.full((values.numel() + 2 * GUARD,), spoil, dtype=values.dtype)
    inner = buffer[GUARD:-GUARD].view(values.shape)
    inner.copy_(values)
    return inner, buffer


def fences_stand(buffer):
    outer = torch.cat((buffer[:GUARD], buffer[-GUARD:]))
    return bool((outer.isnan() if outer.is_floating_point() else outer == -(1 << 20)).all())


class Case:
    """Random rows and a cache in which only cells that some row may see hold numbers."""

    def __init__(self, spec, rows, dtype=torch.float16, sinks=False, magnitude=1.0):
        rng = torch.Generator().manual_seed(5)
        self.spec = spec
        slots, positions = (torch.tensor(x, dtype=torch.int32) for x in zip(*rows, strict=True))
        shape = (N_SLOTS, spec.n_kv_heads, N_CELLS, spec.head_size)
        keys, values = (torch.full(shape, torch.nan, dtype=dtype) for _ in range(2))
        for slot in set(slots.tolist()):
            n_filled = int(positions[slots == slot].max()) + 1
            for slab in (keys, values):
                cells = torch.randn(slab[slot, :, :n_filled].shape, generator=rng)
                slab[slot, :, :n_filled] = cells.to(dtype)
        q = torch.randn(len(rows), spec.n_heads, spec.head_size, generator=rng) * magnitude
        out = torch.full((len(rows), spec.n_heads * spec.head_size), 7.0)
        inputs = {"q": q, "k": keys, "v": values, "slots": slots, "positions": positions}
        if sinks:
            inputs["sinks"] = torch.randn(spec.n_heads, generator=rng)
        self.out, out_buffer = fenced(out)
        self.tensors, self._buffers = {}, [out_buffer]
        for name, tensor in inputs.items():
            self.tensors[name], buffer = fenced(tensor)
            self._buffers.append(buffer)
        self._before = [b.clone() for b in self._buffers[1:]]

    def run(self, attend, rows=slice(None), n_cells=N_CELLS, **settings):
        """Results of `rows`, with no trace left anywhere else."""
        by_row = ("q", "slots", "positions")
        arguments = {n: t[rows] if n in by_row else t for n, t in self.tensors.items()}
        sinks = arguments.pop("sinks", None)
        out = self.out[rows]
        attend(**arguments, spec=self.spec, out=out, n_cells=n_cells, sinks=sinks, **settings)
        assert fences_stand(self._buffers[0])
        for before, after in zip(self._before, self._buffers[1:], strict=True):
            assert torch.equal(before.view(torch.uint8), after.view(torch.uint8))
        return out.clone()

    def expected(self):
        """The definition, row by row and head by head, in float64."""
        q, k, v = (self.tensors[n].double().numpy() for n in "qkv")
        sinks, spec = self.tensors.get("sinks"), self.spec
        out = np.zeros(q.shape)
        rows = zip(self.tensors["slots"].tolist(), self.tensors["positions"].tolist(), strict=True)
        for i_row, (slot, position) in enumerate(rows):
            first = max(0, position - spec.window + 1) if spec.window else 0
            for i_head in range(spec.n_heads):
                i_kv_head = i_head // (spec.n_heads // spec.n_kv_heads)
                seen = np.s_[slot, i_kv_head, first : position + 1]
                score = k[seen] @ q[i_row, i_head] * spec.scale
                if spec.softcap:
                    score = spec.softcap * np.tanh(score / spec.softcap)
                if sinks is not None:
                    score = np.append(score, float(sinks[i_head]))
                weight = np.exp(score - score.max(initial=-np.inf))
                weight = (weight / weight.sum())[: position + 1 - first]
                out[i_row, i_head] = weight @ v[seen]
        return torch.from_numpy(out).flatten(1)


def check_decode(attend, tolerance=3e-6, **settings):
    """Rows of two slots at the edges of blocks and chunks, with padding between."""
    positions = [0, 63, 64, 127, -1, 128, N_CELLS - 1, 30]
    case = Case(rows=[(2, p) for p in positions[:-1]] + [(0, positions[-1])], **settings)
    error = (case.run(attend).double() - case.expected()).abs().max()
    assert error < tolerance, error


def check_prefill(attend, tolerance, start=0, n_rows=70, n_padding=0, exact=True, **settings):
    rows = [(1, start + i) for i in range(n_rows)] + [(1, -1)] * n_padding
    case = Case(rows=rows, **settings)
    error = (case.run(attend, exact=exact).double() - case.expected()).abs().max()
    assert error < tolerance, error


MANNERS = {
    "window 1": {"window": 1},
    "a small window": {"window": 50},
    "a window beyond the context": {"window": 1000},
    "softcap": {"softcap": 2.0},
    "window and softcap": {"window": 130, "softcap": 30.0},
    "one kv head": {"n_kv_heads": 1},
    "no group": {"n_kv_heads": 4},
    "a scale of its own": {"scale": 0.3},
}
manners = pytest.mark.parametrize("manner", MANNERS.values(), ids=MANNERS)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_a_decode_step_is_what_float64_makes_of_it(head_size, dtype):
    check_decode(attention_torch.decode_attention, spec=spec_of(head_size), dtype=dtype)


@manners
@pytest.mark.parametrize("sinks", [False, True])
def test_decode_manners(manner, sinks):
    check_decode(attention_torch.decode_attention, spec=spec_of(**manner), sinks=sinks)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_a_chunk_is_what_float64_makes_of_it(head_size, dtype, exact):
    tolerance = 3e-6 if exact or dtype == torch.float32 else 3e-3
    attend = attention_torch.prefill_attention
    check_prefill(attend, tolerance, 33, exact=exact, spec=spec_of(head_size), dtype=dtype)


@manners
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("exact", [False, True])
def test_prefill_manners(manner, sinks, exact):
    attend, tolerance = attention_torch.prefill_attention, 3e-6 if exact else 3e-3
    check_prefill(attend, tolerance, 100, 80, 3, exact, spec=spec_of(**manner), sinks=sinks)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("scratch_bytes", [1, 20 << 10, 350 << 10])
def test_small_steps_change_nothing(sinks, scratch_bytes, monkeypatch):
    """Rows one by one, some at a time, and two heads of four together."""
    spec = spec_of(window=40, n_heads=8, n_kv_heads=4)
    case = Case(spec, [(1, 20 + i) for i in range(30)], sinks=sinks)
    decode, prefill = attention_torch.decode_attention, attention_torch.prefill_attention
    wide = case.run(decode), case.run(prefill, exact=True), case.run(prefill)
    monkeypatch.setattr(attention_torch, "SCRATCH_BYTES", scratch_bytes)
    narrow = case.run(decode), case.run(prefill, exact=True), case.run(prefill)
    for a, b, off in zip(wide, narrow, (1e-6, 1e-6, 3e-3), strict=True):
        assert torch.allclose(a, b, atol=off)


@pytest.mark.parametrize("window", [0, 4096])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("n_cells", [8192, 131072])
def test_a_long_context_takes_no_more_than_a_margin_has(n_cells, dtype, exact, window):
    """On no device: only sizes are looked at."""
    n_rows = 512
    spec = Attention(16, 8, 128, 0.1, NO_ROPE, window=window)
    with torch.device("meta"):
        k, v = (torch.empty(1, 8, n_cells, 128, dtype=dtype) for _ in range(2))
        q, out = torch.empty(n_rows, 16, 128), torch.empty(n_rows, 16 * 128)
        slots, positions = (torch.empty(n_rows, dtype=torch.int32) for _ in range(2))
    prefill, decode = attention_torch.prefill_attention, attention_torch.decode_attention
    most = 3 * max(attention_torch.SCRATCH_BYTES, 2 * n_cells * 128 * 4)
    most = min(most, MARGIN_BYTES)
    inputs = k, v, slots, positions, spec, out
    if exact or dtype == torch.float32 or n_cells < 10_000:  # no device has a fused attention
        assert peak_bytes(prefill, q, *inputs, n_cells=n_cells, exact=exact) < most
    some = k, v, slots[:4], positions[:4], spec, out[:4]
    assert peak_bytes(decode, q[:4], *some, n_cells=n_cells) < most
