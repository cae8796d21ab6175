"""The memory of a CUDA device, counted in bytes."""

import threading
from typing import Any

from gguf_pp.backend.base import Memory, OutOfMemory

MARGIN_BYTES = 256 << 20
MARGIN_SHARE = 0.02
"""What a device keeps free for cuBLAS workspaces, modules and graphs, and for fragmentation."""


class CudaBudget:
    """Bytes of one CUDA device, shared by all virtual devices on it."""

    def __init__(self, api: Any, index: int, limit_bytes: int | None = None) -> None:
        self._cuda = api.cuda
        self._index = index
        self._lock = threading.Lock()
        self._used_bytes = 0
        self._cached = True  # torch may keep what a model had that was closed
        api.empty((1,), dtype=api.uint8, device=f"cuda:{index}")  # the context counts as taken
        self.total_bytes, room = self._room()
        room = max(0, room - MARGIN_BYTES - int(MARGIN_SHARE * room))
        self._limit_bytes = room if limit_bytes is None else min(room, limit_bytes)

    def _room(self) -> tuple[int, int]:
        """Total bytes, and those free for torch: what its allocator caches counts as free."""
        free, total = self._cuda.mem_get_info(self._index)
        reserved = self._cuda.memory_reserved(self._index)
        return total, free + reserved - self._cuda.memory_allocated(self._index)

    def take(self, device: str, n_bytes: int, what: str) -> None:
        """Count `n_bytes`, or raise OutOfMemory."""
        with self._lock:
            if self._cached:  # what was given back is of no use to cuBLAS while torch keeps it
                self._cuda.empty_cache()
                self._cached = False
            if n_bytes > (free := self._free()):
                raise OutOfMemory(device, what, n_bytes, free)
            self._used_bytes += n_bytes

    def give(self, n_bytes: int) -> None:
        """Give back what `take` counted."""
        with self._lock:
            self._used_bytes -= n_bytes
            self._cached = True
            assert self._used_bytes >= 0

    def memory(self) -> Memory:
        """Total and free bytes."""
        with self._lock:
            return Memory(f"cuda:{self._index}", self.total_bytes, self._free())

    def _free(self) -> int:
        """What is counted is partly allocated and partly yet to be, so neither number alone is it:
        other processes take memory as well."""
        return max(0, min(self._limit_bytes - self._used_bytes, self._room()[1]))
