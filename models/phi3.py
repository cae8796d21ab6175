"""Phi-3 and Phi-4: fused q, k, v and fused gate and up; LongRoPE factors by context."""

from dataclasses import replace

from gguf_pp.arch import Loader, read_rope
from gguf_pp.decoder import Decoder, PreNormLayer, pre_norm_layer
from gguf_pp.gguf import Metadata
from gguf_pp.ops.base import RopeParams
from gguf_pp.parts import load_attention, load_feed_forward


class Model(Decoder):
    """The wiring, without weights. Files name a sliding window, which llama.cpp ignores too."""

    def __init__(self, metadata: Metadata) -> None:
        super().__init__(metadata)
        self.rope = read_rope(metadata, self.hp, neox=True)

    def load_layer(self, load: Loader, i_layer: int) -> PreNormLayer:
        """Weights of one layer."""
        hp, blk = self.hp, f"blk.{i_layer}."
        attention = load_attention(load, hp, blk, self._rope(load))
        ffn = load_feed_forward(load, hp, blk, "silu")
        return pre_norm_layer(load, hp, blk, attention, ffn)

    def _rope(self, load: Loader) -> RopeParams:
        """Long factors once the context exceeds the original one, else short; or none."""
        long = load.n_ctx > self.rope.n_ctx_original
        name = f"rope_factors_{'long' if long else 'short'}.weight"
        return replace(self.rope, freq_factors=name) if load.has(name) else self.rope
