import contextlib
import os
import threading

import pytest
import torch

from gguf_pp.backend.base import OutOfMemory, is_out_of_memory
from gguf_pp.backend.cpu import Budget, CpuBackend
from gguf_pp.backend.host import share_cores, system_memory
from gguf_pp.backend.open import open_devices
from gguf_pp.config import Device

PATIENCE_S = 30
"""What a test that hangs may take; no test that passes waits for a clock."""
MOMENT_S = 0.02
"""How long work that must not run yet is given to do so; too short only misses a bug."""

CORES = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset({0})


class Gate:
    """Holds a stream until the test opens it."""

    def __init__(self):
        self._opened = threading.Event()
        self.reached = threading.Event()
        self.open = self._opened.set

    def __call__(self):
        self.reached.set()
        assert self._opened.wait(PATIENCE_S)


@contextlib.contextmanager
def opened(name="cpu:0", cores=CORES, n_threads=1, limit=1 << 20):
    backend = CpuBackend(name, cores, n_threads, Budget(limit))
    try:
        yield backend
    finally:
        backend.close()


@pytest.fixture
def backend():
    with opened() as one:
        yield one


def finish(backend, stream):
    event = backend.event()
    stream.record(event)
    event.synchronize()


def result_of(backend, stream, work):
    found = []
    stream.run(lambda: found.append(work()))
    finish(backend, stream)
    return found[0]


def test_a_stream_runs_its_work_in_the_order_in_which_it_was_queued(backend):
    stream, log = backend.stream("s"), []
    for i in range(500):
        stream.run(lambda i=i: log.append(i))
    finish(backend, stream)
    assert log == list(range(500))


def test_streams_do_not_wait_for_each_other_unless_asked(backend):
    held, free, gate = backend.stream("held"), backend.stream("free"), Gate()
    held.run(gate)
    assert result_of(backend, free, lambda: 7) == 7
    gate.open()


def test_queueing_never_blocks_the_host(backend):
    one, two, gate, ran = backend.stream("1"), backend.stream("2"), Gate(), []
    buffer = backend.buffer(1, 1, "b")
    one.run(gate)
    event, last = backend.event(), backend.event()
    for _ in range(100):
        one.run(lambda: ran.append(1))
        one.record(event)
        two.wait(event)
        two.copy(buffer, buffer, 1)
        two.run(lambda: ran.append(2))
    two.record(last)
    assert ran == []
    gate.open()
    last.synchronize()
    assert sorted(ran) == [1] * 100 + [2] * 100


def test_work_after_a_wait_is_held_until_the_event_passes(backend):
    one, two, gate, ran = backend.stream("1"), backend.stream("2"), Gate(), threading.Event()
    event = backend.event()
    one.run(gate)
    one.record(event)
    two.wait(event)
    two.run(ran.set)
    assert not ran.wait(MOMENT_S)
    gate.open()
    finish(backend, two)
    assert ran.is_set()


def test_an_event_that_was_never_recorded_is_no_wait(backend):
    event, stream = backend.event(), backend.stream("s")
    event.synchronize()
    stream.wait(event)
    assert result_of(backend, stream, lambda: 1) == 1


def test_a_wait_is_for_the_latest_record_at_the_time_of_the_call(backend):
    one, early, late = (backend.stream(name) for name in ("1", "early", "late"))
    event, gate, ran = backend.event(), Gate(), threading.Event()
    one.record(event)
    early.wait(event)
    one.run(gate)
    one.record(event)
    late.wait(event)
    late.run(ran.set)
    finish(backend, early)  # hangs if it waits for the second record
    assert not ran.wait(MOMENT_S)
    gate.open()
    finish(backend, late)
    assert ran.is_set()


def test_a_wait_that_came_first_is_not_moved_by_a_later_record(backend):
    one, two, first, second = backend.stream("1"), backend.stream("2"), Gate(), Gate()
    event, ran = backend.event(), threading.Event()
    one.run(first)
    one.record(event)
    two.wait(event)
    one.run(second)
    one.record(event)
    two.run(ran.set)
    assert not ran.wait(MOMENT_S)
    first.open()
    assert ran.wait(PATIENCE_S)
    second.open()


