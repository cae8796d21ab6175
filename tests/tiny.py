"""Tiny random models, the same bytes on every machine, and the logits llama.cpp gets from them.

`data/tiny/specs.json` names each model's metadata and tensors. Values come from numpy's PCG64,
seeded with the crc32 of the tensor's name, so neither order nor platform matters.
"""

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFValueType, GGUFWriter
from numpy.typing import NDArray

DATA = Path(__file__).parent / "data" / "tiny"
SPECS: dict[str, dict[str, Any]] = json.loads((DATA / "specs.json").read_text())
NAMES = tuple(SPECS)


def _values(name: str, shape: list[int], stdev: float) -> NDArray[np.float32]:
    rng = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode())))
    if name == "rope_freqs.weight":
        return 1 + 7 * rng.random(shape, dtype=np.float32)
    values = rng.standard_normal(shape, dtype=np.float32) * np.float32(stdev)
    # Norm weights around 1 keep activations alive through the layers.
    return values + np.float32(1) if "norm" in name and name.endswith("weight") else values


def write_tiny(name: str, path: Path) -> Path:
    """Write the model `name` (one of NAMES) with float32 tensors to `path`; return `path`."""
    spec = SPECS[name]
    writer = GGUFWriter(path, spec["architecture"])
    for key, (kind, value) in spec["metadata"].items():
        if kind.startswith("array:"):
            item = GGUFValueType[kind.removeprefix("array:")]
            writer.add_key_value(key, value, GGUFValueType.ARRAY, item)
        else:
            writer.add_key_value(key, value, GGUFValueType[kind])
    for tensor, shape in spec["tensors"].items():
        writer.add_tensor(tensor, _values(tensor, shape, spec["stdev"]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def golden(name: str) -> tuple[list[int], NDArray[np.float32]]:
    """Return (tokens, logits [n_tokens, n_vocab]): one sequence from position 0, f32 KV cache."""
    with np.load(DATA / f"{name}.npz") as arrays:
        return arrays["tokens"].tolist(), arrays["logits"]
