"""Triton's kernels, interpreted, against the library and their twins in torch.

What this cannot see: types that do not compile, memory in which threads meet, speed; that is for
`test_triton_aot` and a GPU.
"""

from dataclasses import replace

import gguf.quants
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import interpreted  # noqa: F401

# isort: split
from gguf_pp.ops.torch_ops import rms_norm
from gguf_pp.triton import (
    decode_kernels,
    multiply,
    multiply_torch,
    quantize_torch,
    why_unusable,
)
from gguf_pp.triton.linear import Limits, MatrixOps
from gguf_pp.triton.planes import to_planes
from tests.quantized import BLOCKS, PLAIN, T, name_of, random_raw, random_x, weights, width, worst

CANARY = -12345.0
N_ROWS = 6  # one program and a half


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """Interpreting a program takes 0.2 s: have each take the most rows that it ever does."""
    monkeypatch.setattr(multiply, "MANY_ROWS", 0)


def planes_of(raw):
    return to_planes(raw.type, raw.n_cols, [torch.from_numpy(raw.data)], torch.device("cpu"))


def framed(*shape, dtype=torch.float32):
    """A tensor in the middle of a larger one that is full of canaries."""
    whole = torch.full((shape[0] + 2, shape[1] + 8), CANARY, dtype=dtype)
    return whole, whole[1:-1, 4:-4]


def assert_unharmed(whole):
    inner = whole[1:-1, 4:-4]
    assert not (inner == whole[0, 0]).any()
    assert int((whole == whole[0, 0]).sum()) == whole.numel() - inner.numel()


def near(got, want):
    return torch.allclose(got, want, rtol=1e-4, atol=2e-6 * float(want.abs().max()))


@pytest.mark.parametrize("type", BLOCKS, ids=name_of)
def test_weights_are_those_of_the_library_bit_for_bit(type):
    raw = random_raw(type, 5, width(type, 800))
    w, expected = planes_of(raw), weights(raw)
    ids = torch.tensor([4, 0, 4])
    whole = torch.full((5, raw.n_cols), CANARY)
    got = multiply.dequantize(w, whole[1:4], ids=ids)
    assert torch.equal(got, expected[ids].float())
    assert torch.equal(got, multiply_torch.dequantize(w, torch.empty(3, raw.n_cols), ids=ids))
    assert (whole[::4] == CANARY).all()


def test_weights_are_dequantized_to_halves_with_their_gain():
    raw = random_raw(T.Q4_K, 3, 512)
    w = planes_of(raw)
    out = [torch.empty(3, 512, dtype=torch.float16) for _ in range(2)]
    got = multiply.dequantize(w, out[0], gain=w.gain)
    assert torch.equal(got, multiply_torch.dequantize(w, out[1], gain=w.gain))


@pytest.mark.parametrize("type", BLOCKS, ids=name_of)
def test_few_rows_are_multiplied_in_int8(type):
    t_rows = 3
    raw = random_raw(type, N_ROWS, width(type, 800))
    w, x = planes_of(raw), random_x(t_rows, raw.n_cols)
    rows = quantize_torch.quantize_int8(x)
    whole, out = framed(t_rows, N_ROWS)
    multiply.gemv_int8(rows, w, out)
    assert_unharmed(whole)
    rounded = rows.codes.double().view(t_rows, -1, 32) * rows.scales.double().unsqueeze(-1)
    assert worst(out, rounded.view(t_rows, -1), weights(raw)) < 2e-6
    assert worst(out, x, weights(raw)) < 4e-3
    assert near(out, multiply_torch.gemv_int8(rows, w, torch.empty(t_rows, N_ROWS)))


@pytest.mark.parametrize("type", BLOCKS, ids=name_of)
def test_few_rows_are_multiplied_exactly(type):
    raw = random_raw(type, N_ROWS, width(type, 800))
    w, x = planes_of(raw), random_x(2, raw.n_cols)
    whole, out = framed(2, N_ROWS)
    multiply.gemv_exact(quantize_torch.transposed(x), w, out)
    assert_unharmed(whole)
    assert worst(out, x, weights(raw)) < 2e-6


@pytest.mark.parametrize("type", PLAIN, ids=name_of)
@pytest.mark.parametrize("n_cols", [8, 296])
def test_plain_weights_are_multiplied_exactly(type, n_cols):
    raw = random_raw(type, 3, n_cols)
    w, x = planes_of(raw), random_x(3, n_cols)
    whole, out = framed(3, 3)
    multiply.gemv_plain(x, w, out)
    assert_unharmed(whole)
    assert worst(out, x, weights(raw)) < 2e-6


@pytest.mark.parametrize("type", BLOCKS, ids=name_of)
def test_some_rows_are_multiplied_in_halves(type):
    raw = random_raw(type, N_ROWS, width(type, 400))
    w, x = planes_of(raw), random_x(9, raw.n_cols)
    rows = quantize_torch.quantize_half(x, is_transposed=True)
    whole, out = framed(9, N_ROWS)
    multiply.gemm(rows, w, out)
    assert_unharmed(whole)
    assert worst(out, x, weights(raw)) < 3e-4
    twin = multiply_torch.gemm(rows, w, torch.empty(9, N_ROWS))
    assert near(out, twin)


