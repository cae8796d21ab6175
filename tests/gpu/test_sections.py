"""Sections of the script for a GPU, as far as they go without one.

The scheduler and the ladder run on the double of torch, kernels in Triton's interpreter where
Triton is installed, models and a worker on the CPU.
"""

from functools import partial

import pytest
import torch

from gguf_pp import triton
from gguf_pp.backend import cuda_edges
from gguf_pp.pipeline.executor import Executor
from tests.cuda_double import Double
from tests.gpu import (
    attending,
    cases,
    choosing,
    kernels,
    memory,
    mixing,
    rig,
    schedule,
    speed,
)
from tests.gpu.heard import Heard
from tests.quantized import T

# The scheduler, on the double of torch.


class DoubleKernels:
    """Launches on the double, a new one for every run."""

    width = 2

    def __init__(self):
        self._n_runs = 0

    def begin(self, ubatches):
        self.api = Double(n_devices=1, seed=self._n_runs, copy_s=1e-5)
        self._n_runs += 1

    def spin(self, seconds):
        self.api.launch("spin", [], [], lambda: None, seconds)

    def copy(self, dst, src):
        self.api.launch("copy", [src], [dst], lambda: dst.data.copy_(src.data), 0)

    def poison(self, dst):
        self.api.launch("poison", [], [dst], lambda: dst.data.fill_(torch.nan), 0)

    def affine(self, dst, src, a, b):
        def work():
            x = torch.tensor(src)[:, None] if isinstance(src, tuple) else src.data
            dst.data.copy_(x * a + b)

        self.api.launch("affine", [] if isinstance(src, tuple) else [src], [dst], work, 0)

    def on_host(self, rows):
        return rows.read()


@pytest.fixture
def small_self_tests(monkeypatch):
    monkeypatch.setattr(cuda_edges, "TEST_BYTES", (256,))


def test_overlap_and_order_are_found_where_they_are(small_self_tests):
    heard = Heard()
    schedule.check_overlap("", heard.report, DoubleKernels())
    assert heard.faults == []
    assert len(heard.figures) == 6
    for name, figures in heard.figures.items():
        assert figures["of_ideal"] == pytest.approx(1, abs=0.05)
        n_stages = int(name[0])
        assert figures["at_once"] == pytest.approx(n_stages * 12 / (11 + n_stages), rel=0.05)


def test_a_scheduler_without_overlap_is_a_fault(monkeypatch, small_self_tests):
    in_turn = partial(Executor, pipelined=False)
    monkeypatch.setattr(rig, "Executor", lambda *args, pipelined: in_turn(*args))
    heard = Heard()
    schedule.check_overlap("", heard.report, DoubleKernels())
    assert any("times the ideal" in fault for fault in heard.faults)


def test_races_are_noticed_for_each_wait_that_is_left_out(small_self_tests):
    heard = Heard()
    schedule.check_races("", heard.report, DoubleKernels(), n_sound=12)
    assert heard.faults == []
    assert heard.figures["wrong"] == 0
    noticed = heard.figures["mutants"]
    assert set(noticed) == set(rig.WAITS)
    assert all(seed is not None for seed in noticed.values())


def test_a_scheduler_that_forgets_a_wait_is_a_fault(monkeypatch, small_self_tests):
    real = rig.forget
    monkeypatch.setattr(rig, "forget", lambda wait, stages: None)
    heard = Heard()
    schedule.check_races("", heard.report, DoubleKernels(), n_sound=1, n_mutant=3)
    assert [fault[:20] for fault in heard.faults] == ["without the wait 'th"] * 4

    class Forgetful(Executor):
        def __init__(self, stages, *args, **kwargs):
            real("the next input is free", stages)
            super().__init__(stages, *args, **kwargs)

    monkeypatch.setattr(rig, "Executor", Forgetful)
    heard = Heard()
    schedule.check_races("", heard.report, DoubleKernels(), n_sound=12, n_mutant=1)
    assert any("runs gave wrong results" in fault for fault in heard.faults)


def test_what_is_used_of_torch_beside_the_double_is_there():
    for name in ("_sleep", "set_sync_debug_mode", "set_per_process_memory_fraction"):
        assert hasattr(torch.cuda, name), name


# Memory.


def ladder(monkeypatch, double):
    monkeypatch.setattr(memory, "ROWS", 1 << 8)
    monkeypatch.setattr(memory, "COLS", 1 << 8)
    monkeypatch.setattr(memory, "COPY_BYTES", 4 << 16)

    def cap(n_bytes):
        double.refuses_above_bytes = double.total_bytes if n_bytes is None else n_bytes

    heard = Heard()
    memory.check("", heard.report, double, cap)
    return heard


def test_the_ladder_is_right_on_the_double(monkeypatch):
    heard = ladder(monkeypatch, Double(n_devices=1))
    assert heard.faults == []
    assert heard.figures == {"under_a_limit": 3, "under_a_refusal": 3, "left_bytes": 0}


def test_a_ladder_that_keeps_a_failed_rung_is_a_fault(monkeypatch):
    double, kept = Double(n_devices=1), []
    real = double.empty

    def empty(shape, **kwargs):
        kept.append(real(shape, **kwargs))
        return kept[-1]

    double.empty = empty
    with pytest.raises(Exception, match="does not fit"):
        ladder(monkeypatch, double)


