"""Gemma 2: norms before and after, soft caps, every other layer sees a window."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gguf_pp.arch import Loader, read_rope, read_window
from gguf_pp.decoder import SandwichLayer, ScaledEmbedding, sandwich_layer
from gguf_pp.gguf import Metadata
from gguf_pp.ops.base import Ops
from gguf_pp.parts import Head, load_attention, load_feed_forward

if TYPE_CHECKING:
    from torch import Tensor


class Model(ScaledEmbedding):
    """The wiring, without weights."""

    def __init__(self, metadata: Metadata) -> None:
        super().__init__(metadata)
        hp = self.hp
        arch = hp.architecture
        self.window = read_window(metadata, hp, 4096)
        self.attn_softcap = metadata.float_of(f"{arch}.attn_logit_softcapping", 50.0)
        self.final_softcap = metadata.float_of(f"{arch}.final_logit_softcapping", 30.0)
        self.rope = read_rope(metadata, hp, neox=True)
        # The 27B model (46 layers) scales queries by the width per head, not by the head size.
        self.scale = (hp.n_embd / hp.n_heads if hp.n_layers == 46 else hp.head_size) ** -0.5

    def load_layer(self, load: Loader, i_layer: int) -> SandwichLayer:
        """Weights of one layer."""
        hp, blk = self.hp, f"blk.{i_layer}."
        attention = load_attention(
            load,
            hp,
            blk,
            self.rope,
            scale=self.scale,
            window=self.window if i_layer % 2 == 0 else 0,
            softcap=self.attn_softcap,
        )
        ffn = load_feed_forward(load, hp, blk, "gelu_tanh")
        return sandwich_layer(load, hp, blk, attention, ffn)

    def logits(self, ops: Ops, w: Head, x: Tensor) -> Tensor:
        """Hidden states of the rows that want logits to logits [n, V], softly capped."""
        logits = w(ops, x)
        cap = self.final_softcap
        if cap:
            # On a CPU row by row: there a number's bits depend on where in a tensor it stands.
            for part in logits if logits.device.type == "cpu" else (logits,):
                part.div_(cap).tanh_().mul_(cap)
        return logits
