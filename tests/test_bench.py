"""What a sweep measures, what a row says, and what is said about rows."""

import gc
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gguf_pp
from gguf_pp.bench import Case, Row, Sweep, alone, keys, remarks, serial
from gguf_pp.config import Options, RuntimeConfig, resolve
from gguf_pp.gguf import ModelFile
from gguf_pp.measure import _loaded, measure, quantization
from gguf_pp.pipeline.build import Pipeline
from tests.tiny import write_tiny

N_EMBD = 32


def config(device: str = "cpu:0,cpu:1", **options) -> RuntimeConfig:
    return resolve(Options(device=device, **options))


def sweep(*configs: RuntimeConfig, **lists) -> Sweep:
    lists = {"n_prompts": [8], "n_gens": [0], "parallel": [1], "depths": [0], **lists}
    return Sweep(configs, **lists)


def placed(cases: list[Case]) -> list[tuple[str, int]]:
    return [(",".join(d.name for d in c.config.devices), c.config.n_copies) for c in cases]


def test_every_combination_is_a_case_and_is_named_after_what_it_measures():
    cases = sweep(config("cpu"), n_prompts=[512, 0], n_gens=[64], parallel=[1, 16], depths=[0, 9])
    assert [case.name for case in cases.cases()] == [
        "pp512",
        "pp512 @ 16",
        "tg64",
        "tg64 @ 16",
        "pp512 d9",
        "pp512 @ 16 d9",
        "tg64 d9",
        "tg64 @ 16 d9",
    ]


def test_baselines_come_first_whether_asked_for_or_not():
    piped = config(n_copies=2)
    cases = sweep(piped, one_device=True).cases()
    assert placed(cases) == [("cpu:0", 1), ("cpu:0,cpu:1", 1), ("cpu:0,cpu:1", 2)]
    assert sweep(piped).added() == [serial(piped)]
    assert sweep(piped, config(n_copies=1), one_device=True).added() == []


def test_settings_that_come_to_the_same_are_one_case():
    one = config("cpu:0", n_copies=4)
    assert placed(sweep(one, config("cpu:0"), config(split_mode="none")).cases()) == [("cpu:0", 1)]


def test_a_case_alone_keeps_nothing_of_the_split():
    assert alone(config(tensor_split="3,1")).shares is None
    assert alone(config(layers="3,1")).layers is None


def test_a_case_says_how_much_context_it_needs():
    def cells(n_prompt: int, n_gen: int, depth: int) -> int:
        return Case(config(), n_prompt, n_gen, 1, depth).n_cells

    assert (cells(512, 0, 0), cells(512, 0, 100), cells(0, 64, 100)) == (514, 613, 165)


def rows_of(model: str, *configs: RuntimeConfig, repetitions: int = 1, **lists) -> list[Row]:
    cases = sweep(*configs, **lists).cases()
    found = measure(Path(model), cases, repetitions=repetitions, warm_up=False)
    return [result.row for result in found]


def test_a_prompt_row_has_what_ran(chat_model):
    piped = config(n_copies=2, ubatch_size=8)
    base, row = rows_of(chat_model, piped, n_prompts=[24], parallel=[2], repetitions=3)
    assert (base.pipeline, base.pipeline_reason) == (False, "--n-copies 1")
    assert (row.pipeline, row.pipeline_reason, row.n_copies) == (True, None, 2)
    assert (row.test, row.n_prompt, row.n_gen, row.parallel) == ("pp24 @ 2", 24, 0, 2)
    assert (row.model, row.quantization) == (Path(chat_model).name, "F32")
    assert (row.devices, row.layers_per_device) == (("cpu:0", "cpu:1"), (2, 2))
    assert (row.ubatch_size, row.groups_in_flight) == (8, None)
    assert row.bytes_per_edge == (2 * 24 * N_EMBD * 4,)
    assert row.bubble_predicted == 1 / 7
    assert base.bubble_predicted == 1 / 2
    assert row.speedup == row.tokens_per_s / base.tokens_per_s
    assert row.speedup_one_device is None
    assert row.tokens_per_s_sd > 0
    assert row.bubble_share == pytest.approx(1 - sum(row.busy_share) / 2)
    assert row.waiting.total == pytest.approx(1)


