"""What a timeline says about who waited for what, on schedules in virtual time, and its file."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gguf_pp
from gguf_pp import trace_file
from gguf_pp.backend.trace import Slice
from gguf_pp.bench import Advice, advice, faster_layers
from gguf_pp.errors import FormatError
from gguf_pp.pipeline.plan import bubble
from gguf_pp.timeline import Lane, Summary, Timeline, Waiting, ready_times, summarize
from tests.simulated import Run, ubatches


def pipelined(seconds, *, n_copies=2, copy_s=0.0, pipelined=True) -> Summary:
    run = Run(seconds, n_copies, copy_s=copy_s, pipelined=pipelined, traced=True)
    return summarize(run.trace.slices, len(seconds))


def one_at_a_time(seconds_per_stage, n) -> Summary:
    """Decoding one stream: the next ubatch is queued when the last one is through."""
    run = Run([[s] for s in seconds_per_stage], 2, traced=True)
    for _ in range(n - 1):
        run.executor.submit(ubatches(1)[0], run._take(0)).wait()
    return summarize(run.trace.slices, len(seconds_per_stage))


def test_equal_stages_wait_only_while_the_pipeline_fills_and_drains():
    got = pipelined([[1.0] * 6] * 3)
    assert got.span_s == 8
    assert got.busy_s == (6, 6, 6)
    assert got.waiting == (Waiting(starved=2),) * 3
    assert got.bubble == pytest.approx(bubble(3, 6))


def test_one_stream_is_starved_on_every_stage():
    got = one_at_a_time([1.0, 1.0, 1.0], 4)
    assert got.span_s == 12
    assert got.waiting == (Waiting(starved=8),) * 3


def test_devices_that_take_turns_are_starved():
    got = pipelined([[1.0] * 4] * 2, n_copies=1, pipelined=False)
    assert got.waiting == (Waiting(starved=4),) * 2


def test_a_slow_first_stage_makes_the_second_wait_for_uneven_stages():
    got = pipelined([[3.0] * 5, [1.0] * 5])
    assert got.span_s == 16
    assert got.waiting == (Waiting(starved=1), Waiting(starved=3, uneven=8))


@pytest.mark.parametrize("n_copies", [1, 2, 4])
def test_a_slow_second_stage_holds_the_first_up_by_its_copies_or_leaves_it_early(n_copies):
    got = pipelined([[1.0] * 5, [3.0] * 5], n_copies=n_copies)
    assert got.span_s == 16
    assert got.waiting == (Waiting(starved=3, uneven=8), Waiting(starved=1))


def test_a_slow_stage_is_the_cause_two_stages_further_too():
    got = pipelined([[1.0] * 6, [1.0] * 6, [4.0] * 6], n_copies=1)
    assert [w.main_cause for w in got.waiting[:2]] == ["uneven", "uneven"]
    assert got.waiting[2] == Waiting(starved=2)


@pytest.mark.parametrize(("n_copies", "between"), [(1, 3), (2, 2), (4, 2)])
def test_a_slow_edge_makes_both_of_its_stages_wait_for_transfers(n_copies, between):
    got = pipelined([[1.0] * 8, [1.0] * 8], n_copies=n_copies, copy_s=3.0)
    assert [w.main_cause for w in got.waiting] == ["transfer", "transfer"]
    assert got.waiting[1] == Waiting(starved=1, transfer=3 + 7 * between)
    assert got.edge_s == (24,)


def test_a_way_out_that_is_occupied_is_a_transfer_even_while_the_next_stage_works():
    got = pipelined([[1.0] * 6, [2.5] * 6], n_copies=1, copy_s=3.0)
    assert got.waiting[0] == Waiting(starved=3 + 2.5, transfer=5 * 3)


def test_a_device_that_gets_going_late_though_its_output_is_free_was_not_held_up():
    def compute(u: int, start: float, end: float) -> Slice:
        return Slice("compute", 0, u, u % 2, 1, 0.0, start, end)

    def transfer(u: int, start: float, end: float) -> Slice:
        return Slice("transfer", 0, u, u % 2, 1, 0.0, start, end)

    slices = [compute(0, 0, 1), transfer(0, 1, 5), compute(1, 1, 2), transfer(1, 5, 9)]
    got = summarize([*slices, compute(2, 6, 7)], 2)
    assert got.waiting[0] == Waiting(starved=1, transfer=3)


def test_what_a_stage_waited_for_is_passed_on_to_the_next():
    got = pipelined([[1.0] * 8, [1.0] * 8, [0.5] * 8], n_copies=1, copy_s=2.0)
    assert [w.main_cause for w in got.waiting] == ["transfer"] * 3


durations = st.lists(st.floats(0.01, 4), min_size=6, max_size=6)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(durations, min_size=1, max_size=4),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.5, 3.0]),
    st.booleans(),
)
def test_busy_and_waiting_add_up_to_the_span_and_slices_of_a_device_never_overlap(
    seconds, n_copies, copy_s, pipelined
):
    run = Run(seconds, n_copies, copy_s=copy_s, pipelined=pipelined, traced=True)
    got = summarize(run.trace.slices, len(seconds))
    for i, (busy, waiting) in enumerate(zip(got.busy_s, got.waiting, strict=True)):
        assert busy == pytest.approx(sum(seconds[i]))
        assert busy + waiting.total == pytest.approx(got.span_s)
        assert min(waiting.starved, waiting.uneven, waiting.transfer) >= 0
    assert overlapping(run.trace.slices) == []


def overlapping(slices) -> list[tuple[Slice, Slice]]:
    lanes: dict[tuple[str, int], list[Slice]] = {}
    for s in slices:
        lanes.setdefault((s.kind, s.i_stage), []).append(s)
    return [
        (a, b)
        for lane in lanes.values()
        for a, b in pairwise(sorted(lane, key=lambda s: s.start_s))
        if b.start_s < a.end_s
    ]


def test_a_summary_of_nothing_is_all_zero():
    got = summarize([], 2)
    assert (got.span_s, got.bubble, got.busy_shares) == (0, 0, (0, 0))
    assert got.all_waiting.shares() is None


def test_slices_that_have_not_ended_do_not_count():
    slices = Run([[1.0] * 3] * 2, 2, traced=True).trace.slices
    running = Slice("compute", 0, 3, 1, 1, queued_s=2.0, start_s=3.0)
    assert summarize([*slices, running], 2) == summarize(slices, 2)


def test_layers_move_from_the_slow_stage_to_the_fast_one():
    assert faster_layers([1.4, 1.0], [15, 15]) == (12, 18)
    assert faster_layers([1.0, 2.0, 1.0], [4, 4, 4]) == (5, 2, 5)
    assert faster_layers([1.0, 1.04], [15, 15]) is None
    assert faster_layers([1.0, 0.0], [15, 15]) is None


def said(summary: Summary, layers) -> str | None:
    names = [f"cpu:{i}" for i in range(len(layers))]
    waiting, busy = summary.all_waiting, summary.busy_s
    found = advice(waiting, summary.bubble, busy, summary.n_copies, names, layers)
    return None if found is None else str(found)


def test_advice_follows_the_cause():
    assert said(pipelined([[1.0] * 40] * 2), [4, 4]) is None
    assert said(one_at_a_time([1.0, 1.0], 5), [4, 4]) == (
        "too little is in flight for 2 devices: try more streams, or smaller ubatches (-ub)"
    )
    assert said(pipelined([[1.0] * 9] * 2, n_copies=1, pipelined=False), [4, 4]) == (
        "one ubatch is in flight, devices take turns: try --n-copies 2"
    )
    assert said(pipelined([[1.0] * 40, [3.0] * 40]), [4, 4]) == (
        "cpu:1 is 3.0 times slower: try --layers 6,2"
    )
    assert said(pipelined([[1.0] * 40] * 2, copy_s=2.0), [4, 4]) == (
        "devices wait for transfers: try fewer devices, or larger ubatches (-ub)"
    )
    assert said(pipelined([[1.0, 1.0, 5.0] * 10] * 2, n_copies=1), [4, 4]) == (
        "stages are even on average but vary: try more copies (--n-copies)"
    )
    assert said(pipelined([[1.0] * 3]), [8]) is None


def test_advice_on_layers_names_the_devices_where_a_worker_may_have_been_named_as_a_whole():
    names = ["cpu", "tcp://h:1/cpu:0", "tcp://h:1/cpu:1"]
    assert str(advice(Waiting(uneven=1), 0.4, [1, 1, 4], 2, names, [4, 4, 4])) == (
        "tcp://h:1/cpu:1 is 4.0 times slower: try --device "
        "cpu,tcp://h:1/cpu:0,tcp://h:1/cpu:1 --layers 5,6,1"
    )


def test_advice_less_what_was_tried_keeps_the_rest_or_is_none():
    found = Advice("too little is in flight", ("more streams", "smaller ubatches (-ub)"))
    assert found.without({"more copies"}) == found
    assert str(found.without({"more streams"})) == (
        "too little is in flight: try smaller ubatches (-ub)"
    )
    assert found.without(found.remedies) is None


def compute(i_stage: int, u: int, start: float, end: float) -> Slice:
    return Slice("compute", i_stage, u, u % 2, 1, 0.0, start, end)


CLIENT, REMOTE = Lane(("cpu",), (3,)), Lane(("tcp://h:1/cpu",), (5,))
HEAD = Lane(("cpu",), (0,))


def test_an_end_of_the_model_is_work_of_its_device_and_no_device_of_its_own():
    # The head of ubatch 0 is computed while the layers of ubatch 1 are, and a while longer.
    slices = [compute(0, 0, 0, 2), compute(1, 0, 2, 4), compute(0, 1, 2, 5), compute(2, 0, 4, 6)]
    slices += [compute(1, 1, 5, 8), compute(2, 1, 8, 10)]
    got = Timeline(tuple(slices), (CLIENT, REMOTE, HEAD)).by_device()
    assert (got.names, got.layers) == (("cpu", "tcp://h:1/cpu"), (3, 5))
    assert got.summary.span_s == 10
    assert got.summary.busy_s == (8, 5)
    assert [w.total for w in got.summary.waiting] == [pytest.approx(2), pytest.approx(5)]
    assert got.summary.bubble == pytest.approx(1 - 13 / 20)


def test_devices_of_a_worker_are_busy_by_their_loads_and_wait_for_the_slowest():
    slices = [compute(0, u, u, u + 1) for u in range(4)]
    lane = Lane(("tcp://h:1/cpu:0", "tcp://h:1/cpu:1"), (1, 3), (0.25, 1.0))
    assert Timeline((), (lane,)).devices == ("tcp://h:1/cpu:0+cpu:1",)
    got = Timeline(tuple(slices), (lane,)).by_device()
    assert (got.names, got.layers) == (lane.devices, (1, 3))
    assert got.summary.busy_s == (1, 4)
    assert got.summary.waiting == (Waiting(uneven=3), Waiting())


def test_what_other_devices_of_a_worker_compute_first_is_no_transfer():
    lane = Lane(("tcp://h:1/cpu:0", "tcp://h:1/cpu:1"), (1, 1), (1.0, 1.0))
    # One second over the network, one in the first device, one in the second.
    slices = (compute(0, 0, 0, 1), Slice("transfer", 0, 0, 0, 1, 0, 1, 1), compute(1, 0, 3, 4))
    alone = summarize(slices, 2).waiting[1]
    assert alone == Waiting(starved=1, transfer=2)
    got = Timeline(slices, (CLIENT, lane)).by_device().summary
    assert got.waiting[1:] == (Waiting(starved=2, transfer=1),) * 2


def test_between_linked_workers_the_input_is_there_when_it_was_computed():
    slices = [compute(0, 0, 0, 1), compute(1, 0, 2, 3), compute(0, 1, 1, 4), compute(1, 1, 5, 6)]
    assert ready_times(slices) == [0, 1, 0, 4]
    assert summarize(slices, 2).waiting[1] == Waiting(starved=1, uneven=1, transfer=2)
    assert summarize(slices, 2).edge_rows == (2,)
    early = replace(slices[1], queued_s=2.5)
    assert summarize([slices[0], early], 2).busy_s == (1, 1)


def recorded() -> Timeline:
    slices = Run([[1.0] * 3, [2.0] * 3], 2, copy_s=0.5, traced=True).trace.slices
    return Timeline(tuple(slices), (Lane(("cpu:0",), (2,)), Lane(("cpu:1",), (2,))))


def test_the_file_has_a_track_per_device_per_edge_and_for_the_host():
    document = json.loads(trace_file.to_json(recorded()))
    names = {
        event["tid"]: event["args"]["name"]
        for event in document["traceEvents"]
        if event["name"] == "thread_name"
    }
    assert names == {0: "host", 1: "cpu:0 compute", 2: "cpu:0 to cpu:1", 3: "cpu:1 compute"}
    used = {event["tid"] for event in document["traceEvents"] if event["ph"] == "X"}
    assert used == set(names)


def test_an_event_names_stage_ubatch_copy_and_rows_and_says_when_its_input_was_there():
    document = json.loads(trace_file.to_json(recorded()))
    event = next(
        e
        for e in document["traceEvents"]
        if e.get("tid") == 3 and e["name"].startswith("stage 1 u1")
    )
    assert event == {
        "ph": "X",
        "name": "stage 1 u1 c1 2 rows",
        "cat": "compute",
        "pid": 1,
        "tid": 3,
        "ts": 3.5e6,
        "dur": 2e6,
        "args": {
            "stage": 1,
            "ubatch": 1,
            "copy": 1,
            "rows": 2,
            "queued_us": 0.0,
            "ready_us": 2.5e6,
        },
    }


def test_input_is_ready_when_queued_computed_or_transferred():
    slices = recorded().slices
    ready = {
        (s.kind, s.i_stage): t
        for s, t in zip(slices, ready_times(slices), strict=True)
        if s.i_ubatch == 1
    }
    assert ready == {
        ("host", -1): 0.0,
        ("compute", 0): 0.0,
        ("transfer", 0): 2.0,
        ("compute", 1): 2.5,
    }


def test_a_file_reads_back_as_it_was(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(trace_file.to_json(recorded()))
    assert trace_file.read(path) == recorded()


def changed(tmp_path, change) -> str:
    """The error for a good file that `change` was made to."""
    document = json.loads(trace_file.to_json(recorded()))
    event = next(e for e in document["traceEvents"] if e.get("cat") == "compute")
    change(document, event)
    path = tmp_path / "t.json"
    path.write_text(json.dumps(document))
    with pytest.raises(FormatError) as caught:
        trace_file.read(path)
    return str(caught.value).removeprefix(f"{path} is not a timeline of gguf-pp: ")


def stage(document) -> dict:
    return document["otherData"]["stages"][0]


BAD = {
    "otherData is no dict": lambda d, e: d.pop("otherData"),
    "traceEvents is no list": lambda d, e: d.update(traceEvents={}),
    "an event is no dict": lambda d, e: d["traceEvents"].append(3),
    "2 devices with 1 numbers of layers and 1 loads": lambda d, e: stage(d)["devices"].append("b"),
    "layers is '-1', not in 0 to 10000": lambda d, e: stage(d).update(layers=[-1]),
    "no stage has layers": lambda d, e: [s.update(layers=[0]) for s in d["otherData"]["stages"]],
    "a load is '1.1', not in 0 to 1": lambda d, e: stage(d).update(loads=[1.1]),
    "0 stages": lambda d, e: d["otherData"]["stages"].clear(),
    "a device called '\\x1b[2J'": lambda d, e: stage(d).update(devices=["\x1b[2J"]),
    "an event of category 'sleep'": lambda d, e: e.update(cat="sleep"),
    "stage is '2', not in 0 to 1": lambda d, e: e["args"].update(stage=2),
    "stage is 'True', not in 0 to 1": lambda d, e: e["args"].update(stage=True),
    "rows is '-1', not in 0 to 1099511627776": lambda d, e: e["args"].update(rows=-1),
    "ts is no number": lambda d, e: e.update(ts="0"),
    "dur is -1": lambda d, e: e.update(dur=-1),
    "queued_us is 1e+16": lambda d, e: e["args"].update(queued_us=1e16),
}


@pytest.mark.parametrize("message", BAD)
def test_a_bad_file_is_refused_with_what_is_wrong(tmp_path, message):
    assert changed(tmp_path, BAD[message]) == message


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"a": NaN}', "\x00", "1" * 9999])
def test_a_file_that_is_not_json_is_refused(tmp_path, text):
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(FormatError, match="is not JSON"):
        trace_file.read(path)


def test_a_file_over_the_limit_is_refused_before_it_is_parsed(tmp_path, monkeypatch):
    path = tmp_path / "t.json"
    path.write_text(trace_file.to_json(recorded()))
    monkeypatch.setattr(trace_file, "MAX_BYTES", 1 << 10)
    with pytest.raises(FormatError, match="larger than"):
        trace_file.read(path)
    with pytest.raises(FormatError, match="cannot be read"):
        trace_file.read(tmp_path / "missing.json")


def test_a_real_run_has_slices_that_do_not_overlap_and_a_summary_that_adds_up(chat_model):
    with gguf_pp.load(chat_model, ["cpu:0", "cpu:1"], ctx_size=256, ubatch_size=16) as llm:
        llm.trace.enabled = True
        llm.generate(list(range(40, 140)), max_tokens=4, temperature=0).completion()
        slices = tuple(llm.trace.slices)
    got = summarize(slices, 2)
    assert overlapping(slices) == []
    assert got.n_ubatches == 7 + 3
    for busy, waiting in zip(got.busy_s, got.waiting, strict=True):
        assert busy + waiting.total == pytest.approx(got.span_s)
    assert got.edge_rows == (103,)
