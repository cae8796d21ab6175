"""What a run would do, as a value: from the header and the memory of devices, without weights.

No device is opened, so it need not exist: it is a name, a memory and a speed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from gguf_pp import arch
from gguf_pp.arch import Model
from gguf_pp.backend.base import Memory
from gguf_pp.config import RuntimeConfig
from gguf_pp.gguf import ModelFile
from gguf_pp.net import parse_endpoint
from gguf_pp.pipeline.memory import MIN_CTX_SIZE, Rung, rungs
from gguf_pp.pipeline.offload import offloaded
from gguf_pp.pipeline.placement import (
    Need,
    Sizes,
    by_pool,
    fits,
    fitting_context,
    kv_bytes,
    measure,
    need_of,
    place,
    place_by_memory,
    place_by_time,
    spare_cells,
    why_not_pipelined,
)
from gguf_pp.pipeline.planned import RAM, PlannedDevice, in_front
from gguf_pp.pipeline.split import Part, parts_of


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """What one device would hold. Embedding and head are parts of its weights; a table that is
    both is counted in both, and once in the weights."""

    device: PlannedDevice
    layers: range
    need: Need
    embedding_bytes: int
    head_bytes: int


@dataclass(frozen=True, slots=True)
class Pool:
    """A memory and what is planned of it: the stages there, and what passes between machines. CPU
    devices share the pool "ram", and those of a worker its RAM."""

    memory: Memory
    devices: tuple[str, ...]
    planned_bytes: int

    @property
    def margin_bytes(self) -> int:
        """What is left; below 0 it does not fit."""
        return self.memory.free_bytes - self.planned_bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """Stages, memory and schedule of a run.

    `rung` are the sizes of the run, fewer than `asked` where those do not fit; if `fits` is false
    they are the least that would be tried. `max_ctx_size` is the largest context of every slot
    that leaves a margin, 0 if none does. `by_time` and `by_memory` are the two ways to split,
    None with one device. `alone` are memories that hold the whole model. Boundary bytes cross each
    edge per ubatch of a prompt, and per ubatch of `decode_rows` sequences in decode.
    """

    stages: tuple[PlannedStage, ...]
    pools: tuple[Pool, ...]
    asked: Rung
    rung: Rung
    fits: bool
    n_slots: int
    n_ctx_train: int
    max_ctx_size: int
    not_pipelined_because: str
    by_time: tuple[int, ...] | None
    by_memory: tuple[int, ...] | None
    alone: tuple[str, ...]
    row_bytes: int
    decode_rows: int
    notes: tuple[str, ...]


def estimate(file: ModelFile, settled: RuntimeConfig, devices: Sequence[PlannedDevice]) -> Plan:
    """Plan what `Pipeline` does with the same file and settings on such devices.

    Raises FormatError, UnsupportedError, PlacementError if layers cannot be split as asked, and
    ConfigError; a model that is too large is a plan that does not fit.
    """
    file.require_model()
    model = arch.build(file.metadata)
    hp = model.hp
    sizes = measure(file, model, settled.ctx_size or hp.n_ctx_train)
    asked_for, given = settled, devices
    settled = offloaded(asked_for, model, sizes, lambda: given)
    if settled.devices != asked_for.devices:
        devices = in_front(settled, devices)
    cell = kv_bytes(hp.n_kv_heads, hp.head_size, settled.kv_types)
    least = cell * MIN_CTX_SIZE * settled.n_slots
    layers = place(settled, sizes, least, devices)
    parts = parts_of(layers, [device.local for device in devices])
    n_ctx = settled.ctx_size or fitting_context(settled, model, sizes, parts, devices)
    asked = Rung(settled.n_copies, settled.max_ubatch_size, n_ctx)
    rung, fit = _best_rung(settled, model, sizes, parts, devices, asked)
    needs = _by_device(
        parts, [need_of(settled, model, sizes, p, rung, devices[i]) for i, p in parts]
    )
    several = len(devices) > 1
    n_groups = min(settled.n_slots, len(devices))
    return Plan(
        stages=_stages(sizes, layers, parts, needs, devices),
        pools=_pools(needs, devices, _relays(model, parts, devices, rung)),
        asked=asked,
        rung=rung,
        fits=fit,
        n_slots=settled.n_slots,
        n_ctx_train=hp.n_ctx_train,
        max_ctx_size=_largest_context(settled, model, sizes, parts, devices, rung),
        not_pipelined_because=why_not_pipelined(settled, len(devices), rung.n_copies),
        by_time=_counts(place_by_time(sizes, devices, settled.n_slots)) if several else None,
        by_memory=_counts(place_by_memory(sizes, least, devices)) if several else None,
        alone=_alone(settled, model, sizes, devices, rung),
        row_bytes=hp.n_embd * 4,
        decode_rows=-(-settled.n_slots // n_groups),
        notes=_notes(settled, devices),
    )


def _best_rung(
    settled: RuntimeConfig,
    model: Model,
    sizes: Sizes,
    parts: Sequence[tuple[int, Part]],
    devices: Sequence[PlannedDevice],
    asked: Rung,
) -> tuple[Rung, bool]:
    """The first rung of the ladder that fits, or the last one and false."""
    ladder = rungs(asked, ctx_fixed=settled.ctx_size is not None)
    for rung in ladder:
        needs = [need_of(settled, model, sizes, p, rung, devices[i]).total for i, p in parts]
        amounts = [(devices[i], need) for (i, _), need in zip(parts, needs, strict=True)]
        amounts += _relays(model, parts, devices, rung)
        if fits([device for device, _ in amounts], (n_bytes for _, n_bytes in amounts)):
            return rung, True
    return ladder[-1], False


def _relays(
    model: Model,
    parts: Sequence[tuple[int, Part]],
    devices: Sequence[PlannedDevice],
    rung: Rung,
) -> list[tuple[PlannedDevice, int]]:
    """Bytes that are no stage's own: what a worker sends from, and, here, what is sent to it and
    received from it. Workers that reach each other need less here."""

    def worker(place: tuple[int, Part]) -> str:
        device = devices[place[0]]
        return "" if device.local else parse_endpoint(device.name).peer

    copies = rung.n_copies * rung.ubatch_size * model.hp.n_embd * 4
    here = next((device for device in devices if device.local), None)
    found = []
    for peer, places in groupby(parts, key=worker):
        if not peer:
            continue
        stages = list(places)
        first, (i_last, last) = stages[0][1], stages[-1]
        n_ends = (not first.embeds) + (not last.heads)
        found.append((devices[i_last], copies * (not last.heads)))
        if here is not None:
            found.append((here, copies * n_ends))
    return found


def _largest_context(
    settled: RuntimeConfig,
    model: Model,
    sizes: Sizes,
    parts: Sequence[tuple[int, Part]],
    devices: Sequence[PlannedDevice],
    rung: Rung,
) -> int:
    cells = spare_cells(settled, model, sizes, parts, devices, rung)
    return max(0, min(model.hp.n_ctx_train, cells))


def _alone(
    settled: RuntimeConfig,
    model: Model,
    sizes: Sizes,
    devices: Sequence[PlannedDevice],
    rung: Rung,
) -> tuple[str, ...]:
    """Names of what can hold all layers: devices, or "cpu" for the RAM."""
    all_of_it = Part(range(model.hp.n_layers), embeds=True, heads=True)
    alone = replace(rung, n_copies=1)

    def holds_all(device: PlannedDevice) -> bool:
        whole = need_of(settled, model, sizes, all_of_it, alone, device)
        return whole.total <= device.room.free_bytes

    pools = {device.room.pool: device for device in devices}
    roomy = [pool for pool, device in pools.items() if holds_all(device)]
    return tuple("cpu" if pool == RAM else pool for pool in roomy)


def _by_device(parts: Sequence[tuple[int, Part]], needs: Sequence[Need]) -> list[Need]:
    """A device with an end of the model as a stage of its own has one more need."""
    sums: dict[int, Need] = {}
    for (i, _), need in zip(parts, needs, strict=True):
        sums[i] = sums[i] + need if i in sums else need
    return [sums[i] for i in sorted(sums)]


def _stages(
    sizes: Sizes,
    layers: Sequence[range],
    parts: Sequence[tuple[int, Part]],
    needs: Sequence[Need],
    devices: Sequence[PlannedDevice],
) -> tuple[PlannedStage, ...]:
    (i_first, _), (i_last, _) = parts[0], parts[-1]
    return tuple(
        PlannedStage(
            device=device,
            layers=mine,
            need=need,
            embedding_bytes=sizes.embedding if i == i_first else 0,
            head_bytes=sizes.head if i == i_last else 0,
        )
        for i, (device, mine, need) in enumerate(zip(devices, layers, needs, strict=True))
    )


def _pools(
    needs: Sequence[Need],
    devices: Sequence[PlannedDevice],
    relays: Sequence[tuple[PlannedDevice, int]],
) -> tuple[Pool, ...]:
    amounts = [*zip(devices, (need.total for need in needs), strict=True), *relays]
    planned = by_pool([device for device, _ in amounts], (n_bytes for _, n_bytes in amounts))
    rooms = {device.room.pool: device.room for device in devices}
    return tuple(
        Pool(rooms[pool], tuple(d.name for d in devices if d.room.pool == pool), n_bytes)
        for pool, n_bytes in planned.items()
    )


def _counts(layers: Sequence[range]) -> tuple[int, ...]:
    return tuple(len(mine) for mine in layers)


def _notes(settled: RuntimeConfig, devices: Sequence[PlannedDevice]) -> tuple[str, ...]:
    notes = list(settled.notes)
    told = [device.name for device in devices if device.source == "flag"]
    if told:
        notes.append(f"planned with the memory given, not looked at: {', '.join(told)}")
    if told and len(devices) > 1:
        notes.append("the speed of devices is not known here: the split by time takes it equal")
    return tuple(notes)
