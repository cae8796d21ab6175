"""Streams of CUDA devices, of which torch deals out 32 in turn."""

import pytest

from gguf_pp.backend import cuda_edges
from gguf_pp.backend.cuda import CudaSet
from tests.cuda_double import Double


def raws(backend):
    """Streams of a backend like a stage's: idle, compute, transfer."""
    streams = backend.stream("compute", compute=True).raw, backend.stream("transfer").raw
    return {backend.idle, *streams}


@pytest.fixture(params=["alone", "with edges"])
def devices(request, monkeypatch):
    """Edges between two are tried first, on streams as well."""
    monkeypatch.setattr(cuda_edges, "TEST_BYTES", (256,))
    return CudaSet([0, 1], [] if request.param == "alone" else [(0, 1)], api=Double())


def test_trying_edges_again_and_again_makes_no_more_streams(monkeypatch):
    monkeypatch.setattr(cuda_edges, "TEST_BYTES", (256,))
    double, n_streams = Double(), []
    for _ in range(3):
        CudaSet([0, 1], [(0, 1)], api=double)
        n_streams.append(len(double.world.streams))
    assert n_streams[0] == n_streams[2]


def test_streams_of_what_is_open_are_its_own_however_much_was_opened_before(devices):
    kept = devices.open("cuda:0", 0, hosted=False)
    used = raws(kept)
    seen = set(used)
    for _ in range(40):
        with_others = devices.open("cuda:0", 0, hosted=False)
        its = raws(with_others)
        assert not its & used
        seen |= its
        with_others.close()
    assert len(seen) == 6
    kept.close()


def test_streams_that_were_given_back_keep_device_and_priority(devices):
    for index in (0, 1, 0, 1):
        backend = devices.open(f"cuda:{index}", index, hosted=False)
        compute = backend.stream("compute", compute=True).raw
        assert {raw.device_index for raw in (backend.idle, compute)} == {index}
        assert (backend.idle.priority, compute.priority) == (-1, 0)
        backend.close()


def test_streams_of_a_device_that_broke_are_used_no_more(devices, monkeypatch):
    backend = devices.open("cuda:0", 0, hosted=False)
    used = raws(backend)

    def broken():
        raise RuntimeError("CUDA error: unspecified launch failure")

    for raw in used:
        monkeypatch.setattr(raw, "synchronize", broken, raising=False)
    backend.close()
    assert not raws(devices.open("cuda:0", 0, hosted=False)) & used
