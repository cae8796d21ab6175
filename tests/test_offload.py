"""-ngl: which layers go to CUDA devices, by the same arithmetic as a plan and a run."""

import re
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gguf_pp.backend.base import Memory
from gguf_pp.config import Options, resolve
from gguf_pp.errors import PlacementError
from gguf_pp.ops.base import RopeParams
from gguf_pp.pipeline.memory import MIN_CTX_SIZE, Rung
from gguf_pp.pipeline.offload import AUTO_CTX_SIZE, offloaded
from gguf_pp.pipeline.placement import (
    MARGIN,
    Sizes,
    fitting_context,
    is_cuda,
    need_of,
    scratch_bytes,
)
from gguf_pp.pipeline.split import Part, ranges_of
from gguf_pp.triton.linear import SCRATCH_BYTES

MIB = 1 << 20
N_LAYERS = 12
MODEL = SimpleNamespace(
    hp=SimpleNamespace(
        n_embd=256,
        n_ff=512,
        qkv_rows=(256, 64, 64),
        n_kv_heads=1,
        head_size=64,
        n_ctx_train=8192,
        n_experts=0,
    ),
    ropes=(RopeParams(64, 1e4, neox=True),),
)


@dataclass(frozen=True)
class Gpu:
    name: str
    free_bytes: int
    pool: str | None = None
    local = True
    relative_speed = 1.0

    def memory(self):
        return Memory(self.pool or self.name, 1 << 40, self.free_bytes)


def sizes(layers=(10 * MIB,) * N_LAYERS, embedding=40 * MIB, head=40 * MIB, tied=False):
    return Sizes(embedding, tuple(layers), head, tied, frozenset())


def asked(free, ngl="auto", **flags):
    """Settings for CUDA devices with so many MiB free each, and the devices."""
    device = ",".join(f"cuda:{i}" for i in range(len(free)))
    config = resolve(Options(device=device, n_gpu_layers=ngl, **flags))
    return config, [Gpu(d.name, n * MIB) for d, n in zip(config.devices, free, strict=True)]


def settle(free, ngl="auto", model_sizes=None, **flags):
    config, gpus = asked(free, ngl, **flags)
    return offloaded(config, MODEL, model_sizes or sizes(), lambda: gpus), gpus


def placed(config):
    """Layers by device, where they are settled."""
    return dict(zip([d.name for d in config.devices], config.layers or (), strict=False))


def fit(config, model_sizes, gpus, counts, ctx_size, share=1.0):
    """Whether the last layers fit, counted by hand: {name: layers}."""
    n_before = len(model_sizes.layers) - sum(counts.values())
    ranges = ranges_of([n_before, *counts.values()])[1:]
    rung = Rung(config.n_copies, config.max_ubatch_size, ctx_size)
    for name, layers in zip(counts, ranges, strict=True):
        (gpu,) = (gpu for gpu in gpus if gpu.name == name)
        ends = {"embeds": layers.start == 0, "heads": layers.stop == len(model_sizes.layers)}
        need = need_of(config, MODEL, model_sizes, Part(layers, **ends), rung, gpu)
        if need.total > int(share * gpu.free_bytes):
            return False
    return True


def test_where_all_layers_fit_nothing_changes():
    config, _ = settle([400, 400])
    before, _ = asked([400, 400])
    assert (config.devices, config.layers, config.notes) == (before.devices, None, ())
    assert (config.n_gpu_layers, config.n_copies) == (None, 2)


def test_one_device_with_all_layers_is_not_pipelined():
    assert settle([4000])[0].n_copies == 1
    assert settle([4000], "99")[0].n_copies == 1
    assert settle([150])[0].n_copies == 2


@pytest.mark.parametrize("ctx_size", [None, 600])
def test_what_auto_chooses_fits_and_one_layer_more_would_not(ctx_size):
    for free in range(0, 420, 7):
        config, gpus = settle([free], ctx_size=ctx_size)
        ctx, share = ctx_size or AUTO_CTX_SIZE, 1.0 if ctx_size else 1 - MARGIN
        n = 0 if config.layers is None else placed(config).get("cuda:0", 0)
        if config.devices[0].kind == "cuda":
            least = ctx_size or MIN_CTX_SIZE
            assert fit(config, sizes(), gpus, {"cuda:0": N_LAYERS}, least, share)
            continue
        assert n < N_LAYERS
        then = replace(config, n_copies=2)
        assert n == 0 or fit(then, sizes(), gpus, {"cuda:0": n}, ctx, share)
        assert not fit(then, sizes(), gpus, {"cuda:0": n + 1}, ctx, share)
    assert config.layers is None  # the last one had room for all


