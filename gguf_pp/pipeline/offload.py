"""How many layers go to CUDA devices, and the CPU in front for those that do not: -ngl."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from gguf_pp.arch import Model
from gguf_pp.config import Device, RuntimeConfig
from gguf_pp.pipeline import placement, split
from gguf_pp.pipeline.memory import MIN_CTX_SIZE, Rung
from gguf_pp.pipeline.placement import MARGIN, Sizes, by_pool, kv_bytes, need_of, place
from gguf_pp.pipeline.split import Part

AUTO_CTX_SIZE = 4096
"""The context that layers leave room for where some go to the CPU and none was asked for."""


def offloaded(
    config: RuntimeConfig,
    model: Model,
    sizes: Sizes,
    rooms: Callable[[], Sequence[placement.Device]],
) -> RuntimeConfig:
    """Settle -ngl for a model: put the CPU in front for the layers that it keeps off the GPUs.

    `rooms` tells the memory of the configured devices, and is asked only where -ngl is auto. Where
    auto leaves layers to the CPU, a note says how many and why. Raises PlacementError if layers
    cannot be split as asked.
    """
    n_gpu_layers, n_layers = config.n_gpu_layers, len(sizes.layers)
    if config.layers is not None or n_gpu_layers is None:
        return config
    if n_gpu_layers == "auto":
        return _Room(config, model, sizes, rooms()).settled()
    if n_gpu_layers >= n_layers:
        return _done(config)
    shares = config.shares or [1.0] * len(config.devices)
    counts = [0] * len(shares)
    if n_gpu_layers:
        counts = [len(mine) for mine in split.split_by_shares(n_gpu_layers, shares)]
    return _with_cpu(config, n_layers, counts)


def _done(config: RuntimeConfig) -> RuntimeConfig:
    """Nothing is left for -ngl to say."""
    n_copies = config.n_copies if len(config.devices) > 1 else 1
    return replace(config, n_gpu_layers=None, n_copies=n_copies)


def _with_cpu(config: RuntimeConfig, n_layers: int, counts: Sequence[int]) -> RuntimeConfig:
    """The last layers on the devices, by `counts`, and those before them on the CPU. A device with
    none is not opened."""
    cpu = Device("cpu", "cpu", threads=config.devices[0].threads)
    pairs = zip((cpu, *config.devices), (n_layers - sum(counts), *counts), strict=True)
    kept = [(device, n) for device, n in pairs if n]
    settled = replace(
        config,
        devices=tuple(device for device, _ in kept),
        shares=None,
        layers=tuple(n for _, n in kept),
    )
    return _done(settled)


@dataclass(frozen=True, slots=True)
class _Room:
    """What of a model fits on `devices`, those of `config`: weights, cache, copies and scratch.

    The same arithmetic as in a plan and in a run, and at the sizes asked for: where all fit only
    in a smaller ubatch, some go to the CPU.
    """

    config: RuntimeConfig
    model: Model
    sizes: Sizes
    devices: Sequence[placement.Device]

    def settled(self) -> RuntimeConfig:
        """All layers on the devices if they fit with the least context, else as many as do."""
        config, n_layers = self.config, len(self.sizes.layers)
        hp = self.model.hp
        cell = kv_bytes(hp.n_kv_heads, hp.head_size, config.kv_types)
        by_default = place(config, self.sizes, cell * MIN_CTX_SIZE * config.n_slots, self.devices)
        if self.fit([len(layers) for layers in by_default], self._rung(MIN_CTX_SIZE)):
            return _done(config)
        rung = self._rung(min(AUTO_CTX_SIZE, hp.n_ctx_train))
        counts = self._filled(rung) if config.shares is None else self._shared(rung)
        settled = _with_cpu(config, n_layers, counts)
        return replace(settled, notes=(*config.notes, self._note(counts, rung)))

    def _rung(self, ctx_size: int) -> Rung:
        config = self.config
        return Rung(config.n_copies, config.max_ubatch_size, config.ctx_size or ctx_size)

    def parts(self, counts: Sequence[int]) -> Iterator[tuple[int, Part]]:
        """The last sum(counts) layers: the index of a device and what it has of the model."""
        n_layers = len(self.sizes.layers)
        first = n_layers - sum(counts)
        for i, n in enumerate(counts):
            if n:
                stop = first + n
                yield i, Part(range(first, stop), embeds=first == 0, heads=stop == n_layers)
                first = stop

    def fit(self, counts: Sequence[int], rung: Rung) -> bool:
        """Whether the last layers fit, `counts` on each device."""
        limits = self.limits()
        return all(n <= limits[pool] for pool, n in self.taken(counts, rung).items())

    def limits(self) -> dict[str, int]:
        """Bytes to take of each memory. A context that was not asked for leaves a margin, as it
        does when it is chosen."""
        share = 1.0 if self.config.ctx_size else 1 - MARGIN
        memories = [device.memory() for device in self.devices]
        return {memory.pool: int(share * memory.free_bytes) for memory in memories}

    def taken(self, counts: Sequence[int], rung: Rung) -> dict[str, int]:
        """Bytes of each memory."""
        parts = list(self.parts(counts))
        devices = [self.devices[i] for i, _ in parts]
        pairs = zip(parts, devices, strict=True)
        needs = (
            need_of(self.config, self.model, self.sizes, part, rung, device)
            for (_, part), device in pairs
        )
        return by_pool(devices, (need.total for need in needs))

    def _filled(self, rung: Rung) -> list[int]:
        """Every device as full as it gets, the last one first."""
        counts = [0] * len(self.devices)
        for i in reversed(range(len(counts))):
            while sum(counts) < len(self.sizes.layers):
                counts[i] += 1
                if not self.fit(counts, rung):
                    counts[i] -= 1
                    break
        return counts

    def _shared(self, rung: Rung) -> list[int]:
        """As many as fit when -ts divides them."""
        assert self.config.shares is not None
        for n in range(len(self.sizes.layers), 0, -1):
            counts = split.share_out(n, self.config.shares)
            if self.fit(counts, rung):
                return counts
        return [0] * len(self.devices)

    def _note(self, counts: Sequence[int], rung: Rung) -> str:
        """Where layers went, and the numbers that decided it."""
        n_layers, limits, taken = len(self.sizes.layers), self.limits(), self.taken(counts, rung)
        if sum(counts) == n_layers:
            return f"all layers fit the GPUs only if split so: {self._have(counts, taken)}"
        more = list(counts)
        more[next((i for i, n in enumerate(counts) if n), -1)] += 1
        wanted = self.taken(more, rung)
        if not taken:
            ((pool, least),) = wanted.items()
            return (
                f"no layer fits the GPUs with a context of {rung.ctx_size}, the CPU has all "
                f"{n_layers}: {pool} has {limits[pool] >> 20} of the {least >> 20} MiB that the "
                "last one takes, with the head"
            )
        extra = sum(wanted.values()) - sum(taken.values())
        return (
            f"{sum(counts)} of {n_layers} layers fit the GPUs with a context of {rung.ctx_size}, "
            f"the CPU has the first {n_layers - sum(counts)}: {self._have(counts, taken)}, and one "
            f"more takes {extra >> 20} MiB"
        )

    def _have(self, counts: Sequence[int], taken: dict[str, int]) -> str:
        limits = self.limits()
        pairs = [(d.name, d.memory().pool, n) for d, n in zip(self.devices, counts, strict=True)]
        return ", ".join(
            f"{name} has {n} in {taken[pool] >> 20} of {limits[pool] >> 20} MiB"
            for name, pool, n in pairs
            if n
        )
