"""Devices in virtual time: the scheduler's test double, and the ruler for its schedules.

Queued work is executed when the host first waits, one queue head at a time, in a random order
among those that may legally go next. Every stream carries a clock in seconds and a vector clock;
each access to a buffer is checked against the last accesses by other streams, so that a missing
wait is reported as a race even when the random order happened to give the right result.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from gguf_pp.backend.base import Buffer, Event, Memory, OutOfMemory

Clock = dict[str, int]


def _join(clock: Clock, other: Clock) -> None:
    """Let `clock` know everything that `other` knows."""
    for name, tick in other.items():
        clock[name] = max(clock.get(name, 0), tick)


@dataclass(slots=True)
class Mark:
    """One record of an event: when it passed, and what had happened before it."""

    passed: bool = False
    time_s: float = 0.0
    clock: Clock = field(default_factory=dict)


class World:
    """All simulated devices of one run: the random order, the clocks, the races found."""

    def __init__(self, seed: int = 0, copy_s: float = 0.0) -> None:
        self.random = random.Random(seed)
        self.copy_s = copy_s
        self.streams: list[SimStream] = []
        self.races: list[str] = []
        self.current: SimStream | None = None
        self.n_host_waits = 0
        self.host_s = 0.0
        self.host_clock: Clock = {}

    def advance(self, until: Callable[[], bool]) -> None:
        """Execute queued work in a random legal order until `until()` holds."""
        while not until():
            ready = [s for s in self.streams if s.ready()]
            assert ready, "deadlock: every stream waits for an event that no queued work records"
            stream = self.random.choice(ready)
            self.current = stream
            stream.step()
            self.current = None

    @property
    def makespan_s(self) -> float:
        """Virtual time at which the last stream finished."""
        return max((s.now_s for s in self.streams), default=0.0)

    def now(self) -> float:
        """Virtual time of the running work, or of the host."""
        return self.host_s if self.current is None else self.current.now_s

    def spend(self, seconds: float) -> None:
        """Let the running work take `seconds`."""
        assert self.current is not None
        self.current.now_s += seconds


class _Item(NamedTuple):
    """Work in a queue: what it waits for, and what the host knew when it queued it."""

    work: Callable[[], None]
    mark: Mark | None
    queued_s: float
    host_clock: Clock


class SimBuffer:
    """Float32 [n_rows, n_cols] that knows who touched it last. Fresh and poisoned memory is NaN."""

    def __init__(self, world: World, name: str, n_rows: int, n_cols: int) -> None:
        self._world = world
        self._name = name
        self._data = torch.full((n_rows, n_cols), float("nan"))
        self._writer: tuple[str, int] | None = None
        self._readers: dict[str, int] = {}
        self.n_bytes = self._data.nbytes

    @property
    def tensor(self) -> torch.Tensor:
        """The data, for reading; use `write` to change it."""
        return self.read()

    def read(self) -> torch.Tensor:
        """Read all rows from the running stream."""
        stream = self._world.current
        assert stream is not None, f"{self._name} is touched outside of a stream"
        self._check("read after write", stream, self._writer)
        self._readers[stream.name] = stream.tick
        return self._data

    def write(self, rows: torch.Tensor) -> None:
        """Replace the first rows from the running stream; the others become NaN."""
        stream = self._world.current
        assert stream is not None, f"{self._name} is touched outside of a stream"
        self._check("write after write", stream, self._writer)
        for reader in self._readers.items():
            self._check("write after read", stream, reader)
        self._writer, self._readers = (stream.name, stream.tick), {}
        self._data.fill_(float("nan"))
        self._data[: len(rows)] = rows

    def _check(self, kind: str, stream: "SimStream", other: tuple[str, int] | None) -> None:
        if other is None:
            return
        name, tick = other
        if name != stream.name and stream.clock.get(name, 0) < tick:
            self._world.races.append(f"{kind} of {self._name}: {stream.name} against {name}")


class SimEvent:
    """Points at its latest record."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.mark: Mark | None = None

    def synchronize(self) -> None:
        """Run the world until the latest record has passed."""
        mark = self.mark
        if mark is not None and not mark.passed:
            self._world.n_host_waits += 1
            self._world.advance(lambda: mark.passed)
        if mark is not None:
            self._world.host_s = max(self._world.host_s, mark.time_s)
            _join(self._world.host_clock, mark.clock)


