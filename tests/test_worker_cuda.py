"""A worker that lends CUDA devices: the same results as without, and what it says of them."""

import json
from functools import partial

import numpy as np
import pytest

import gguf_pp
from gguf_pp.backend import cuda
from gguf_pp.backend.cuda_relay import PinnedBuffer
from gguf_pp.cli.main import main
from gguf_pp.cli.worker import WorkerFlags, _settings
from gguf_pp.config import parse_devices
from gguf_pp.errors import PlacementError
from gguf_pp.worker.cuda import CudaLender
from gguf_pp.worker.session import Session
from tests.cuda_double import Double
from tests.sockets import eventually
from tests.worker_cuda import OPTIONS, PROMPTS, everything, free_bytes, lending, name_of, now

__all__ = ["now"]


@pytest.fixture(scope="module")
def wanted(chat_model):
    with gguf_pp.load(chat_model, devices=["cpu"], parallel=3, **OPTIONS) as llm:
        return everything(llm)


PLACES = {
    "behind the client": (["cuda:0"], ["cpu", "{0}"]),
    "before the client": (["cuda:0"], ["{0}", "cpu"]),
    "the whole model": (["cuda:0"], ["{0}"]),
    "two devices": (["cuda:0,cuda:1"], ["cpu", "{0}"]),
    "two virtual devices, in the middle": (["cuda:1,cuda:1"], ["cpu:0", "{0}", "cpu:1"]),
    "then a CPU": (["cuda:0,cpu"], ["cpu", "{0}"]),
    "a CPU first": (["cpu,cuda:0"], ["{0}", "cpu"]),
    "two linked workers": (["cuda:0", "cuda:1"], ["{0}", "{1}"]),
    "the second of a device": (["cuda:0,cuda:0"], ["cpu", "{0}/cuda:0#2"]),
    "behind a GPU": (["cpu"], ["cuda:0", "{0}"]),
    "before a GPU": (["cpu"], ["{0}", "cuda:0"]),
    "between two GPUs": (["cuda:0"], ["cuda:0", "{0}", "cuda:1"]),
}


CASES = [(place, 2) for place in PLACES]
CASES += [
    (place, n_copies)
    for place in (
        "two virtual devices, in the middle",
        "then a CPU",
        "two linked workers",
        "between two GPUs",
    )
    for n_copies in (1, 4)
]


