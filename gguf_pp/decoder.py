"""How parts are joined into decoder layers, and what all decoders have at both ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from gguf_pp.arch import HParams, Loader
from gguf_pp.batch import UBatch
from gguf_pp.gguf import Metadata
from gguf_pp.ops.base import LayerKV, Matrix, Ops, RopeParams
from gguf_pp.parts import (
    Experts,
    FeedForward,
    Head,
    SelfAttention,
    load_embedding,
    load_head,
    load_norm,
)

if TYPE_CHECKING:
    from torch import Tensor


class Layer(Protocol):
    """A layer with its weights."""

    def __call__(self, ops: Ops, x: Tensor, kv: LayerKV, ubatch: UBatch) -> Tensor:
        """[T, E] to [T, E]."""
        ...


@dataclass(frozen=True, slots=True)
class PreNormLayer:
    """x + attention(norm(x)), then x + ffn(norm(x))."""

    attn_norm: Tensor
    attention: SelfAttention
    ffn_norm: Tensor
    ffn: FeedForward | Experts
    eps: float

    def __call__(self, ops: Ops, x: Tensor, kv: LayerKV, ubatch: UBatch) -> Tensor:
        """[T, E] to [T, E]."""
        x = self.attention(ops, ops.normed(x, self.attn_norm, self.eps), kv, ubatch, add=x)
        return self.ffn(ops, ops.normed(x, self.ffn_norm, self.eps), add=x)


@dataclass(frozen=True, slots=True)
class SandwichLayer:
    """x + norm(attention(norm(x))), then x + norm(ffn(norm(x)))."""

    attn_norm: Tensor
    attention: SelfAttention
    post_attention_norm: Tensor
    ffn_norm: Tensor
    ffn: FeedForward
    post_ffw_norm: Tensor
    eps: float

    def __call__(self, ops: Ops, x: Tensor, kv: LayerKV, ubatch: UBatch) -> Tensor:
        """[T, E] to [T, E]."""
        h = self.attention(ops, ops.normed(x, self.attn_norm, self.eps), kv, ubatch)
        x = ops.rms_norm(h, self.post_attention_norm, self.eps, add=x)
        h = self.ffn(ops, ops.normed(x, self.ffn_norm, self.eps))
        return ops.rms_norm(h, self.post_ffw_norm, self.eps, add=x)


class Decoder:
    """The ends of a model; an architecture adds `rope` and `load_layer`, and overrides what
    differs."""

    rope: RopeParams

    def __init__(self, metadata: Metadata) -> None:
        """Read the sizes; raises FormatError or UnsupportedError."""
        self.metadata = metadata
        self.hp = HParams.read(metadata)

    @property
    def ropes(self) -> tuple[RopeParams, ...]:
        """Each kind of rotation that layers ask for, without its factors."""
        return (self.rope,)

    def load_embedding(self, load: Loader) -> Matrix:
        """Weights of `embed`."""
        return load_embedding(load, self.hp)

    def load_head(self, load: Loader) -> Head:
        """Weights of `logits`."""
        return load_head(load, self.hp)

    def embed(self, ops: Ops, w: Matrix, ids: Tensor) -> Tensor:
        """Token ids int64 [T] to hidden states [T, E]."""
        return ops.embed(w, ids)

    def layer(self, ops: Ops, w: Layer, x: Tensor, kv: LayerKV, ubatch: UBatch) -> Tensor:
        """One layer: [T, E] to [T, E]."""
        return w(ops, x, kv, ubatch)

    def logits(self, ops: Ops, w: Head, x: Tensor) -> Tensor:
        """Hidden states of the rows that want logits [n, E] to logits [n, V]."""
        return w(ops, x)


class ScaledEmbedding(Decoder):
    """A decoder whose embedding is multiplied by the root of the width (the Gemma family)."""

    def embed(self, ops: Ops, w: Matrix, ids: Tensor) -> Tensor:
        """Token ids int64 [T] to hidden states [T, E]."""
        return ops.embed(w, ids).mul_(self.hp.n_embd**0.5)


def pre_norm_layer(
    load: Loader,
    hp: HParams,
    blk: str,
    attention: SelfAttention,
    ffn: FeedForward | Experts,
) -> PreNormLayer:
    """Add the norms to what differs between architectures."""
    return PreNormLayer(
        attn_norm=load_norm(load, hp, blk, "attn_norm"),
        attention=attention,
        ffn_norm=load_norm(load, hp, blk, "ffn_norm"),
        ffn=ffn,
        eps=hp.eps,
    )


def sandwich_layer(
    load: Loader, hp: HParams, blk: str, attention: SelfAttention, ffn: FeedForward
) -> SandwichLayer:
    """Add the norms to what differs between architectures."""
    return SandwichLayer(
        attn_norm=load_norm(load, hp, blk, "attn_norm"),
        attention=attention,
        post_attention_norm=load_norm(load, hp, blk, "post_attention_norm"),
        ffn_norm=load_norm(load, hp, blk, "ffn_norm"),
        ffn=ffn,
        post_ffw_norm=load_norm(load, hp, blk, "post_ffw_norm"),
        eps=hp.eps,
    )
