"""Small models whose tensors are quantized in several types, as those of real files are."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import gguf.quants
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from numpy.typing import NDArray

TEXTS = [*(chr(code) for code in range(0x21, 0x7F)), "!#"]
N_EMBD, N_FF, N_VOCAB = 256, 96, len(TEXTS)
N_HEADS, N_KV_HEADS, HEAD_SIZE = 4, 2, 16


class Kind(NamedTuple):
    """An architecture, and the types of its tensors that are quantized, by the end of their names.

    Rows of `attn_output` and `ffn_down` are too short for types in blocks of 256.
    """

    architecture: str
    n_layers: int
    types: dict[str, str]
    has_norms_around: bool = False
    has_biases: bool = False
    n_experts: int = 0


KINDS = {
    "llama": Kind(
        "llama",
        2,
        {
            "token_embd": "Q6_K", "output": "Q6_K", "attn_q": "Q4_K", "attn_k": "Q4_K",
            "attn_v": "Q6_K", "attn_output": "Q8_0", "ffn_gate": "Q4_K", "ffn_up": "Q4_K",
            "ffn_down": "Q4_0",
        },
    ),
    "gemma3": Kind(
        "gemma3",
        6,
        {
            "token_embd": "Q8_0", "output": "Q6_K", "attn_q": "Q5_K", "attn_k": "Q5_K",
            "attn_v": "Q6_K", "attn_output": "Q5_0", "ffn_gate": "Q4_K", "ffn_up": "Q6_K",
            "ffn_down": "Q4_1",
        },
        has_norms_around=True,
    ),
    "qwen2": Kind(
        "qwen2",
        2,
        {
            "token_embd": "Q4_0", "output": "Q8_0", "attn_q": "Q8_0", "attn_k": "Q4_0",
            "attn_v": "Q4_0", "attn_output": "F16", "ffn_gate": "Q3_K", "ffn_up": "Q2_K",
            "ffn_down": "IQ4_NL",
        },
        has_biases=True,
    ),
    "mixtral": Kind(
        "llama",
        2,
        {
            "token_embd": "Q4_0", "output": "Q6_K", "attn_q": "Q4_K", "attn_k": "Q4_K",
            "attn_v": "Q6_K", "attn_output": "Q8_0", "ffn_gate_inp": "F32", "ffn_gate_exps": "Q4_K",
            "ffn_up_exps": "Q4_K", "ffn_down_exps": "Q5_1",
        },
        n_experts=4,
    ),
}  # fmt: skip


def write_mixed(name: str, path: Path, seed: int = 0) -> Path:
    """Write the model `name` (one of KINDS) with random values to `path`; return `path`."""
    kind = KINDS[name]
    writer = GGUFWriter(path, kind.architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(N_EMBD)
    writer.add_block_count(kind.n_layers)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(N_HEADS)
    writer.add_head_count_kv(N_KV_HEADS)
    writer.add_key_length(HEAD_SIZE)
    writer.add_value_length(HEAD_SIZE)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TEXTS)
    writer.add_token_merges(["! #"])
    writer.add_sliding_window(16)
    if kind.n_experts:
        writer.add_expert_count(kind.n_experts)
        writer.add_expert_used_count(2)
    random = np.random.Generator(np.random.PCG64(seed))
    for tensor, shape in _shapes(kind):
        _add(writer, tensor, shape, kind.types.get(tensor.split(".")[-2]), random)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _shapes(kind: Kind) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "token_embd.weight", (N_VOCAB, N_EMBD)
    yield "output_norm.weight", (N_EMBD,)
    if "output" in kind.types:
        yield "output.weight", (N_VOCAB, N_EMBD)
    n_q, n_kv = N_HEADS * HEAD_SIZE, N_KV_HEADS * HEAD_SIZE
    norms = ["attn_norm", "ffn_norm"]
    norms += ["post_attention_norm", "post_ffw_norm"] if kind.has_norms_around else []
    for i in range(kind.n_layers):
        blk = f"blk.{i}."
        yield from ((f"{blk}{norm}.weight", (N_EMBD,)) for norm in norms)
        if kind.has_norms_around:
            yield from ((f"{blk}attn_{x}_norm.weight", (HEAD_SIZE,)) for x in "qk")
        for x, n_rows in (("q", n_q), ("k", n_kv), ("v", n_kv)):
            yield f"{blk}attn_{x}.weight", (n_rows, N_EMBD)
            if kind.has_biases:
                yield f"{blk}attn_{x}.bias", (n_rows,)
        yield f"{blk}attn_output.weight", (N_EMBD, n_q)
        exps, stacked = ("_exps", (kind.n_experts,)) if kind.n_experts else ("", ())
        if kind.n_experts:
            yield f"{blk}ffn_gate_inp.weight", (kind.n_experts, N_EMBD)
        yield f"{blk}ffn_gate{exps}.weight", (*stacked, N_FF, N_EMBD)
        yield f"{blk}ffn_up{exps}.weight", (*stacked, N_FF, N_EMBD)
        yield f"{blk}ffn_down{exps}.weight", (*stacked, N_EMBD, N_FF)


def _add(
    writer: GGUFWriter,
    name: str,
    shape: tuple[int, ...],
    type_name: str | None,
    random: np.random.Generator,
) -> None:
    if len(shape) == 1:
        values = random.standard_normal(shape, dtype=np.float32) * np.float32(0.1)
        writer.add_tensor(name, values + np.float32(name.endswith("norm.weight")))
        return
    assert type_name is not None, name
    type = GGMLQuantizationType[type_name]
    if type in _SCALES:
        data = _random_blocks(type, shape, random)
    else:
        stdev = np.float32(shape[-1] ** -0.5)
        values = random.standard_normal(shape, dtype=np.float32) * stdev
        data = gguf.quants.quantize(values, type)
    writer.add_tensor(name, data, raw_dtype=type)


# Of types that the library does not quantize: where their float16 are.
_SCALES = {
    GGMLQuantizationType.Q2_K: (80, 82),
    GGMLQuantizationType.Q3_K: (108,),
    GGMLQuantizationType.Q4_K: (0, 2),
    GGMLQuantizationType.Q5_K: (0, 2),
    GGMLQuantizationType.Q6_K: (208,),
    GGMLQuantizationType.IQ4_NL: (0,),
}


def _random_blocks(
    type: GGMLQuantizationType, shape: tuple[int, ...], random: np.random.Generator
) -> NDArray[np.uint8]:
    """Any bytes, their scales such that weights have the variance 1 / width."""
    block_size, type_size = GGML_QUANT_SIZES[type]
    n_blocks, n_cols = math.prod(shape) // block_size, shape[-1]
    blocks = random.integers(0, 256, (n_blocks, type_size), dtype=np.uint8)

    def put(scale: float) -> NDArray[np.uint8]:
        for at in _SCALES[type]:
            blocks[:, at : at + 2] = np.frombuffer(np.float16(scale).tobytes(), dtype=np.uint8)
        return blocks.reshape(*shape[:-1], -1)

    stdev = float(gguf.quants.dequantize(put(1.0), type).std())
    return put(n_cols**-0.5 / stdev)
