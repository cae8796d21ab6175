"""A made model of the size of a small real one, its matrices quantized in several ways."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize

T = GGMLQuantizationType


class Size(NamedTuple):
    """Of a llama. Heads are of 64."""

    n_layers: int = 8
    n_heads: int = 16
    n_kv_heads: int = 4
    n_ff: int = 2048
    n_vocab: int = 4096


TYPES = {
    "attn_q": T.Q4_0,  # q, k and v are one matrix at rest: of two types
    "attn_k": T.Q4_0,
    "attn_v": T.Q8_0,
    "attn_output": T.Q5_0,
    "ffn_gate": T.Q4_1,
    "ffn_up": T.Q4_1,
    "ffn_down": T.Q5_1,
    "token_embd": T.Q8_0,
    "output": T.F16,
}


def write_model(path: Path, size: Size | None = None) -> Path:
    """Write it to `path`; the same bytes everywhere. Returns `path`."""
    size = size or Size()
    texts = [*_byte_texts(), "th", *(f"word{i}" for i in range(size.n_vocab - 258)), "<|end|>"]
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(4096)
    writer.add_embedding_length(64 * size.n_heads)
    writer.add_block_count(size.n_layers)
    writer.add_feed_forward_length(size.n_ff)
    writer.add_head_count(size.n_heads)
    writer.add_head_count_kv(size.n_kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(64)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(texts)
    writer.add_token_types([TokenType.NORMAL] * (len(texts) - 1) + [TokenType.CONTROL])
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(len(texts) - 1)
    writer.add_add_bos_token(False)
    for name, shape in _shapes(size):
        _add(writer, name, shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _byte_texts() -> Iterator[str]:
    """GPT-2's character for each byte: printable Latin-1 is itself, the others follow U+0100."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    n_others = 0
    for byte in range(256):
        yield chr(byte if byte in plain else 0x100 + n_others)
        n_others += byte not in plain


def _shapes(size: Size) -> Iterator[tuple[str, tuple[int, ...]]]:
    n_embd, n_kv = 64 * size.n_heads, 64 * size.n_kv_heads
    yield "token_embd.weight", (size.n_vocab, n_embd)
    for i in range(size.n_layers):
        yield f"blk.{i}.attn_norm.weight", (n_embd,)
        yield f"blk.{i}.attn_q.weight", (n_embd, n_embd)
        yield f"blk.{i}.attn_k.weight", (n_kv, n_embd)
        yield f"blk.{i}.attn_v.weight", (n_kv, n_embd)
        yield f"blk.{i}.attn_output.weight", (n_embd, n_embd)
        yield f"blk.{i}.ffn_norm.weight", (n_embd,)
        yield f"blk.{i}.ffn_gate.weight", (size.n_ff, n_embd)
        yield f"blk.{i}.ffn_up.weight", (size.n_ff, n_embd)
        yield f"blk.{i}.ffn_down.weight", (n_embd, size.n_ff)
    yield "output_norm.weight", (n_embd,)
    yield "output.weight", (size.n_vocab, n_embd)


def _add(writer: GGUFWriter, name: str, shape: tuple[int, ...]) -> None:
    if len(shape) == 1:
        writer.add_tensor(name, np.ones(shape, dtype=np.float32))
        return
    random = np.random.Generator(np.random.PCG64(sum(name.encode())))
    values = random.standard_normal(shape, dtype=np.float32)
    # Logits far apart: the best token is the best with other roundings too.
    values *= np.float32((4 if name == "output.weight" else 1) / shape[1] ** 0.5)
    type = TYPES[name.split(".")[-2]]
    writer.add_tensor(name, quantize(values, type), raw_dtype=type)
