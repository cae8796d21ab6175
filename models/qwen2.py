"""Qwen2 and Qwen2.5: like Llama, with biases on q, k and v and rotated halves."""

from gguf_pp.arch import Loader, read_rope
from gguf_pp.decoder import Decoder, PreNormLayer, pre_norm_layer
from gguf_pp.gguf import Metadata
from gguf_pp.parts import load_attention, load_feed_forward


class Model(Decoder):
    """The wiring, without weights."""

    def __init__(self, metadata: Metadata) -> None:
        super().__init__(metadata)
        self.rope = read_rope(metadata, self.hp, neox=True)

    def load_layer(self, load: Loader, i_layer: int) -> PreNormLayer:
        """Weights of one layer."""
        hp, blk = self.hp, f"blk.{i_layer}."
        attention = load_attention(load, hp, blk, self.rope)
        ffn = load_feed_forward(load, hp, blk, "silu")
        return pre_norm_layer(load, hp, blk, attention, ffn)