def test_size_and_memory_are_those_of_the_model(chat_model):
    with gguf_pp.load(chat_model, ["cpu:0", "cpu:1"], ctx_size=26, ubatch_size=8) as llm:
        uses = [u.weight_bytes + u.kv_bytes + u.buffer_bytes for u in llm.devices()]
    row = rows_of(chat_model, config(ubatch_size=8), n_prompts=[24])[-1]
    assert row.peak_memory == tuple(uses)
    with ModelFile.open(chat_model) as file:
        assert row.size == file.n_bytes == 4 * row.params


def test_one_device_is_a_baseline_when_asked_for(chat_model):
    first, base, row = rows_of(chat_model, config(), one_device=True)
    assert (first.devices, first.speedup, first.speedup_one_device) == (("cpu:0",), 1, 1)
    assert row.speedup_one_device == row.tokens_per_s / first.tokens_per_s
    assert (first.bubble_predicted, first.bytes_per_edge) == (0, ())
    assert base.speedup == 1


def test_decoding_is_timed_without_its_prompts(chat_model):
    lists = {"n_prompts": [0], "n_gens": [6], "parallel": [4], "depths": [0, 10]}
    cases = sweep(config(n_copies=1), **lists).cases()
    for result in measure(Path(chat_model), cases, repetitions=2):
        computed = [s for s in result.timeline.slices if s.kind == "compute" and s.i_stage == 0]
        assert [s.n_rows for s in computed] == [4] * 6
        assert result.row.groups_in_flight == 1
        assert result.row.bubble_predicted == 1 / 2
        assert result.row.bytes_per_edge == (4 * 6 * N_EMBD * 4,)


def test_groups_of_streams_are_seen_in_the_row(chat_model, monkeypatch):
    monkeypatch.setattr("gguf_pp.engine.choose_groups", lambda *load: 2)
    lists = {"n_prompts": [0], "n_gens": [12], "parallel": [4]}
    row = rows_of(chat_model, config(n_copies=2), **lists)[-1]
    assert row.groups_in_flight == 2


def test_what_is_in_the_cache_is_not_read_again_and_nothing_else_is_known(chat_model):
    lists = {"n_prompts": [24], "depths": [0, 40], "parallel": [1, 2]}
    cases = sweep(config(n_copies=1, ubatch_size=8), **lists).cases()
    for result in measure(Path(chat_model), cases, repetitions=3):
        computed = [s for s in result.timeline.slices if s.kind == "compute" and s.i_stage == 0]
        assert sum(s.n_rows for s in computed) == 24 * result.row.parallel


def test_the_model_is_loaded_once_per_placement(chat_model, monkeypatch):
    loads = []

    class Counted(Pipeline):
        def __init__(self, *args):
            loads.append(1)
            super().__init__(*args)

    monkeypatch.setattr("gguf_pp.measure.Pipeline", Counted)
    rows = rows_of(chat_model, config(), parallel=[1, 2], n_gens=[2], depths=[0, 4], repetitions=3)
    assert (len(rows), len(loads)) == (2 * 8, 2)


def test_memory_stays_flat_over_repetitions(chat_model):
    case = Case(config(ubatch_size=8), 64, 0, 2, 0)

    def held(n: int) -> int:
        bench.repeat(case, n, warm_up=False)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    with ModelFile.open(chat_model) as file, _loaded(file, [case]) as bench:
        tracemalloc.start()
        try:
            few = held(6)
            # The slices of one repetition alone take 10 kB.
            assert held(25) - few < 50_000
        finally:
            tracemalloc.stop()


def test_progress_counts_cases(chat_model):
    seen = []
    cases = sweep(config("cpu"), n_gens=[2]).cases()
    for _ in measure(Path(chat_model), cases, progress=lambda *pair: seen.append(pair)):
        pass
    assert seen == [(0, 2), (1, 2), (2, 2)]


def test_the_quantization_is_the_file_type_or_what_most_bytes_are(chat_model, tmp_path):
    with ModelFile.open(chat_model) as file:
        assert quantization(file) == "F32"
    path = write_tiny("llama", tmp_path / "m.gguf")
    with ModelFile.open(path, ["general.file_type=int:15"]) as file:
        assert quantization(file) == "Q4_K_M"
    with ModelFile.open(path, ["general.file_type=int:9999"]) as file:
        assert quantization(file) == "F32"


