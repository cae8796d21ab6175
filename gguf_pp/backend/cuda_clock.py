"""When a CUDA device came to what was queued there, in the time of the host."""

from collections import deque
from collections.abc import Callable
from operator import itemgetter
from typing import Any

from gguf_pp.backend.cuda_edges import Current


class CudaClock:
    """A `DeviceClock` of one stage: events on its streams, told apart from one event whose time
    the host knows as well.

    That event is made at each `settle`, on `stream`, which does nothing else, and so is close to
    what it is compared with: the device's clock may run faster or slower than the host's. What
    settles is one thread; others may note.
    """

    def __init__(self, cuda: Any, stream: Any) -> None:
        self._cuda = cuda
        self._stream = stream
        self._noted: deque[tuple[Any, Callable[[float], None]]] = deque()

    def note(self, tell: Callable[[float], None]) -> None:
        """As in DeviceClock."""
        event = self._cuda.Event(enable_timing=True)
        event.record()
        self._noted.append((event, tell))

    def settle(self, clock: Callable[[], float]) -> None:
        """As in DeviceClock. Waits for nothing that was queued."""
        pending = [self._noted.popleft() for _ in range(len(self._noted))]
        if not pending:
            return
        passed = [event.query() for event, _ in pending]
        _, now_s, now = min((self._now(clock) for _ in range(3)), key=itemgetter(0))
        for (event, tell), is_past in zip(pending, passed, strict=True):
            if is_past:
                tell(now_s - 1e-3 * event.elapsed_time(now))
            else:
                self._noted.append((event, tell))

    def _now(self, clock: Callable[[], float]) -> tuple[float, float, Any]:
        """A moment, by the host and as an event, behind the seconds that it took: microseconds,
        unless the host did something else in between."""
        now = self._cuda.Event(enable_timing=True)
        with Current(self._cuda, self._stream):
            before = clock()
            now.record(self._stream)
            now.synchronize()
            after = clock()
        return after - before, (before + after) / 2, now
