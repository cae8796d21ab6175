"""CPU devices: a share of the cores, worker threads, real concurrency within one process.

A compute stream is a thread pinned to the device's cores; torch's and our own kernels' thread
teams are started from it, so that they stay on those cores and two devices do not fight. Copy
streams are threads that only move memory. Torch releases the GIL inside its operations, our
kernels do too: Python's part per operation is what devices of one process share.
"""

import contextlib
import os
import queue
import threading
from collections.abc import Callable
from functools import partial

import torch

from gguf_pp.backend.base import Buffer, Event, Memory, OutOfMemory
from gguf_pp.backend.host import system_memory


class CpuBuffer:
    """Float32 [n_rows, n_cols] in RAM."""

    def __init__(self, n_rows: int, n_cols: int) -> None:
        self.tensor = torch.empty(n_rows, n_cols, dtype=torch.float32)
        self.n_bytes = self.tensor.nbytes


class Mark:
    """One record of an event, and what broke the stream before it passed."""

    def __init__(self) -> None:
        self._passed = threading.Event()
        self._failure: BaseException | None = None

    def set(self, failure: BaseException | None) -> None:
        """It has passed, or its stream broke before."""
        self._failure = failure
        self._passed.set()

    def wait(self) -> None:
        """Block until it has passed; raises if its stream broke."""
        self._passed.wait()
        if self._failure is not None:
            raise RuntimeError("a stream broke") from self._failure


class CpuEvent:
    """Points at the mark of its latest record; None before the first."""

    def __init__(self) -> None:
        self.mark: Mark | None = None

    def synchronize(self) -> None:
        """Block the host until the latest record has passed; raises if its stream broke."""
        if self.mark is not None:
            self.mark.wait()


class CpuStream:
    """A worker thread and its queue.

    Work that raises, which is a bug, ends all work on this stream and on those that wait for it;
    the host hears of it where it waits, instead of waiting forever.
    """

    def __init__(self, name: str, cores: frozenset[int], n_threads: int) -> None:
        self.name = name
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(
            target=self._work, args=(cores, n_threads), name=name, daemon=True
        )
        self._thread.start()

    def wait(self, event: Event) -> None:
        """Hold later work on this stream until `event` has passed."""
        assert isinstance(event, CpuEvent)
        if event.mark is not None:
            self.run(event.mark.wait)

    def record(self, event: Event) -> None:
        """Let `event` pass once all work queued so far is done."""
        assert isinstance(event, CpuEvent)
        event.mark = mark = Mark()
        self._queue.put(lambda: mark.set(self._failure))

    def copy(self, dst: Buffer, src: Buffer, n_rows: int) -> None:
        """Queue a copy of the first `n_rows` rows."""
        self.run(lambda: _copy_rows(dst, src, n_rows))

    def run(self, work: Callable[[], None]) -> None:
        """Queue `work`."""
        self._queue.put(partial(self._unless_broken, work))

    def close(self) -> None:
        """Finish what is queued, then end the thread."""
        self._queue.put(None)
        self._thread.join()

    def _work(self, cores: frozenset[int], n_threads: int) -> None:
        if hasattr(os, "sched_setaffinity"):
            with contextlib.suppress(OSError):  # a sandbox may forbid it; threads still suffice
                os.sched_setaffinity(0, cores)
        # Both torch's OpenMP and MKL counts are per calling thread, but a thread's first use of
        # them takes over what any thread set last: so that comes before, and is overridden.
        torch.get_num_threads()
        torch.set_num_threads(n_threads)
        with torch.inference_mode():
            while (item := self._queue.get()) is not None:
                item()

    def _unless_broken(self, work: Callable[[], None]) -> None:
        if self._failure is None:
            try:
                work()
            except BaseException as exc:  # noqa: BLE001 - raised again where the host waits
                self._failure = exc


def _copy_rows(dst: Buffer, src: Buffer, n_rows: int) -> None:
    dst.tensor[:n_rows].copy_(src.tensor[:n_rows])


class Budget:
    """Bytes of RAM that the devices of one process may take together."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.total_bytes, available = system_memory()
        self.limit_bytes = available if limit_bytes is None else limit_bytes
        self.used_bytes = 0
        self._lock = threading.Lock()

    def take(self, device: str, n_bytes: int, what: str) -> None:
        """Count `n_bytes`, or raise OutOfMemory."""
        with self._lock:
            free = self.limit_bytes - self.used_bytes
            if n_bytes > free:
                raise OutOfMemory(device, what, n_bytes, free)
            self.used_bytes += n_bytes

    def give(self, n_bytes: int) -> None:
        """Give back what `take` counted."""
        with self._lock:
            self.used_bytes -= n_bytes
            assert self.used_bytes >= 0


class CpuBackend:
    """One CPU device: `name` as the user wrote it, the cores it owns, threads for its compute."""

    local = True

    def __init__(self, name: str, cores: frozenset[int], n_threads: int, budget: Budget) -> None:
        self.name = name
        self.cores = cores
        self.n_threads = n_threads
        self.relative_speed = float(min(n_threads, len(cores)))
        self._budget = budget
        self._streams: list[CpuStream] = []

    def buffer(self, n_rows: int, n_cols: int, what: str) -> CpuBuffer:
        """Reserve a buffer; raises OutOfMemory."""
        n_bytes = 4 * n_rows * n_cols
        self.reserve(n_bytes, what)
        try:
            return CpuBuffer(n_rows, n_cols)
        except BaseException:
            self.release(n_bytes)
            raise

    def event(self) -> CpuEvent:
        """Make an event that was never recorded."""
        return CpuEvent()

    def stream(self, name: str, *, compute: bool = False) -> CpuStream:
        """Make a stream: a thread on this device's cores."""
        n_threads = self.n_threads if compute else 1
        stream = CpuStream(f"{self.name} {name}", self.cores, n_threads)
        self._streams.append(stream)
        return stream

    def reserve(self, n_bytes: int, what: str) -> None:
        """Count `n_bytes` as taken; raises OutOfMemory if the RAM has less."""
        self._budget.take(self.name, n_bytes, what)

    def release(self, n_bytes: int) -> None:
        """Give back what `reserve` took."""
        self._budget.give(n_bytes)

    def memory(self) -> Memory:
        """Total and free bytes of the RAM, which all CPU devices share."""
        free = self._budget.limit_bytes - self._budget.used_bytes
        return Memory("ram", self._budget.total_bytes, max(0, free))

    def close(self) -> None:
        """End the device's threads."""
        for stream in self._streams:
            stream.close()
        self._streams.clear()
