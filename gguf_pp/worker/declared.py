"""What a client declares when it opens a session, checked before anything is made of it."""

from dataclasses import dataclass
from typing import Any, cast

from gguf_pp.config import MAX_COPIES, Kernels, Wire
from gguf_pp.gguf import Identity
from gguf_pp.pipeline.memory import Rung
from gguf_pp.pipeline.split import Part
from gguf_pp.wire import MAX_ROWS, MAX_SPANS, Fields, ProtocolError

MAX_STAGES = 64
MAX_TENSORS = 1 << 17
MAX_LAYERS = 10_000
MAX_CTX_SIZE = 1 << 30


@dataclass(frozen=True, slots=True)
class Declared:
    """Stages as (device, part), and how they compute; the model as it was sent, for the store."""

    identity: Identity
    metadata: dict[str, Any]
    tensors: list[Any]
    stages: tuple[tuple[str, Part], ...]
    n_slots: int
    kv_types: tuple[str, str]
    kernels: Kernels
    exact: bool
    n_vocab: int
    wire: Wire
    label: str

    @property
    def embeds(self) -> bool:
        """Whether the first stage embeds tokens."""
        return self.stages[0][1].embeds

    @property
    def heads(self) -> bool:
        """Whether the last stage makes logits."""
        return self.stages[-1][1].heads


def read_identity(fields: Fields) -> Identity:
    """Which model is meant. Raises ProtocolError."""
    sizes = fields.integers("sizes", 1 << 10, 1, 1 << 50)
    return Identity(sizes, fields.text("digest", 64))


def read_declared(body: Fields, devices: list[str]) -> Declared:
    """Read the body of OPEN for a worker with `devices`. Raises ProtocolError."""
    kinds = body.items("kv_types", 2)
    if len(kinds) != 2 or any(kind not in ("f16", "f32") for kind in kinds):
        raise ProtocolError("kv_types are two of f16 and f32")
    label = body.text("label", 256)
    return Declared(
        identity=read_identity(body.object("identity")),
        metadata=body.object("metadata").values(),
        tensors=body.items("tensors", MAX_TENSORS),
        stages=_stages(body, devices),
        n_slots=body.integer("n_slots", 1, MAX_SPANS),
        kv_types=(kinds[0], kinds[1]),
        kernels=cast(Kernels, body.choice("kernels", "auto", "native", "torch")),
        exact=body.flag("exact"),
        n_vocab=body.integer("n_vocab", 1, 1 << 31),
        wire=cast(Wire, body.choice("wire", "f32", "f16")),
        label="".join(c if c.isprintable() else "?" for c in label),
    )


def _stages(body: Fields, devices: list[str]) -> tuple[tuple[str, Part], ...]:
    """Consecutive ranges of layers on different devices; the model's ends at the ends."""
    items = body.objects("stages", MAX_STAGES)
    embeds, heads = body.flag("embeds"), body.flag("heads")
    stages: list[tuple[str, Part]] = []
    for i, item in enumerate(items):
        device = item.choice("device", *devices)
        bounds = item.integers("layers", 2, 0, MAX_LAYERS)
        if len(bounds) != 2 or bounds[0] >= bounds[1]:
            raise ProtocolError(f"a stage with the layers {bounds}")
        if stages and stages[-1][1].layers.stop != bounds[0]:
            raise ProtocolError("the layers of the stages do not follow each other")
        part = Part(range(*bounds), embeds and i == 0, heads and i == len(items) - 1)
        stages.append((device, part))
    names = [device for device, _ in stages]
    if not stages or len(set(names)) < len(names):
        raise ProtocolError("no stage, or two on one device")
    if embeds and stages[0][1].layers.start != 0:
        raise ProtocolError("an embedding before another layer than the first")
    return tuple(stages)


def read_rung(body: Fields) -> Rung:
    """Read the body of ALLOCATE. Raises ProtocolError."""
    return Rung(
        n_copies=body.integer("n_copies", 1, MAX_COPIES),
        ubatch_size=body.integer("ubatch_size", 1, MAX_ROWS),
        ctx_size=body.integer("ctx_size", 1, MAX_CTX_SIZE),
    )