def test_every_key_of_a_row_is_explained():
    assert list(keys()) == list(ROW.as_dict())
    assert all(keys().values())


ROW = Row(
    test="pp512",
    model="m.gguf",
    size=1,
    params=1,
    quantization="Q4_1",
    devices=("cpu:0", "cpu:1"),
    layers_per_device=(15, 15),
    threads=(1, 1),
    kernels=("native", "native"),
    n_copies=2,
    pipeline=True,
    pipeline_reason=None,
    groups_in_flight=None,
    ubatch_size=64,
    n_prompt=512,
    n_gen=0,
    parallel=1,
    depth=0,
    tokens_per_s=100.0,
    tokens_per_s_sd=1.0,
    speedup=1.8,
    speedup_one_device=None,
    busy_share=(0.95, 0.95),
    bubble_share=0.05,
    bubble_predicted=0.05,
    waiting_starved=1.0,
    waiting_uneven=0.0,
    waiting_transfer=0.0,
    edges=("cpu:0 to cpu:1",),
    bytes_per_edge=(1,),
    peak_memory=(1, 1),
    versions={},
)
DECODE = replace(ROW, test="tg64 @ 8", n_prompt=0, n_gen=64, parallel=8, groups_in_flight=2)


def test_nothing_is_said_about_devices_that_are_busy():
    assert remarks([ROW, DECODE]) == []


def test_one_stream_over_two_devices_is_called_sequential():
    one = replace(DECODE, parallel=1, test="tg64", bubble_share=0.5)
    assert remarks([one, replace(one, n_copies=4)]) == [
        "decode of one stream is sequential: 2 devices cannot speed it up"
    ]
    assert remarks([replace(one, devices=("cpu:0",))]) == []


def test_a_slow_stage_is_named_with_a_better_split():
    slow = replace(
        ROW,
        busy_share=(0.71, 1.0),
        bubble_share=0.145,
        waiting_starved=0.1,
        waiting_uneven=0.9,
    )
    assert remarks([DECODE, slow]) == ["pp512: cpu:1 is 1.4 times slower: try --layers 18,12"]


def test_copies_that_gain_nothing_are_named():
    more = replace(DECODE, n_copies=4, tokens_per_s=101.0)
    said = ["8 streams fill 2 devices; more copies gain nothing"]
    assert remarks([DECODE, more]) == said
    assert remarks([ROW, replace(ROW, n_copies=4)]) == [
        "pp512 fills 2 devices; more copies gain nothing"
    ]
    idle = replace(DECODE, bubble_share=0.3, waiting_starved=0.0, waiting_transfer=1.0)
    assert remarks([idle, replace(idle, n_copies=4, ubatch_size=128)])[0] == (
        "tg64 @ 8: more copies than 2 gain nothing"
    )
    assert remarks([DECODE, replace(more, tokens_per_s=110.0)]) == []
    assert remarks([DECODE, replace(more, layers_per_device=(14, 16))]) == []


def test_a_difference_within_what_repetitions_differ_by_is_none():
    more = replace(ROW, n_copies=4, tokens_per_s=110.0)
    gains_nothing = ["pp512 fills 2 devices; more copies gain nothing"]
    assert remarks([ROW, more]) == []
    assert remarks([replace(ROW, tokens_per_s_sd=12.0), more]) == gains_nothing
    once = [replace(row, tokens_per_s_sd=0.0) for row in (ROW, more)]
    assert remarks(once) == gains_nothing
    assert remarks([once[0], replace(once[1], tokens_per_s=111.0)]) == []


def test_pipelining_that_gains_nothing_is_called_so_rather_than_full_devices():
    serial = replace(DECODE, n_copies=1, pipeline=False, tokens_per_s=99.0, bubble_share=0.5)
    rows = [serial, DECODE, replace(DECODE, n_copies=4)]
    assert remarks(rows) == ["tg64 @ 8: pipelining gains nothing over --n-copies 1"]
    assert remarks([replace(serial, tokens_per_s=60.0), DECODE]) == []


