"""Whole models through the code for CUDA devices, on a stand-in that does everything at once."""

import ast
import logging
import subprocess
import sys
import threading
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

import gguf_pp
from gguf_pp.backend import cuda
from gguf_pp.backend.cuda_host import Landing
from gguf_pp.batch import Span, UBatch
from gguf_pp.config import Options
from gguf_pp.errors import ConfigError, FormatError, PlacementError
from gguf_pp.gguf import ModelFile
from gguf_pp.pipeline.estimate import estimate
from gguf_pp.pipeline.executor import Ticket
from gguf_pp.pipeline.load import Stopped
from gguf_pp.pipeline.outlet import ROWS, CudaOutlet
from gguf_pp.pipeline.planned import resolve
from gguf_pp.pipeline.stage import LayerStage, _pick
from gguf_pp.pipeline.stopwatch import CudaStopwatch
from gguf_pp.triton import ops as device_ops
from gguf_pp.triton.ops import DeviceOps
from tests.cuda_now import Now
from tests.sockets import WAIT_S

PROMPTS = ["The", "A longer prompt, of several words", "x" * 100]
GREEDY = {"max_tokens": 12, "temperature": 0.0}
OPTIONS = {"kernels": "torch", "ctx_size": 256, "ubatch_size": 16, "exact": True}
PLACES = {
    "one": ["cuda:0"],
    "two": ["cuda:0", "cuda:1"],
    "two virtual": ["cuda", "cuda:0"],
    "before a CPU": ["cuda:1", "cpu"],
    "behind a CPU": ["cpu", "cuda:0"],
    "around a CPU": ["cuda:0", "cpu", "cuda:1"],
}


@pytest.fixture
def now(monkeypatch):
    now = Now()
    monkeypatch.setattr(cuda, "open_cuda", partial(cuda.open_cuda, api=now))

    class OnHost(DeviceOps):
        def __init__(self, device, *, exact, is_torch_only):
            now.log.append(f"ops on {device}")
            super().__init__("cpu", exact=exact, is_torch_only=is_torch_only)

    monkeypatch.setattr(device_ops, "DeviceOps", OnHost)
    n_threads = cuda.torch.get_num_threads()
    cuda.torch.set_num_threads(1)  # stages compute in this thread, and there is little to compute
    yield now
    cuda.torch.set_num_threads(n_threads)


@pytest.fixture(scope="module")
def wanted(chat_model):
    with gguf_pp.load(chat_model, devices=["cpu"], parallel=3, **OPTIONS) as llm:
        ids = llm.tokenize(PROMPTS[1])
        return [c.ids for c in llm.generate_batch(PROMPTS, **GREEDY)], llm.logits(ids)


@pytest.mark.parametrize("n_copies", [1, 2])
@pytest.mark.parametrize("place", PLACES)
def test_the_same_tokens_and_logits_come_out_wherever_layers_are(
    chat_model, now, wanted, place, n_copies
):
    tokens, logits = wanted
    options = {**OPTIONS, "devices": PLACES[place], "parallel": 3, "n_copies": n_copies}
    with gguf_pp.load(chat_model, **options) as llm:
        assert [c.ids for c in llm.generate_batch(PROMPTS, **GREEDY)] == tokens
        np.testing.assert_allclose(
            llm.logits(llm.tokenize(PROMPTS[1])), logits, rtol=1e-4, atol=1e-4
        )
        assert all(s > 0 for stage in llm._pipeline.stages for _, _, s in stage.recent)
        assert all(stage.recent for stage in llm._pipeline.stages)
    n_cuda = sum("cuda" in name for name in PLACES[place])
    assert len([line for line in now.log if line.startswith("ops on cuda:")]) == n_cuda


def test_virtual_devices_have_names_of_their_own_and_one_memory(chat_model, now):
    options = {**OPTIONS, "devices": ["cuda:1", "cuda:1"], "memory": "cuda:1=128MiB"}
    with gguf_pp.load(chat_model, **options) as llm:
        one, two = (stage.backend for stage in llm._pipeline.stages)
        assert (one.name, two.name) == ("cuda:1", "cuda:1#2")
        assert one.memory() == two.memory()
        assert 0 < one.memory().free_bytes < 64 << 20  # each has room for products of its own
        assert [stage.kernels for stage in llm._pipeline.stages] == ["torch cpu"] * 2


