"""Gemma 3 (text): norms around everything, five layers with a window to one without."""

from dataclasses import replace

from gguf_pp.arch import Loader, read_rope, read_rope_base, read_window
from gguf_pp.decoder import SandwichLayer, ScaledEmbedding, sandwich_layer
from gguf_pp.gguf import Metadata
from gguf_pp.ops.base import RopeParams
from gguf_pp.parts import load_attention, load_feed_forward


class Model(ScaledEmbedding):
    """The wiring, without weights."""

    def __init__(self, metadata: Metadata) -> None:
        super().__init__(metadata)
        hp = self.hp
        self.window = read_window(metadata, hp, 0)
        self.rope = read_rope(metadata, hp, neox=True)
        # Layers with a window turn at their own base, and no scaling applies to them.
        local_base = read_rope_base(metadata, hp, "freq_base_swa")
        self.rope_local = replace(self.rope, base=local_base, scaling="none")
        # The 27B model (62 layers) scales queries by the width per head, not by the head size.
        self.scale = (hp.n_embd / hp.n_heads if hp.n_layers == 62 else hp.head_size) ** -0.5

    @property
    def ropes(self) -> tuple[RopeParams, ...]:
        """Each kind of rotation that layers ask for."""
        return (self.rope, self.rope_local) if self.window else (self.rope,)

    def load_layer(self, load: Loader, i_layer: int) -> SandwichLayer:
        """Weights of one layer."""
        hp, blk = self.hp, f"blk.{i_layer}."
        local = self.window > 0 and i_layer % 6 != 5
        attention = load_attention(
            load,
            hp,
            blk,
            self.rope_local if local else self.rope,
            scale=self.scale,
            window=self.window if local else 0,
            qk_norm=True,
        )
        ffn = load_feed_forward(load, hp, blk, "gelu_tanh")
        return sandwich_layer(load, hp, blk, attention, ffn)
