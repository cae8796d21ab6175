"""What a worker is told of a model: enough to build and check its stages, and no more."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from gguf_pp.arch import Model
from gguf_pp.config import RuntimeConfig
from gguf_pp.errors import UnsupportedError
from gguf_pp.gguf import ModelFile
from gguf_pp.gguf.identity import Identity
from gguf_pp.pipeline.placement import visit
from gguf_pp.pipeline.sizing import SizeLoader
from gguf_pp.pipeline.split import Part
from gguf_pp.wire import MAX_META_BYTES, pack_json

MAX_ITEMS = 4096
"""Longest list of metadata that is sent; what is longer describes the vocabulary."""


def manifest(
    file: ModelFile,
    identity: Identity,
    model: Model,
    places: Sequence[tuple[str, Part]],
    config: RuntimeConfig,
    n_vocab: int,
) -> tuple[dict[str, Any], list[str]]:
    """The body of OPEN for `places` (devices by the worker's names, and their parts), and the names
    of the tensors it lists. Raises FormatError, UnsupportedError."""
    names = _names(file, model, [part for _, part in places])
    infos = [file.tensors[name] for name in names]
    body = {
        "identity": {"sizes": list(identity.sizes), "digest": identity.digest},
        "metadata": _metadata(file),
        "tensors": [[i.name, int(i.type), list(i.shape), i.n_bytes] for i in infos],
        "stages": [
            {"device": name, "layers": [part.layers.start, part.layers.stop]}
            for name, part in places
        ],
        "embeds": places[0][1].embeds,
        "heads": places[-1][1].heads,
        "n_slots": config.n_slots,
        "kv_types": list(config.kv_types),
        "kernels": config.kernels,
        "exact": config.exact,
        "n_vocab": n_vocab,
        "wire": config.wire,
        "label": file.path.name[:200],
    }
    if (n_bytes := len(pack_json(body))) > MAX_META_BYTES:
        raise UnsupportedError(f"{file.path}: {n_bytes} bytes to describe the model to a worker")
    return body, names


def _names(file: ModelFile, model: Model, parts: Sequence[Part]) -> list[str]:
    """Tensors of these parts at any context, in the order of the file."""
    names: set[str] = set()
    for n_ctx in {1, model.hp.n_ctx_train}:  # there may be rotation factors for short and for long
        loader = SizeLoader(file, n_ctx)
        for part in parts:
            visit(loader, model, part)
        names |= loader.names
    return [name for name in file.tensors if name in names]


def _metadata(file: ModelFile) -> dict[str, Any]:
    """Keys a model may read: those of the tokenizer stay here."""
    kept = {}
    for key, value in file.metadata.items():
        if isinstance(value, np.ndarray):
            value = value.tolist()
        if not key.startswith("tokenizer.") and _sendable(value):
            kept[key] = value
    return kept


def _sendable(value: object) -> bool:
    if isinstance(value, list):
        return len(value) <= MAX_ITEMS and all(_sendable(item) for item in value)
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, bool | int | str)
