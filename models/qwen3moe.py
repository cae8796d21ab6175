"""Qwen3 with a mixture of experts in every layer."""

from gguf_pp.arch import Loader, read_rope
from gguf_pp.decoder import Decoder, PreNormLayer, pre_norm_layer
from gguf_pp.gguf import Metadata
from gguf_pp.parts import load_attention, load_experts


class Model(Decoder):
    """The wiring, without weights."""

    def __init__(self, metadata: Metadata) -> None:
        super().__init__(metadata)
        self.rope = read_rope(metadata, self.hp, neox=True)

    def load_layer(self, load: Loader, i_layer: int) -> PreNormLayer:
        """Weights of one layer."""
        hp, blk = self.hp, f"blk.{i_layer}."
        attention = load_attention(load, hp, blk, self.rope, qk_norm=True)
        ffn = load_experts(load, hp, self.metadata, blk, "silu")
        return pre_norm_layer(load, hp, blk, attention, ffn)
