"""Llama 1 to 3, Mistral, Mixtral, SmolLM2 and their relatives.

RMS norm, rotation of interleaved pairs, grouped queries, SwiGLU or a mixture of SwiGLU experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

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
    ffn: parts.FeedForward | parts.Experts


class Model:
    """The wiring, without weights."""

    def __init__(self, metadata: Metadata) -> None:
        self.hp = HParams.read(metadata)
        self.metadata = metadata
        arch = self.hp.architecture
        self.scale = metadata.float_of(f"{arch}.attention.scale", 0.0) or None
        self.moe = metadata.int_of(f"{arch}.expert_count", 0) > 0
        self.rope = read_rope(metadata, self.hp, neox=False)

    def load_embedding(self, load: Loader) -> Matrix:
        """Weights of `embed`."""
        return parts.load_embedding(load, self.hp)

    def load_layer(self, load: Loader, i_layer: int) -> Layer:
        """Weights of one layer."""
        hp, blk, rope = self.hp, f"blk.{i_layer}.", self.rope
        if load.has("rope_freqs.weight"):
            rope = replace(rope, freq_factors="rope_freqs.weight")
        return Layer(
            attn_norm=parts.load_norm(load, hp, blk, "attn_norm"),
            attention=parts.load_attention(load, hp, blk, rope, scale=self.scale),
            ffn_norm=parts.load_norm(load, hp, blk, "ffn_norm"),
            ffn=parts.load_experts(load, hp, self.metadata, blk, "silu")
            if self.moe
            else parts.load_feed_forward(load, hp, blk, "silu"),
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
