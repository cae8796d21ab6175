import gc
import logging
import weakref
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gguf_pp.backend.base import OutOfMemory, is_out_of_memory
from gguf_pp.backend.sim import SimBackend, World
from gguf_pp.errors import PlacementError
from gguf_pp.pipeline.memory import Rung, climb_down, rungs
from gguf_pp.pipeline.ring import Ring

N_EMBD = 8
CELL_BYTES = 16


@pytest.fixture(autouse=True, scope="module")
def only_new_objects_are_collected():
    """The ladder collects garbage at every step; what was imported would be walked each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Device(SimBackend):
    """Fails the allocations whose numbers, counted from 0, are in `fails`."""

    def __init__(self, world, limit_bytes, fails=()):
        super().__init__(world, "dev", limit_bytes)
        self.fails = fails
        self.n_allocations = 0

    def reserve(self, n_bytes, what):
        self.n_allocations += 1
        if self.n_allocations - 1 in self.fails:
            raise OutOfMemory(self.name, what, n_bytes, 0)
        super().reserve(n_bytes, what)


class Tensors:
    """What an allocation holds, so that a test can see it die."""


class Stage:
    """Allocates what a stage of layers does, in that order: KV cache, real ring, scratch."""

    def __init__(self, backend, n_layers, born, *, first=False, last=False):
        self.backend, self.n_layers, self.first, self.last = backend, n_layers, first, last
        self.born = born
        self.ring = None
        self.n_bytes = 0
        self.kv = []

    def allocate(self, rung):
        held = Tensors()
        self.born.append(weakref.ref(held))
        for _ in range(self.n_layers):
            self._reserve(rung.ctx_size * CELL_BYTES, "KV cache")
            self.kv.append(held)
        self.ring = Ring(
            self.backend,
            rung.n_copies,
            rung.ubatch_size,
            N_EMBD,
            inp=not self.first,
            out=not self.last,
        )
        self._reserve(rung.ubatch_size * 100, "scratch")

    def _reserve(self, n_bytes, what):
        self.backend.reserve(n_bytes, what)
        self.n_bytes += n_bytes

    def release(self):
        self.kv.clear()
        if self.ring is not None:
            self.ring.release()
        self.backend.release(self.n_bytes)
        self.n_bytes = 0


class Run:
    """The ladder over two stages on one device."""

    def __init__(self, ladder, limit_bytes=1 << 40, fails=()):
        self.device = Device(World(), limit_bytes, fails)
        self.born = []
        self.stages = [
            Stage(self.device, 2, self.born, first=True),
            Stage(self.device, 1, self.born, last=True),
        ]
        self.tried = []
        self.baselines = []
        self.rung, self.result = climb_down(ladder, self.attempt, self.release)

    def attempt(self, rung):
        self.tried.append(rung)
        self.baselines.append(self.device.used_bytes)
        assert all(ref() is None for ref in self.born), "a failed attempt is still alive"
        for stage in self.stages:
            stage.allocate(rung)
        return self

    def release(self):
        for stage in self.stages:
            stage.release()


def needed(rung):
    """Bytes of one rung, summed up by hand: 3 layers, one edge with two buffers per copy."""
    kv = 3 * rung.ctx_size * CELL_BYTES
    copies = 2 * rung.n_copies * rung.ubatch_size * N_EMBD * 4
    return kv + copies + 2 * rung.ubatch_size * 100


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.DEBUG, logger="gguf_pp")
    return lambda: [(r.levelname, r.getMessage()) for r in caplog.records if r.name == "gguf_pp"]


def test_the_ladder_goes_down_copies_then_ubatch_then_context():
    assert rungs(Rung(4, 128, 2048), ctx_fixed=False) == [
        Rung(4, 128, 2048),
        Rung(2, 128, 2048),
        Rung(1, 128, 2048),
        Rung(1, 64, 2048),
        Rung(1, 32, 2048),
        Rung(1, 32, 1024),
        Rung(1, 32, 512),
    ]


@pytest.mark.parametrize(
    ("asked", "fixed", "expected"),
    [
        (Rung(2, 32, 512), False, [Rung(2, 32, 512), Rung(1, 32, 512)]),
        (Rung(1, 32, 512), False, [Rung(1, 32, 512)]),
        (Rung(1, 8, 100), False, [Rung(1, 8, 100)]),
        (Rung(1, 40, 600), False, [Rung(1, 40, 600), Rung(1, 32, 600), Rung(1, 32, 512)]),
        (Rung(3, 16, 1 << 20), True, [Rung(n, 16, 1 << 20) for n in (3, 2, 1)]),
    ],
)
def test_the_ladder_ends_at_the_floors(asked, fixed, expected):
    assert rungs(asked, ctx_fixed=fixed) == expected


@given(st.integers(1, 16), st.integers(1, 1 << 16), st.integers(1, 1 << 22), st.booleans())
def test_every_rung_is_smaller_in_one_thing_and_no_larger_in_another(n, ubatch, ctx, fixed):
    asked = Rung(n, ubatch, ctx)
    ladder = rungs(asked, ctx_fixed=fixed)
    assert ladder[0] == asked
    for above, below in pairwise(ladder):
        pairs = [
            (above.n_copies, below.n_copies),
            (above.ubatch_size, below.ubatch_size),
            (above.ctx_size, below.ctx_size),
        ]
        assert sorted(a > b for a, b in pairs) == [False, False, True]
        assert all(a >= b for a, b in pairs)
    if fixed:
        assert {rung.ctx_size for rung in ladder} == {ctx}


LADDER = rungs(Rung(4, 128, 2048), ctx_fixed=False)
N_ALLOCATIONS = 2 + 4 + 1 + 1 + 4 + 1  # KV, copies and scratch of two stages at the first rung


def test_what_fits_is_tried_once_and_logs_nothing(lines):
    run = Run(LADDER)
    assert (run.tried, run.rung, run.result) == (LADDER[:1], LADDER[0], run)
    assert run.device.n_allocations == N_ALLOCATIONS
    assert run.device.used_bytes == needed(LADDER[0])
    assert lines() == []


@pytest.mark.parametrize("k", range(N_ALLOCATIONS))
def test_wherever_an_attempt_fails_all_of_it_is_freed_before_the_next(k, lines):
    run = Run(LADDER, fails={k})
    assert run.tried == LADDER[:2]
    assert run.baselines == [0, 0]
    assert run.rung == LADDER[1]
    assert run.device.used_bytes == needed(LADDER[1])
    assert lines() == [("WARNING", "compute buffer allocation failed, retrying with n_copies=2")]
    run.release()
    assert run.device.used_bytes == 0


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, needed(LADDER[0]) + 10),
    st.sets(st.integers(0, 40), max_size=4),
)
def test_the_first_rung_that_fits_is_taken(limit, fails):
    fitting = [rung for rung in LADDER if needed(rung) <= limit]
    if not fitting:
        with pytest.raises(PlacementError):
            Run(LADDER, limit)
        return
    assert Run(LADDER, limit).rung == fitting[0]
    try:
        run = Run(LADDER, limit, fails)
    except PlacementError:
        assert fails
        return
    assert run.tried == LADDER[: LADDER.index(run.rung) + 1]
    assert set(run.baselines) == {0}
    assert run.device.used_bytes == needed(run.rung)


def test_each_rung_is_logged_and_the_last_failure_names_them_all(lines):
    with pytest.raises(PlacementError) as caught:
        Run(LADDER, 1000)
    assert lines() == [
        ("WARNING", "compute buffer allocation failed, retrying with n_copies=2"),
        ("WARNING", "compute buffer allocation failed, retrying without pipeline parallelism"),
        ("WARNING", "allocation failed, retrying with a ubatch of 64"),
        ("WARNING", "allocation failed, retrying with a ubatch of 32"),
        ("WARNING", "allocation failed, retrying with a context of 1024"),
        ("WARNING", "allocation failed, retrying with a context of 512"),
    ]
    assert str(caught.value).splitlines() == [
        "the model does not fit:",
        "  n_copies=4 ubatch=128 ctx=2048: dev: 32768 bytes for KV cache, 1000 free",
        "  n_copies=2 ubatch=128 ctx=2048: dev: 32768 bytes for KV cache, 1000 free",
        "  n_copies=1 ubatch=128 ctx=2048: dev: 32768 bytes for KV cache, 1000 free",
        "  n_copies=1 ubatch=64 ctx=2048: dev: 32768 bytes for KV cache, 1000 free",
        "  n_copies=1 ubatch=32 ctx=2048: dev: 32768 bytes for KV cache, 1000 free",
        "  n_copies=1 ubatch=32 ctx=1024: dev: 16384 bytes for KV cache, 1000 free",
        "  n_copies=1 ubatch=32 ctx=512: dev: 8192 bytes for KV cache, 1000 free",
    ]
    assert caught.value.hint


def test_a_context_that_was_asked_for_is_refused_rather_than_cut(lines):
    with pytest.raises(PlacementError) as caught:
        Run(rungs(Rung(2, 32, 4096), ctx_fixed=True), 1000)
    assert len(str(caught.value).splitlines()) == 1 + 2
    assert "ctx=4096" in str(caught.value)
    assert lines() == [
        ("WARNING", "compute buffer allocation failed, retrying without pipeline parallelism")
    ]


def test_after_the_last_rung_nothing_is_left_behind():
    released = []

    def attempt(rung):
        raise OutOfMemory("dev", "scratch", 2, 1)

    with pytest.raises(PlacementError) as caught:
        climb_down(LADDER[:2], attempt, lambda: released.append(True))
    assert released == [True, True]
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


def test_a_failed_attempt_is_dead_when_it_is_released_without_help_of_the_collector():
    born, alive = [], []

    def attempt(rung):
        mine = Tensors()
        born.append(weakref.ref(mine))
        if len(born) == 1:
            raise OutOfMemory("dev", "scratch", 2, 1)
        return rung

    gc.disable()
    try:
        climb_down(LADDER[:2], attempt, lambda: alive.append(born[0]()))
    finally:
        gc.enable()
    assert alive == [None]


def test_what_an_attempt_tied_into_a_knot_is_collected_before_the_next():
    born, kept = [], []

    def attempt(rung):
        assert all(ref() is None for ref in born)
        knot = Tensors()
        knot.itself = knot
        born.append(weakref.ref(knot))
        kept.append(knot)
        if len(born) == 1:
            raise OutOfMemory("dev", "scratch", 2, 1)
        return rung

    assert climb_down(LADDER[:2], attempt, kept.clear)[0] == LADDER[1]


LOOKALIKES = [
    OutOfMemory("dev", "scratch", 2, 1),
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore lines"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: …"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
    RuntimeError("CUDA error: out of memory"),
]


@pytest.mark.parametrize("failure", LOOKALIKES, ids=lambda exc: type(exc).__name__)
def test_an_allocation_failure_is_known_in_every_shape(failure):
    def attempt(rung):
        if rung == LADDER[0]:
            raise failure
        return rung

    assert is_out_of_memory(failure)
    assert climb_down(LADDER, attempt, lambda: None)[0] == LADDER[1]


def test_a_real_failure_of_the_allocator_is_known():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 45, dtype=torch.float64)
    assert is_out_of_memory(caught.value)


def test_a_failure_is_told_in_one_line_even_if_it_has_none():
    def attempt(rung):
        raise LOOKALIKES[2] if rung.n_copies > 2 else MemoryError

    with pytest.raises(PlacementError) as caught:
        climb_down(LADDER[:2], attempt, lambda: None)
    assert [line.rpartition("2048: ")[2] for line in str(caught.value).splitlines()[1:]] == [
        "CUDA out of memory. Tried to allocate 2 GiB",
        "MemoryError",
    ]


@pytest.mark.parametrize(
    "failure", [RuntimeError("shape mismatch"), ValueError("bad"), KeyboardInterrupt()]
)
def test_any_other_failure_passes_through_at_once(failure, lines):
    tried = []

    def attempt(rung):
        tried.append(rung)
        raise failure

    with pytest.raises(type(failure)):
        climb_down(LADDER, attempt, lambda: None)
    assert tried == LADDER[:1]
    assert lines() == []
