"""Devices by name."""

from collections.abc import Sequence

from gguf_pp.backend.base import Backend
from gguf_pp.backend.cpu import Budget, CpuBackend, share_cores
from gguf_pp.config import Device


def open_devices(devices: Sequence[Device], memory_bytes: int | None) -> list[Backend]:
    """Open `devices` in order; `memory_bytes` caps the RAM they take together."""
    budget = Budget(memory_bytes)
    shares = share_cores(len(devices))
    opened: list[Backend] = []
    for device, cores in zip(devices, shares, strict=True):
        n_threads = device.threads or len(cores)
        opened.append(CpuBackend(device.name, cores, n_threads, budget))
    return opened