# Kernels.


@pytest.fixture
def interpreted(monkeypatch):
    import tests.interpreted  # noqa: F401 - skips where there is no Triton

    assert triton.is_interpreted()
    monkeypatch.setattr(kernels, "OPS_ROWS", (1,))


SMALL = cases.Shape(3, 100, (3,), (9,))


@pytest.mark.parametrize("name", ["Q4_0", "F16"])
def test_types_are_right_in_the_interpreter(interpreted, name):
    heard = Heard()
    kernels.check(name, heard.report, "cpu", (SMALL,))
    assert heard.faults == []
    assert heard.figures["ops"]["triton exact"] < kernels.EXACT


def test_a_kernel_that_is_off_is_a_fault(interpreted, monkeypatch):
    from gguf_pp.triton import multiply

    real = multiply.gemv_int8

    def off(x, w, out, **addends):
        real(x, w, out, **addends)
        out[-1, -1] += out.abs().max()
        return out

    monkeypatch.setattr(multiply, "gemv_int8", off)
    heard = Heard()
    kernels.check("Q8_0", heard.report, "cpu", (SMALL,))
    said = " ".join(heard.faults)
    assert "int8 of 3 rows is off by" in said and "triton default, 1 rows" in said
    assert "exact" not in said


def test_types_without_kernels_are_right_through_torch(monkeypatch):
    monkeypatch.setattr(kernels, "OPS_ROWS", (2,))
    heard = Heard()
    kernels.check_others(heard.report, "cpu", SMALL)
    assert heard.faults == []
    assert "IQ2_XS" in heard.figures


def test_attention_is_right_in_the_interpreter(interpreted, monkeypatch):
    monkeypatch.setattr(attending, "MANNERS", ({"window": 130, "softcap": 30.0},))
    heard = Heard()
    for part in ("attention", "attention 80"):
        kernels.check(part, heard.report, "cpu")
    assert heard.faults == []
    assert 0 < heard.figures["decode"] < 5e-6


def test_tokens_are_chosen_as_on_the_host_and_others_are_told(monkeypatch):
    monkeypatch.setattr(choosing, "SIZES", ((3, 1000), (2, 5000)))
    heard = Heard()
    choosing.check_choosing(heard.report, "cpu")
    assert heard.faults == []
    monkeypatch.setattr(choosing, "host_token", lambda row, choice: 0)
    choosing.check_choosing(heard.report, "cpu")
    assert len(heard.faults) == len(choosing.KINDS) * len(choosing.SIZES)


def test_experts_are_mixed_as_in_float64(monkeypatch):
    if triton.why_unusable(torch.device("cpu")) is None:
        from gguf_pp.triton import multiply

        # The interpreter takes its time for each program, however much that computes.
        sizes = multiply._gemv_sizes
        monkeypatch.setattr(multiply, "_gemv_sizes", lambda *args: (sizes(*args)[0], 64))
    for name, value in {"N_ROWS": (1, 9), "N_EXPERTS": 4, "WIDTH": 32, "N_FF": 32}.items():
        monkeypatch.setattr(mixing, name, value)
    heard = Heard()
    kernels.check("mix Q8_0", heard.report, "cpu")
    assert heard.faults == []
    assert 0 < heard.figures["default"] < mixing.ROUNDED


def test_canaries_tell_what_is_written_beside_a_result_and_what_is_not_written():
    framed = cases.Framed(2, 3, "cpu")
    assert not framed.is_sound()
    framed.inner.fill_(1)
    assert framed.is_sound()
    framed._whole[0, 0] = 1
    assert not framed.is_sound()


def test_not_a_number_is_off():
    w = torch.ones(2, 4, dtype=torch.float64)
    x = torch.ones(1, 4)
    assert cases.worst(x @ w.float().t(), x, w) == 0
    assert not cases.worst(torch.full((1, 2), torch.nan), x, w) <= 1


def test_rows_that_repeat_are_the_same_rows():
    raw = cases.raw_of(T.Q6_K, 2, 512)
    once, thrice = (cases.planes_of(raw, "cpu", n) for n in (1, 3))
    assert thrice.n_rows == 6 and thrice.n_bytes == 3 * once.n_bytes
    wanted = cases.weights_of(raw, "cpu").float()
    got = thrice.dequantize(torch.empty(6, 512))
    assert torch.equal(got, wanted.repeat(3, 1))


# Tables.


def test_the_crossover_table_says_which_way_is_fastest_and_what_the_limits_cost():
    times = {
        "gemv": {1: 1.0, 8: 9.0},
        "gemm": {1: 4.0, 8: 5.0, 64: 8.0, 128: 30.0},
        "mm": {1: 20.0, 8: 20.0, 64: 20.0, 128: 21.0},
    }
    table = speed.table_of(times)
    assert table["fastest"] == ["gemv", "gemm", "gemm", "mm"]
    assert table["fastest_up_to"] == {"gemv": 1, "gemm": 64, "mm": 128}
    assert table["default_loses"] == {"rows": 8, "times": 9 / 5}
    assert table["us"]["gemv"] == [1.0, 9.0]
