"""From device to device: the self-test, the way through the host, devices of other kinds."""

import threading

import pytest

from gguf_pp.backend import cuda_edges
from gguf_pp.backend.cuda import open_cuda
from gguf_pp.backend.cuda_edges import choose_modes, find_damage
from gguf_pp.errors import PlacementError
from tests.cuda_double import Double
from tests.cuda_run import Run, named

PATIENCE_S = 30
"""What a test that hangs may take; no test that passes waits for a clock."""


@pytest.fixture(autouse=True)
def small_self_tests(monkeypatch):
    monkeypatch.setattr(cuda_edges, "TEST_BYTES", (256,))


def test_damaged_copies_go_through_the_host_with_one_warning(caplog):
    double = Double()
    double.damages = lambda source, target, n_bytes: (source, target) in {(0, 1), (2, 1)}
    run = Run("012", double=double)
    assert run.is_right()
    assert [run.backends[0].mode_to(1), run.backends[1].mode_to(2)] == ["host", "p2p"]
    assert [run.backends[1].mode_to(0), run.backends[2].mode_to(1)] == ["p2p", "host"]
    assert [record.getMessage() for record in caplog.records] == [
        "direct copies arrive damaged: cuda:0 to cuda:1 (1 of 256 bytes differ), "
        "cuda:2 to cuda:1 (1 of 256 bytes differ); going through host memory, which is slower"
    ]


def test_damage_that_only_large_copies_have_is_found():
    double = Double()
    double.damages = lambda source, target, n_bytes: n_bytes > 4096
    assert find_damage(double, 0, 1, "p2p", [256, 4096]) == ""
    assert find_damage(double, 0, 1, "p2p", [256, 8192]) == "1 of 8192 bytes differ"
    assert find_damage(double, 0, 1, "host", [256, 8192]) == ""
    assert double.world.races == []


def test_real_self_tests_send_16_mib(monkeypatch):
    monkeypatch.undo()
    assert cuda_edges.TEST_BYTES == (4 << 10, 1 << 20, 16 << 20)


def test_each_edge_is_tried_both_ways_and_copies_within_a_device_are_not():
    double = Double()
    assert choose_modes(double, [(0, 1), (1, 1)], "auto") == {
        (0, 1): "p2p",
        (1, 0): "p2p",
        (1, 1): "p2p",
    }
    pairs = [details for what, _, *details in double.log if what == "copy"]
    tried = [(getattr(src, "place", "host"), dst.place) for dst, src in pairs]
    tried = [pair for pair in tried if all(isinstance(place, int) for place in pair)]
    assert tried == [(0, 1), (1, 0)]


def test_damage_where_a_way_of_copying_was_asked_for_is_an_error():
    double = Double()
    double.damages = lambda source, target, n_bytes: True
    with pytest.raises(PlacementError, match=r"cuda:0 to cuda:1 arrive damaged \(p2p: ") as caught:
        open_cuda(named("0", "1"), edge_copy="p2p", api=double)
    assert caught.value.hint == "try --edge-copy host"
    double.host_damages = True
    for asked in ("auto", "host"):
        with pytest.raises(PlacementError, match=r"arrive damaged \(host: ") as caught:
            open_cuda(named("0", "1"), edge_copy=asked, api=double)
        assert caught.value.hint == "name one of the two devices"


def test_host_mode_copies_only_between_pinned_and_device_memory():
    run = Run("01", edge_copy="host")
    places = [tuple(t.place for t in details) for what, _, *details in run.log if what == "copy"]
    assert set(places) == {("pinned", 0), (1, "pinned"), ("pinned", 1)}
    assert run.is_right()


@pytest.mark.parametrize("which", ["_landed", "_arrived"])
def test_a_wait_on_the_way_through_the_host_that_is_left_out_is_noticed(which, monkeypatch):
    arrive = cuda_edges.Pinned.arrive

    def forgetful(self, x, d, dst):
        stream, event = (d, self._landed) if which == "_landed" else (x, self._arrived)
        with monkeypatch.context() as patched:
            patched.setattr(stream, "wait_event", lambda e: e is event or type(stream).wait_event)
            arrive(self, x, d, dst)

    def races():
        monkeypatch.setattr(cuda_edges, "find_damage", lambda *args: "")  # or it would notice
        runs = [Run("012", double=Double(seed=i, copy_s=0.5), edge_copy="host") for i in range(8)]
        return any(run.races for run in runs)

    assert not races()
    monkeypatch.setattr(cuda_edges.Pinned, "arrive", forgetful)
    assert races()


def test_buffers_have_a_twin_on_the_host_only_where_one_is_needed():
    def twins(**kwargs):
        one, _ = open_cuda(named("0", "1"), api=Double(), **kwargs)
        return one.buffer(2, 2, "b").pinned is not None

    assert twins(edge_copy="host")
    assert not twins(edge_copy="auto")


# With devices of other kinds.

MIXED = ["cpu 0", "0 cpu", "0 cpu 1", "cpu 0 1", "0 1 cpu", "0 0 cpu 0"]


@pytest.mark.parametrize("edge_copy", ["auto", "host"])
@pytest.mark.parametrize("n_copies", [1, 2, 3])
@pytest.mark.parametrize("names", MIXED)
def test_cpu_and_cuda_devices_work_in_one_pipeline(names, n_copies, edge_copy):
    for seed in range(3):
        run = Run(names.split(), n_copies, seed=seed, edge_copy=edge_copy)
        assert run.is_right()


@pytest.mark.parametrize("names", MIXED)
def test_not_pipelined_mixed_devices_give_the_same(names):
    assert Run(names.split(), 1, pipelined=False).is_right()


def test_with_threads_each_record_has_an_event_of_its_own():
    # A thread may come to a wait only after the next record was queued.
    (backend,) = open_cuda(named("0", "cpu"), api=Double())
    stream, event = backend.stream("1"), backend.event()
    stream.record(event)
    first = event.mark
    stream.record(event)
    assert event.mark.raw is not first.raw
    first.wait()
    event.synchronize()
    backend.close()


@pytest.mark.parametrize("names", MIXED)
def test_queueing_never_blocks_the_host_while_a_cpu_computes(names):
    opened = threading.Event()

    class Gated(Run):
        def submitted(self):
            assert self.results == {}
            opened.set()

    def meet(i_stage, i_ubatch):
        if names.split()[i_stage] == "cpu":
            assert opened.wait(PATIENCE_S)

    assert Gated(names.split(), meet=meet).is_right()


def test_a_stream_thread_that_broke_is_told_to_the_host_and_to_those_who_wait():
    (backend,) = open_cuda(named("0", "cpu"), api=Double())
    one, two, event = backend.stream("1"), backend.stream("2"), backend.event()
    one.run(lambda: 1 // 0)
    one.record(event)
    two.wait(event)
    last = backend.event()
    two.record(last)
    for each in (event, last):
        with pytest.raises(RuntimeError, match="a stream broke"):
            each.synchronize()
    backend.close()
