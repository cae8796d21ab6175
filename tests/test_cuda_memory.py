"""Memory of CUDA devices: what is counted, what is free, and the ladder when it runs out."""

import numpy as np
import pytest
import torch

from gguf_pp.backend.base import OutOfMemory, is_out_of_memory
from gguf_pp.backend.cuda import open_cuda
from gguf_pp.backend.cuda_budget import MARGIN_BYTES, MARGIN_SHARE
from gguf_pp.backend.cuda_host import Landing, Uploads
from gguf_pp.config import Device
from gguf_pp.errors import ConfigError
from gguf_pp.pipeline.memory import Rung, climb_down
from gguf_pp.pipeline.ring import Ring
from tests.cuda_double import Double
from tests.cuda_run import named

TOTAL = 8 << 30


def room_of(n_bytes):
    """What is left of free memory after the margin."""
    return n_bytes - MARGIN_BYTES - int(MARGIN_SHARE * n_bytes)


def opened(*names, double=None, **kwargs):
    return open_cuda(named(*names), api=double or Double(), **kwargs)


def test_free_memory_is_what_the_driver_and_the_allocator_have_minus_a_margin():
    double = Double(total_bytes=TOTAL)
    double.others_bytes[1], double.allocated[1], double.cached[1] = 3 << 30, 1 << 20, 1 << 30
    (backend,) = opened("1", double=double)
    memory = backend.memory()
    assert (memory.pool, memory.total_bytes) == ("cuda:1", TOTAL)
    assert memory.free_bytes == room_of(TOTAL - (3 << 30) - (1 << 20))


def test_what_is_reserved_is_taken_from_all_virtual_devices_of_a_device():
    one, two, other = opened("0", "0", "1")
    before = two.memory().free_bytes
    one.reserve(1 << 30, "weights")
    assert two.memory().free_bytes == before - (1 << 30)
    assert other.memory().free_bytes == before
    with pytest.raises(OutOfMemory) as caught:
        two.reserve(before, "KV cache")
    exc = caught.value
    assert (exc.device, exc.what, exc.asked_bytes) == ("cuda:0", "KV cache", before)
    assert exc.free_bytes == before - (1 << 30)
    one.release(1 << 30)
    two.reserve(before, "KV cache")
    assert one.memory().free_bytes == 0


def test_what_is_reserved_and_then_allocated_is_taken_once():
    double = Double()
    (backend,) = opened("0", double=double)
    before = backend.memory().free_bytes
    buffer = backend.buffer(1 << 10, 1 << 10, "input copy 0")
    assert (buffer.n_bytes, buffer.tensor.shape, buffer.tensor.place) == (4 << 20, (1024, 1024), 0)
    assert backend.memory().free_bytes == before - (4 << 20)


def test_what_other_processes_take_later_is_not_free():
    double = Double(total_bytes=TOTAL)
    (backend,) = opened("0", double=double)
    double.others_bytes[0] = TOTAL - 999
    assert backend.memory().free_bytes == 999
    with pytest.raises(OutOfMemory, match="1000 bytes for weights, 999 free"):
        backend.reserve(1000, "weights")


def test_a_device_may_be_given_a_limit():
    one, two = opened("0", "1", limit_bytes={1: 1000})
    assert one.memory().free_bytes > two.memory().free_bytes == 1000


def test_a_full_device_has_nothing_free():
    double = Double()
    double.others_bytes[0] = double.total_bytes - 5
    assert opened("0", double=double)[0].memory().free_bytes == 0


def test_what_the_allocator_refuses_is_not_counted():
    double = Double()
    (backend,) = opened("0", double=double)
    before = backend.memory().free_bytes
    double.empty = refuse
    with pytest.raises(torch.OutOfMemoryError):
        backend.buffer(1, 1, "input copy 0")
    assert backend.memory().free_bytes == before


def refuse(*args, **kwargs):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublas"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cub"), True),
        (OutOfMemory("cuda:0", "weights", 2, 1), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"), False),
        (ValueError("out of memory"), False),
        (Exception("out of resource: shared memory, Required: 240000"), False),
    ],
)
def test_errors_that_mean_too_little_memory_are_told_from_others(error, is_one):
    assert is_out_of_memory(error) is is_one
    if isinstance(error, RuntimeError) and hasattr(torch, "AcceleratorError"):
        assert issubclass(torch.AcceleratorError, RuntimeError)


def test_the_ladder_frees_a_failed_rung_and_empties_the_cache_before_the_next():
    double = Double()
    (backend,) = opened("0", double=double)
    double.refuses_above_bytes = 14 << 20

    def attempt(rung):
        return Ring(backend, rung.n_copies, 1 << 10, 1 << 10, inp=True, out=False)

    ladder = [Rung(n, 32, 512) for n in (5, 4, 3)]
    rung, ring = climb_down(ladder, attempt, lambda: None)
    assert (rung.n_copies, ring.n_bytes) == (3, 12 << 20)
    assert (double.allocated[0], double.cached[0]) == (12 << 20, 0)
    # Before each rung: what a closed model left is in the cache as well.
    assert [what for what, *_ in double.log].count("empty_cache") == len(ladder)
    assert backend.memory().free_bytes == room_of(TOTAL) - ring.n_bytes


