import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gguf_pp.backend.base import OutOfMemory
from gguf_pp.backend.sim import SimBackend, World


class Devices:
    """Two streams on a device each, a buffer, and work that reads and writes it."""

    def __init__(self, seed=0, copy_s=0.0):
        self.world = World(seed, copy_s)
        self.backend = SimBackend(self.world, "sim:0")
        self.a, self.b, self.c = (self.backend.stream(name) for name in "abc")
        self.buffer = self.backend.buffer(2, 2, "buffer")

    def event(self):
        return self.backend.event()

    def finish(self, *streams):
        events = [self.event() for _ in streams]
        for stream, event in zip(streams, events, strict=True):
            stream.record(event)
        for event in events:
            event.synchronize()

    def write(self, value=1.0):
        self.buffer.write(torch.full((2, 2), value))

    def spend(self, seconds):
        return lambda: self.world.spend(seconds)


def test_nothing_runs_before_the_host_waits():
    d, log = Devices(), []
    d.a.run(lambda: log.append("a"))
    assert log == []
    d.finish(d.a)
    assert log == ["a"]


def test_a_stream_runs_in_order_whatever_the_seed():
    for seed in range(20):
        d, log = Devices(seed), []
        for i in range(10):
            (d.a, d.b)[i % 2].run(lambda i=i, log=log: log.append(i))
        d.finish(d.a, d.b)
        assert [i for i in log if i % 2 == 0] == [0, 2, 4, 6, 8]
        assert [i for i in log if i % 2] == [1, 3, 5, 7, 9]


def test_streams_interleave_in_more_than_one_way():
    orders = set()
    for seed in range(20):
        d, log = Devices(seed), []
        for name in "aabb":
            getattr(d, name).run(lambda name=name, log=log: log.append(name))
        d.finish(d.a, d.b)
        orders.add("".join(log))
    assert len(orders) > 3


@pytest.mark.parametrize("seed", range(10))
def test_work_after_a_wait_comes_after_the_event(seed):
    d, log = Devices(seed), []
    event = d.event()
    d.a.run(lambda: log.append("a"))
    d.a.record(event)
    d.b.wait(event)
    d.b.run(lambda: log.append("b"))
    d.finish(d.b)
    assert log == ["a", "b"]


@pytest.mark.parametrize("seed", range(10))
def test_a_wait_is_for_the_latest_record_at_the_time_of_the_call(seed):
    d, log = Devices(seed), []
    event, later = d.event(), d.event()
    d.a.record(event)
    d.b.wait(event)
    d.a.wait(later)  # never recorded: no wait
    d.a.run(d.spend(5.0))
    d.a.record(event)
    d.b.run(lambda: log.append(d.b.now_s))
    d.c.wait(event)
    d.c.run(lambda: log.append(d.c.now_s))
    d.finish(d.b, d.c)
    assert sorted(log) == [0.0, 5.0]


def test_an_event_that_was_never_recorded_does_not_hold_the_host():
    d = Devices()
    d.event().synchronize()
    assert d.world.n_host_waits == 0


def test_the_host_is_counted_only_when_it_really_waits():
    d = Devices()
    event = d.event()
    d.a.record(event)
    event.synchronize()
    event.synchronize()
    assert d.world.n_host_waits == 1


def test_time_passes_side_by_side_and_joins_where_streams_wait():
    d = Devices()
    event = d.event()
    d.a.run(d.spend(3.0))
    d.a.record(event)
    d.b.run(d.spend(1.0))
    d.b.wait(event)
    d.b.run(d.spend(0.5))
    d.c.run(d.spend(2.0))
    d.finish(d.a, d.b, d.c)
    assert (d.a.now_s, d.b.now_s, d.c.now_s) == (3.0, 3.5, 2.0)
    assert d.world.makespan_s == 3.5


def test_work_cannot_start_before_the_host_queued_it():
    d = Devices()
    d.a.run(d.spend(3.0))
    d.finish(d.a)
    assert d.world.host_s == 3.0
    d.b.run(d.spend(1.0))
    d.finish(d.b)
    assert d.b.now_s == 4.0


def test_a_copy_takes_its_time_and_moves_the_first_rows():
    d = Devices(copy_s=0.25)
    target = d.backend.buffer(3, 2, "target")
    d.a.run(d.write)
    d.a.copy(target, d.buffer, 1)
    rows = []
    d.a.run(lambda: rows.extend(target.read().tolist()))
    d.finish(d.a)
    assert rows[0] == [1.0, 1.0]
    assert all(math.isnan(value) for row in rows[1:] for value in row)
    assert d.world.makespan_s == 0.25


ACCESSES = {"read": lambda d: d.buffer.read(), "write": lambda d: d.write()}
RACES = [
    ("write", "read", "read after write"),
    ("read", "write", "write after read"),
    ("write", "write", "write after write"),
]


