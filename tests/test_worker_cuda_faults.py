"""Clients that die, memory that runs out and devices that break, on a worker with CUDA devices."""

import gc
import json
import subprocess
import sys
import threading
import weakref
from contextlib import contextmanager

import pytest

import gguf_pp
from gguf_pp.backend import cuda
from gguf_pp.errors import PlacementError, RemoteError
from gguf_pp.pipeline.split import Part
from gguf_pp.pipeline.stage import LayerStage
from gguf_pp.worker.stages import WorkedStage
from tests.nursery import ROOT
from tests.prepared import prepare
from tests.sockets import eventually, in_thread
from tests.worker_cuda import (
    GREEDY,
    OPTIONS,
    PROMPTS,
    answer,
    everything,
    free_bytes,
    lending,
    name_of,
    now,
)

__all__ = ["now"]


@pytest.fixture(scope="module")
def right(chat_model):
    with gguf_pp.load(chat_model, devices=["cpu"], parallel=3, **OPTIONS) as llm:
        return everything(llm)[0]


@contextmanager
def loaded(chat_model, *lent):
    """A worker, and a model whose middle layers are there."""
    with lending(*lent) as (worker,):
        devices = ["cpu:0", name_of(worker), "cpu:1"]
        with gguf_pp.load(chat_model, devices, timeout=5, **OPTIONS) as llm:
            yield worker, llm


def no_threads_of(worker):
    names = ("ram ", "cuda:")
    return [t.name for t in threading.enumerate() if t.name.startswith(names)] == []


class Gate:
    """Holds the device up: whoever waits for it waits for this."""

    def __init__(self, now, monkeypatch):
        self.reached, self.opened = threading.Event(), threading.Event()
        real = now.cuda.Event

        def event(**kwargs):
            made = real(**kwargs)
            if kwargs.get("blocking"):
                made.synchronize = self.wait
            return made

        monkeypatch.setattr(now.cuda, "Event", event)
        self.held = False

    def wait(self):
        if self.held:
            self.reached.set()
            assert self.opened.wait(60)


def test_a_client_that_is_lost_in_a_ubatch_leaves_nothing_behind(
    chat_model, now, right, monkeypatch
):
    gate = Gate(now, monkeypatch)
    with lending("cuda:0", memory="64MiB,cuda:0=256MiB") as (worker,):
        free = free_bytes(worker)
        devices = ["cpu:0", name_of(worker), "cpu:1"]
        with gguf_pp.load(chat_model, devices, timeout=5, **OPTIONS) as llm:
            gate.held = True
            failures = in_thread(llm.generate(PROMPTS[2], **GREEDY).completion)
            assert gate.reached.wait(60)
            llm._pipeline.remote_stages[0].peer.close()
            assert isinstance(failures.get(timeout=60), RemoteError)
            assert free_bytes(worker) < free  # the device has not come to the end of it
            gate.held = False
            gate.opened.set()
        eventually(lambda: (free_bytes(worker), worker.lender.budget.used_bytes) == (free, 0))
        eventually(lambda: no_threads_of(worker))
        with gguf_pp.load(chat_model, devices, parallel=3, **OPTIONS) as llm:
            assert everything(llm)[0] == right


@pytest.mark.parametrize("moment", ["load", "prefill", "decode"])
def test_a_client_that_is_killed_costs_nothing(moment, chat_model, now, tmp_path):
    prepared = tmp_path / "prepared.json"
    prepared.write_text(json.dumps(prepare(chat_model, Part(range(4), True, True), "cuda:0")))
    with lending("cuda:0,cuda:1", memory="64MiB,cuda:0=256MiB") as (worker,):
        free = free_bytes(worker)
        command = [sys.executable, "-m", "tests.light", worker.address, str(prepared), moment]
        killed = subprocess.run(command, cwd=ROOT, capture_output=True)
        assert killed.returncode < 0, killed.stderr
        eventually(lambda: (free_bytes(worker), worker.lender.budget.used_bytes) == (free, 0))
        eventually(lambda: no_threads_of(worker))


def test_what_the_allocator_refuses_is_tried_smaller(chat_model, now, right):
    alive = weakref.WeakSet()
    real, most = now.empty, 8

    def empty(shape, dtype, device=None, pin_memory=False):
        if pin_memory and len(shape) == 2:
            if len(alive) == most:
                raise RuntimeError("CUDA error: out of memory")
            made = real(shape, dtype, device, pin_memory)
            alive.add(made)
            return made
        return real(shape, dtype, device, pin_memory)

    now.empty = empty
    with lending("cuda:0", memory="cuda:0=256MiB") as (worker,):
        free = free_bytes(worker)
        devices = ["cpu:0", name_of(worker), "cpu:1"]
        with gguf_pp.load(chat_model, devices, parallel=3, n_copies=4, **OPTIONS) as llm:
            assert llm.n_copies == 2
            assert len(alive) == 8  # two copies in and out, their twins, and what is on the host
            assert everything(llm)[0] == right
        eventually(lambda: free_bytes(worker) == free)
        gc.collect()
        eventually(lambda: len(alive) == 0)