class SimStream:
    """A queue in virtual time."""

    def __init__(self, world: World, name: str) -> None:
        self.name = name
        self.now_s = 0.0
        self.clock: Clock = {}
        self.tick = 0
        self._world = world
        self._queue: deque[_Item] = deque()

    def wait(self, event: Event) -> None:
        """Hold later work on this stream until `event` has passed."""
        assert isinstance(event, SimEvent)
        mark = event.mark
        if mark is None:
            return

        def join() -> None:
            self.now_s = max(self.now_s, mark.time_s)
            _join(self.clock, mark.clock)

        self._push(join, mark)

    def record(self, event: Event) -> None:
        """Let `event` pass once all work queued so far is done."""
        assert isinstance(event, SimEvent)
        event.mark = mark = Mark()

        def passes() -> None:
            mark.passed, mark.time_s = True, self.now_s
            mark.clock = {**self.clock, self.name: self.tick}

        self._push(passes)

    def copy(self, dst: Buffer, src: Buffer, n_rows: int) -> None:
        """Queue a copy of the first `n_rows` rows."""
        assert isinstance(dst, SimBuffer)
        assert isinstance(src, SimBuffer)

        def move() -> None:
            self._world.spend(self._world.copy_s)
            dst.write(src.read()[:n_rows])

        self._push(move)

    def run(self, work: Callable[[], None]) -> None:
        """Queue `work`."""
        self._push(work)

    def _push(self, work: Callable[[], None], mark: Mark | None = None) -> None:
        world = self._world
        self._queue.append(_Item(work, mark, world.host_s, dict(world.host_clock)))

    def ready(self) -> bool:
        """Whether the head of the queue may go."""
        return bool(self._queue) and (self._queue[0].mark is None or self._queue[0].mark.passed)

    def step(self) -> None:
        """Execute the head of the queue."""
        item = self._queue.popleft()
        self.tick += 1
        self.clock[self.name] = self.tick
        self.now_s = max(self.now_s, item.queued_s)
        _join(self.clock, item.host_clock)
        item.work()


class SimBackend:
    """One simulated device with `limit_bytes` of memory."""

    local = True

    def __init__(self, world: World, name: str, limit_bytes: int = 1 << 40) -> None:
        self.world = world
        self.name = name
        self.n_threads = 1
        self.relative_speed = 1.0
        self.limit_bytes = limit_bytes
        self.used_bytes = 0

    def buffer(self, n_rows: int, n_cols: int, what: str) -> SimBuffer:
        """Reserve a buffer; raises OutOfMemory."""
        self.reserve(4 * n_rows * n_cols, what)
        return SimBuffer(self.world, f"{self.name} {what}", n_rows, n_cols)

    def event(self) -> SimEvent:
        """Make an event that was never recorded."""
        return SimEvent(self.world)

    def stream(self, name: str, *, compute: bool = False) -> SimStream:
        """Make a stream."""
        stream = SimStream(self.world, f"{self.name} {name}")
        self.world.streams.append(stream)
        return stream

    def reserve(self, n_bytes: int, what: str) -> None:
        """Count `n_bytes` as taken; raises OutOfMemory."""
        if self.used_bytes + n_bytes > self.limit_bytes:
            raise OutOfMemory(self.name, what, n_bytes, self.limit_bytes - self.used_bytes)
        self.used_bytes += n_bytes

    def release(self, n_bytes: int) -> None:
        """Give back what `reserve` took."""
        self.used_bytes -= n_bytes

    def memory(self) -> Memory:
        """Total and free bytes."""
        return Memory(self.name, self.limit_bytes, self.limit_bytes - self.used_bytes)

    def close(self) -> None:
        """Nothing to stop."""
