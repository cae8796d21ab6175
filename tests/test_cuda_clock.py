"""Times of CUDA devices in the host's: on the double, which has a virtual time for each stream."""

from itertools import pairwise

import pytest
import torch

import gguf_pp
from gguf_pp.backend.cuda_clock import CudaClock
from gguf_pp.backend.cuda_edges import Current
from gguf_pp.backend.trace import Trace
from gguf_pp.batch import Span, UBatch
from gguf_pp.pipeline.stopwatch import CudaStopwatch
from tests.cuda_double import Double
from tests.test_cuda_pipeline import GREEDY, OPTIONS, PROMPTS, now

__all__ = ["now"]


def test_work_on_a_device_takes_its_own_time_and_not_that_of_its_launch():
    double = Double(kernel_s=2.0)
    stream = double.cuda.Stream(device=1)
    host_s = iter(range(100, 10_000, 10))
    trace = Trace(clock=lambda: float(next(host_s)))
    trace.clocks[0] = CudaClock(double.cuda, double.cuda.Stream(device=1))
    trace.enabled = True
    x = double.empty((4,), dtype=torch.float32, device="cuda:1")
    pieces = [trace.open("compute", 0, i, 0, 1) for i in range(3)]
    with Current(double.cuda, stream):
        for piece in pieces:
            trace.start(piece)
            x.fill_(1.0)
            trace.end(piece)
    assert [(p.start_s, p.end_s) for p in trace.slices] == [(0.0, 0.0)] * 3  # not there yet
    stream.synchronize()
    assert [p.end_s - p.start_s for p in trace.slices] == [2.0] * 3
    assert [b.start_s - a.end_s for a, b in pairwise(pieces)] == [0.0] * 2
    times = [(p.start_s, p.end_s) for p in trace.slices]
    assert times == [(p.start_s, p.end_s) for p in pieces]  # and stay as they were told


def test_devices_and_the_host_share_one_clock():
    double = Double(kernel_s=3.0)
    trace = Trace(clock=double.world.now)
    trace.clocks = {i: CudaClock(double.cuda, double.cuda.Stream(device=i)) for i in range(2)}
    trace.enabled = True
    streams = [double.cuda.Stream(device=i) for i in range(2)]
    first, second = (trace.open("compute", i, 0, 0, 1) for i in range(2))
    done = double.cuda.Event()
    for i, piece in enumerate((first, second)):
        with Current(double.cuda, streams[i]):
            if i:
                streams[1].wait_event(done)
            trace.start(piece)
            double.empty((4,), dtype=torch.float32, device=f"cuda:{i}").fill_(1.0)
            trace.end(piece)
            done.record(streams[0]) if not i else None
    host = trace.open("host", -1, 0, 0, 1)
    trace.start(host)
    double.synchronize()
    trace.end(host)
    assert len(trace.slices) == 3
    times = [(s.start_s, s.end_s) for s in (first, second, host)]
    assert times == [(0.0, 3.0), (3.0, 6.0), (0.0, 6.0)]


def test_looking_at_a_trace_waits_for_nothing_that_was_queued():
    double = Double()
    stream, told = double.cuda.Stream(device=0), []
    clock = CudaClock(double.cuda, double.cuda.Stream(device=0))
    x = double.empty((4,), dtype=torch.float32, device="cuda:0")
    with Current(double.cuda, stream):
        clock.note(lambda s: told.append(s))
        x.fill_(1.0)
        clock.note(lambda s: told.append(s))
    noted = [event for event, _ in clock._noted]
    clock.settle(lambda: 0.0)
    waited_for = [
        event
        for what, _, event in [e[:3] for e in double.log if len(e) == 3]
        if what == "synchronize"
    ]
    assert waited_for and all(event not in noted for event in waited_for)
    stream.synchronize()
    clock.settle(lambda: 0.0)
    assert len(told) == 2
    double.log.clear()
    clock.settle(lambda: 0.0)
    assert double.log == []  # nothing to tell: the device is left alone


def test_what_ubatches_took_is_known_once_the_device_is_through():
    double = Double(kernel_s=2.0)
    watch, stream = CudaStopwatch(double.cuda), double.cuda.Stream(device=0)
    x = double.empty((4,), dtype=torch.float32, device="cuda:0")
    with Current(double.cuda, stream):
        start = watch.start()
        x.fill_(1.0)
        watch.stop(start, UBatch((0,), (Span(0, 0, 1),), (0,)))
    assert list(watch.recent) == []
    stream.synchronize()
    assert list(watch.recent) == [(1, 1, 2.0)]


@pytest.mark.parametrize("devices", [["cuda:0", "cuda:1"], ["cpu", "cuda:0"]])
def test_a_recorded_run_has_times_of_all_stages(chat_model, now, devices):
    with gguf_pp.load(chat_model, devices=devices, **OPTIONS) as llm:
        llm.trace.enabled = True
        llm.generate(PROMPTS[2], **GREEDY).completion()
        slices = list(llm.trace.slices)
        clocked = sorted(llm.trace.clocks)
    assert llm.trace.clocks == {}
    kinds = {(s.kind, s.i_stage) for s in slices}
    assert kinds == {("host", -1), ("compute", 0), ("compute", 1), ("transfer", 0)}
    by_ubatch = {}
    for s in slices:
        assert 0 < s.start_s <= s.end_s
        by_ubatch.setdefault(s.i_ubatch, {})[s.kind, s.i_stage] = s
    for stages in by_ubatch.values():
        on_the_way = stages["transfer", 0]
        assert stages["compute", 0].end_s <= on_the_way.start_s + 1e-3
        assert on_the_way.start_s <= stages["compute", 1].start_s + 1e-3
    assert clocked == [i for i, name in enumerate(devices) if name != "cpu"]