def test_what_does_not_fit_the_device_is_cut_down_or_told(chat_model, now):
    options = {**OPTIONS, "devices": ["cuda:0"], "ctx_size": 0, "memory": "cuda:0=72MiB"}
    with gguf_pp.load(chat_model, **options) as llm:
        assert llm._engine.ctx_size < 1 << 16
    options = {**options, "memory": "cuda:0=8MiB", "n_gpu_layers": "all"}
    with pytest.raises(PlacementError, match="the model does not fit"):
        gguf_pp.load(chat_model, **options)


@pytest.mark.parametrize(
    ("ngl", "options", "layers"),
    [
        ("0", {}, {"cpu": (0, 4)}),
        ("1", {}, {"cpu": (0, 3), "cuda:0": (3, 4)}),
        ("3", {"tensor_split": "1,2"}, {"cpu": (0, 1), "cuda:0": (1, 2), "cuda:1": (2, 4)}),
        ("4", {}, {"cuda:0": (0, 4)}),
        ("all", {}, {"cuda:0": (0, 4)}),
    ],
)
def test_layers_beyond_ngl_go_to_the_cpu(chat_model, now, wanted, ngl, options, layers):
    devices = ["cuda:0", "cuda:1"] if options else ["cuda:0"]
    options = {**OPTIONS, **options, "devices": devices, "parallel": 3, "n_gpu_layers": ngl}
    with gguf_pp.load(chat_model, **options) as llm:
        assert {use.name: use.layers for use in llm.devices()} == layers
        assert [c.ids for c in llm.generate_batch(PROMPTS, **GREEDY)] == wanted[0]


CARDS = [
    ("cuda:0=1KiB", ["cuda:0"]),
    ("cuda:0=66800KiB", ["cuda:0"]),
    ("cuda:0=66900KiB", ["cuda:0"]),
    ("cuda:0=33900KiB,cuda:1=66800KiB", ["cuda:0", "cuda:1"]),
    ("cuda:0=1GiB", ["cuda:0"]),
]


@pytest.mark.parametrize(("memory", "devices"), CARDS, ids=[memory for memory, _ in CARDS])
def test_as_many_layers_as_fit_go_to_cuda_devices_and_the_plan_knows_how_many(
    chat_model, now, wanted, memory, devices, caplog
):
    options = {**OPTIONS, "devices": devices, "parallel": 3, "memory": memory}
    planned = plan(chat_model, options)
    caplog.clear()
    with gguf_pp.load(chat_model, **options) as llm:
        used = llm.devices()
        assert [c.ids for c in llm.generate_batch(PROMPTS, **GREEDY)] == wanted[0]
    stages = {s.device.name: s for s in planned.stages}
    assert {u.name: u.layers for u in used} == {
        name: (s.layers.start, s.layers.stop) for name, s in stages.items()
    }
    for use in used:
        need = stages[use.name].need
        assert (use.weight_bytes, use.kv_bytes) == (need.weights, need.kv)
        assert use.buffer_bytes == need.copies + need.scratch
    assert planned.fits
    said = [m for m in caplog.messages if "the CPU has" in m]
    assert said == [note for note in planned.notes if "the CPU has" in note]
    assert len(said) == ("cpu" in stages)


def plan(path, options):
    settings = {"ctx_size": options["ctx_size"], "ubatch_size": options["ubatch_size"]}
    settings |= {"parallel": options["parallel"], "memory": options["memory"]}
    with ModelFile.open(path) as file:
        return estimate(file, *resolve(Options(device=",".join(options["devices"]), **settings)))