def two_accesses(first, second, seed, join):
    """`first` on stream a, `second` on stream b, with `join` queued between them."""
    d = Devices(seed)
    d.a.run(lambda: ACCESSES[first](d))
    join(d)
    d.b.run(lambda: ACCESSES[second](d))
    d.finish(d.a, d.b)
    return d.world.races


@pytest.mark.parametrize(("first", "second", "kind"), RACES)
def test_a_missing_wait_is_a_race_in_whatever_order_it_went(first, second, kind):
    kinds = set()
    for seed in range(20):
        races = two_accesses(first, second, seed, lambda d: None)
        assert len(races) == 1
        kinds.add(races[0])
    assert f"{kind} of sim:0 buffer: sim:0 b against sim:0 a" in kinds


def record_and_wait(d):
    event = d.event()
    d.a.record(event)
    d.b.wait(event)


def by_way_of_a_third_stream(d):
    one, two = d.event(), d.event()
    d.a.record(one)
    d.c.wait(one)
    d.c.record(two)
    d.b.wait(two)


def by_way_of_the_host(d):
    d.finish(d.a)


JOINS = [record_and_wait, by_way_of_a_third_stream, by_way_of_the_host]


@pytest.mark.parametrize("join", JOINS)
@pytest.mark.parametrize(("first", "second", "kind"), RACES)
def test_what_waits_on_any_path_is_no_race(first, second, kind, join):
    assert not any(two_accesses(first, second, seed, join) for seed in range(10))


def test_an_event_recorded_too_early_does_not_help():
    def early(d):
        event = d.event()
        d.c.record(event)
        d.b.wait(event)

    assert all(two_accesses("write", "read", seed, early) for seed in range(10))


def test_readers_may_meet_and_a_stream_does_not_race_with_itself():
    for seed in range(10):
        assert two_accesses("read", "read", seed, lambda d: None) == []
    d = Devices()
    d.a.run(d.write)
    d.a.run(d.buffer.read)
    d.a.run(d.write)
    d.finish(d.a)
    assert d.world.races == []


@pytest.mark.parametrize(("waits", "n_races"), [("", 2), ("a", 1), ("b", 1), ("ab", 0)])
def test_a_write_waits_for_every_reader(waits, n_races):
    for seed in range(10):
        d, done = Devices(seed), {}
        for name in "ab":
            getattr(d, name).run(d.buffer.read)
            done[name] = d.event()
            getattr(d, name).record(done[name])
        for name in waits:
            d.c.wait(done[name])
        d.c.run(d.write)
        d.finish(d.a, d.b, d.c)
        assert len(d.world.races) == n_races


def test_fresh_and_overwritten_memory_is_not_a_number():
    d, seen = Devices(), []
    d.a.run(lambda: seen.append(d.buffer.read().isnan().all()))
    d.a.run(d.write)
    d.a.run(lambda: d.buffer.write(torch.zeros(1, 2)))
    d.a.run(lambda: seen.append(d.buffer.read().isnan().tolist()))
    d.finish(d.a)
    assert bool(seen[0])
    assert seen[1] == [[False, False], [True, True]]


def test_a_buffer_is_touched_only_inside_a_stream():
    d = Devices()
    with pytest.raises(AssertionError, match="outside of a stream"):
        d.buffer.read()


def test_streams_that_wait_for_each_other_forever_are_found():
    d = Devices()
    event = d.event()
    d.a.record(event)
    d.a._queue.clear()  # the record was lost
    d.b.wait(event)
    with pytest.raises(AssertionError, match="deadlock"):
        d.finish(d.b)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 30), st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5))))
def test_virtual_time_does_not_depend_on_the_random_order(seed, work):
    def clocks(seed):
        d = Devices(seed)
        streams, event = (d.a, d.b, d.c), d.event()
        for i, seconds in work:
            streams[i].wait(event)
            streams[i].run(d.spend(float(seconds)))
            if seconds % 2:
                streams[i].record(event)
        d.finish(*streams)
        return [s.now_s for s in streams]

    assert clocks(seed) == clocks(0)


def test_memory_is_counted_per_device():
    world = World()
    one, two = SimBackend(world, "sim:0", 100), SimBackend(world, "sim:1", 100)
    one.buffer(2, 8, "input copy 0")
    assert (one.memory().free_bytes, two.memory().free_bytes) == (36, 100)
    assert one.memory().pool != two.memory().pool
    with pytest.raises(OutOfMemory, match="sim:0: 37 bytes for scratch, 36 free"):
        one.reserve(37, "scratch")
    one.release(64)
    one.reserve(100, "scratch")
    assert one.memory().free_bytes == 0
