"""The devices of a run, opened: those of this machine, and those that workers lend."""

from dataclasses import dataclass, field, replace

from gguf_pp.backend.base import Backend
from gguf_pp.backend.cpu import Budget
from gguf_pp.backend.open import open_pipeline
from gguf_pp.config import Device, RuntimeConfig
from gguf_pp.pipeline.lent import chosen, expanded
from gguf_pp.pipeline.peer import Peer, RemoteDevice
from gguf_pp.pipeline.split import split_by_shares


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
        backends = [device for device in self.all if not isinstance(device, RemoteDevice)]
        for backend in (*backends, *self.relays):
            backend.close()
        self.relays.clear()


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


def offloaded(config: RuntimeConfig, n_layers: int) -> RuntimeConfig:
    """Put the CPU in front, for the layers of a model that -ngl keeps off the GPUs."""
    n_gpu_layers = config.n_gpu_layers
    if n_gpu_layers is None or n_gpu_layers >= n_layers:
        return config
    cpu = Device("cpu", "cpu", threads=config.devices[0].threads)
    if n_gpu_layers == 0:
        return replace(config, devices=(cpu,), shares=None)
    shares = config.shares or [1.0] * len(config.devices)
    on_gpus = [len(part) for part in split_by_shares(n_gpu_layers, shares)]
    layers = (n_layers - n_gpu_layers, *on_gpus)
    return replace(config, devices=(cpu, *config.devices), shares=None, layers=layers)


def _same_worker(before: Device | None, device: Device) -> bool:
    ends = [d.endpoint.peer for d in (before, device) if d is not None and d.endpoint is not None]
    return len(ends) == 2 and ends[0] == ends[1]


def _of_worker(device: Device, peer: Peer) -> list[RemoteDevice]:
    """The devices that a name means. Raises ConfigError."""
    assert device.endpoint is not None
    names = {d.name_there for d in chosen(device.endpoint, [d.lent for d in peer.devices])}
    return [remote for remote in peer.devices if remote.name_there in names]