def test_a_plan_looks_at_devices_that_are_here(chat_model, now):
    options = {**OPTIONS, "devices": ["cuda:0", "cuda:1"], "parallel": 1, "memory": "cuda:1=1GiB"}
    with pytest.raises(ConfigError, match=r"'cuda:7'.*its memory is not known"):
        plan(chat_model, {**options, "devices": ["cuda:7"], "memory": None})
    first, second = plan(chat_model, options).stages
    with gguf_pp.load(chat_model, **{**OPTIONS, "devices": ["cuda:0"]}) as llm:
        (use,) = llm.devices()
        taken = use.weight_bytes + use.kv_bytes + use.buffer_bytes
        assert first.device.room.free_bytes == pytest.approx(use.free_bytes + taken, abs=1 << 16)
    assert (first.device.source, second.device.source) == ("here", "flag")
    assert second.device.room.free_bytes == 1 << 30


def test_stages_on_cuda_devices_load_at_the_same_time(chat_model, now, monkeypatch):
    both, load = threading.Barrier(2, timeout=30), LayerStage.load_weights

    def meet(stage, loader):
        both.wait()
        load(stage, loader)

    monkeypatch.setattr(LayerStage, "load_weights", meet)
    done = []
    options = {**OPTIONS, "devices": ["cuda:0", "cuda:1"]}
    with gguf_pp.load(chat_model, **options, progress=lambda *so_far: done.append(so_far)):
        assert done == sorted(done)
        assert done[-1][0] == done[-1][1]


def test_where_one_stage_cannot_load_the_others_stop(chat_model, now, monkeypatch):
    failed, stopped = threading.Event(), []
    deadline = time.monotonic() + WAIT_S

    def fail_second(stage, loader):
        if stage.name == "cuda:1":
            failed.set()
            raise FormatError("a broken tensor")
        failed.wait()
        try:
            while time.monotonic() < deadline:
                loader.vector("blk.0.attn_norm.weight", 32)
        except Stopped:
            stopped.append(stage.name)
            raise

    monkeypatch.setattr(LayerStage, "load_weights", fail_second)
    with pytest.raises(FormatError, match="a broken tensor"):
        gguf_pp.load(chat_model, **OPTIONS, devices=["cuda:0", "cuda:1"])
    assert stopped == ["cuda:0"]


def test_that_it_has_not_run_on_hardware_is_said_once(chat_model, now, caplog):
    caplog.set_level(logging.WARNING, "gguf_pp")
    gguf_pp.load(chat_model, **OPTIONS, devices=["cuda:0", "cuda:1"]).close()
    assert len([m for m in caplog.messages if "CUDA" in m]) == 1


def test_a_device_that_is_not_there_is_named(chat_model, now):
    with pytest.raises(ConfigError, match="no device 'cuda:7': there are 2 CUDA devices"):
        gguf_pp.load(chat_model, **OPTIONS, devices=["cpu", "cuda:7"])
    now.version.cuda, now.n_devices = None, 0
    with pytest.raises(ConfigError, match="device 'cuda:0' needs a torch with CUDA"):
        gguf_pp.load(chat_model, **OPTIONS, devices=["cuda:0"])


class Broken:
    """A sampler that wants to see logits, and fails."""

    def choice(self):
        return None

    def __call__(self, logits):
        return 1 / 0


def test_a_sampler_that_fails_fails_its_own_request_only(chat_model, now, monkeypatch):
    with gguf_pp.load(chat_model, **OPTIONS, devices=["cuda:0"], parallel=2) as llm:
        bad = llm.generate("The", **GREEDY)
        bad._request.sampler = Broken()
        with pytest.raises(ZeroDivisionError):
            bad.completion()
        assert len(llm.generate("The", **GREEDY).completion().ids) == GREEDY["max_tokens"]


def outlet(*, waits=False, n_slots=1):
    return CudaOutlet(Now(), n_slots, 3, waits=waits)


def random(n_rows):
    generator = np.random.Generator(np.random.PCG64(n_rows))
    return cuda.torch.from_numpy(generator.standard_normal((n_rows, 3), dtype=np.float32))


def test_logits_are_taken_in_order_when_their_ubatch_is_waited_for():
    way, got = outlet(), {}

    def take(logits, rows):
        assert len(logits) == len(rows)
        got.update(zip(rows, logits.tolist(), strict=True))

    logits = random(ROWS + 1)
    deliver = way.deliver(way.send(logits, range(5, 6 + ROWS), take))
    assert got == {}
    for _ in range(2):  # what was delivered is not delivered again
        deliver()
        assert list(got) == list(range(5, 6 + ROWS))
        assert list(got.values()) == logits.tolist()
        got = dict(got)


