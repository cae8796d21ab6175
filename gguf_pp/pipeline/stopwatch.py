"""How long a stage's ubatches take on its device."""

import threading
import time
from collections import deque
from typing import Any

from gguf_pp.batch import UBatch

N_RECENT = 64


class Stopwatch:
    """`recent` are (rows, outputs, seconds) of the ubatches computed last, by the clock of the
    host: for devices whose work is done when its call returns."""

    def __init__(self) -> None:
        self._recent: deque[tuple[int, int, float]] = deque(maxlen=N_RECENT)

    @property
    def recent(self) -> deque[tuple[int, int, float]]:
        """As above, the oldest first."""
        return self._recent

    def start(self) -> Any:
        """A moment to give to `stop`."""
        return time.perf_counter()

    def stop(self, start: Any, ubatch: UBatch) -> None:
        """Note what `ubatch` took since `start`."""
        self._note(ubatch, time.perf_counter() - start)

    def _note(self, ubatch: UBatch, seconds: float) -> None:
        self._recent.append((ubatch.n_rows, len(ubatch.outputs), seconds))


class CudaStopwatch(Stopwatch):
    """The same by events on the current stream, read once they have passed: the host only launches
    work, and is ahead of the device. `cuda` is torch.cuda."""

    def __init__(self, cuda: Any) -> None:
        super().__init__()
        self._cuda = cuda
        self._running: deque[tuple[UBatch, Any, Any]] = deque()
        self._lock = threading.Lock()

    @property
    def recent(self) -> deque[tuple[int, int, float]]:
        """Those that the device is through with."""
        self._collect()
        return self._recent

    def _collect(self) -> None:
        with self._lock:  # the host may look while the stream's thread starts
            while self._running and self._running[0][2].query():
                ubatch, start, end = self._running.popleft()
                self._note(ubatch, 1e-3 * start.elapsed_time(end))

    def start(self) -> Any:
        """A moment to give to `stop`, which the stream has yet to come to."""
        self._collect()
        return self._record()

    def stop(self, start: Any, ubatch: UBatch) -> None:
        """Have what `ubatch` takes noted once it has passed."""
        self._running.append((ubatch, start, self._record()))

    def _record(self) -> Any:
        event = self._cuda.Event(enable_timing=True)
        event.record()
        return event