def test_the_host_waits_for_the_latest_record(backend):
    stream, event, gate, passed = backend.stream("s"), backend.event(), Gate(), threading.Event()
    stream.record(event)
    event.synchronize()
    stream.run(gate)
    stream.record(event)
    host = threading.Thread(target=lambda: (event.synchronize(), passed.set()))
    host.start()
    assert not passed.wait(MOMENT_S)
    gate.open()
    host.join(PATIENCE_S)
    assert passed.is_set()


def test_a_copy_moves_the_first_rows_and_no_others():
    with opened() as backend:
        stream = backend.stream("transfer")
        source, target = backend.buffer(3, 2, "source"), backend.buffer(4, 2, "target")
        source.tensor.copy_(torch.arange(6.0).view(3, 2))
        target.tensor.fill_(-1)
        stream.copy(target, source, 2)
        finish(backend, stream)
    assert target.tensor.tolist() == [[0, 1], [2, 3], [-1, -1], [-1, -1]]


def test_a_stream_that_broke_is_told_to_the_host_and_to_those_who_wait(backend):
    one, two, three = (backend.stream(name) for name in "123")
    event, ran = backend.event(), []
    one.run(lambda: ran.append(1 // 0))
    one.run(lambda: ran.append("after"))
    one.record(event)
    two.wait(event)
    two.run(lambda: ran.append("elsewhere"))
    for stream in (one, two, one):
        with pytest.raises(RuntimeError, match="a stream broke") as caught:
            finish(backend, stream)
    cause = caught.value
    while cause.__cause__ is not None:
        cause = cause.__cause__
    assert isinstance(cause, ZeroDivisionError)
    assert result_of(backend, three, lambda: 3) == 3
    assert ran == []


def test_closing_finishes_what_is_queued_and_ends_the_threads():
    backend, ran, gate = CpuBackend("cpu:7", CORES, 1, Budget(0)), [], Gate()
    streams = [backend.stream("compute", compute=True), backend.stream("transfer")]
    assert {"cpu:7 compute", "cpu:7 transfer"} <= {t.name for t in threading.enumerate()}
    streams[0].run(gate)
    for stream in streams:
        stream.run(lambda: ran.append(1))
    gate.open()
    backend.close()
    assert ran == [1, 1]
    assert not any(t.name.startswith("cpu:7") for t in threading.enumerate())
    backend.close()


def test_work_needs_no_gradients(backend):
    assert result_of(backend, backend.stream("s"), torch.is_inference_mode_enabled)


def test_each_stream_has_the_threads_of_its_own_device():
    before = torch.get_num_threads()
    with opened("cpu:0", n_threads=3) as one, opened("cpu:1", n_threads=2) as two:
        streams = [
            (one, one.stream("compute", compute=True)),
            (two, two.stream("compute", compute=True)),
            (two, two.stream("transfer")),
        ]
        for _ in range(2):
            counts = [result_of(backend, s, torch.get_num_threads) for backend, s in streams]
            assert counts == [3, 2, 1]
    assert torch.get_num_threads() == before


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_a_stream_and_the_threads_it_starts_stay_on_the_cores_of_the_device():
    mine = frozenset({min(CORES)})

    def of_a_helper():
        found = []
        helper = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
        helper.start()
        helper.join()
        return found[0]

    with opened(cores=mine) as backend:
        stream = backend.stream("compute", compute=True)
        assert result_of(backend, stream, lambda: os.sched_getaffinity(0)) == mine
        assert result_of(backend, stream, of_a_helper) == mine
    assert os.sched_getaffinity(0) == CORES


def test_what_is_reserved_is_taken_from_all_devices_of_the_process():
    budget = Budget(1000)
    one, two = (CpuBackend(f"cpu:{i}", CORES, 1, budget) for i in range(2))
    one.reserve(600, "weights")
    assert two.memory().free_bytes == 400
    assert one.memory().pool == two.memory().pool == "ram"
    with pytest.raises(OutOfMemory, match="cpu:1: 401 bytes for KV cache, 400 free") as caught:
        two.reserve(401, "KV cache")
    exc = caught.value
    assert (exc.device, exc.what, exc.asked_bytes, exc.free_bytes) == (
        "cpu:1",
        "KV cache",
        401,
        400,
    )
    two.reserve(400, "KV cache")
    assert one.memory().free_bytes == 0
    one.release(600)
    assert two.memory().free_bytes == 600


def test_a_buffer_is_reserved_as_it_is_made():
    with opened(limit=100) as backend:
        buffer = backend.buffer(3, 8, "input copy 0")
        assert (buffer.n_bytes, buffer.tensor.shape) == (96, (3, 8))
        assert backend.memory().free_bytes == 4
        with pytest.raises(OutOfMemory, match="32 bytes for input copy 1, 4 free"):
            backend.buffer(1, 8, "input copy 1")
        assert backend.memory().free_bytes == 4


def test_a_buffer_that_the_system_refuses_is_not_counted():
    with opened(limit=1 << 60) as backend:
        with pytest.raises(RuntimeError) as caught:
            backend.buffer(1 << 40, 64, "input copy 0")
        assert is_out_of_memory(caught.value)
        assert backend.memory().free_bytes == 1 << 60


def test_more_is_never_given_back_than_was_taken(backend):
    backend.reserve(5, "scratch")
    with pytest.raises(AssertionError):
        backend.release(6)


def test_devices_may_reserve_at_the_same_time():
    budget, start = Budget(10), threading.Barrier(4)

    def work():
        start.wait(PATIENCE_S)
        for _ in range(2000):
            with contextlib.suppress(OutOfMemory):
                budget.take("cpu", 3, "scratch")
                assert budget.used_bytes <= 10
                budget.give(3)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert budget.used_bytes == 0


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity on this system")
@pytest.mark.parametrize(
    ("cores", "n_devices", "shares"),
    [
        ({0, 1, 2, 3}, 1, [{0, 1, 2, 3}]),
        ({0, 1, 2, 3}, 2, [{0, 1}, {2, 3}]),
        ({8, 3, 5, 4, 9}, 2, [{3, 4}, {5, 8, 9}]),
        (set(range(8)), 3, [{0, 1}, {2, 3, 4}, {5, 6, 7}]),
        ({6}, 3, [{6}, {6}, {6}]),
        ({0, 1}, 4, [{0}, {0}, {1}, {1}]),
    ],
)
def test_cores_are_dealt_in_contiguous_shares(cores, n_devices, shares, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores)
    assert share_cores(n_devices) == shares


def test_a_limit_of_the_container_counts_without_what_it_cached_of_files(tmp_path):
    proc, group = tmp_path / "proc", tmp_path / "cgroup"
    proc.mkdir()
    group.mkdir()
    (proc / "meminfo").write_text("MemTotal:  1000 kB\nMemFree: 5 kB\nMemAvailable: 800 kB\n")
    assert system_memory(proc, group) == (1000 << 10, 800 << 10)
    (group / "memory.current").write_text(f"{500 << 10}\n")
    stat = f"anon 7\nactive_file {100 << 10}\ninactive_file {300 << 10}\n"
    (group / "memory.stat").write_text(stat)
    for limit, total, free in ((600, 600, 500), (950, 950, 800), (5000, 1000, 800), (50, 50, 0)):
        (group / "memory.max").write_text(f"{limit << 10}\n")
        assert system_memory(proc, group) == (total << 10, free << 10)
    (group / "memory.max").write_text("max\n")
    assert system_memory(proc, group) == (1000 << 10, 800 << 10)


def test_without_proc_the_size_of_the_memory_is_known(tmp_path):
    total, available = system_memory(tmp_path, tmp_path)
    assert total == available > 0


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_devices_are_opened_in_order_with_their_threads_and_one_budget():
    asked = [Device("cpu:1", "cpu", 1, 5), Device("cpu:0", "cpu", 0)]
    one, two = open_devices(asked, Budget(123))
    assert (one.name, two.name) == ("cpu:1", "cpu:0")
    assert (one.cores, two.cores) == tuple(share_cores(2))
    assert (one.n_threads, two.n_threads) == (5, len(two.cores))
    # Threads beyond the cores make no device faster.
    assert (one.relative_speed, two.relative_speed) == (len(one.cores), len(two.cores))
    one.reserve(100, "weights")
    assert two.memory().free_bytes == 23