@given(
    st.lists(st.integers(0, 260), min_size=1, max_size=4),
    st.lists(st.integers(1, 30), min_size=4, max_size=10),
    st.integers(0, 60),
    st.booleans(),
    st.sampled_from([None, 512, 2048]),
)
def test_no_other_way_to_use_the_devices_holds_more_layers(free, layers, head, tied, ctx_size):
    model_sizes = sizes([n * MIB for n in layers], head * MIB, head * MIB, tied)
    try:
        config, gpus = settle(free, model_sizes=model_sizes, ctx_size=ctx_size)
    except PlacementError:
        assert len(free) > len(layers)
        return
    ctx, share = ctx_size or AUTO_CTX_SIZE, 1.0 if ctx_size else 1 - MARGIN
    found = placed(config)
    if config.layers is None:
        assert [d.kind for d in config.devices] == ["cuda"] * len(gpus)
        return
    on_cpu, sizes_then = found.pop("cpu", 0), replace(config, n_copies=2)
    assert on_cpu + sum(found.values()) == len(layers)
    assert fit(sizes_then, model_sizes, gpus, found, ctx, share)
    if on_cpu:
        for more in ways(sum(found.values()) + 1, [gpu.name for gpu in gpus]):
            assert not fit(sizes_then, model_sizes, gpus, more, ctx, share)


def ways(n_layers, names):
    """All ways to have so many layers on devices of these names, in order; some may have none."""
    if not names:
        return [{}] if n_layers == 0 else []
    first, *others = names
    return [
        {**({first: n} if n else {}), **rest}
        for n in range(n_layers + 1)
        for rest in ways(n_layers - n, others)
    ]


def test_devices_are_filled_from_the_end_and_one_without_room_is_left_out():
    config, _ = settle([130, 20, 170])
    assert list(placed(config)) == ["cpu", "cuda:0", "cuda:2"]
    assert [d.kind for d in config.devices] == ["cpu", "cuda", "cuda"]
    config, _ = settle([130, 170, 20])
    assert list(placed(config)) == ["cpu", "cuda:0", "cuda:1"]


def test_a_split_that_fits_is_found_where_that_by_time_does_not():
    config, gpus = settle([80, 300], ctx_size=512)
    assert placed(config) == {"cuda:1": N_LAYERS}
    (note,) = config.notes
    assert note.startswith("all layers fit the GPUs only if split so: cuda:1 has 12 in ")
    assert config.n_copies == 1
    assert fit(config, sizes(), gpus, placed(config), 512)


@pytest.mark.parametrize(("shares", "ratio"), [("1,1", 1), ("3,1", 3), ("1,2", 0.5)])
def test_shares_hold_for_the_layers_that_fit(shares, ratio):
    seen = set()
    for free in range(110, 180, 5):
        config, gpus = settle([free, free], tensor_split=shares, ctx_size=512)
        found = placed(config)
        n_cpu = found.pop("cpu", 0)
        if 0 < n_cpu < N_LAYERS:
            first, second = (found.get(gpu.name, 0) for gpu in gpus)
            assert abs(first - ratio * second) <= 1 + ratio
            assert fit(config, sizes(), gpus, found, 512)
            assert config.shares is None
            seen.add(n_cpu)
    assert len(seen) > 2


def test_virtual_devices_share_one_memory():
    config = resolve(Options(device="cuda:0,cuda:0", ctx_size=512))
    gpus = [Gpu(d.name, 190 * MIB, "cuda:0") for d in config.devices]
    found = placed(offloaded(config, MODEL, sizes(), lambda: gpus))
    found.pop("cpu")
    alone = placed(settle([190], ctx_size=512)[0])
    assert 0 < sum(found.values()) <= alone["cuda:0"]