@pytest.mark.parametrize(("place", "n_copies"), CASES)
def test_the_same_tokens_and_logits_come_from_devices_of_a_worker(
    place, n_copies, chat_model, now, wanted
):
    lent, devices = PLACES[place]
    with lending(*lent) as workers:
        names = [d.format(*map(name_of, workers)) for d in devices]
        with gguf_pp.load(chat_model, names, parallel=3, n_copies=n_copies, **OPTIONS) as llm:
            tokens, logits = everything(llm)
            recents = [r for stage in llm._pipeline.remote_stages for r in stage.recents]
            assert all(seconds > 0 for recent in recents for _, _, seconds in recent)
    assert tokens == wanted[0]
    np.testing.assert_allclose(logits, wanted[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("first", "is_pinned"), [("cuda:0", True), ("cpu", False)])
def test_devices_here_copy_to_pinned_memory_what_a_worker_gets(first, is_pinned, chat_model, now):
    with (
        lending("cpu") as (worker,),
        gguf_pp.load(chat_model, [first, name_of(worker)], n_copies=2, **OPTIONS) as llm,
    ):
        (remote,) = llm._pipeline.remote_stages
        buffers = [copy.inp for copy in remote.ring.copies]
        assert [isinstance(buffer, PinnedBuffer) for buffer in buffers] == [is_pinned] * 2


@pytest.mark.parametrize("place", ["behind the client", "the whole model", "a CPU first"])
def test_never_is_more_room_offered_than_there_is(place, chat_model, now, monkeypatch):
    offered, real = [], Session._grant

    def grant(session, n):
        real(session, n)
        offered.append(session._n_free)

    monkeypatch.setattr(Session, "_grant", grant)
    lent, devices = PLACES[place]
    with lending(*lent) as (worker,):
        names = [d.format(name_of(worker)) for d in devices]
        with gguf_pp.load(chat_model, names, parallel=3, n_copies=2, **OPTIONS) as llm:
            everything(llm)
    assert len(offered) > 10
    assert max(offered) == 2


def test_half_precision_on_the_wire_stays_close(chat_model, now, wanted):
    with lending("cuda:0") as (worker,):
        devices = ["cpu:0", name_of(worker), "cpu:1"]
        with gguf_pp.load(chat_model, devices, wire="f16", parallel=3, **OPTIONS) as llm:
            logits = llm.logits(llm.tokenize(PROMPTS[1]))
    assert not np.array_equal(logits, wanted[1])
    assert np.linalg.norm(logits - wanted[1]) / np.linalg.norm(wanted[1]) < 2e-2


# What is said, and what is free.


def test_devices_are_described_as_they_are(now):
    now.total_bytes = 4 << 30
    with lending("cuda:1,cpu,cuda:1", memory="cuda:1=1GiB") as (worker,):
        one, cpu, two = worker.lender.describe()
    assert (one["name"], cpu["name"], two["name"]) == ("cuda:1", "cpu", "cuda:1#2")
    assert one["pool"] == two["pool"] == "cuda:1" != cpu["pool"]
    assert (one["total_bytes"], one["free_bytes"]) == (4 << 30, 1 << 30)
    assert one["relative_speed"] > cpu["relative_speed"]
    assert one["kernels"] == "torch cpu"
    assert one["unusable"] is None
    assert cpu["n_threads"] > 0


def test_what_sessions_take_is_free_again_when_they_end(chat_model, now):
    emptied = []
    with lending("cuda:0", memory="64MiB,cuda:0=256MiB") as (worker,):
        free, ram = free_bytes(worker), worker.lender.budget
        options = {**OPTIONS, "devices": ["cpu:0", name_of(worker), "cpu:1"]}
        with gguf_pp.load(chat_model, **options) as one:
            (use,) = one._pipeline.remote_stages[0].uses()
            taken = free - free_bytes(worker)
            told = use.weight_bytes + use.kv_bytes + use.buffer_bytes
            assert told <= taken < 1.01 * told
            assert use.free_bytes == free - told
            assert ram.used_bytes > 0  # what is received and sent
            with gguf_pp.load(chat_model, **options):
                assert free_bytes(worker) == free - 2 * taken
                now.cuda.empty_cache = lambda: emptied.append(True)
            eventually(lambda: free_bytes(worker) == free - taken)
            eventually(lambda: emptied == [True])  # for other processes
        eventually(lambda: free_bytes(worker) == free)
        eventually(lambda: ram.used_bytes == 0)


def test_copies_between_devices_are_tried_before_they_are_lent(now, caplog, monkeypatch):
    double = Double(n_devices=3)
    double.damages = lambda source, target, n_bytes: (source, target) == (2, 0)
    monkeypatch.setattr(cuda, "CudaSet", partial(cuda.CudaSet.func, api=double))
    loan = CudaLender(parse_devices("cuda:0,cuda:1,cuda:2"), None, "auto").loan()
    opened = [loan.open(f"cuda:{i}") for i in range(3)]
    modes = {(i, j): opened[i].mode_to(j) for i in range(3) for j in range(3)}
    assert [pair for pair, mode in modes.items() if mode == "host"] == [(2, 0)]
    assert "cuda:2 to cuda:0" in caplog.text
    with pytest.raises(PlacementError, match="cuda:2 to cuda:0 arrive damaged"):
        CudaLender(parse_devices("cuda:0,cuda:2"), None, "p2p")
    for backend in opened:
        backend.close()


# The command line.


def test_flags_say_what_is_lent_and_how_much_of_it(tmp_path):
    flags = WorkerFlags(
        device="cuda:0,cpu,cuda:1",
        memory="8GiB,cuda:1=1GiB",
        edge_copy="host",
        cache=tmp_path,
    )
    settings = _settings(flags)
    assert [device.name for device in settings.devices] == ["cuda:0", "cpu", "cuda:1"]
    assert (settings.memory_bytes, settings.cuda_bytes) == (8 << 30, ((1, 1 << 30),))
    assert settings.edge_copy == "host"


def test_a_device_that_is_not_there_is_one_error_line(capsys):
    assert main(["worker", "-p", "0", "--cache-size", "0", "--device", "cpu,cuda:99"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "error: " in err and "'cuda:99'" in err and " hint: " in err
    assert "Traceback" not in err


def test_check_shows_devices_and_those_that_broke(now, capsys):
    with lending("cuda:0,cuda:1,cpu", memory="cuda:1=1GiB") as (worker,):
        worker.lender.cuda.condemn(0, "CUDA error: unspecified launch failure")
        assert main(["worker", "--check", worker.address]) == 0
        out = capsys.readouterr().out
        assert main(["worker", "--check", worker.address, "--json"]) == 0
    broken, sound, cpu = (line for line in out.splitlines() if line.startswith("c"))
    assert "can be used no more: CUDA error: unspecified launch failure" in broken
    assert "torch cpu kernels" in sound and "threads" not in sound and "1024.0 MiB" in sound
    assert "threads" in cpu
    devices = json.loads(capsys.readouterr().out)["devices"]
    assert [bool(device["unusable"]) for device in devices] == [True, False, False]
