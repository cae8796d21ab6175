"""What is planned is what is then allocated."""

from dataclasses import fields, is_dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gguf_pp import config
from gguf_pp.config import Options
from gguf_pp.errors import (
    ConfigError,
    PlacementError,
    RemoteError,
    UnsupportedError,
)
from gguf_pp.gguf import ModelFile
from gguf_pp.pipeline import placement
from gguf_pp.pipeline.build import Pipeline
from gguf_pp.pipeline.estimate import estimate
from gguf_pp.pipeline.memory import Rung
from gguf_pp.pipeline.planned import parse_memory, resolve
from tests.gguf_bytes import STRING, gguf, key
from tests.real import real
from tests.tiny import NAMES, write_tiny

MIB = 1 << 20
LAYOUTS = {
    "one device": {},
    "two devices": {"device": "cpu:0,cpu:1"},
    "more copies, slots and shares": {
        "device": "cpu:0,cpu:1",
        "tensor_split": "3,1",
        "n_copies": 4,
        "parallel": 3,
        "cache_type_k": "f32",
    },
    "serial": {"device": "cpu:0,cpu:1", "n_copies": 1, "ubatch_size": 7},
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return {name: write_tiny(name, folder / f"{name}.gguf") for name in NAMES}


def planned(path, **flags):
    with ModelFile.open(path) as file:
        return estimate(file, *resolve(Options(**flags)))


def pipeline(path, **flags):
    with ModelFile.open(path) as file:
        return Pipeline(file, config.resolve(Options(**flags)), lambda _so_far, _total: None)


def held_bytes(weights, seen):
    """Bytes of all tensors and matrices within, each once."""
    if isinstance(weights, torch.Tensor):
        return weights.nbytes
    if isinstance(weights, list | tuple):
        return sum(held_bytes(each, seen) for each in weights)
    if hasattr(weights, "n_bytes"):
        new = id(weights) not in seen
        seen.add(id(weights))
        return weights.n_bytes * new
    if is_dataclass(weights) and not {"cos", "sin"} <= {f.name for f in fields(weights)}:
        return sum(held_bytes(getattr(weights, f.name), seen) for f in fields(weights))
    return 0


def check_allocated(path, **flags):
    plan, real = planned(path, **flags), pipeline(path, **flags)
    try:
        assert plan.rung == real.rung
        assert plan.not_pipelined_because == real.reason
        for expected, stage in zip(plan.stages, real.stages, strict=True):
            need, parts = expected.need, (stage._embedding, stage._weights, stage._head)
            assert expected.layers == stage.layers
            assert (need.weights, need.kv) == (stage.weight_bytes, stage.kv_bytes)
            assert (need.copies, need.scratch) == (stage.ring.n_bytes, stage.scratch_bytes)
            assert need.weights == pytest.approx(held_bytes(parts, set()), rel=0.1)
            assert need.kv == pytest.approx(sum(kv.n_bytes for kv in stage._kv), rel=0.1)
    finally:
        real.close()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_a_tiny_model_takes_what_was_planned(tiny, name, layout):
    check_allocated(tiny[name], ctx_size=64, **LAYOUTS[layout])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_real_model_takes_what_was_planned(layout):
    check_allocated(real("smollm2-135m"), ctx_size=256, **LAYOUTS[layout])


@pytest.mark.parametrize("n_bytes", [1 << 30, 70 * MIB, 40 * MIB, 34 * MIB, 32 * MIB, 1 * MIB])
@pytest.mark.parametrize("flags", [{}, {"device": "cpu:0,cpu:1", "n_copies": 4}, {"ctx_size": 512}])
def test_with_little_memory_the_plan_steps_down_as_the_run_does(chat_model, n_bytes, flags):
    flags = {"memory": str(n_bytes), **flags}
    if planned(chat_model, **flags).fits:
        check_allocated(chat_model, **flags)
    else:
        with pytest.raises(PlacementError):
            pipeline(chat_model, **flags)


def test_less_memory_is_planned_in_smaller_steps_until_nothing_fits(chat_model):
    flags = {"device": "cpu:0,cpu:1", "n_copies": 4, "ctx_size": 512}
    room = [planned(chat_model, memory=f"{mib}m", **flags) for mib in range(60, 30, -1)]
    assert [plan.fits for plan in room] == sorted((p.fits for p in room), reverse=True)
    assert (room[0].rung, room[0].fits) == (Rung(4, 512, 512), True)
    assert (room[-1].rung, room[-1].fits) == (Rung(1, 32, 512), False)
    assert room[-1].pools[0].margin_bytes < 0


def test_the_largest_context_fits_and_a_tenth_more_does_not(chat_model):
    flags = {"memory": "cuda:0=60MiB,cuda:1=90MiB", "parallel": 64}
    most = planned(chat_model, ctx_size=64, **flags).max_ctx_size
    assert 64 < most < 1 << 16
    asked = Rung(2, 512, most)
    assert planned(chat_model, ctx_size=most, **flags).rung == asked
    assert planned(chat_model, ctx_size=most * 11 // 10, **flags).rung != asked


def test_devices_need_not_exist_if_their_memory_is_given(chat_model):
    plan = planned(chat_model, memory="cuda:1=1GiB, tcp://[fe80::1]:50=512m,cpu=2g", ctx_size=64)
    assert [s.device.name for s in plan.stages] == ["cuda:1", "tcp://[fe80::1]:50", "cpu"]
    assert [p.memory.free_bytes for p in plan.pools] == [1 << 30, 1 << 29, 2 << 30]
    assert sum(plan.by_time) == sum(plan.by_memory) == 4
    assert plan.alone == ("cuda:1", "tcp://[fe80::1]:50", "cpu")
    assert [s.device.source for s in plan.stages] == ["flag", "flag", "here"]
    assert plan.notes == (
        "planned with the memory given, not looked at: cuda:1, tcp://[fe80::1]:50",
        "the speed of devices is not known here: the split by time takes it equal",
    )


def test_workers_by_rpc_and_by_other_spellings_may_have_their_memory_given(chat_model):
    flags = {"rpc": "h:50,g:51", "memory": "tcp://h:50=1g,rpc:g:51=2g,cpu=3g"}
    for device in (None, "cpu"):
        plan = planned(chat_model, device=device, ctx_size=64, **flags)
        names = ["cpu", "tcp://h:50", "tcp://g:51"]
        assert [s.device.name for s in plan.stages] == names
        assert [p.memory.free_bytes >> 30 for p in plan.pools] == [3, 1, 2]


def test_a_worker_that_cannot_be_asked_is_an_error_that_says_what_to_do_instead(chat_model):
    with pytest.raises(RemoteError) as caught:
        resolve(Options(device="cpu,tcp://127.0.0.1:1", timeout=1.0))
    assert "127.0.0.1:1" in str(caught.value)
    assert caught.value.hint.endswith("say what it has: --memory tcp://127.0.0.1:1=24GiB")


def test_a_device_with_a_share_of_0_is_not_planned(chat_model):
    plan = planned(chat_model, memory="cuda:0=1g,cuda:1=1g,cuda:2=1g", tensor_split="1,0,3")
    assert [(s.device.name, len(s.layers)) for s in plan.stages] == [("cuda:0", 1), ("cuda:2", 3)]


def test_what_does_not_fit_as_split_may_fit_one_device_alone(chat_model):
    flags = {"memory": "cuda:0=1g,cuda:1=1m", "ctx_size": 64}
    assert [s.device.name for s in planned(chat_model, **flags).stages] == ["cuda:0"]
    plan = planned(chat_model, n_gpu_layers="all", **flags)
    assert not plan.fits
    assert plan.alone == ("cuda:0",)
    assert [pool.margin_bytes < 0 for pool in plan.pools] == [False, True]


def test_a_single_device_has_no_split_to_propose(chat_model):
    plan = planned(chat_model, ctx_size=64)
    assert (plan.by_time, plan.by_memory) == (None, None)
    assert plan.not_pipelined_because == "there is one device"


def test_memory_by_device_keeps_a_margin_of_its_own(chat_model):
    plan = planned(chat_model, device="cpu:0,cpu:1", memory="cpu:0=1g", ctx_size=64)
    assert [pool.memory.pool for pool in plan.pools] == ["cpu:0", "ram"]


def test_virtual_devices_on_one_share_its_memory(chat_model):
    flags = {"device": "cuda:0,cuda:0,cuda:1", "memory": "cuda:0=1g,cuda:1=1g", "ctx_size": 64}
    plan = planned(chat_model, **flags)
    assert [stage.device.name for stage in plan.stages] == ["cuda:0", "cuda:0#2", "cuda:1"]
    assert [(p.memory.pool, p.memory.total_bytes) for p in plan.pools] == [
        ("cuda:0", 1 << 30),
        ("cuda:1", 1 << 30),
    ]
    one = planned(chat_model, **flags | {"device": "cuda:0,cuda:1", "layers": "3,1"})
    halves = planned(chat_model, **flags | {"layers": "2,1,1"})
    needed = halves.pools[0].margin_bytes, one.pools[0].margin_bytes
    assert 0 < needed[1] - needed[0] < 64 << 20  # scratch and buffers of one more stage


def test_a_device_is_one_however_its_number_is_written(chat_model):
    flags = {"device": "cuda:0,cuda:00", "memory": "cuda:000=1g", "ctx_size": 64}
    plan = planned(chat_model, **flags)
    assert [stage.device.name for stage in plan.stages] == ["cuda:0", "cuda:0#2"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"device": "cuda:0"}, "its memory is not known"),
        ({"device": "gpu"}, "no device 'gpu'"),
        ({"device": ""}, "no device ''"),
        ({"device": "cpu:0,cpu:0"}, "named twice"),
        ({"device": "tcp://a:1,tcp://a:1", "memory": "tcp://a:1=1g"}, "named twice"),
        ({"device": "cuda:0#2", "memory": "cuda:0=1g"}, "no device 'cuda:0#2'"),
        ({"device": "cpu,cpu:0"}, "cpu is all cores"),
        ({"device": "cpu:0", "memory": "cpu:1=1g"}, "'cpu:1', which is not among the devices"),
        ({"memory": "cuda:0=1g,cuda:0=2g"}, "twice"),
        ({"memory": "cuda:0=1g,cuda:00=2g"}, "twice"),
        ({"memory": "1g,2g"}, "two sizes"),
        ({"memory": "cuda:0:1g"}, "is not a size"),
        ({"memory": "cuda:0="}, "is not a size"),
        ({"memory": "=1g"}, "''"),
        ({"memory": "cuda:0=1g,cuda:1=1g", "tensor_split": "1,2,3"}, "3 shares for 2 devices"),
    ],
)
def test_a_bad_flag_is_one_clear_error(flags, words):
    with pytest.raises(ConfigError) as caught:
        resolve(Options(**flags))
    assert words in str(caught.value)


@given(st.dictionaries(st.from_regex(r"cuda:[0-9]", fullmatch=True), st.integers(0, 1 << 40)))
def test_memory_reads_back(given_bytes):
    text = ",".join(f"{name}={n_bytes}" for name, n_bytes in given_bytes.items())
    assert parse_memory(text or None) == (None, given_bytes)


def test_a_vocabulary_cannot_be_planned(tmp_path):
    path = tmp_path / "vocab.gguf"
    path.write_bytes(gguf([key("general.architecture", STRING, "llama")]))
    with pytest.raises(UnsupportedError, match="a vocabulary only"):
        planned(path)


def test_with_several_slots_the_last_device_gets_fewer_layers_for_the_head():
    class Core:
        local = True
        relative_speed = 1.0

    smollm2 = placement.Sizes(0, (2214144,) * 30, 30 << 20, True, frozenset())
    gemma3 = placement.Sizes(0, (4 << 20,) * 18, 178 << 20, True, frozenset())
    for sizes, even, uneven in ((smollm2, 15, 19), (gemma3, 9, 11)):
        first = [placement.place_by_time(sizes, [Core(), Core()], n)[0].stop for n in (1, 16)]
        assert first == [even, uneven]
