"""Models that several tests share."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter, TokenType
from hypothesis import HealthCheck, settings

# Whether Triton's kernels run on the CPU is settled when it is first imported, for the process.
os.environ.setdefault("TRITON_INTERPRET", "1")

# How long an example takes says something about the machine, not about the code. What is looked
# for at every run elsewhere is the same at every run of CI.
settings.register_profile(
    "untimed",
    deadline=None,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("untimed")

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CONTROL = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<s>")
N_EMBD, N_FF, N_LAYERS, N_HEADS = 32, 48, 4, 2
LONG_CTX = 1 << 16


@pytest.fixture(autouse=True)
def same_numbers_every_time() -> None:
    """What fails once fails again."""
    torch.manual_seed(0)


def byte_texts() -> Iterator[str]:
    """GPT-2's character for each byte: printable Latin-1 is itself, the others follow U+0100."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    n_others = 0
    for byte in range(256):
        yield chr(byte if byte in plain else 0x100 + n_others)
        n_others += byte not in plain


def write_chat_model(path: Path, *, template: str | None = TEMPLATE, add_bos: bool = False) -> Path:
    """Write a small random llama that reads bytes and answers in printable ASCII without end."""
    texts = [*byte_texts(), "th", *CONTROL]
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(LONG_CTX)
    writer.add_embedding_length(N_EMBD)
    writer.add_block_count(N_LAYERS)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(N_HEADS)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(N_EMBD // N_HEADS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(texts)
    n_normal = len(texts) - len(CONTROL)
    writer.add_token_types([TokenType.NORMAL] * n_normal + [TokenType.CONTROL] * len(CONTROL))
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(texts.index("<|end|>"))
    writer.add_bos_token_id(texts.index("<s>"))
    writer.add_add_bos_token(add_bos)
    if template is not None:
        writer.add_chat_template(template)
    for name, values in _tensors(len(texts)):
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(n_vocab: int) -> Iterator[tuple[str, np.ndarray]]:
    rng = np.random.Generator(np.random.PCG64(7))

    def values(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(0.3)

    yield "token_embd.weight", values(n_vocab, N_EMBD)
    n_kv = N_EMBD // N_HEADS
    for i in range(N_LAYERS):
        yield f"blk.{i}.attn_norm.weight", np.ones(N_EMBD, dtype=np.float32)
        yield f"blk.{i}.attn_q.weight", values(N_EMBD, N_EMBD)
        yield f"blk.{i}.attn_k.weight", values(n_kv, N_EMBD)
        yield f"blk.{i}.attn_v.weight", values(n_kv, N_EMBD)
        yield f"blk.{i}.attn_output.weight", values(N_EMBD, N_EMBD)
        yield f"blk.{i}.ffn_norm.weight", np.ones(N_EMBD, dtype=np.float32)
        yield f"blk.{i}.ffn_gate.weight", values(N_FF, N_EMBD)
        yield f"blk.{i}.ffn_up.weight", values(N_FF, N_EMBD)
        yield f"blk.{i}.ffn_down.weight", values(N_EMBD, N_FF)
    yield "output_norm.weight", np.ones(N_EMBD, dtype=np.float32)
    head = values(n_vocab, N_EMBD) * 4
    # Of random logits the best is above 0: the tokens with 0 are never chosen.
    shown = np.zeros(n_vocab, dtype=bool)
    shown[0x20:0x7F] = True
    head[~shown] = 0
    yield "output.weight", head


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of a model with a vocabulary of bytes and a chat template, and no BOS."""
    return str(write_chat_model(tmp_path_factory.mktemp("models") / "chat.gguf"))


@pytest.fixture(scope="session")
def plain_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same without a chat template, and with a BOS."""
    path = tmp_path_factory.mktemp("models") / "plain.gguf"
    return str(write_chat_model(path, template=None, add_bos=True))
