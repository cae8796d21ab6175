"""CUDA devices that a worker lends, and what becomes of those that break."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from gguf_pp.backend import cuda
from gguf_pp.backend.base import Memory
from gguf_pp.backend.cpu import Budget
from gguf_pp.backend.cuda_budget import CudaBudget
from gguf_pp.backend.cuda_relay import Relay
from gguf_pp.config import Device, EdgeCopy
from gguf_pp.errors import PlacementError, in_short
from gguf_pp.triton import ops

log = logging.getLogger("gguf_pp")


class CudaLease(CudaBudget):
    """What one session has taken of a device, given back as a whole at its end."""

    def __init__(self, budget: CudaBudget) -> None:
        self._budget = budget
        self._taken_bytes = 0

    def take(self, device: str, n_bytes: int, what: str) -> None:
        """Count `n_bytes`, or raise OutOfMemory."""
        self._budget.take(device, n_bytes, what)
        self._taken_bytes += n_bytes

    def give(self, n_bytes: int) -> None:
        """Give back what `take` counted."""
        self._budget.give(n_bytes)
        self._taken_bytes -= n_bytes

    def memory(self) -> Memory:
        """As of the device."""
        return self._budget.memory()

    def end(self) -> None:
        """Give back all that is left."""
        self.give(self._taken_bytes)


class CudaLoan:
    """The devices of one session."""

    def __init__(self, lender: "CudaLender") -> None:
        self._lender = lender
        self._leases: dict[int, CudaLease] = {}
        self._relay: Relay | None = None

    def open(self, name: str) -> cuda.CudaBackend:
        """Open a device by name. Raises PlacementError if it is broken."""
        lender, index = self._lender, self._lender.indices[name]
        if why := lender.failures.get(index):
            raise PlacementError(
                f"{name} can be used no more: {why}", hint="restart that worker, then try again"
            )
        lease = self._leases.setdefault(index, CudaLease(lender.here.budgets[index]))
        # What comes in and goes out has threads: the one that brings it must not launch as well.
        return lender.here.open(name, index, hosted=True, budget=lease)

    def relay(self, budget: Budget) -> Relay:
        """Where rows come in for devices and go out from them: one for all."""
        if self._relay is None:
            self._relay = Relay(budget, self._lender.here.api)
        return self._relay

    def inspect(self) -> str:
        """As in Loan."""
        lender = self._lender
        for index in self._leases:
            if index not in lender.failures and (why := lender.here.failure(index)):
                lender.condemn(index, why)
        broken = [index for index in self._leases if index in lender.failures]
        return "; ".join(f"cuda:{i} can be used no more: {lender.failures[i]}" for i in broken)

    def end(self, keep: Sequence[object]) -> bool:
        """Give memory back; true if devices are broken, and what they have with them.

        Freeing pinned memory asks the driver, which refuses then, and torch ends the process.
        """
        if any(index in self._lender.failures for index in self._leases):
            self._lender.kept.append((self, *keep))
            return True
        for lease in self._leases.values():
            lease.end()
        return False


class CudaLender:
    """CUDA devices by name. `failures` are those, by index, that no session gets any more."""

    def __init__(
        self, devices: Sequence[Device], limit_bytes: Mapping[int, int] | None, edge_copy: EdgeCopy
    ) -> None:
        """Tries all copies between devices, as sessions may use them in any order.

        Raises ConfigError for a device that is not there, PlacementError if copies arrive damaged.
        """
        self.indices = {d.name: d.index or 0 for d in devices if d.kind == "cuda"}
        wanted = sorted(set(self.indices.values()))
        edges = [(a, b) for a in wanted for b in wanted]
        self.here = cuda.CudaSet(wanted, edges, edge_copy=edge_copy, limit_bytes=limit_bytes)
        self.failures: dict[int, str] = {}
        self.kept: list[object] = []
        self._speeds = {i: self.here.relative_speed(i) for i in wanted}
        self._kernels = {i: self._kernels_on(i) for i in wanted}
        log.warning("CUDA devices: written without one at hand, and not yet run on any")

    def _kernels_on(self, index: int) -> str:
        with self.here.api.cuda.device(index):
            return ops.DeviceOps(f"cuda:{index}", exact=False, is_torch_only=False).name

    def loan(self) -> CudaLoan:
        """For a new session."""
        return CudaLoan(self)

    def tidy(self) -> None:
        """Give back what torch's allocator keeps for later."""
        if not self.failures:
            self.here.api.cuda.empty_cache()

    def condemn(self, index: int, why: str) -> None:
        """From now on nobody gets this device."""
        if index not in self.failures:
            self.failures[index] = why
            log.error("cuda:%d can be used no more: %s; restart this worker", index, why)

    def _free_bytes(self, index: int) -> int:
        """Those of a device that is sound; 0 if it is not, which is noted."""
        if index in self.failures:
            return 0
        try:
            return self.here.budgets[index].memory().free_bytes
        except RuntimeError as exc:
            self.condemn(index, in_short(exc))
            return 0

    def describe(self, name: str) -> dict[str, Any]:
        """The device, for the answer to INFO; `unusable` says why nobody gets it."""
        index = self.indices[name]
        return {
            "name": name,
            "pool": f"cuda:{index}",
            "total_bytes": self.here.budgets[index].total_bytes,
            "free_bytes": self._free_bytes(index),
            "n_threads": 1,
            "relative_speed": self._speeds[index],
            "kernels": self._kernels[index],
            "unusable": self.failures.get(index),
        }
