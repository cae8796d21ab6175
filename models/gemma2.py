"""Gemma 2: norms before and after, soft caps, every other layer sees a window."""

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
    post_attention_norm: Tensor
    ffn_norm: Tensor
    ffn: parts.FeedForward
    post_ffw_norm: Tensor


class Model:
    """The wiring, without weights."""

    def __init__(self, metadata: Metadata) -> None:
        self.hp = hp = HParams.read(metadata)
        arch = hp.architecture
        self.window = metadata.int_of(f"{arch}.attention.sliding_window", 4096)
        self.attn_softcap = metadata.float_of(f"{arch}.attn_logit_softcapping", 50.0)
        self.final_softcap = metadata.float_of(f"{arch}.final_logit_softcapping", 30.0)
        self.rope = read_rope(metadata, hp, neox=True)
        # The 27B model (46 layers) scales queries by the width per head, not by the head size.
        self.scale = (hp.n_embd / hp.n_heads if hp.n_layers == 46 else hp.head_size) ** -0.5

    def load_embedding(self, load: Loader) -> Matrix:
        """Weights of `embed`."""
        return parts.load_embedding(load, self.hp)

    def load_layer(self, load: Loader, i_layer: int) -> Layer:
        """Weights of one layer."""
        hp, blk = self.hp, f"blk.{i_layer}."
        attention = parts.load_attention(
            load,
            hp,
            blk,
            self.rope,
            scale=self.scale,
            window=self.window if i_layer % 2 == 0 else 0,
            softcap=self.attn_softcap,
        )
        return Layer(
            attn_norm=parts.load_norm(load, hp, blk, "attn_norm"),
            attention=attention,
            post_attention_norm=parts.load_norm(load, hp, blk, "post_attention_norm"),
            ffn_norm=parts.load_norm(load, hp, blk, "ffn_norm"),
            ffn=parts.load_feed_forward(load, hp, blk, "gelu_tanh"),
            post_ffw_norm=parts.load_norm(load, hp, blk, "post_ffw_norm"),
        )

    def load_head(self, load: Loader) -> parts.Head:
        """Weights of `logits`."""
        return parts.load_head(load, self.hp)

    def embed(self, ops: Ops, w: Matrix, tokens: Sequence[int]) -> Tensor:
        """Token ids to hidden states [T, E]."""
        return ops.embed(w, tokens).mul_(self.hp.n_embd**0.5)

    def layer(self, ops: Ops, w: Layer, x: Tensor, kv: LayerKV, ubatch: UBatch) -> Tensor:
        """One layer: [T, E] to [T, E]."""
        eps = self.hp.eps
        h = w.attention(ops, ops.rms_norm(x, w.attn_norm, eps), kv, ubatch)
        x = ops.rms_norm(h, w.post_attention_norm, eps, add=x)
        h = w.ffn(ops, ops.rms_norm(x, w.ffn_norm, eps))
        return ops.rms_norm(h, w.post_ffw_norm, eps, add=x)

    def logits(self, ops: Ops, w: parts.Head, x: Tensor) -> Tensor:
        """Hidden states of the rows that want logits to logits [n, V]."""
        logits = w(ops, x)
        cap = self.final_softcap
        if cap:
            for row in logits:  # row by row, so that a row's bits do not depend on the others
                row.div_(cap).tanh_().mul_(cap)
        return logits
