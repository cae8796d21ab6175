"""The parts that decoder layers are put together from: weights with the one thing they do.

A part is loaded by its `load_*` function, which names its tensors, and called with the stage's
`Ops`. Architectures differ in how parts are joined; that is written in models/.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gguf_pp.arch import HParams, Loader
from gguf_pp.batch import UBatch
from gguf_pp.errors import FormatError
from gguf_pp.gguf import Metadata
from gguf_pp.ops.base import (
    Activation,
    Attention,
    LayerKV,
    Matrix,
    Mixture,
    Operand,
    Ops,
    RopeParams,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Linear:
    """x Wᵀ + b."""

    weight: Matrix
    bias: Tensor | None = None

    def __call__(self, ops: Ops, x: Operand, add: Tensor | None = None) -> Tensor:
        """[T, n_cols] to [T, n_rows], plus `add`."""
        return ops.linear(x, self.weight, bias=self.bias, add=add)


@dataclass(frozen=True, slots=True)
class SelfAttention:
    """Projections around ops.attention."""

    qkv: Linear
    output: Linear
    spec: Attention

    def __call__(
        self, ops: Ops, x: Operand, kv: LayerKV, ubatch: UBatch, add: Tensor | None = None
    ) -> Tensor:
        """[T, E] to [T, E], plus `add`."""
        heads = ops.attention(self.qkv(ops, x), kv, ubatch, self.spec)
        return self.output(ops, heads, add)


@dataclass(frozen=True, slots=True)
class FeedForward:
    """down(activation(gate(x)) * up(x))."""

    gate_up: Linear
    down: Linear
    activation: Activation

    def __call__(self, ops: Ops, x: Operand, add: Tensor | None = None) -> Tensor:
        """[T, E] to [T, E], plus `add`."""
        return self.down(ops, ops.gated(self.gate_up(ops, x), self.activation), add)


@dataclass(frozen=True, slots=True)
class Experts:
    """A feed-forward network per expert; a router [n_experts, E] picks some for each row."""

    router: Linear
    mixture: Mixture

    def __call__(self, ops: Ops, x: Operand, add: Tensor | None = None) -> Tensor:
        """[T, E] to [T, E], plus `add`."""
        return ops.mixture(x, self.router(ops, x), self.mixture, add=add)


@dataclass(frozen=True, slots=True)
class Head:
    """Final norm and output projection; without an output matrix, the token embedding again."""

    norm: Tensor
    output: Matrix
    eps: float

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        """[n, E] to logits [n, V]."""
        return ops.linear(ops.normed(x, self.norm, self.eps), self.output)


def load_embedding(load: Loader, hp: HParams) -> Matrix:
    """The token embedding [V, E]."""
    name = "token_embd.weight"
    return load.matrix((name, load.n_rows(name)), n_cols=hp.n_embd)


def load_head(load: Loader, hp: HParams) -> Head:
    """Final norm and output, tied to the embedding where the file has no output."""
    name = "output.weight" if load.has("output.weight") else "token_embd.weight"
    # A worker with the head alone has no embedding to compare with.
    n_vocab = load.n_rows("token_embd.weight" if load.has("token_embd.weight") else name)
    return Head(
        norm=load.vector("output_norm.weight", hp.n_embd),
        output=load.matrix((name, n_vocab), n_cols=hp.n_embd),
        eps=hp.eps,
    )


def load_norm(load: Loader, hp: HParams, blk: str, name: str) -> Tensor:
    """A norm over the width."""
    return load.vector(f"{blk}{name}.weight", hp.n_embd)


def load_attention(
    load: Loader,
    hp: HParams,
    blk: str,
    rope: RopeParams,
    *,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    qk_norm: bool = False,
) -> SelfAttention:
    """Separate or fused q, k, v with biases where the file has them; `scale` default 1/√D."""
    n_q, n_k, n_v = hp.qkv_rows
    fused = load.has(f"{blk}attn_qkv.weight")
    rows = {"attn_qkv": n_q + n_k + n_v} if fused else {"attn_q": n_q, "attn_k": n_k, "attn_v": n_v}
    spec = Attention(
        n_heads=hp.n_heads,
        n_kv_heads=hp.n_kv_heads,
        head_size=hp.head_size,
        scale=hp.head_size**-0.5 if scale is None else scale,
        rope=load.rope(rope),
        window=window,
        softcap=softcap,
        q_norm=load.vector(f"{blk}attn_q_norm.weight", hp.head_size) if qk_norm else None,
        k_norm=load.vector(f"{blk}attn_k_norm.weight", hp.head_size) if qk_norm else None,
        eps=hp.eps,
    )
    return SelfAttention(
        qkv=load_linear(load, blk, rows, hp.n_embd),
        output=load_linear(load, blk, {"attn_output": hp.n_embd}, n_q),
        spec=spec,
    )


def load_feed_forward(load: Loader, hp: HParams, blk: str, activation: Activation) -> FeedForward:
    """Separate gate and up, or both in `ffn_up` (gate first)."""
    fused = not load.has(f"{blk}ffn_gate.weight")
    rows = {"ffn_up": 2 * hp.n_ff} if fused else {"ffn_gate": hp.n_ff, "ffn_up": hp.n_ff}
    return FeedForward(
        gate_up=load_linear(load, blk, rows, hp.n_embd),
        down=load_linear(load, blk, {"ffn_down": hp.n_embd}, hp.n_ff),
        activation=activation,
    )


def load_experts(
    load: Loader, hp: HParams, metadata: Metadata, blk: str, activation: Activation
) -> Experts:
    """`ffn_gate_inp` and the `ffn_*_exps` tensors; counts and sizes from the metadata."""
    arch = hp.architecture
    n_experts = metadata.int_of(f"{arch}.expert_count")
    n_used = metadata.int_of(f"{arch}.expert_used_count")
    n_ff = metadata.int_of(f"{arch}.expert_feed_forward_length", hp.n_ff)
    if not 0 < n_used <= n_experts <= 4096:
        raise FormatError(f"{arch}.expert_used_count is {n_used} of {n_experts} experts")
    gate_up = load.experts(
        (f"{blk}ffn_gate_exps.weight", n_ff),
        (f"{blk}ffn_up_exps.weight", n_ff),
        n_cols=hp.n_embd,
        n_experts=n_experts,
    )
    down = load.experts((f"{blk}ffn_down_exps.weight", hp.n_embd), n_cols=n_ff, n_experts=n_experts)
    return Experts(
        router=load_linear(load, blk, {"ffn_gate_inp": n_experts}, hp.n_embd),
        mixture=Mixture(gate_up, down, n_used, activation),
    )


def load_linear(load: Loader, blk: str, rows: dict[str, int], n_cols: int) -> Linear:
    """Matrices `blk`NAME.weight stacked by rows, and their biases if the file has them."""
    weight = load.matrix(*((f"{blk}{n}.weight", size) for n, size in rows.items()), n_cols=n_cols)
    biased = [name for name in rows if load.has(f"{blk}{name}.bias")]
    if not biased:
        return Linear(weight)
    if len(biased) < len(rows):
        raise FormatError(f"{blk}{biased[0]} has a bias, but not all of {', '.join(rows)}")
    return Linear(weight, load.vectors(*((f"{blk}{name}.bias", n) for name, n in rows.items())))