def test_what_decided_is_said_in_numbers():
    config, _ = settle([150, 150], ctx_size=512)
    (note,) = config.notes
    n = placed(config)
    assert note.startswith(
        f"{N_LAYERS - n['cpu']} of 12 layers fit the GPUs with a context of 512, the CPU has the "
        f"first {n['cpu']}: cuda:0 has {n['cuda:0']} in "
    )
    told = re.findall(r"cuda:\d has \d in (\d+) of 150 MiB", note)
    assert len(told) == 2
    (more,) = re.findall(r"one more takes (\d+) MiB", note)
    assert all(int(taken) <= 150 < int(taken) + int(more) + 1 for taken in told[:1])


@pytest.mark.parametrize("free", [[0], [20, 30]])
def test_without_any_room_the_cpu_has_all_and_that_is_said(free):
    config, _ = settle(free, n_copies=4)
    assert [d.name for d in config.devices] == ["cpu"]
    assert (config.layers, config.n_copies, config.n_gpu_layers) == ((12,), 1, None)
    (note,) = config.notes
    assert note.startswith("no layer fits the GPUs with a context of 4096, the CPU has all 12: ")
    assert f"cuda:{len(free) - 1} has {int(free[-1] * 0.95)} of the " in note


def test_the_context_that_was_left_room_for_is_had():
    config, gpus = settle([110, 150])
    counts = placed(config)
    on_gpus = {gpu.name: gpu for gpu in gpus}
    layers = ranges_of(list(counts.values()))
    parts = [
        (i, Part(mine, embeds=mine.start == 0, heads=mine.stop == N_LAYERS))
        for i, mine in enumerate(layers)
    ]
    devices = [on_gpus.get(name, Gpu(name, 1 << 40)) for name in counts]
    assert fitting_context(config, MODEL, sizes(), parts, devices) >= AUTO_CTX_SIZE


@pytest.mark.parametrize("ngl", ["auto", "3", "0", None])
def test_threads_and_limits_of_the_run_stay(ngl):
    config, _ = settle([100], ngl, threads="3", edge_copy="host")
    assert config.devices[0].name == "cpu"
    assert {d.threads for d in config.devices} == {3}
    assert config.edge_copy == "host"


def test_all_and_exact_splits_do_not_look_at_the_memory():
    def fail():
        raise AssertionError

    for flags in ({"n_gpu_layers": "all"}, {"n_gpu_layers": "-1"}, {"layers": "12"}):
        config = resolve(Options(device="cuda:0", **flags))
        assert offloaded(config, MODEL, sizes(), fail) is config
    for flags in ({"device": "cpu"}, {"device": "cpu,cuda:0"}):
        config = resolve(Options(**flags))
        assert offloaded(config, MODEL, sizes(), fail) is config


@pytest.mark.parametrize(
    ("ngl", "flags", "layers"),
    [
        ("5", {}, {"cpu": 7, "cuda:0": 3, "cuda:1": 2}),
        ("5", {"tensor_split": "1,4"}, {"cpu": 7, "cuda:0": 1, "cuda:1": 4}),
        ("0", {}, {"cpu": 12}),
        ("12", {}, {}),
    ],
)
def test_a_number_of_layers_is_divided_whatever_fits(ngl, flags, layers):
    config, _ = settle([0, 0], ngl, **flags)
    assert placed(config) == layers
    assert config.devices[0].kind == ("cuda" if ngl == "12" else "cpu")


def test_a_cuda_device_has_more_than_activations_to_hold():
    rung, more = Rung(1, 64, 1000), Rung(1, 64, 2000)
    part, end = (Part(range(n), embeds=True, heads=False) for n in (3, 0))
    on_cpu, on_gpu = (scratch_bytes(MODEL, part, rung, name) for name in ("cpu:0", "cuda:0#2"))
    assert on_gpu - on_cpu > SCRATCH_BYTES
    # Cosine and sine of 32 angles for each of 1000 more positions, as float32.
    assert scratch_bytes(MODEL, part, more, "tcp://h:1/cuda:1") - on_gpu == 1000 * 2 * 32 * 4
    assert scratch_bytes(MODEL, end, rung, "cuda:0") == scratch_bytes(MODEL, end, more, "cuda:0")
    assert scratch_bytes(MODEL, part, more, "cpu") == on_cpu


@pytest.mark.parametrize(
    ("name", "cuda"),
    [("cuda:0", True), ("tcp://cuda:1/cpu:0", False), ("tcp://cuda:50052", False), ("cpu", False)],
)
def test_a_cuda_device_is_known_by_its_name(name, cuda):
    assert is_cuda(name) is cuda
