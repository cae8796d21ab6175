"""The devices of a run, opened: those of this machine, and those that workers lend."""

from dataclasses import dataclass, field, replace
from functools import partial

from gguf_pp import arch
from gguf_pp.backend.base import Backend
from gguf_pp.backend.cpu import Budget
from gguf_pp.backend.open import open_pipeline
from gguf_pp.config import Device, RuntimeConfig, parse_devices
from gguf_pp.gguf import ModelFile
from gguf_pp.pipeline.lent import chosen, expanded
from gguf_pp.pipeline.offload import offloaded
from gguf_pp.pipeline.peer import Peer, RemoteDevice
from gguf_pp.pipeline.placement import measure
from gguf_pp.pipeline.planned import PlannedDevice, cuda_here


@dataclass(slots=True)
class Devices:
    """`all` in pipeline order, as `config` has them; `peers` are the workers behind some, `relays`
    what sends to them and receives from them here."""

    config: RuntimeConfig
    all: list[Backend | RemoteDevice]
    budget: Budget
    peers: list[Peer] = field(default_factory=list)
    relays: list[Backend] = field(default_factory=list)

    def close(self) -> None:
        """Stop local devices and end the sessions with workers."""
        for peer in self.peers:
            peer.close()
        for backend in (*self.here, *self.relays):
            backend.close()
        self.relays.clear()

    @property
    def here(self) -> list[Backend]:
        """Those of this machine."""
        return [device for device in self.all if not isinstance(device, RemoteDevice)]


def open_all(config: RuntimeConfig) -> Devices:
    """Open devices here and connect to workers. Raises RemoteError, ConfigError, PlacementError.

    Consecutive devices of one worker are one session. A worker named without a device is all of
    its devices, which share what was asked for it.
    """
    budget = Budget(config.memory_bytes)
    peers: list[Peer] = []
    try:
        found = []
        for before, device in zip([None, *config.devices], config.devices, strict=False):
            # A worker that is named again after another device is another session.
            if device.endpoint is not None and not _same_worker(before, device):
                peers.append(Peer(device.endpoint, config))
            found.append([] if device.endpoint is None else _of_worker(device, peers[-1]))
        expanded_config = expanded(config, [len(remote) or 1 for remote in found])
        opened = open_pipeline(
            config.devices, budget, edge_copy=config.edge_copy, cuda_bytes=dict(config.cuda_bytes)
        )
    except BaseException:
        for peer in peers:
            peer.close()
        raise
    backends = iter(opened)
    devices: list[Backend | RemoteDevice] = []
    for remote in found:
        devices += remote or [next(backends)]
    return Devices(expanded_config, devices, budget, peers)


def look_at(file: ModelFile, config: RuntimeConfig) -> tuple[RuntimeConfig, list[PlannedDevice]]:
    """The devices that a run of a model has, -ngl settled: the configuration with each by name, and
    what it has free. They are opened and closed again. Raises what `open_all` does, FormatError and
    UnsupportedError."""
    file.require_model()
    model = arch.build(file.metadata)
    sizes = measure(file, model, config.ctx_size or model.hp.n_ctx_train)
    opened = open_all(offloaded(config, model, sizes, partial(cuda_here, config)))
    try:
        found = [PlannedDevice(d.name, d.relative_speed, d.memory(), "worker") for d in opened.all]
    finally:
        opened.close()
    named = [
        d if d.endpoint is None else replace(parse_devices(place.name)[0], threads=d.threads)
        for d, place in zip(opened.config.devices, found, strict=True)
    ]
    return replace(opened.config, devices=tuple(named)), found


def _same_worker(before: Device | None, device: Device) -> bool:
    ends = [d.endpoint.peer for d in (before, device) if d is not None and d.endpoint is not None]
    return len(ends) == 2 and ends[0] == ends[1]


def _of_worker(device: Device, peer: Peer) -> list[RemoteDevice]:
    """The devices that a name means. Raises ConfigError."""
    assert device.endpoint is not None
    names = {d.name_there for d in chosen(device.endpoint, [d.lent for d in peer.devices])}
    return [remote for remote in peer.devices if remote.name_there in names]
