"""The words a model is written in.

An `Ops` belongs to one stage: it owns the scratch and the threads of that stage's device and is
called from one thread only. Results are tensors of their own: none is overwritten by a later call.
Shapes: T rows (tokens) of the ubatch, E width, H query heads, K kv heads, D head size, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from gguf_pp.batch import UBatch
from gguf_pp.quants.raw import RawTensor

if TYPE_CHECKING:
    from torch import Tensor

Activation = Literal["silu", "gelu_tanh", "gelu_erf"]


class Matrix(Protocol):
    """A weight matrix at rest on a device, still quantized: [n_rows, n_cols], y = x Wᵀ.

    May consist of several GGUF tensors stacked by rows (q, k and v; gate and up).
    """

    n_rows: int
    n_cols: int
    n_bytes: int


class ExpertMatrix(Protocol):
    """A weight matrix per expert at rest on a device: [n_experts, n_rows, n_cols]."""

    n_experts: int
    n_rows: int
    n_cols: int
    n_bytes: int


class Operand(Protocol):
    """What `linear` multiplies: float32 [T, K], a Tensor or something that stands for one.

    Only the Ops that made it looks inside. May be multiplied several times while what it was made
    of stays as it is. Its length is T.
    """

    def __len__(self) -> int: ...


class LayerKV(Protocol):
    """Keys and values of one layer, for all slots; only the Ops that made it looks inside."""

    n_slots: int
    n_cells: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class RopeParams:
    """What a file says about rotation. `n_rot` dimensions turn; `factor` 1 is no scaling."""

    n_rot: int
    base: float
    neox: bool
    scaling: Literal["none", "linear", "yarn"] = "none"
    factor: float = 1.0
    n_ctx_original: int = 0
    magnitude: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    freq_factors: str | None = None


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotation tables: `cos` and `sin` float32 [n_positions, n_rot/2], magnitude included.

    `neox` rotates the pairs (i, i + n_rot/2), otherwise (2i, 2i + 1). Dimensions from n_rot on
    pass unchanged.
    """

    cos: Tensor
    sin: Tensor
    neox: bool


@dataclass(frozen=True, slots=True)
class Attention:
    """How one layer attends. `window` 0 is unlimited, otherwise a row at position p sees
    positions in (p - window, p]. `softcap` 0 is off, otherwise scores become
    softcap * tanh(score / softcap). `q_norm`/`k_norm`: RMS norm weights [D] applied per head
    before the rotation.
    """

    n_heads: int
    n_kv_heads: int
    head_size: int
    scale: float
    rope: Rope
    window: int = 0
    softcap: float = 0.0
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0


@dataclass(frozen=True, slots=True)
class Mixture:
    """A feed-forward network per expert, of which `n_used` serve a row.

    `gate_up` [n_experts, 2F, E] has the gate first; `down` is [n_experts, E, F].
    """

    gate_up: ExpertMatrix
    down: ExpertMatrix
    n_used: int
    activation: Activation


class Ops(Protocol):
    """What a stage's device can do. All activations are float32, contiguous [T, ...]."""

    name: str
    maps_weights: bool
    """Whether matrices are views of the mapped file rather than copies of it."""
    overhead_rows: int
    """What a call costs before its first row, in rows: weights read or dequantized, launches."""

    def matrix(self, parts: Sequence[RawTensor]) -> Matrix:
        """Take quantized tensors [n_i, K] to the device, stacked by rows in the given order."""
        ...

    def experts(self, parts: Sequence[RawTensor]) -> ExpertMatrix:
        """Take quantized tensors [n_experts, n_i, K] to the device, an expert's rows stacked."""
        ...

    def vector(self, raw: RawTensor) -> Tensor:
        """Take a small tensor to the device as float32, its shape kept."""
        ...

    def layer_kv(
        self, n_slots: int, n_cells: int, n_kv_heads: int, head_size: int, k_type: str, v_type: str
    ) -> LayerKV:
        """Reserve keys and values of one layer; types are "f32" or "f16"."""
        ...

    def ids(self, tokens: Sequence[int]) -> Tensor:
        """Take token ids to the device: int64 [T], to be changed by whoever asks."""
        ...

    def embed(self, table: Matrix, ids: Tensor) -> Tensor:
        """Look up rows of `table`: float32 [T, E]. Token ids are already checked."""
        ...

    def linear(
        self, x: Operand, w: Matrix, *, bias: Tensor | None = None, add: Tensor | None = None
    ) -> Tensor:
        """x [T, n_cols] times Wᵀ, plus `bias` [n_rows], plus `add` [T, n_rows]: [T, n_rows]."""
        ...

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, *, add: Tensor | None = None
    ) -> Tensor:
        """x / sqrt(mean(x²) + eps) * weight over the last dimension, plus `add`: [T, E]."""
        ...

    def normed(self, x: Tensor, weight: Tensor, eps: float) -> Operand:
        """`rms_norm` of x [T, E], for nothing but products."""
        ...

    def gated(self, gate_up: Tensor, activation: Activation) -> Operand:
        """activation(gate) * up of a stacked [T, 2F] (gate first): [T, F], for products.

        "gelu_tanh" rounds its argument and result to float16 and is 0 below -10 and x above 10:
        what ggml's CPU table computes, so that results equal llama.cpp's to more than 3 digits.
        """
        ...

    def mixture(
        self, x: Operand, logits: Tensor, spec: Mixture, *, add: Tensor | None = None
    ) -> Tensor:
        """What the experts make of x [T, E] for which `logits` [T, n_experts] are greatest.

        They are weighted by the softmax of these, and `add` is added: [T, E]. Of equal logits
        those of lower experts count as greater. Experts are added in ascending order in every row,
        so that a row's sum does not depend on which experts other rows chose.
        """
        ...

    def attention(self, qkv: Tensor, kv: LayerKV, ubatch: UBatch, spec: Attention) -> Tensor:
        """Norm and rotate q and k of a stacked [T, (H + 2K) D], store k and v, attend.

        Returns [T, H D]. Cells of a span are written before any row of it attends.
        """
        ...
