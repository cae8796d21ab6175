"""Devices by name."""

import logging
from collections.abc import Mapping, Sequence

from gguf_pp.backend.base import Backend
from gguf_pp.backend.cpu import Budget, CpuBackend
from gguf_pp.backend.host import share_cores
from gguf_pp.config import Device, EdgeCopy
from gguf_pp.errors import ConfigError

log = logging.getLogger("gguf_pp")


def open_devices(devices: Sequence[Device], budget: Budget) -> list[CpuBackend]:
    """Open CPU `devices` in order; `budget` is the RAM they take together.

    Raises ConfigError for a device of another kind.
    """
    shares = share_cores(max(1, len(devices)))
    opened: list[CpuBackend] = []
    for device, cores in zip(devices, shares, strict=False):
        if device.kind != "cpu":
            raise ConfigError(f"{device.name} cannot be used for this yet", hint="name cpu devices")
        n_threads = device.threads or len(cores)
        if n_threads > len(cores):
            log.warning("%s: %d threads for %d cores", device.name, n_threads, len(cores))
        opened.append(CpuBackend(device.name, cores, n_threads, budget))
    return opened


def open_pipeline(
    devices: Sequence[Device],
    budget: Budget,
    *,
    edge_copy: EdgeCopy = "auto",
    cuda_bytes: Mapping[int, int] | None = None,
) -> list[Backend]:
    """Open those of a pipeline's `devices` that are of this machine, in order.

    `cuda_bytes` caps what is taken of a CUDA device, by index. Raises ConfigError for a device that
    is not there, PlacementError if copies between two of them arrive damaged.
    """
    cuda: Sequence[Backend] = []
    if any(device.kind == "cuda" for device in devices):
        from gguf_pp.backend.cuda import open_cuda  # only here: others need not load it

        cuda = open_cuda(devices, edge_copy=edge_copy, limit_bytes=cuda_bytes)
        log.warning("CUDA devices: written without one at hand, and not yet run on any")
    cpus = iter(open_devices([device for device in devices if device.kind == "cpu"], budget))
    gpus = iter(cuda)
    sources = {"cpu": cpus, "cuda": gpus}
    return [next(sources[device.kind]) for device in devices if device.kind in sources]