def test_more_logits_than_there_is_room_for_are_taken_earlier():
    way, got = outlet(), []
    deliver = way.deliver(way.send(random(ROWS * 20), range(ROWS * 20), lambda _, r: got.extend(r)))
    assert 0 < len(got) < ROWS * 20
    deliver()
    assert got == list(range(ROWS * 20))


def test_a_thread_that_may_block_takes_logits_at_once():
    way, got = outlet(waits=True), []
    assert way.deliver(way.send(random(2), range(2), lambda _, rows: got.extend(rows))) is None
    assert got == [0, 1]


class Interrupted:
    """An event at which the host is interrupted, `n` times."""

    def __init__(self, n):
        self.n = n

    def synchronize(self):
        self.n -= 1
        if self.n >= 0:
            raise KeyboardInterrupt

    def record(self, stream=None):
        pass


def ticket(done=None):
    return Ticket(UBatch((0,), (Span(0, 0, 1),), (0,)), done or Interrupted(0))


def test_who_is_interrupted_while_waiting_may_wait_again():
    api = Now()
    api.cuda.Event = lambda **kwargs: Interrupted(2)
    landing, got = Landing(api, 2, (1, 3), api.float32), []
    parcel = landing.send(random(1), lambda rows: got.append(rows.tolist()))
    waiting = ticket(Interrupted(1))
    waiting.deliver = partial(landing.deliver, parcel)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            waiting.wait()
    waiting.wait()
    assert got == [random(1).tolist()]


def test_what_was_opened_is_not_consumed_again():
    # The host may be interrupted between opening a parcel and forgetting it.
    got = []
    parcel = Landing(Now(), 2, (1, 3), Now.float32).send(
        random(1), lambda rows: got.append(len(rows))
    )
    parcel.open()
    parcel.open()
    assert got == [1]


@pytest.mark.parametrize("rows", [[3], [0, 1, 2], [0, 2, 3, 4, 9], [8, 9]])
def test_rows_that_want_logits_are_picked_in_order(rows):
    assert _pick(random(10), rows).tolist() == random(10)[rows].tolist()


def test_an_interrupt_in_the_middle_of_a_ubatch_is_told_once_and_fails_it():
    def interrupt(*_):
        raise KeyboardInterrupt

    way, sampled, launched = outlet(), ticket(), ticket()
    sampled.deliver = way.deliver(way.send(random(1), range(1), interrupt))
    launched.error = KeyboardInterrupt()
    for interrupted in (sampled, launched):
        with pytest.raises(KeyboardInterrupt):
            interrupted.wait()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="interrupted"):
                interrupted.wait()


def test_times_are_those_between_events_that_have_passed():
    made = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing
            self.at_ms = len(made) ** 2
            self.passed = False
            made.append(self)

        def record(self):
            pass

        def query(self):
            return self.passed

        def elapsed_time(self, later):
            return float(later.at_ms - self.at_ms)

    watch = CudaStopwatch(SimpleNamespace(Event=Event))
    ubatches = [UBatch((0,) * n, (Span(0, 0, n),), (0,)) for n in (1, 2, 3)]
    for ubatch in ubatches:
        watch.stop(watch.start(), ubatch)
    assert list(watch.recent) == []
    for event in made[:2] + made[4:]:
        event.passed = True
    watch.start()
    assert list(watch.recent) == [(1, 1, pytest.approx(1e-3))]
    made[3].passed = True
    watch.start()
    assert [seconds for _, _, seconds in watch.recent] == pytest.approx([1e-3, 5e-3, 9e-3])


def test_without_a_cuda_device_nothing_of_cuda_or_triton_is_loaded(chat_model):
    code = (
        "import sys, gguf_pp\n"
        f"gguf_pp.load({chat_model!r}, ctx_size=64).close()\n"
        "print([m for m in sys.modules if 'cuda' in m and 'gguf_pp' in m or 'triton' in m])\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    found = [name for name in ast.literal_eval(done.stdout) if not name.startswith("torch.")]
    assert found == [], done.stderr