@pytest.mark.parametrize(
    ("names", "message", "hint"),
    [
        (("7",), "no device 'cuda:7': there are 4 CUDA devices here", "gguf-pp doctor"),
        (("0", "9", "5"), "no device 'cuda:5': there are 4", "gguf-pp devices"),
    ],
)
def test_a_device_that_is_not_there_is_an_error(names, message, hint):
    with pytest.raises(ConfigError, match=message) as caught:
        opened(*names)
    assert hint in caught.value.hint


def test_a_torch_without_cuda_is_named():
    double = Double(n_devices=0)
    double.version.cuda = None
    with pytest.raises(ConfigError, match="'cuda:0' needs a torch with CUDA, this is 2"):
        opened("0", double=double)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="'cuda:0'"):
            open_cuda([Device("cuda:0", "cuda", 0)])


def test_a_pipeline_without_cuda_devices_opens_none():
    assert open_cuda(named("cpu", "cpu")) == []


def test_what_is_used_of_torch_is_there():
    for name in vars(Double().cuda):
        assert hasattr(torch.cuda, name), name
    for name in ("wait_event", "synchronize"):
        assert hasattr(torch.cuda.Stream, name)
    for name in ("record", "synchronize", "elapsed_time"):
        assert hasattr(torch.cuda.Event, name)


# Between host and device.


def on_device(double, values):
    tensor = double.empty(values.shape, dtype=values.dtype, device="cuda:0")
    double.launch("make", [], [tensor], lambda: tensor.data.copy_(values), 1.0)
    return tensor


@pytest.mark.parametrize("seed", range(4))
def test_uploads_bring_what_was_there_when_they_were_sent(seed):
    double = Double(seed=seed, copy_s=0.3)
    uploads = Uploads(double, 2, 64)
    out = double.empty((4,), dtype=torch.int32, device="cuda:0")
    values, seen = torch.zeros(4, dtype=torch.int32), []
    for i in range(6):
        values.fill_(i)
        uploads.send(values, out)
        double.launch("use", [out], [], lambda: seen.append(out.data.tolist()))
    assert len(seen) < 6  # the host did not wait for all
    double.synchronize()
    assert seen == [[i] * 4 for i in range(6)]
    assert double.world.races == []


@pytest.mark.parametrize("seed", range(4))
def test_weights_are_gathered_and_their_memory_is_not_reused_before_it_was_copied(seed):
    double = Double(seed=seed, copy_s=1.0)
    uploads, seen = Uploads(double, 2, 24), []
    pieces = torch.arange(5 * 12, dtype=torch.uint8).view(5, 2, 6)
    for i in range(4):
        out = double.empty((4, 6), dtype=torch.uint8, device="cuda:0")
        uploads.send_pieces([pieces[i], pieces[i + 1]], out)
        double.launch("use", [out], [], lambda out=out: seen.append(out.data.clone()))
    double.synchronize()
    for i, rows in enumerate(seen):
        assert torch.equal(rows, torch.cat([pieces[i], pieces[i + 1]]))
    assert double.world.races == []
    assert [what for what, *_ in double.log].count("synchronize") == 4


def test_the_host_waits_before_it_writes_to_pinned_memory_that_is_on_its_way(monkeypatch):
    double = Double()
    uploads = Uploads(double, 2, 64)
    out = double.empty((4,), dtype=torch.int32, device="cuda:0")
    for _, event in uploads._slots:
        monkeypatch.setattr(event, "synchronize", lambda: None)
    for i in range(4):
        uploads.send(torch.full((4,), i, dtype=torch.int32), out)
    double.synchronize()
    assert double.world.races


def test_what_lands_is_consumed_in_order_by_whoever_first_waits():
    double, got = Double(copy_s=0.3), []
    landing = Landing(double, 3, (2, 2), double.float32)
    parcels = []
    for i in range(5):
        rows = on_device(double, torch.full((1 + i % 2, 2), float(i)))
        parcels.append(landing.send(rows, lambda rows: got.append(rows.read().tolist())))
    assert got == [[[0.0, 0.0]], [[1.0, 1.0], [1.0, 1.0]]]  # to make room
    landing.deliver(parcels[3])
    assert len(got) == 4
    landing.deliver(parcels[0])
    landing.deliver(parcels[4])
    assert [rows[0][0] for rows in got] == list(np.arange(5.0))
    assert double.world.races == []


def test_what_a_consumer_raises_is_raised_to_who_waits_for_that_parcel():
    double, got = Double(), []
    landing = Landing(double, 1, (1, 1), double.float32)

    def broken(rows):
        raise ZeroDivisionError

    bad = landing.send(on_device(double, torch.ones(1, 1)), broken)
    good = landing.send(on_device(double, torch.ones(1, 1)), got.append)
    landing.deliver(good)
    assert len(got) == 1
    with pytest.raises(ZeroDivisionError):
        landing.deliver(bad)
