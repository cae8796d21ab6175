"""What runs where there is no Triton, and what its kernels are held against."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gguf import GGML_QUANT_SIZES

import gguf_pp.triton
from gguf_pp.ops.torch_ops import rms_norm
from gguf_pp.quants import reference
from gguf_pp.triton import multiply_torch, quantize_torch, why_unusable
from gguf_pp.triton.linear import MatrixOps
from tests.live import peak_bytes
from tests.quantized import BLOCKS, PLAIN, T, name_of, random_raw, random_x, weights, width, worst
from tests.test_quants_reference import KNOWN

QUANTIZED = [t for t in KNOWN if GGML_QUANT_SIZES[t][0] > 1]


def torch_ops(**settings):
    return MatrixOps("cpu", is_torch_only=True, **settings)


@pytest.mark.parametrize("type", [*QUANTIZED, *PLAIN], ids=name_of)
@pytest.mark.parametrize("t_rows", [1, 5, 70])
def test_every_type_is_multiplied_without_triton(type, t_rows):
    raw = random_raw(type, 9, width(type, 512))
    ops = torch_ops()
    x = random_x(t_rows, raw.n_cols)
    assert worst(ops.linear(x, ops.matrix([raw])), x, weights(raw)) < 2e-6


@pytest.mark.parametrize("type", [*BLOCKS, *PLAIN, T.IQ2_XS], ids=name_of)
def test_a_gpu_without_triton_multiplies_halves(type):
    raw = random_raw(type, 9, width(type, 512))
    ops = torch_ops(scratch_bytes=8 * raw.n_cols)
    ops._likes_halves = True
    x, w = random_x(3, raw.n_cols), ops.matrix([raw])
    assert worst(ops.linear(x, w), x, weights(raw)) < (4e-3 if type is T.BF16 else 3e-4)
    assert worst(ops.linear(x, w, exact=True), x, weights(raw)) < 2e-6


def test_a_scratch_of_one_row_does():
    raws = [random_raw(T.Q4_K, 5, 512), random_raw(T.F16, 3, 512)]
    x = random_x(4, 512)
    ops = torch_ops(scratch_bytes=4 * 512)
    assert worst(ops.linear(x, ops.matrix(raws)), x, weights(*raws)) < 2e-6


def test_pieces_of_a_matrix_begin_where_loads_are_wide():
    raw = random_raw(T.Q6_K, 100, 256)
    ops = torch_ops(scratch_bytes=4 * 256 * 37)
    w, x = ops.matrix([raw]), random_x(4, 256)
    ((_, part),) = w.parts()
    first_rows = [first for first, _, _ in ops._chunks(part, torch.float32)]
    assert first_rows == [0, 32, 64, 96]
    assert worst(ops.linear(x, w), x, weights(raw)) < 2e-6


@pytest.mark.parametrize("type", [T.Q4_K, T.Q8_0, T.MXFP4, T.IQ2_XS, T.BF16], ids=name_of)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_dequantizing_takes_little_beside_its_result(type, dtype, monkeypatch):
    monkeypatch.setattr(reference, "_CPU_STEP", reference._STEP)  # as on a CUDA device
    monkeypatch.setattr(multiply_torch, "PIECE_WEIGHTS", 1 << 19)
    raw = random_raw(type, 1024, 4096)
    ((_, w),) = torch_ops().matrix([raw]).parts()
    out = torch.empty(w.n_rows, w.n_cols, dtype=dtype)
    assert peak_bytes(multiply_torch.dequantize, w, out, gain=w.gain) < 15 << 19


def test_rows_that_are_asked_for_are_dequantized_piece_by_piece(monkeypatch):
    monkeypatch.setattr(multiply_torch, "PIECE_WEIGHTS", 2 * 512)
    ((_, w),) = torch_ops().matrix([random_raw(T.Q6_K, 7, 512)]).parts()
    ids = torch.tensor([6, 0, 3, 3, 5])
    half, whole = (torch.empty(5, 512, dtype=d) for d in (torch.float16, torch.float32))
    multiply_torch.dequantize(w, half, ids=ids, gain=w.gain)
    multiply_torch.dequantize(w, whole, ids=ids, gain=w.gain)
    assert torch.equal(half, whole.half())


def test_bias_and_addend_are_added_to_every_part():
    raws = [random_raw(T.Q8_0, 5, 64), random_raw(T.F32, 3, 64)]
    ops = torch_ops()
    w, x, bias, add = ops.matrix(raws), random_x(2, 64), torch.randn(8), torch.randn(2, 8)
    assert torch.equal(ops.linear(x, w, bias=bias, add=add), ops.linear(x, w) + bias + add)


def test_no_rows_are_multiplied_to_no_rows():
    ops = torch_ops()
    assert ops.linear(torch.empty(0, 64), ops.matrix([random_raw(T.Q8_0, 5, 64)])).shape == (0, 5)


def test_rows_are_looked_up_across_parts():
    raws = [random_raw(T.Q4_0, 5, 256), random_raw(T.IQ2_XS, 3, 256), random_raw(T.F16, 4, 256)]
    ops = torch_ops()
    ids = torch.tensor([11, 0, 6, 4, 0, 8])
    found = ops.rows(ops.matrix(raws), ids)
    assert torch.equal(found, weights(*raws)[ids].float())


def test_prepared_rows_are_normed():
    raw, x, weight = random_raw(T.Q5_1, 5, 64), random_x(3, 64), torch.randn(64)
    ops = torch_ops()
    y = ops.linear(ops.prepared(x, (weight, 1e-5)), ops.matrix([raw]))
    assert worst(y, rms_norm(x, weight, 1e-5), weights(raw)) < 2e-6


def test_the_reason_against_triton_is_kept_in_words(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "gguf_pp.triton.probe_kernels", raising=False)
    monkeypatch.delattr(gguf_pp.triton, "probe_kernels", raising=False)
    why_unusable.cache_clear()
    try:
        assert str(MatrixOps("cpu").why_torch).startswith("Triton does not load: ")
    finally:
        why_unusable.cache_clear()


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
from gguf_pp.triton import attention_torch, choose, launching, linear, matrix, mixture_torch
from gguf_pp.triton import multiply_torch, planes, quantize_torch, rope_torch, standing
from gguf_pp.triton.ops import DeviceOps
from tests.quantized import T, random_raw, random_x, weights, worst

for exact in (True, False):
    ops, raw, x = DeviceOps("cpu", exact=exact), random_raw(T.Q4_K, 9, 512), random_x(3, 512)
    assert ops.name == "torch cpu", ops.name
    assert str(ops._products.why_torch).startswith("Triton does not load: ")
    assert worst(ops.linear(x, ops.matrix([raw])), x, weights(raw)) < 4e-3
"""


