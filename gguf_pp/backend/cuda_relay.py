"""Host memory in front of CUDA devices and behind them: they copy to it and from it themselves."""

from collections.abc import Callable
from functools import partial
from typing import Any

from gguf_pp.backend.cpu import Budget, CpuBackend, CpuBuffer, CpuStream
from gguf_pp.backend.host import share_cores

Broke = Callable[[BaseException], None]
"""Hears, on a stream's own thread, what has just ended all work on it."""


def ignore(exc: BaseException) -> None:
    """Leave it to whoever waits for the stream."""


def telling(broke: Broke, work: Callable[[], None]) -> None:
    """Do `work`; `broke` hears what it raises."""
    try:
        work()
    except BaseException as exc:
        broke(exc)
        raise


class PinnedBuffer(CpuBuffer):
    """Float32 [n_rows, n_cols] in pinned RAM."""

    def __init__(self, api: Any, n_rows: int, n_cols: int) -> None:
        self.tensor = api.empty((n_rows, n_cols), dtype=api.float32, pin_memory=True)
        self.n_bytes = self.tensor.nbytes


class RelayStream(CpuStream):
    """A thread that waits for devices, and hands on what they have made."""

    def __init__(self, name: str, relay: "Relay") -> None:
        super().__init__(name, share_cores(1)[0], 1)
        self._relay = relay

    def run(self, work: Callable[[], None]) -> None:
        """Queue `work`."""
        super().run(partial(telling, self._relay.tell, work))


class Relay(CpuBackend):
    """The host, as a place where rows come in for CUDA devices and go out from them. `api` is the
    torch module, or a double of it."""

    def __init__(self, budget: Budget, api: Any, name: str = "ram") -> None:
        super().__init__(name, share_cores(1)[0], 1, budget)
        self.broke: Broke = ignore
        self._api = api

    def tell(self, exc: BaseException) -> None:
        """A stream broke."""
        self.broke(exc)

    def buffer(self, n_rows: int, n_cols: int, what: str) -> PinnedBuffer:
        """Reserve a buffer; raises OutOfMemory, or what torch raises in its place."""
        n_bytes = 4 * n_rows * n_cols
        self.reserve(n_bytes, what)
        try:
            return PinnedBuffer(self._api, n_rows, n_cols)
        except BaseException:
            self.release(n_bytes)
            raise

    def stream(self, name: str, *, compute: bool = False) -> RelayStream:
        """Make a stream."""
        stream = RelayStream(f"{self.name} {name}", self)
        self._streams.append(stream)
        return stream
