"""Operations in plain torch: the reference, and what runs where there are no kernels of our own.

A row's bits depend here on the shape of the call: the BLAS picks another order of summation for
another number of rows. Differences are of the order of float32 rounding.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from gguf_pp.batch import Span, UBatch
from gguf_pp.ops.base import Activation, Attention, LayerKV, Matrix, Mixture, Operand, Rope
from gguf_pp.ops.mixture import ExpertList, mixture_in_turn
from gguf_pp.quants.blocks import BlockMatrix
from gguf_pp.quants.raw import RawTensor
from gguf_pp.quants.reference import dequantize

SCRATCH_FLOATS = 4 << 20
"""Floats that a matrix is dequantized into, block of rows by block of rows."""

KV_TYPES = {"f32": torch.float32, "f16": torch.float16}


class TorchLayerKV:
    """Keys and values [n_slots, n_kv_heads, n_cells, D]; untouched cells cost no memory."""

    def __init__(
        self, n_slots: int, n_cells: int, n_kv_heads: int, head_size: int, k_type: str, v_type: str
    ) -> None:
        self.n_slots, self.n_cells = n_slots, n_cells
        shape = (n_slots, n_kv_heads, n_cells, head_size)
        self.k = torch.empty(shape, dtype=KV_TYPES[k_type])
        self.v = torch.empty(shape, dtype=KV_TYPES[v_type])
        self.n_bytes = self.k.nbytes + self.v.nbytes


class TorchOps:
    """Ops on a CPU device through torch."""

    name = "torch"
    maps_weights = True
    overhead_rows = 64

    def __init__(self) -> None:
        self._scratch = torch.empty(SCRATCH_FLOATS)

    def matrix(self, parts: Sequence[RawTensor]) -> Matrix:
        """Keep quantized tensors as they lie in the file."""
        return BlockMatrix(parts)

    def experts(self, parts: Sequence[RawTensor]) -> ExpertList:
        """A matrix of its own per expert."""
        return ExpertList(parts, self.matrix)

    def vector(self, raw: RawTensor) -> Tensor:
        """A small tensor as float32, its shape kept."""
        data = torch.from_numpy(raw.data.copy())
        out = torch.empty(raw.n_rows, raw.n_cols)
        return dequantize(data, raw.type, out).view(raw.shape)

    def layer_kv(
        self, n_slots: int, n_cells: int, n_kv_heads: int, head_size: int, k_type: str, v_type: str
    ) -> TorchLayerKV:
        """Reserve keys and values of one layer."""
        return TorchLayerKV(n_slots, n_cells, n_kv_heads, head_size, k_type, v_type)

    def ids(self, tokens: Sequence[int]) -> Tensor:
        """Token ids int64 [T]."""
        return torch.tensor(tokens, dtype=torch.int64)

    def embed(self, table: Matrix, ids: Tensor) -> Tensor:
        """Look up rows: [T, E]."""
        assert isinstance(table, BlockMatrix)
        return table.rows(ids, torch.empty(len(ids), table.n_cols))

    def linear(
        self, x: Operand, w: Matrix, *, bias: Tensor | None = None, add: Tensor | None = None
    ) -> Tensor:
        """x Wᵀ + bias + add: [T, n_rows]."""
        assert isinstance(x, Tensor) and isinstance(w, BlockMatrix)
        y = w.linear(x, torch.empty(x.shape[0], w.n_rows), self._scratch)
        if bias is not None:
            y += bias
        if add is not None:
            y += add
        return y

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, *, add: Tensor | None = None
    ) -> Tensor:
        """x / sqrt(mean(x²) + eps) * weight + add."""
        return rms_norm(x, weight, eps, add)

    def normed(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """As `rms_norm`."""
        return rms_norm(x, weight, eps)

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """activation(gate) * up: [T, F]."""
        return gated(gate_up, activation)

    def mixture(
        self, x: Operand, logits: Tensor, spec: Mixture, *, add: Tensor | None = None
    ) -> Tensor:
        """What the best experts make of x, weighted, plus `add`: [T, E]."""
        return mixture_in_turn(self, x, logits, spec, add)

    def attention(self, qkv: Tensor, kv: LayerKV, ubatch: UBatch, spec: Attention) -> Tensor:
        """Norm, rotate, store, attend: [T, H D]."""
        assert isinstance(kv, TorchLayerKV)
        n_rows, n_heads, n_kv_heads = len(qkv), spec.n_heads, spec.n_kv_heads
        heads = qkv.view(n_rows, -1, spec.head_size)
        q, k, v = torch.split(heads, [n_heads, n_kv_heads, n_kv_heads], dim=1)
        if spec.q_norm is not None:
            q = F.rms_norm(q, spec.q_norm.shape, spec.q_norm, spec.eps)
        if spec.k_norm is not None:
            k = F.rms_norm(k, spec.k_norm.shape, spec.k_norm, spec.eps)
        out = torch.empty(n_rows, n_heads * spec.head_size)
        first = 0
        for span in ubatch.spans:
            rows = slice(first, first + span.n_rows)
            q_span, k_span = (_rotate(t[rows], spec.rope, span.start) for t in (q, k))
            cells = slice(span.start, span.start + span.n_rows)
            kv.k[span.slot, :, cells] = k_span.transpose(0, 1)
            kv.v[span.slot, :, cells] = v[rows].transpose(0, 1)
            out[rows] = _attend(q_span, kv, span, spec)
            first += span.n_rows
        return out


def rms_norm(x: Tensor, weight: Tensor, eps: float, add: Tensor | None = None) -> Tensor:
    """As in Ops, on any device."""
    y = F.rms_norm(x, weight.shape, weight, eps)
    return y if add is None else y.add_(add)


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    """As in Ops, on any device."""
    gate, up = gate_up.chunk(2, dim=-1)
    return _ACTIVATIONS[activation](gate) * up


def _gelu_tanh(x: Tensor) -> Tensor:
    """GELU as base.py defines it: argument and result rounded to float16, ends cut off."""
    y = F.gelu(x.half().float(), approximate="tanh").half().float()
    return y.where(x.abs() < 10, x.clamp(min=0))


_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": _gelu_tanh,
    "gelu_erf": F.gelu,
}


def _rotate(x: Tensor, rope: Rope, start: int) -> Tensor:
    """Rotate heads x [n, H, D] that stand at positions start, start + 1, ..."""
    cos, sin = (t[start : start + len(x), None] for t in (rope.cos, rope.sin))  # [n, 1, n_rot/2]
    n_rot = 2 * cos.shape[-1]
    turned, rest = x[..., :n_rot], x[..., n_rot:]
    a, b = turned.chunk(2, dim=-1) if rope.neox else (turned[..., ::2], turned[..., 1::2])
    a, b = a * cos - b * sin, a * sin + b * cos
    pairs = (a, b) if rope.neox else (torch.stack((a, b), dim=-1).flatten(-2),)
    return torch.cat((*pairs, rest), dim=-1)


def _attend(q: Tensor, kv: TorchLayerKV, span: Span, spec: Attention) -> Tensor:
    """Attend from q [n, H, D] to the cells of the span's slot: [n, H D]."""
    n_rows, end = span.n_rows, span.start + span.n_rows
    group = spec.n_heads // spec.n_kv_heads
    first = max(0, span.start - spec.window + 1) if spec.window else 0
    k = kv.k[span.slot, :, first:end].float()  # [K, S, D]
    v = kv.v[span.slot, :, first:end].float()
    q = q.view(n_rows, spec.n_kv_heads, group, -1).permute(1, 2, 0, 3)  # [K, G, n, D]
    scores = torch.matmul(q, k.transpose(1, 2).unsqueeze(1)).mul_(spec.scale)  # [K, G, n, S]
    if spec.softcap:
        scores.div_(spec.softcap).tanh_().mul_(spec.softcap)
    rows = torch.arange(span.start, end)[:, None]
    cells = torch.arange(first, end)[None, :]
    hidden = cells > rows
    if spec.window:
        hidden |= cells <= rows - spec.window
    weights = scores.masked_fill_(hidden, -math.inf).softmax(dim=-1)
    y = torch.matmul(weights, v.unsqueeze(1))  # [K, G, n, D]
    return y.permute(2, 0, 1, 3).reshape(n_rows, -1)
