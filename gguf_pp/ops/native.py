"""Operations through the kernels in gguf_pp/native.

A row's bits depend on the row alone: not on the other rows of a call, on how a prompt is cut into
ubatches, or on the number of threads. Results are fresh tensors, which the allocator takes from
the blocks that earlier results left; a call costs a few microseconds beside its kernel.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gguf_pp.batch import UBatch
from gguf_pp.errors import UnsupportedError
from gguf_pp.native import kernels, start_team
from gguf_pp.ops.base import Activation, Attention, LayerKV, Matrix
from gguf_pp.quants.planes import PlaneMatrix
from gguf_pp.quants.raw import RawTensor
from gguf_pp.quants.reference import dequantize

MAX_HEAD_SIZE = 512
"""Elements of a head that the attention kernel has room for."""

_KV_TYPES = {"f32": torch.float32, "f16": torch.float16}
_ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1, "gelu_erf": 2}


class NativeLayerKV:
    """Keys and values of one layer; untouched cells cost no memory.

    Keys are [n_slots, n_kv_heads, cells / 8, D, 8] and values [n_slots, n_kv_heads, n_cells, D],
    where cells and the D of values are rounded up to a multiple of 8. What was not written is
    undefined, NaN included, and is never seen.
    """

    def __init__(
        self, n_slots: int, n_cells: int, n_kv_heads: int, head_size: int, k_type: str, v_type: str
    ) -> None:
        self.n_slots, self.n_cells = n_slots, n_cells
        self.n_kv_heads, self.head_size = n_kv_heads, head_size
        k_shape = (n_slots, n_kv_heads, -(-n_cells // 8), head_size, 8)
        v_shape = (n_slots, n_kv_heads, n_cells, -(-head_size // 8) * 8)
        self.k = torch.empty(k_shape, dtype=_KV_TYPES[k_type])
        self.v = torch.empty(v_shape, dtype=_KV_TYPES[v_type])
        self.n_bytes = self.k.nbytes + self.v.nbytes


class NativeOps:
    """Ops on a CPU device through C kernels and `n_threads` threads.

    With `exact`, activations stay float32 in every product; otherwise `linear` rounds them to
    int8 in groups of 32 for quantized weights. Tensors that do not have the shape, type or layout
    that a kernel reads raise ValueError. ConfigError if the kernels were not built.
    """

    name = "native"

    def __init__(self, n_threads: int, *, exact: bool) -> None:
        module = kernels("native")
        assert module is not None
        self._kernels = module
        self._team = start_team(n_threads)
        self._exact = exact

    def matrix(self, parts: Sequence[RawTensor]) -> PlaneMatrix:
        """Copy quantized tensors into the kernels' layout, stacked by rows."""
        return PlaneMatrix.build(parts, self._team)

    def vector(self, raw: RawTensor) -> Tensor:
        """A small tensor as float32, its shape kept."""
        out = torch.empty(raw.n_rows, raw.n_cols)
        return dequantize(torch.from_numpy(raw.data.copy()), raw.type, out).view(raw.shape)

    def layer_kv(
        self, n_slots: int, n_cells: int, n_kv_heads: int, head_size: int, k_type: str, v_type: str
    ) -> NativeLayerKV:
        """Reserve keys and values of one layer; UnsupportedError if heads are too wide."""
        if head_size > MAX_HEAD_SIZE:
            raise UnsupportedError(
                f"heads of {head_size} elements, the kernels take at most {MAX_HEAD_SIZE}",
                hint="pass --kernels torch",
            )
        return NativeLayerKV(n_slots, n_cells, n_kv_heads, head_size, k_type, v_type)

    def embed(self, table: Matrix, tokens: Sequence[int]) -> Tensor:
        """Look up rows: [T, E]."""
        assert isinstance(table, PlaneMatrix)
        return table.rows(tokens, torch.empty(len(tokens), table.n_cols))

    def linear(
        self, x: Tensor, w: Matrix, *, bias: Tensor | None = None, add: Tensor | None = None
    ) -> Tensor:
        """x Wᵀ + bias + add: [T, n_rows]."""
        assert isinstance(w, PlaneMatrix)
        out = torch.empty(x.shape[0], w.n_rows)
        return w.linear(x, out, team=self._team, exact=self._exact, bias=bias, add=add)

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, *, add: Tensor | None = None
    ) -> Tensor:
        """x / sqrt(mean(x²) + eps) * weight + add; the mean is taken in float64."""
        n_rows, n_cols = x.shape
        out = torch.empty(n_rows, n_cols)
        self._kernels.rms_norm(
            self._team,
            _address(x, (n_rows, n_cols)),
            _address(weight, (n_cols,)),
            0 if add is None else _address(add, (n_rows, n_cols)),
            out.data_ptr(),
            n_rows,
            n_cols,
            eps,
        )
        return out

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """activation(gate) * up: [T, F]."""
        n_rows, n_both = gate_up.shape
        n_cols = n_both // 2
        out = torch.empty(n_rows, n_cols)
        x = _address(gate_up, (n_rows, 2 * n_cols))
        code = _ACTIVATIONS[activation]
        self._kernels.gated(self._team, x, out.data_ptr(), n_rows, n_cols, code)
        return out

    def attention(self, qkv: Tensor, kv: LayerKV, ubatch: UBatch, spec: Attention) -> Tensor:
        """Norm, rotate, store, attend: [T, H D]. Spans are checked against `kv` and the tables."""
        assert isinstance(kv, NativeLayerKV)
        heads = (spec.n_heads, spec.n_kv_heads, spec.head_size)
        if heads[1:] != (kv.n_kv_heads, kv.head_size):
            raise ValueError(f"{heads[1:]} heads meet a cache of {kv.n_kv_heads, kv.head_size}")
        n_rows = ubatch.n_rows
        x = _address(qkv, (n_rows, (spec.n_heads + 2 * spec.n_kv_heads) * spec.head_size))
        out = torch.empty(n_rows, spec.n_heads * spec.head_size)
        self._kernels.attention(
            self._team,
            ubatch.spans,
            x,
            out.data_ptr(),
            n_rows,
            _cache(kv),
            heads,
            _rope(spec),
            _norms(spec),
            spec.window,
            spec.scale,
            spec.softcap,
        )
        return out


