"""Llama 1 to 3, Mistral, Mixtral, SmolLM2 and their relatives.

RMS norm, rotation of interleaved pairs, grouped queries, SwiGLU or a mixture of SwiGLU experts.
"""

from dataclasses import replace

from gguf_pp.arch import Loader, read_rope
from gguf_pp.decoder import Decoder, PreNormLayer, pre_norm_layer
from gguf_pp.gguf import Metadata
from gguf_pp.parts import load_attention, load_experts, load_feed_forward


class Model(Decoder):
    """The wiring, without weights."""

    def __init__(self, metadata: Metadata) -> None:
        super().__init__(metadata)
        arch = self.hp.architecture
        self.scale = metadata.float_of(f"{arch}.attention.scale", 0.0) or None
        self.moe = metadata.int_of(f"{arch}.expert_count", 0) > 0
        self.rope = read_rope(metadata, self.hp, neox=False)

    def load_layer(self, load: Loader, i_layer: int) -> PreNormLayer:
        """Weights of one layer."""
        hp, blk, rope = self.hp, f"blk.{i_layer}.", self.rope
        if load.has("rope_freqs.weight"):
            rope = replace(rope, freq_factors="rope_freqs.weight")
        attention = load_attention(load, hp, blk, rope, scale=self.scale)
        if self.moe:
            experts = load_experts(load, hp, self.metadata, blk, "silu")
            return pre_norm_layer(load, hp, blk, attention, experts)
        return pre_norm_layer(load, hp, blk, attention, load_feed_forward(load, hp, blk, "silu"))
