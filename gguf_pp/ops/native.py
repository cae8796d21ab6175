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
from gguf_pp.ops.base import Activation, Attention, LayerKV, Matrix, Mixture, Operand
from gguf_pp.ops.mixture import ExpertList, mixture_in_turn
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
        are_half = (k_type == "f16", v_type == "f16")
        self.place = (self.k.data_ptr(), self.v.data_ptr(), *are_half, n_slots, n_cells)


class NativeOps:
    """Ops on a CPU device through C kernels and `n_threads` threads.

    With `exact`, activations stay float32 in every product; otherwise `linear` rounds them to
    int8 in groups of 32 for quantized weights of 512 columns or more. Tensors that do not have the
    shape, type or layout that a kernel reads raise ValueError. ConfigError if the kernels were not
    built.
    """

    name = "native"
    maps_weights = False
    overhead_rows = 2

    def __init__(self, n_threads: int, *, exact: bool) -> None:
        module = kernels("native")
        assert module is not None
        self._kernels = module
        self._team = start_team(n_threads)
        # What torch still does for this device is small, and its threads would spin beside ours.
        torch.set_num_threads(1)
        self._exact = exact
        self._specs: dict[int, tuple[Attention, tuple[object, ...]]] = {}

    def matrix(self, parts: Sequence[RawTensor]) -> PlaneMatrix:
        """Copy quantized tensors into the kernels' layout, stacked by rows."""
        return PlaneMatrix.build(parts, self._team)

    def experts(self, parts: Sequence[RawTensor]) -> ExpertList:
        """A matrix of its own per expert."""
        return ExpertList(parts, self.matrix)

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

    def ids(self, tokens: Sequence[int]) -> Tensor:
        """Token ids int64 [T]."""
        return torch.tensor(tokens, dtype=torch.int64)

    def embed(self, table: Matrix, ids: Tensor) -> Tensor:
        """Look up rows: [T, E]."""
        assert isinstance(table, PlaneMatrix)
        return table.rows(ids.tolist(), torch.empty(len(ids), table.n_cols))

    def linear(
        self, x: Operand, w: Matrix, *, bias: Tensor | None = None, add: Tensor | None = None
    ) -> Tensor:
        """x Wᵀ + bias + add: [T, n_rows]."""
        assert isinstance(x, Tensor) and isinstance(w, PlaneMatrix)
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

    def normed(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """As `rms_norm`."""
        return self.rms_norm(x, weight, eps)

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """activation(gate) * up: [T, F]."""
        n_rows, n_both = gate_up.shape
        n_cols = n_both // 2
        out = torch.empty(n_rows, n_cols)
        x = _address(gate_up, (n_rows, 2 * n_cols))
        code = _ACTIVATIONS[activation]
        self._kernels.gated(self._team, x, out.data_ptr(), n_rows, n_cols, code)
        return out

    def mixture(
        self, x: Operand, logits: Tensor, spec: Mixture, *, add: Tensor | None = None
    ) -> Tensor:
        """What the best experts make of x, weighted, plus `add`: [T, E]."""
        return mixture_in_turn(self, x, logits, spec, add)

    def attention(self, qkv: Tensor, kv: LayerKV, ubatch: UBatch, spec: Attention) -> Tensor:
        """Norm, rotate, store, attend: [T, H D]. Spans are checked against `kv` and the tables."""
        assert isinstance(kv, NativeLayerKV)
        if (spec.n_kv_heads, spec.head_size) != (kv.n_kv_heads, kv.head_size):
            raise ValueError(
                f"{spec.n_kv_heads} kv heads of {spec.head_size} meet a cache of "
                f"{kv.n_kv_heads} of {kv.head_size}"
            )
        n_rows = ubatch.n_rows
        x = _address(qkv, (n_rows, (spec.n_heads + 2 * spec.n_kv_heads) * spec.head_size))
        out = torch.empty(n_rows, spec.n_heads * spec.head_size)
        static = self._static_arguments(spec)
        self._kernels.attention(
            self._team, ubatch.spans, x, out.data_ptr(), n_rows, kv.place, *static
        )
        return out

    def _static_arguments(self, spec: Attention) -> tuple[object, ...]:
        # Keeping the spec beside its arguments keeps its id, and the addresses, from another use.
        _, arguments = self._specs.get(id(spec), (None, None))
        if arguments is None:
            arguments = _static_arguments(spec)
            self._specs[id(spec)] = spec, arguments
        return arguments


def _static_arguments(spec: Attention) -> tuple[object, ...]:
    """What the kernel wants to know of a layer, in its order."""
    cos, sin = spec.rope.cos, spec.rope.sin
    n_positions, n_pairs = cos.shape
    table, norm = (n_positions, n_pairs), (spec.head_size,)
    return (
        (spec.n_heads, spec.n_kv_heads, spec.head_size),
        (_address(cos, table), _address(sin, table), spec.rope.neox, n_positions, 2 * n_pairs),
        (
            0 if spec.q_norm is None else _address(spec.q_norm, norm),
            0 if spec.k_norm is None else _address(spec.k_norm, norm),
            spec.eps,
        ),
        spec.window,
        spec.scale,
        spec.softcap,
    )


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
