"""Devices by name."""

import logging
from collections.abc import Sequence

from gguf_pp.backend.cpu import Budget, CpuBackend
from gguf_pp.backend.host import share_cores
from gguf_pp.config import Device

log = logging.getLogger("gguf_pp")


def open_devices(devices: Sequence[Device], budget: Budget) -> list[CpuBackend]:
    """Open `devices` of this machine in order; `budget` is the RAM they take together."""
    shares = share_cores(max(1, len(devices)))
    opened: list[CpuBackend] = []
    for device, cores in zip(devices, shares, strict=False):
        n_threads = device.threads or len(cores)
        if n_threads > len(cores):
            log.warning("%s: %d threads for %d cores", device.name, n_threads, len(cores))
        opened.append(CpuBackend(device.name, cores, n_threads, budget))
    return opened
