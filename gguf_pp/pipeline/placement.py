"""Which layers go to which device, and what that takes: one arithmetic to plan and to load."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from gguf_pp.arch import Model
from gguf_pp.backend.base import Memory
from gguf_pp.config import RuntimeConfig
from gguf_pp.gguf.source import TensorSource
from gguf_pp.net import is_remote, parse_endpoint
from gguf_pp.pipeline import split
from gguf_pp.pipeline.memory import MIN_CTX_SIZE, Rung
from gguf_pp.pipeline.sizing import SizeLoader
from gguf_pp.pipeline.split import Part, parts_of

MARGIN = 0.05
"""Share of the free memory that a context chosen by us leaves alone."""

HEAD_SHARE = 0.25
"""How much of the layers' time the head may stand for where layers are split by time."""

LOGITS_BYTES = 32 << 20
"""Logits are made for as many rows at a time as fit in this."""

PRODUCT_BYTES = 32 << 20
"""What a CUDA device keeps for weights as they are multiplied; as in triton/linear.py."""

PAIRS_BYTES = 128 << 20
"""What it keeps at most for rows beside the experts they chose; as in triton/experts.py."""

INDEX_BYTES = 1 << 20
"""What it keeps for positions, slots and token ids, generously."""


class Device(Protocol):
    """What placing asks of a device: one that is opened has it, and so has one that is only
    planned, or on another machine (not `local`)."""

    @property
    def name(self) -> str:
        """As the user wrote it, or the worker's name for it behind the worker's."""
        ...

    @property
    def local(self) -> bool:
        """Whether it is of this machine."""
        ...

    @property
    def relative_speed(self) -> float:
        """As in Backend."""
        ...

    def memory(self) -> Memory:
        """Total and free bytes."""
        ...


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of a model's weights, as they lie in the file."""

    embedding: int
    layers: tuple[int, ...]
    head: int
    tied: bool
    names: frozenset[str]

    def of(self, part: Part) -> int:
        """Bytes of one stage. A device with both ends holds a tied table once."""
        total = sum(self.layers[i] for i in part.layers)
        total += self.embedding * part.embeds + self.head * part.heads
        twice = part.heads and (part.embeds or part.has_table) and self.tied
        return total - self.embedding * twice


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that one stage takes; `copies` are all its rotating inputs and outputs."""

    weights: int
    kv: int
    copies: int
    scratch: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.kv + self.copies + self.scratch

    def __add__(self, other: "Need") -> "Need":
        return Need(
            self.weights + other.weights,
            self.kv + other.kv,
            self.copies + other.copies,
            self.scratch + other.scratch,
        )


def measure(file: TensorSource, model: Model, n_ctx: int) -> Sizes:
    """Add up sizes; on the way every tensor is checked. Raises FormatError."""

    def size(load: Callable[[SizeLoader], object]) -> SizeLoader:
        loader = SizeLoader(file, n_ctx)
        load(loader)
        return loader

    embedding = size(model.load_embedding)
    head = size(model.load_head)
    # Tables shared by all layers are small and are counted with each.
    layers = [
        size(lambda load, i=i: model.load_layer(load, i))  # type: ignore[misc]
        for i in range(model.hp.n_layers)
    ]
    names = embedding.names.union(head.names, *(layer.names for layer in layers))
    return Sizes(
        embedding=embedding.n_bytes,
        layers=tuple(layer.n_bytes for layer in layers),
        head=head.n_bytes,
        tied="token_embd.weight" in head.names,
        names=frozenset(names),
    )


def visit(loader: SizeLoader, model: Model, part: Part) -> None:
    """Have `loader` count, check and name the tensors of one stage. Raises FormatError."""
    if part.embeds:
        model.load_embedding(loader)
    for i_layer in part.layers:
        model.load_layer(loader, i_layer)
    if part.heads:
        model.load_head(loader)


def need_of(
    config: RuntimeConfig, model: Model, sizes: Sizes, part: Part, rung: Rung, device: Device
) -> Need:
    """What the stage with `part` takes on `device` at `rung`."""
    hp = model.hp
    cell = kv_bytes(hp.n_kv_heads, hp.head_size, config.kv_types)
    n_buffers = (not part.embeds) + (not part.heads)
    copies = rung.n_copies * n_buffers * rung.ubatch_size * hp.n_embd * 4
    if config.run_ahead and (part.embeds or part.heads):
        copies += 4 * config.n_slots * n_parcels(config, len(config.devices), rung.n_copies)
    return Need(
        weights=sizes.of(part),
        kv=cell * rung.ctx_size * config.n_slots * len(part.layers),
        copies=copies,
        scratch=scratch_bytes(model, part, rung, device.name),
    )


def n_parcels(config: RuntimeConfig, n_devices: int, n_copies: int) -> int:
    """Parcels of chosen tokens (pipeline/feedback.py): as many as ubatches in flight may choose."""
    if n_devices > 1 and n_copies == 1:  # devices take turns, and the host with them
        return 0
    n_groups = min(config.n_slots, 2 * n_devices)
    return n_groups * (1 + config.run_ahead) + n_devices + n_copies


def by_pool(devices: Sequence[Device], amounts: Iterable[int]) -> dict[str, int]:
    """Sums over the devices that share a memory."""
    sums: dict[str, int] = {}
    for device, amount in zip(devices, amounts, strict=True):
        pool = device.memory().pool
        sums[pool] = sums.get(pool, 0) + amount
    return sums


def fits(devices: Sequence[Device], amounts: Iterable[int]) -> bool:
    """Whether every memory has what is asked of it."""
    free = {memory.pool: memory.free_bytes for memory in (d.memory() for d in devices)}
    return all(asked <= free[pool] for pool, asked in by_pool(devices, amounts).items())


def place(
    config: RuntimeConfig, sizes: Sizes, cell_bytes: int, devices: Sequence[Device]
) -> list[range]:
    """Layers per device: as `--layers` or `-ts` say, else equal time, else equal memory.

    Equal time is dropped if some device cannot hold its part. `cell_bytes` is the KV of one layer
    at the least context.
    """
    n_layers = len(sizes.layers)
    if config.layers is not None:
        return split.split_exact(n_layers, config.layers, len(config.devices))
    if config.shares is not None:
        return split.split_by_shares(n_layers, config.shares)
    by_time = place_by_time(sizes, devices, config.n_slots)
    parts = parts_of(by_time, [device.local for device in devices])
    amounts = (sizes.of(part) + cell_bytes * len(part.layers) for _, part in parts)
    if fits([devices[i] for i, _ in parts], amounts):
        return by_time
    return place_by_memory(sizes, cell_bytes, devices)


def place_by_time(sizes: Sizes, devices: Sequence[Device], n_slots: int) -> list[range]:
    """Equal time, if a layer takes as long as it has bytes and a device is as fast as it says.

    Prompts need the head for one token in all, decoding for every token. With several slots it
    counts, up to HEAD_SHARE of the layers, which is also the most that prompts lose; a single
    stream, which no split makes faster, leaves the layers even for prompts.
    """
    most = int(HEAD_SHARE * sum(sizes.layers))
    head = min(sizes.head, most) if n_slots > 1 else 0
    speeds = [device.relative_speed for device in devices]
    return split.split_evenly(sizes.layers, speeds, _at_the_ends(devices, 0, head))


def place_by_memory(sizes: Sizes, cell_bytes: int, devices: Sequence[Device]) -> list[range]:
    """Memories filled to equal shares, both ends of the model and `cell_bytes` a layer counted."""
    layer_bytes = [size + cell_bytes for size in sizes.layers]
    room = [device.memory().free_bytes for device in devices]
    ends = _at_the_ends(devices, sizes.embedding, sizes.head)
    return split.split_evenly(layer_bytes, room, ends)


def _at_the_ends(devices: Sequence[Device], first: int, last: int) -> list[int]:
    """What the devices with the embedding and with the head carry beside layers."""
    i_embeds, i_heads = split.ends_of([device.local for device in devices])
    return [first * (i == i_embeds) + last * (i == i_heads) for i in range(len(devices))]


def fitting_context(
    config: RuntimeConfig,
    model: Model,
    sizes: Sizes,
    parts: Sequence[tuple[int, Part]],
    devices: Sequence[Device],
) -> int:
    """The largest context, up to the model's own, whose KV cache fits beside everything else."""
    rung = Rung(config.n_copies, config.max_ubatch_size, 0)
    cells = spare_cells(config, model, sizes, parts, devices, rung)
    if cells >= model.hp.n_ctx_train:
        return model.hp.n_ctx_train
    return max(MIN_CTX_SIZE, cells // 256 * 256)


def spare_cells(
    config: RuntimeConfig,
    model: Model,
    sizes: Sizes,
    parts: Sequence[tuple[int, Part]],
    devices: Sequence[Device],
    rung: Rung,
) -> int:
    """KV cells per slot for which `rung` leaves room, a margin kept; below 0 if not even none."""

    def taken(n_cells: int) -> dict[str, int]:
        here = Rung(rung.n_copies, rung.ubatch_size, n_cells)
        needs = (need_of(config, model, sizes, p, here, devices[i]).total for i, p in parts)
        return by_pool([devices[i] for i, _ in parts], needs)

    fixed, one = taken(0), taken(1)
    free = {memory.pool: memory.free_bytes for memory in (d.memory() for d in devices)}
    return min(
        (int(free[pool] * (1 - MARGIN)) - fixed[pool]) // (one[pool] - fixed[pool]) for pool in free
    )


def why_not_pipelined(config: RuntimeConfig, n_stages: int, n_copies: int) -> str:
    """The condition that keeps stages from overlapping when `n_copies` were had; empty if none."""
    if n_stages == 1:
        return "there is one device"
    if n_copies > 1:
        return ""
    if config.n_copies > 1:
        return "its buffers could not be allocated"
    return "--n-copies 1"


def kv_bytes(n_kv_heads: int, head_size: int, kv_types: tuple[str, str]) -> int:
    """Bytes of one cell of one layer."""
    return n_kv_heads * head_size * sum({"f32": 4, "f16": 2}[kind] for kind in kv_types)


def logits_rows(n_vocab: int) -> int:
    """Rows of logits made at a time."""
    return max(1, min(64, LOGITS_BYTES // (4 * n_vocab)))


def scratch_bytes(model: Model, part: Part, rung: Rung, device: str) -> int:
    """An upper estimate of the activations alive at once in a layer, and the logits; and what a
    CUDA device has of its own: room for products, experts, indexes, rotation tables, and for the
    graph of a full ubatch, whose activations and ends are its own.

    What copying weights takes there for a while (a chunk) and graphs of decode steps is in the
    device's margin.
    """
    hp = model.hp
    width = 4 * hp.n_embd + 3 * hp.n_ff + 2 * sum(hp.qkv_rows)
    n_bytes = 4 * rung.ubatch_size * width + (LOGITS_BYTES if part.heads else 0)
    if is_cuda(device):
        n_bytes += PRODUCT_BYTES + INDEX_BYTES
    if is_cuda(device) and part.layers:
        n_bytes += 4 * rung.ubatch_size * (width + 2 * hp.n_embd)
        n_bytes += 2 * PAIRS_BYTES * (hp.n_experts > 0)
        # Cosines and sines of half the rotated dimensions.
        n_bytes += 4 * rung.ctx_size * sum(rope.n_rot for rope in model.ropes)
    return n_bytes


def is_cuda(device: str) -> bool:
    """Whether the device of that name is a CUDA device, here or on another machine."""
    name = (parse_endpoint(device).device or "") if is_remote(device) else device
    return name.startswith("cuda")