def _cache(kv: NativeLayerKV) -> tuple[int, int, bool, bool, int, int]:
    k, v = kv.k, kv.v
    k_is_half, v_is_half = k.dtype == torch.float16, v.dtype == torch.float16
    return k.data_ptr(), v.data_ptr(), k_is_half, v_is_half, kv.n_slots, kv.n_cells


def _rope(spec: Attention) -> tuple[int, int, bool, int, int]:
    cos, sin = spec.rope.cos, spec.rope.sin
    n_positions, n_pairs = cos.shape
    shape = (n_positions, n_pairs)
    return _address(cos, shape), _address(sin, shape), spec.rope.neox, n_positions, 2 * n_pairs


def _norms(spec: Attention) -> tuple[int, int, float]:
    shape = (spec.head_size,)
    q = 0 if spec.q_norm is None else _address(spec.q_norm, shape)
    k = 0 if spec.k_norm is None else _address(spec.k_norm, shape)
    return q, k, spec.eps


def _address(tensor: Tensor, shape: tuple[int, ...]) -> int:
    """Where the kernels find a float32 tensor that is laid out as they read it."""
    if tensor.shape != shape or tensor.dtype != torch.float32 or not tensor.is_contiguous():
        raise ValueError(
            f"wanted contiguous float32 {list(shape)}, "
            f"got {tensor.dtype} {list(tensor.shape)} with strides {tensor.stride()}"
        )
    if not tensor.is_cpu:
        raise ValueError(f"wanted a tensor on the CPU, got one on {tensor.device}")
    return tensor.data_ptr()
