"""Qwen3 with a mixture of experts in every layer."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gguf_pp import parts
from gguf_pp.arch import HParams, Loader, read_rope
from gguf_pp.batch import UBatch
from gguf_pp.gguf import Metadata
from gguf_pp.ops.base import LayerKV, Matrix, Ops


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer."""

    attn_norm: Tensor
    attention: parts.SelfAttention
    ffn_norm: Tensor
    ffn: parts.Experts


class Model:
    """The wiring, without weights."""

    def __init__(self, metadata: Metadata) -> None:
        self.hp = HParams.read(metadata)
        self.metadata = metadata
        self.rope = read_rope(metadata, self.hp, neox=True)

    def load_embedding(self, load: Loader) -> Matrix:
        """Weights of `embed`."""
        return parts.load_embedding(load, self.hp)

    def load_layer(self, load: Loader, i_layer: int) -> Layer:
        """Weights of one layer."""
        hp, blk = self.hp, f"blk.{i_layer}."
        return Layer(
            attn_norm=parts.load_norm(load, hp, blk, "attn_norm"),
            attention=parts.load_attention(load, hp, blk, self.rope, qk_norm=True),
            ffn_norm=parts.load_norm(load, hp, blk, "ffn_norm"),
            ffn=parts.load_experts(load, hp, self.metadata, blk, "silu"),
        )

    def load_head(self, load: Loader) -> parts.Head:
        """Weights of `logits`."""
        return parts.load_head(load, self.hp)

    def embed(self, ops: Ops, w: Matrix, tokens: Sequence[int]) -> Tensor:
        """Token ids to hidden states [T, E]."""
        return ops.embed(w, tokens)

    def layer(self, ops: Ops, w: Layer, x: Tensor, kv: LayerKV, ubatch: UBatch) -> Tensor:
        """One layer: [T, E] to [T, E]."""
        x = w.attention(ops, ops.rms_norm(x, w.attn_norm, self.hp.eps), kv, ubatch, add=x)
        return w.ffn(ops, ops.rms_norm(x, w.ffn_norm, self.hp.eps), add=x)

    def logits(self, ops: Ops, w: parts.Head, x: Tensor) -> Tensor:
        """Hidden states of the rows that want logits to logits [n, V]."""
        return w(ops, x)