def prmt(low, high, selector):
    """Four of eight bytes, chosen by the lowest four nibbles of `selector`, as PTX says it."""
    choice = [selector >> (4 * i) & 15 for i in range(4)]
    assert max(choice) < 8  # above, the sign of the byte is repeated
    taken = (low | high << 32).to_bytes(8, "little")
    return int.from_bytes(bytes(taken[i] for i in choice), "little")


PTX = {
    "and.b32": int.__and__,
    "or.b32": int.__or__,
    "shr.u32": int.__rshift__,
    "mov.b32": int,
    "prmt.b32": prmt,
}


def run_ptx(code, word):
    registers = {"$2": word}
    for line in code.strip("{} ").split("; "):
        operation, target, *operands = line.strip(";").replace(",", "").split()
        if operation != ".reg":
            values = [registers[o] if o in registers else int(o, 0) for o in operands]
            registers[target] = PTX[operation](*values)
    return registers["$0"], registers["$1"]


@pytest.mark.parametrize("name", ["IQ4", "MXFP4"])
@given(word=st.integers(0, 2**32 - 1))
def test_the_assembly_looks_up_what_the_interpreter_does(name, word):
    owner = {"IQ4": gguf.quants.IQ4_NL, "MXFP4": gguf.quants.MXFP4}[name]
    nibbles = [word >> (4 * i) & 15 for i in range(8)]
    expected = [
        int.from_bytes(np.int8([owner.kvalues[i] for i in half]).tobytes(), "little")
        for half in (nibbles[::2], nibbles[1::2])
    ]
    code = getattr(decode_kernels, f"_{name}_ASM").value
    assert list(run_ptx(code, word)) == expected


def among_nan(tensor):
    """The same rows with one of all bits set, which floats read as NaN, before and behind them."""
    as_bytes = tensor.contiguous().view(torch.uint8)
    whole = as_bytes.new_full((len(tensor) + 2, *as_bytes.shape[1:]), 0xFF)
    whole[1:-1] = as_bytes
    return whole[1:-1].view(tensor.dtype)