def test_without_triton_all_loads_and_torch_computes():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "failure",
    [
        RuntimeError("Failed to find C compiler. Please specify via CC environment variable."),
        subprocess.CalledProcessError(1, ["gcc", "main.c"]),
        FileNotFoundError(2, "No such file or directory", "ptxas"),
        AssertionError("libcuda.so cannot found!"),
        None,
    ],
    ids=lambda failure: type(failure).__name__,
)
def test_a_first_kernel_that_fails_or_computes_nothing_is_the_reason(failure, monkeypatch):
    import tests.interpreted  # noqa: F401 - skips where there is no Triton
    from gguf_pp.triton import probe_kernels

    def launch(out):
        if failure is not None:
            raise failure

    monkeypatch.setattr(gguf_pp.triton, "is_interpreted", lambda: True)
    monkeypatch.setattr(probe_kernels, "count", {(1,): launch})
    why = why_unusable.__wrapped__(torch.device("cpu"))
    assert why.startswith("Triton")
    assert failure is None or str(failure) in why


def test_a_compiler_of_triton_is_not_asked_for_a_cpu(monkeypatch):
    monkeypatch.setattr(gguf_pp.triton, "is_interpreted", lambda: False)
    assert why_unusable.__wrapped__(torch.device("cpu")) is not None


@pytest.mark.parametrize("type", BLOCKS, ids=name_of)
def test_int8_activations_cost_little(type):
    raw = random_raw(type, 6, width(type, 768))
    ((_, w),) = torch_ops().matrix([raw]).parts()
    x = random_x(3, raw.n_cols)
    y = multiply_torch.gemv_int8(quantize_torch.quantize_int8(x), w, torch.empty(3, 6))
    assert worst(y, x, weights(raw)) < 4e-3


@pytest.mark.parametrize("type", BLOCKS, ids=name_of)
def test_halves_cost_less(type):
    raw = random_raw(type, 6, width(type, 768))
    ((_, w),) = torch_ops().matrix([raw]).parts()
    x = random_x(3, raw.n_cols)
    rows = quantize_torch.quantize_half(x, is_transposed=True)
    assert worst(multiply_torch.gemm(rows, w, torch.empty(3, 6)), x, weights(raw)) < 3e-4


def test_codes_scales_and_sums_agree():
    x = random_x(3, 96)
    rows = quantize_torch.quantize_int8(x)
    values = rows.codes.view(3, 3, 32) * rows.scales.unsqueeze(-1)
    assert torch.all((values - x.view(3, 3, 32)).abs() <= rows.scales.unsqueeze(-1) * 0.5001)
    assert torch.allclose(rows.sums.view(3, 6), values.view(3, 6, 16).sum(-1), rtol=1e-5, atol=1e-6)


def test_halves_of_int8_go_up():
    x = torch.zeros(1, 32)
    x[0, :4] = torch.tensor([127.0, 2.5, -2.5, 3.5])
    assert quantize_torch.quantize_int8(x).codes[0, :4].tolist() == [127, 3, -2, 4]


def test_extreme_rows_stay_finite_and_keep_their_size():
    x = torch.stack([torch.full((32,), v) for v in (0.0, 1e-45, 1e-37, 1e-30, 3e38)])
    rows = quantize_torch.quantize_int8(x)
    assert rows.codes[:, 0].tolist() == [0, 0, 0, 127, 127]
    assert torch.isfinite(rows.scales).all()
    half = quantize_torch.quantize_half(x, is_transposed=False)
    assert torch.isfinite(half.values).all() and half.values.abs().max() < 4
    back = half.values[3:].double() * half.scales[3:, None].double()
    assert torch.allclose(back, x[3:].double(), rtol=1e-3)


def test_transposing_twice_changes_nothing():
    x = torch.arange(64.0).view(2, 32)
    once = quantize_torch.transposed(x)
    assert once[0, :5].tolist() == [0, 4, 8, 12, 1]
    assert torch.equal(quantize_torch.transposed(once), x)
