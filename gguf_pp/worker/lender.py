"""The devices that a worker lends, and one account for the memory of all its sessions."""

import ctypes
import gc
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from gguf_pp.backend.base import Backend
from gguf_pp.backend.cpu import Budget, CpuBackend
from gguf_pp.backend.host import share_cores
from gguf_pp.config import Device, EdgeCopy
from gguf_pp.native import kernels

if TYPE_CHECKING:
    from gguf_pp.worker.cuda import CudaLender, CudaLoan


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


class Loan:
    """What one session has of the worker: devices that it opens, and memory."""

    def __init__(self, lender: "Lender") -> None:
        self._lender = lender
        self._lease = Lease(lender.budget)
        self._cuda: CudaLoan | None = None

    def open(self, name: str) -> Backend:
        """Open a device, for threads of its own. Raises PlacementError if it is broken."""
        lender = self._lender
        if name in lender.places:
            cores, n_threads = lender.places[name]
            return CpuBackend(name, cores, n_threads, self._lease)
        return self._on_cuda().open(name)

    def beside(self, backend: Backend) -> CpuBackend:
        """Where the host keeps what goes to `backend` and comes from it: itself, if it is a CPU."""
        return backend if isinstance(backend, CpuBackend) else self._on_cuda().relay(self._lease)

    def inspect(self) -> str:
        """Which of its devices can be used no more, and why; "" if all is well with them. Nobody
        else gets those from now on."""
        return "" if self._cuda is None else self._cuda.inspect()

    def end(self, keep: Sequence[object] = ()) -> None:
        """Give all memory back, unless devices are broken: then `keep` stays, for good."""
        if self._cuda is not None and self._cuda.end(keep):
            return
        self._lease.end()

    def _on_cuda(self) -> "CudaLoan":
        if self._cuda is None:
            assert self._lender.cuda is not None
            self._cuda = self._lender.cuda.loan()
        return self._cuda


class Lender:
    """Devices by name. Every session computes on threads of its own, on the device's cores."""

    def __init__(
        self,
        devices: Sequence[Device],
        memory_bytes: int | None,
        cuda_bytes: Mapping[int, int] | None = None,
        edge_copy: EdgeCopy = "auto",
    ) -> None:
        """`memory_bytes` caps the RAM, `cuda_bytes` CUDA devices by index.

        Raises ConfigError for a device that is not there, PlacementError if copies between two of
        them arrive damaged.
        """
        self.budget = Budget(memory_bytes)
        self.names = [device.name for device in devices]
        cpus = [device for device in devices if device.kind == "cpu"]
        shares = share_cores(max(1, len(cpus)))
        self.places = {
            device.name: (cores, device.threads or len(cores))
            for device, cores in zip(cpus, shares, strict=False)
        }
        self.cuda: CudaLender | None = None
        if len(cpus) < len(devices):
            from gguf_pp.worker import cuda  # only here: others need not load it

            self.cuda = cuda.CudaLender(devices, cuda_bytes, edge_copy)

    def loan(self) -> Loan:
        """For a new session."""
        return Loan(self)

    def tidy(self) -> None:
        """Let other processes have what sessions that are over had of devices."""
        if self.cuda is not None:
            self.cuda.tidy()

    def describe(self) -> list[dict[str, Any]]:
        """The devices, for the answer to INFO."""
        return [self._describe(name) for name in self.names]

    def _describe(self, name: str) -> dict[str, Any]:
        if name not in self.places:
            assert self.cuda is not None
            return self.cuda.describe(name)
        cores, n_threads = self.places[name]
        return {
            "name": name,
            "pool": "ram",
            "total_bytes": self.budget.total_bytes,
            "free_bytes": max(0, self.budget.limit_bytes - self.budget.used_bytes),
            "n_threads": n_threads,
            "relative_speed": float(min(n_threads, len(cores))),
            "kernels": "torch" if kernels("auto") is None else "native",
        }
