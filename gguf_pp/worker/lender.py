"""The devices that a worker lends, and one account for the memory of all its sessions."""

import ctypes
import gc
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from gguf_pp.backend.cpu import Budget, CpuBackend
from gguf_pp.backend.host import share_cores
from gguf_pp.config import Device
from gguf_pp.native import kernels


class Lease(Budget):
    """What one session has taken of the worker's memory, given back as a whole at its end."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._taken_bytes = 0

    @property
    def total_bytes(self) -> int:  # type: ignore[override]
        """RAM of the machine."""
        return self._budget.total_bytes

    @property
    def limit_bytes(self) -> int:  # type: ignore[override]
        """What all sessions may take."""
        return self._budget.limit_bytes

    @property
    def used_bytes(self) -> int:  # type: ignore[override]
        """What all sessions have taken."""
        return self._budget.used_bytes

    def take(self, device: str, n_bytes: int, what: str) -> None:
        """Count `n_bytes`, or raise OutOfMemory."""
        self._budget.take(device, n_bytes, what)
        self._taken_bytes += n_bytes

    def give(self, n_bytes: int) -> None:
        """Give back what `take` counted."""
        self._budget.give(n_bytes)
        self._taken_bytes -= n_bytes

    def end(self) -> None:
        """Give back all that is left."""
        self.give(self._taken_bytes)


def trim() -> None:
    """Give freed memory back to the system, of which the C library would keep what a session used
    in pieces of up to 32 MiB."""
    gc.collect()
    with suppress(AttributeError, OSError, TypeError):  # only glibc has it, and needs it
        ctypes.CDLL(None).malloc_trim(0)


class Lender:
    """Devices by name. Every session computes on threads of its own, on the device's cores."""

    def __init__(self, devices: Sequence[Device], memory_bytes: int | None) -> None:
        self.budget = Budget(memory_bytes)
        shares = share_cores(len(devices))
        self._places = {
            device.name: (cores, device.threads or len(cores))
            for device, cores in zip(devices, shares, strict=True)
        }

    @property
    def names(self) -> list[str]:
        """Names of the devices, in order."""
        return list(self._places)

    def lend(self, name: str, lease: Lease) -> CpuBackend:
        """Open a device for a session."""
        cores, n_threads = self._places[name]
        return CpuBackend(name, cores, n_threads, lease)

    def describe(self) -> list[dict[str, Any]]:
        """The devices, for the answer to INFO."""
        free = max(0, self.budget.limit_bytes - self.budget.used_bytes)
        return [
            {
                "name": name,
                "pool": "ram",
                "total_bytes": self.budget.total_bytes,
                "free_bytes": free,
                "n_threads": n_threads,
                "relative_speed": float(min(n_threads, len(cores))),
                "kernels": "torch" if kernels("auto") is None else "native",
            }
            for name, (cores, n_threads) in self._places.items()
        ]