def test_a_cap_on_a_device_is_felt_by_the_client(chat_model, now):
    with lending("cuda:0", memory="cuda:0=100KiB") as (worker,):
        with pytest.raises(PlacementError, match=r"cuda:0.* free"):
            gguf_pp.load(chat_model, ["cpu", name_of(worker)], layers="1,3", parallel=3, **OPTIONS)
        eventually(lambda: free_bytes(worker) == 100 << 10)


def fail_at(monkeypatch, n, message):
    """Have what a stage launches for the `n`-th ubatch from now on raise."""
    calls, real = [], LayerStage.forward

    def forward(self, *args, **kwargs):
        if isinstance(self, WorkedStage):
            calls.append(self)
            if len(calls) == n:
                raise RuntimeError(message)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(LayerStage, "forward", forward)


def break_device(now, index=0):
    """Have every call say what it says after an error inside of a kernel."""

    real = now.cuda.mem_get_info
    now.broken[index] = "CUDA error: an illegal memory access was encountered\nmore"

    def mem_get_info(device):
        if device in now.broken:
            raise RuntimeError(now.broken[device])
        return real(device)

    now.cuda.mem_get_info = mem_get_info


def test_a_kernel_that_fails_fails_its_request_only(chat_model, now, monkeypatch):
    with loaded(chat_model, "cuda:0") as (worker, llm):
        before = answer(llm)
        fail_at(monkeypatch, 2, "CUDA error: invalid configuration argument")
        with pytest.raises(RemoteError, match=f"{worker.address}.*invalid configuration"):
            answer(llm)
        assert answer(llm) == before
        assert worker.lender.describe()[0]["unusable"] is None


def told(worker, llm, caplog):
    """A device broke: the client hears of it, the worker says so, and nobody gets it any more."""
    with pytest.raises(RemoteError, match="cuda:0 can be used no more: CUDA error: an illegal"):
        answer(llm)
    why = "CUDA error: an illegal memory access was encountered"
    assert worker.lender.describe()[0]["unusable"] == why
    assert free_bytes(worker) == 0
    assert f"cuda:0 can be used no more: {why}" in caplog.text
    with pytest.raises(PlacementError, match="cuda:0 can be used no more"):
        answer(llm)  # which connects anew
    # Nothing is freed that the driver would have to be asked for.
    eventually(lambda: len(worker.lender.cuda.kept) == 1)


@pytest.mark.parametrize("lent", ["cuda:0", "cuda:0,cuda:1"])
def test_a_device_that_broke_ends_the_session_and_is_lent_no_more(
    lent, chat_model, now, monkeypatch, caplog
):
    with loaded(chat_model, lent) as (worker, llm):
        answer(llm)
        fail_at(monkeypatch, 2, "CUDA error: an illegal memory access was encountered")
        break_device(now)
        told(worker, llm, caplog)


@pytest.mark.parametrize("method", ["_copy_pinned", "_launch"])
def test_a_stream_that_broke_ends_the_session_instead_of_leaving_it_to_wait(
    method, chat_model, now, monkeypatch, caplog
):
    with loaded(chat_model, "cuda:0") as (worker, llm):
        answer(llm)

        def broken(self, *args):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        monkeypatch.setattr(cuda.CudaStream, method, broken)
        break_device(now)
        told(worker, llm, caplog)


def test_a_stream_that_broke_on_a_sound_device_ends_its_session_only(chat_model, now, monkeypatch):
    with loaded(chat_model, "cuda:0") as (_, llm):
        before = answer(llm)
        with monkeypatch.context() as patch:
            patch.setattr(cuda.CudaStream, "_copy_pinned", lambda self, *args: 1 / 0)
            with pytest.raises(RemoteError, match="a stage broke: division by zero"):
                answer(llm)
        assert answer(llm) == before


def test_other_devices_of_a_worker_are_lent_when_one_broke(chat_model, now, caplog):
    with lending("cuda:0,cuda:1,cpu") as (worker,):
        break_device(now)
        assert [bool(d.get("unusable")) for d in worker.lender.describe()] == [True, False, False]
        address = name_of(worker)
        for name in ("cuda:1", "cpu"):
            with gguf_pp.load(chat_model, ["cpu", f"{address}/{name}"], **OPTIONS) as llm:
                assert answer(llm)
        with pytest.raises(PlacementError, match=r"cuda:0 can be used no more.*illegal"):
            gguf_pp.load(chat_model, ["cpu", f"{address}/cuda:0"], **OPTIONS)
