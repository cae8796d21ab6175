"""The devices of a run, opened: those of this machine, and those that workers lend."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from gguf_pp.backend.base import Backend
from gguf_pp.backend.cpu import Budget
from gguf_pp.backend.open import open_devices
from gguf_pp.config import Device, RuntimeConfig
from gguf_pp.errors import ConfigError
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
    """Open devices here and connect to workers. Raises RemoteError, ConfigError.

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
    except BaseException:
        for peer in peers:
            peer.close()
        raise
    local = [device for device in config.devices if device.endpoint is None]
    backends = iter(open_devices(local, budget))
    config = _expanded(config, [len(remote) or 1 for remote in found])
    devices: list[Backend | RemoteDevice] = []
    for remote in found:
        devices += remote or [next(backends)]
    return Devices(config, devices, budget, peers)


def _same_worker(before: Device | None, device: Device) -> bool:
    ends = [d.endpoint.peer for d in (before, device) if d is not None and d.endpoint is not None]
    return len(ends) == 2 and ends[0] == ends[1]


def _of_worker(device: Device, peer: Peer) -> list[RemoteDevice]:
    """The devices that a name means. Raises ConfigError."""
    assert device.endpoint is not None
    if device.endpoint.device is None:
        return peer.devices
    wanted = [remote for remote in peer.devices if remote.name_there == device.endpoint.device]
    if not wanted:
        have = ", ".join(remote.name_there for remote in peer.devices)
        raise ConfigError(f"{device.name}: the worker has no such device", hint=f"it has {have}")
    return wanted


def _expanded(config: RuntimeConfig, counts: Sequence[int]) -> RuntimeConfig:
    """Replace every name that means several devices by those; what was asked of it is divided."""
    if all(n == 1 for n in counts):
        return config
    pairs = list(zip(config.devices, counts, strict=True))
    shares, layers = config.shares, config.layers
    if shares is not None:
        shares = tuple(s / n for s, n in zip(shares, counts, strict=True) for _ in range(n))
    if layers is not None:
        layers = tuple(
            len(part)
            for n_layers, n in zip(layers, counts, strict=True)
            for part in split_by_shares(n_layers, [1.0] * n)
        )
    devices = tuple(device for device, n in pairs for _ in range(n))
    return replace(config, devices=devices, shares=shares, layers=layers)