def test_a_small_matrix_is_split_along_its_columns(monkeypatch):
    monkeypatch.setattr(multiply, "MIN_GEMM_LOOPS", 1)
    raw = random_raw(T.Q8_0, 3, 576)  # 36 chunks, 16 to a step
    w, x = planes_of(raw), random_x(9, 576)
    rows = quantize_torch.quantize_half(x, is_transposed=True)
    bias, add = torch.randn(3), torch.randn(9, 3)
    for n_programs, n_launched in ((2, 2), (512, 3)):
        monkeypatch.setattr(multiply, "GEMM_PROGRAMS", n_programs)
        step = multiply._split_chunks(multiply.gemm_launch(T.Q8_0, 9), 3, 36)
        assert -(-36 // step) == n_launched
        whole, out = framed(9, 3)
        multiply.gemm(rows, w, out)
        assert_unharmed(whole)
        assert worst(out, x, weights(raw)) < 3e-4
        added = multiply.gemm(rows, w, torch.empty(9, 3), bias=bias, add=add)
        assert torch.equal(added, out + bias + add)


@pytest.mark.parametrize("type", [T.Q4_0, T.Q3_K, T.Q4_K], ids=name_of)
def test_nothing_beyond_the_rows_is_read(type):
    raw = random_raw(type, 3, width(type, 800))
    w, x = planes_of(raw), random_x(3, raw.n_cols)
    guarded = replace(w, planes={name: among_nan(plane) for name, plane in w.planes.items()})
    rows = quantize_torch.quantize_int8(x)
    half = quantize_torch.quantize_half(x, is_transposed=True)
    out, again = torch.empty(3, 3), torch.empty(3, 3)
    guarded_rows = quantize_torch.Int8Rows(*(among_nan(part) for part in rows))
    multiply.gemv_int8(guarded_rows, guarded, out)
    assert torch.equal(out, multiply.gemv_int8(rows, w, again))
    guarded_half = half._replace(values=among_nan(half.values))
    multiply.gemm(guarded_half, guarded, out)
    assert torch.equal(out, multiply.gemm(half, w, again))


@pytest.mark.parametrize("scale", [2**-24, 2**-14, 60000.0])
@pytest.mark.parametrize("type", [T.Q4_0, T.Q8_0], ids=name_of)
def test_extreme_scales_keep_their_size(type, scale):
    raw = random_raw(type, 2, 256)
    blocks = torch.from_numpy(raw.data).view(16, -1)
    blocks[:, :2] = torch.tensor([scale], dtype=torch.float16).view(torch.uint8)
    w, x = planes_of(raw), random_x(9, 256)
    halves = quantize_torch.quantize_half(x, is_transposed=True)
    assert worst(multiply.gemm(halves, w, torch.empty(9, 2)), x, weights(raw)) < 3e-4
    out = multiply.gemv_int8(quantize_torch.quantize_int8(x[:1]), w, torch.empty(1, 2))
    assert worst(out, x[:1], weights(raw)) < 4e-3


def test_bias_and_addend_are_added():
    raw, x = random_raw(T.Q8_0, 2, 64), random_x(9, 64)
    w, bias, add = planes_of(raw), torch.randn(2), torch.randn(9, 4)[:, :2]
    out = torch.empty(9, 4)[:, :2]
    for rows, multiplied in (
        (quantize_torch.quantize_int8(x), multiply.gemv_int8),
        (quantize_torch.transposed(x), multiply.gemv_exact),
        (quantize_torch.quantize_half(x, is_transposed=True), multiply.gemm),
    ):
        plain = multiplied(rows, w, out).clone()
        assert torch.equal(multiplied(rows, w, out, bias=bias, add=add), plain + bias + add)


@pytest.mark.parametrize("multiplied", [multiply.gemv_int8, multiply.gemv_exact, multiply.gemm])
def test_a_row_does_not_depend_on_other_rows(multiplied):
    raw, x = random_raw(T.Q4_K, 4, 1280), random_x(17 if multiplied is multiply.gemm else 8, 1280)
    made = {
        multiply.gemv_int8: quantize_torch.quantize_int8,
        multiply.gemv_exact: quantize_torch.transposed,
        multiply.gemm: lambda x: quantize_torch.quantize_half(x, is_transposed=True),
    }[multiplied]
    w = planes_of(raw)
    together = multiplied(made(x), w, torch.empty(len(x), 4))
    alone = multiplied(made(x[5:6]), w, torch.empty(1, 4))
    assert torch.equal(alone, together[5:6])


def test_a_weight_row_does_not_depend_on_how_many_a_program_takes(monkeypatch):
    raw, rows = random_raw(T.Q6_K, 3, 1280), quantize_torch.quantize_int8(random_x(2, 1280))
    w = planes_of(raw)
    four = multiply.gemv_int8(rows, w, torch.empty(2, 3))
    monkeypatch.setattr(multiply, "MANY_ROWS", 1 << 30)
    assert torch.equal(multiply.gemv_int8(rows, w, torch.empty(2, 3)), four)


def test_the_interpreter_counts_as_a_device():
    assert why_unusable(torch.device("cpu")) is None


def called(monkeypatch, t_rows, type, **how):
    """The kernels that one product of `t_rows` rows goes through."""
    names = []
    for name in ("gemv_int8", "gemv_exact", "gemv_plain", "gemm", "dequantize"):
        real = getattr(multiply_torch, name)

        def spied(*args, name=name, real=real, **kwargs):
            names.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(multiply, name, spied)
    raw, x = random_raw(type, 3, 256), random_x(t_rows, 256)
    ops = MatrixOps("cpu", limits=Limits(gemv=2, gemm=4))
    y = ops.linear(x, ops.matrix([raw]), bias=torch.zeros(3), **how)
    assert worst(y, x, weights(raw)) < (2e-6 if how else 4e-3)
    return names


@pytest.mark.parametrize(
    ("t_rows", "type", "how", "names"),
    [
        (2, T.Q4_0, {}, ["gemv_int8"]),
        (2, T.Q4_0, {"exact": True}, ["gemv_exact"]),
        (2, T.F16, {}, ["gemv_plain"]),
        (4, T.Q4_0, {}, ["gemm"]),
        (4, T.Q4_0, {"exact": True}, ["dequantize"]),
        (4, T.F16, {}, []),
        (4, T.BF16, {}, []),
        (4, T.BF16, {"exact": True}, []),
        (4, T.F32, {}, []),
        (5, T.Q4_0, {}, ["dequantize"]),
        (2, T.IQ2_XS, {}, []),
        (5, T.IQ2_XS, {}, []),
    ],
)
def test_the_number_of_rows_decides_the_way(monkeypatch, t_rows, type, how, names):
    assert called(monkeypatch, t_rows, type, **how) == names


def test_parts_of_several_types_share_one_result():
    raws = [random_raw(T.Q4_0, 3, 256), random_raw(T.F16, 2, 256), random_raw(T.Q6_K, 1, 256)]
    ops = MatrixOps("cpu")
    x, weight, add = random_x(2, 256), torch.randn(256), torch.randn(2, 6)
    w = ops.matrix(raws)
    normed = rms_norm(x, weight, 1e-5)
    for exact in (False, True):
        y = ops.linear(ops.prepared(x, (weight, 1e-5)), w, exact=exact, add=add) - add
        assert worst(y, normed, weights(*raws)) < (1e-5 if exact else 1e-2)
    assert torch.equal(ops.rows(w, torch.tensor([5, 1])), weights(*raws)[[5, 1]].float())
