"""The real executor and ring over CUDA streams, on a double of torch that executes in time."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gguf_pp.backend import cuda_edges
from gguf_pp.backend.cuda import CudaBackend, open_cuda
from gguf_pp.backend.cuda_edges import Current
from gguf_pp.pipeline.executor import Executor
from tests.cuda_double import Double
from tests.cuda_run import Run, named
from tests.simulated import expected, ubatches
from tests.test_executor import MUTANTS, without


@pytest.fixture(autouse=True)
def small_self_tests(monkeypatch):
    monkeypatch.setattr(cuda_edges, "TEST_BYTES", (256,))


def directly(s):
    """From stage s - 1 to s, as torch copies between two devices."""
    yield f"barrier X{s - 1} D{s}"
    yield f"copy X{s - 1}"
    yield f"barrier D{s} X{s - 1}"


def by_the_host(s):
    """The same through pinned memory: D waits for what left, X for what arrived."""
    yield f"copy X{s - 1}"
    yield f"record X{s - 1} landed"
    yield f"wait D{s} landed"
    yield f"copy D{s}"
    yield f"record D{s} landed"
    yield f"wait X{s - 1} landed"


def within(s):
    """The same on one device."""
    yield f"copy X{s - 1}"


def protocol(n_stages, n_copies, n_ubatches, way):
    """The same from scheduler.md, written down anew."""
    for u in range(n_ubatches):
        c, again = u % n_copies, u >= n_copies
        for s in range(n_stages):
            if s > 0:
                yield f"wait X{s - 1} done[{s - 1}][{c}]"
                yield from [f"wait X{s - 1} free[{s}][{c}]"] * again
                yield from way(s)
                yield f"record X{s - 1} filled[{s}][{c}]"
                yield f"wait S{s} filled[{s}][{c}]"
            if s + 1 < n_stages and again:
                yield f"wait S{s} filled[{s + 1}][{c}]"
            yield from [f"kernel S{s} load"] * (s > 0)
            yield f"record S{s} free[{s}][{c}]"
            yield f"kernel S{s} forward"
            if s == n_stages - 1:
                yield f"copy S{s}"
                yield f"record S{s} landed"
            yield f"record S{s} done[{s}][{c}]"
        yield f"record S{n_stages - 1} ticket[{u}]"


each_n_stages = pytest.mark.parametrize("n_stages", [1, 2, 3, 4])
each_n_copies = pytest.mark.parametrize("n_copies", [1, 2, 3, 4])


@each_n_stages
@each_n_copies
@pytest.mark.parametrize(("edge_copy", "way"), [("auto", directly), ("host", by_the_host)])
def test_exactly_the_waits_records_and_copies_of_the_protocol_are_issued(
    n_stages, n_copies, edge_copy, way
):
    run = Run([str(i) for i in range(n_stages)], n_copies, edge_copy=edge_copy)
    script = [line for line in run.script() if not line.startswith("synchronize")]
    assert script == list(protocol(n_stages, n_copies, 7, way))
    assert run.is_right()


@each_n_stages
@each_n_copies
def test_virtual_devices_on_one_index_have_streams_of_their_own(n_stages, n_copies):
    run = Run(["0"] * n_stages, n_copies)
    script = [line for line in run.script() if not line.startswith("synchronize")]
    assert script == list(protocol(n_stages, n_copies, 7, within))
    assert run.is_right()
    assert run.double.contexts == {0}


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=5),
    st.integers(1, 4),
    st.integers(0, 1 << 30),
    st.sampled_from(["auto", "host"]),
    st.booleans(),
)
def test_any_placement_gives_what_stages_in_turn_give(
    indices, n_copies, seed, edge_copy, pipelined
):
    rng = random.Random(seed)
    seconds = [[rng.choice([0.1, 1.0, 3.0]) for _ in range(7)] for _ in indices]
    double = Double(seed=seed, copy_s=rng.choice([0.0, 0.5, 2.0]))
    run = Run(
        list(map(str, indices)),
        n_copies,
        double=double,
        edge_copy=edge_copy,
        pipelined=pipelined,
        seconds=seconds,
    )
    assert run.is_right()


@pytest.mark.parametrize("names", ["0123", "0000", "0011"])
def test_pipelined_the_host_waits_only_for_a_slot_to_land_in(names):
    run = Run(names)  # there are slots for 4 stages and 2 copies
    assert sum(what == "synchronize" for what, *_ in run.log) == 7 - 6


@pytest.mark.parametrize("edge_copy", ["auto", "host"])
@pytest.mark.parametrize("wait", MUTANTS)
def test_a_wait_that_is_left_out_is_noticed(wait, edge_copy):
    uneven = [[1.0, 0.2, 2.0, 0.1, 1.0, 0.2, 2.0], [0.3, 1.5, 0.2, 1.0, 0.3, 1.5, 0.2]] * 2

    def races(executor):
        runs = [
            Run("012", double=Double(seed=i, copy_s=0.5), edge_copy=edge_copy, executor=executor,
                seconds=uneven)
            for i in range(8)
        ]  # fmt: skip
        return any(run.races for run in runs)

    assert races(without(*MUTANTS[wait]))
    assert not races(Executor)


IDEAL_S = 3 * (1 + 0.3) + 7 * (1 + 0.3)
"""Of 7 ubatches of one second over 4 devices, with copies of 0.3 s."""


def test_copies_do_not_couple_the_compute_streams():
    run = Run("0123", double=Double(copy_s=0.3))
    names = run.names()
    barriers = [entry[1:] for entry in run.log if entry[0] == "barrier"]
    assert barriers
    assert not [pair for pair in barriers if {"S"} & {names[stream][0] for stream in pair}]
    # The last stage, which also sends its logits to the host, is busy from its first input on.
    assert run.makespan_s == pytest.approx(IDEAL_S)


def test_with_compute_streams_current_copies_would_couple_them(monkeypatch):
    class NoIdle(CudaBackend):
        """The idle stream is the compute stream."""

        def stream(self, name, *, compute=False):
            stream = super().stream(name, compute=compute)
            if compute:
                self.idle = stream.raw
            return stream

    monkeypatch.setattr("gguf_pp.backend.cuda.CudaBackend", NoIdle)
    run = Run("0123", double=Double(copy_s=0.3))
    assert run.races == []
    assert run.makespan_s > IDEAL_S + 1


def test_stages_launch_on_their_own_device_and_the_host_gets_its_own_back():
    double = Double()
    mine = cuda_edges.Current(double.cuda, double.cuda.Stream(device=3))
    with mine:
        before = [double.current_stream(i) for i in range(4)], double.current_stream()
        run = Run("0212", double=double)  # that memory and stream agree is checked by the double
        after = [double.current_stream(i) for i in range(4)], double.current_stream()
    assert run.is_right()
    assert after == before
    assert before[1].device_index == 3


def test_no_context_is_made_on_a_device_that_is_not_named():
    assert Run("23").double.contexts == {2, 3}


def test_the_last_of_several_streams_decides_the_current_device():
    double = Double()
    one, two = (double.cuda.Stream(device=i) for i in (1, 2))
    with Current(double.cuda, two, one):
        assert double.current_stream() is one
        assert double.current_stream(2) is two
        with Current(double.cuda, two):
            assert double.current_stream() is two
        assert double.current_stream() is one
    assert double.current_stream() is double.defaults[0]
    assert double.current_stream(2) is double.defaults[2]


def test_other_streams_than_those_for_compute_go_first():
    run = Run("01")
    priorities = {(stage.compute.raw.priority, stage.backend.idle.priority) for stage in run.stages}
    assert priorities == {(0, -1)}
    assert run.stages[0].transfer.raw.priority == -1


def test_not_pipelined_devices_take_turns():
    assert Run("012", 1, pipelined=False).makespan_s == 3 * 7


def test_a_failing_ubatch_fails_alone():
    def meet(i_stage, i_ubatch):
        if (i_stage, i_ubatch) in {(1, 3), (0, 5)}:
            raise ZeroDivisionError(f"stage {i_stage}")

    run = Run("012", meet=meet)
    assert {i: str(exc) for i, exc in run.errors.items()} == {3: "stage 1", 5: "stage 0"}
    assert run.races == []
    for i, ubatch in enumerate(ubatches(7)):
        assert i in run.errors or run.results[i] == expected(ubatch, 3)


def test_without_threads_a_bug_in_queued_work_is_raised_where_it_is_queued():
    (backend,) = open_cuda(named("0"), api=Double())
    with pytest.raises(ZeroDivisionError):
        backend.stream("1").run(lambda: 1 // 0)


@pytest.mark.parametrize("names", ["0", "0 cpu"])
def test_work_needs_no_gradients(names):
    (backend,) = open_cuda(named(*names.split()), api=Double())
    found, done = [], backend.event()
    stream = backend.stream("s", compute=True)
    stream.run(lambda: found.append(torch.is_inference_mode_enabled()))
    stream.record(done)
    done.synchronize()
    backend.close()
    assert found == [True]
    assert not torch.is_inference_mode_enabled()


def test_an_event_is_used_again_and_a_wait_is_for_its_latest_record():
    (backend,) = open_cuda(named("0"), api=Double())
    one, two, event = backend.stream("1"), backend.stream("2"), backend.event()
    event.synchronize()
    two.wait(event)  # never recorded: no wait
    one.record(event)
    raw = event.mark.raw
    one.record(event)
    two.wait(event)
    assert event.mark.raw is raw
    log = backend.api.log
    assert [(what, stream) for what, stream, *_ in log if what in ("wait", "record")] == [
        ("record", one.raw),
        ("record", one.raw),
        ("wait", two.raw),
    ]
