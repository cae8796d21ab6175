"""Vocabularies of real models, with the ids that llama.cpp gets from them.

`data/vocab/NAME.json.xz` is the metadata as JSON. Merges are two lists there: how far the id of
the merged token is from the one before, and the length of the left part.
"""

import json
import lzma
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from gguf_pp.gguf import Metadata
from gguf_pp.tokenizer import Tokenizer

DATA = Path(__file__).parent / "data"
STORED = ("deepseek-coder", "falcon", "gpt-2", "llama-spm", "mpt", "phi-3", "qwen2")
REAL = ("gemma3-270m", "smollm2-135m")
SHARED = Path(__file__).parents[2] / "shared" / "goldens" / "vocab"


def metadata(values: dict[str, Any]) -> Metadata:
    return Metadata(values, Path("test.gguf"))


@cache
def stored(name: str) -> Tokenizer:
    """Return the tokenizer of a vocabulary in `data/vocab`."""
    values = json.loads(lzma.decompress((DATA / "vocab" / f"{name}.json.xz").read_bytes()))
    if "merges" in values:
        steps, n_left = values.pop("merges")
        joined = [values["tokenizer.ggml.tokens"][i] for i in accumulate(steps)]
        values["tokenizer.ggml.merges"] = [
            f"{text[:n]} {text[n:]}" for text, n in zip(joined, n_left, strict=True)
        ]
    return Tokenizer.from_metadata(metadata(values))


def cases(folder: Path, stem: str) -> list[tuple[str, list[int]]]:
    """Return (text, ids) of one pair of golden files."""
    # Bytes, since reading as text would turn \\r\\n into \\n.
    texts = (folder / f"{stem}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = (folder / f"{stem}.out").read_text().split("\n")
    return [(text, [int(i) for i in line.split()]) for text, line in zip(texts, lines, strict=True)]