def test_one_device_that_is_no_slower_than_two_is_named():
    one = replace(ROW, devices=("cpu",), layers_per_device=(30,), n_copies=1, pipeline=False)
    assert remarks([one, ROW]) == ["pp512: cpu alone is no slower"]
    assert remarks([replace(one, tokens_per_s=60.0), ROW]) == []


VARYING = replace(
    DECODE, busy_share=(0.8, 0.8), bubble_share=0.2, waiting_starved=0.0, waiting_uneven=1.0
)


def test_nothing_is_advised_that_was_measured_and_did_not_help():
    more = replace(VARYING, n_copies=4)
    advice = "tg64 @ 8: stages are even on average but vary: try more copies (--n-copies)"
    assert remarks([VARYING]) == [advice]
    assert remarks([VARYING, more]) == ["8 streams fill 2 devices; more copies gain nothing"]
    assert remarks([VARYING, replace(more, tokens_per_s=120.0)]) == [advice]

    slow = replace(VARYING, busy_share=(0.6, 1.0))
    assert remarks([slow]) == ["tg64 @ 8: cpu:1 is 1.7 times slower: try --layers 19,11"]
    assert remarks([slow, replace(slow, layers_per_device=(19, 11), tokens_per_s=95.0)]) == []

    starved = replace(ROW, bubble_share=0.3)
    few = "pp512: too little is in flight for 2 devices: try "
    assert remarks([starved]) == [few + "more streams, or smaller ubatches (-ub)"]
    assert remarks([starved, replace(starved, ubatch_size=32)]) == [few + "more streams"]
    eight = replace(ROW, test="pp512 @ 8", parallel=8)
    assert remarks([starved, eight]) == [few + "smaller ubatches (-ub)"]


def test_full_devices_are_not_told_to_move_layers():
    slow = replace(ROW, busy_share=(0.7, 0.95), bubble_share=0.2, waiting_uneven=1.0)
    slow = replace(slow, waiting_starved=0.0)
    assert remarks([slow, replace(slow, n_copies=4)]) == [
        "pp512: more copies than 2 gain nothing",
        "pp512: cpu:1 is 1.4 times slower: try --layers 17,13",
    ]


def test_with_several_sets_of_devices_each_is_named():
    other = replace(ROW, devices=("cpu:0", "cuda:0"))
    rows = [replace(row, n_copies=n) for row in (ROW, other) for n in (2, 4)]
    assert remarks(rows) == [
        "pp512 on cpu:0,cpu:1 fills 2 devices; more copies gain nothing",
        "pp512 on cpu:0,cuda:0 fills 2 devices; more copies gain nothing",
    ]


shares = st.floats(0.05, 1)


@given(
    st.lists(
        st.builds(
            lambda test, n_copies, pipeline, **changes: replace(
                ROW if test == "pp512" else DECODE,
                n_copies=n_copies,
                pipeline=pipeline and n_copies > 1,
                **changes,
            ),
            test=st.sampled_from(["pp512", "tg64 @ 8"]),
            n_copies=st.sampled_from([1, 2, 4]),
            layers_per_device=st.sampled_from([(15, 15), (17, 13)]),
            ubatch_size=st.sampled_from([32, 64]),
            pipeline=st.booleans(),
            tokens_per_s=st.floats(80, 120),
            tokens_per_s_sd=st.sampled_from([0.0, 2.0, 15.0]),
            busy_share=st.tuples(shares, shares),
            bubble_share=st.floats(0, 0.9),
            waiting_starved=st.floats(0, 1),
            waiting_uneven=st.floats(0, 1),
            waiting_transfer=st.floats(0, 1),
        ),
        max_size=8,
    )
)
def test_no_two_remarks_contradict_each_other(rows):
    said = remarks(rows)
    assert sum("try" in text for text in said) <= 1
    for test, subject in (("pp512", "pp512"), ("tg64 @ 8", "8 streams")):
        mine = [text for text in said if text.startswith((test, subject))]
        assert sum("try" not in text for text in mine) <= 1
        advice = [text for text in mine if "try" in text]
        assert not (advice and any("fill" in text for text in mine))
        if any("more copies" in text and "nothing" in text for text in mine):
            assert not any("copies" in text for text in advice)
