"""Devices by name."""

import logging
from collections.abc import Sequence

from gguf_pp.backend.base import Backend
from gguf_pp.backend.cpu import Budget, CpuBackend
from gguf_pp.backend.host import share_cores
from gguf_pp.config import Device

log = logging.getLogger("gguf_pp")


def open_devices(devices: Sequence[Device], memory_bytes: int | None) -> list[Backend]:
    """Open `devices` in order; `memory_bytes` caps the RAM they take together."""
    budget = Budget(memory_bytes)
    shares = share_cores(len(devices))
    opened: list[Backend] = []
    for device, cores in zip(devices, shares, strict=True):
        n_threads = device.threads or len(cores)
        if n_threads > len(cores):
            log.warning("%s: %d threads for %d cores", device.name, n_threads, len(cores))
        opened.append(CpuBackend(device.name, cores, n_threads, budget))
    return opened
