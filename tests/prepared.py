"""What a light client says, made with the code of the real one."""

from typing import Any

from gguf_pp import arch
from gguf_pp.config import Options, resolve
from gguf_pp.gguf import ModelFile, identity_of
from gguf_pp.pipeline.manifest import manifest
from gguf_pp.pipeline.split import Part


def prepare(path: str, part: Part, device: str = "cpu") -> dict[str, Any]:
    """The body of OPEN for `part` of a model on one device, for JSON."""
    with ModelFile.open(path) as file:
        model = arch.build(file.metadata)
        config = resolve(Options())
        n_vocab = file.tensors["token_embd.weight"].shape[0]
        body, _ = manifest(file, identity_of(file), model, [(device, part)], config, n_vocab)
    return {"open": body, "path": path}


def whole(path: str) -> dict[str, Any]:
    """All of a model of four layers."""
    return prepare(path, Part(range(4), True, True))
