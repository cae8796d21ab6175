import subprocess
import sys
import threading

import gguf.quants
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as T

from gguf_pp.errors import FormatError, UnsupportedError
from gguf_pp.native import kernels, start_team
from gguf_pp.quants.planes import PlaneMatrix, split_experts
from gguf_pp.quants.raw import RawTensor

MODULE = kernels()
pytestmark = pytest.mark.skipif(MODULE is None, reason="the kernels are not built")

# Where the float16 of a block are.
HALVES = {
    **dict.fromkeys((T.Q4_0, T.Q5_0, T.Q8_0, T.IQ4_NL, T.IQ4_XS, T.IQ1_S), (0,)),
    **dict.fromkeys((T.IQ2_XXS, T.IQ2_XS, T.IQ2_S, T.IQ3_XXS, T.IQ3_S), (0,)),
    **dict.fromkeys((T.Q4_1, T.Q5_1, T.Q4_K, T.Q5_K), (0, 2)),
    **{T.Q2_K: (80, 82), T.Q3_K: (108,), T.Q6_K: (208,), T.TQ1_0: (52,), T.TQ2_0: (64,)},
}
FLOATS = (T.F32, T.F16, T.BF16)
ALL = tuple(t for t in T if MODULE and t in MODULE.PLANE_TYPES)
QUANTIZED = tuple(t for t in ALL if t not in FLOATS)
OFTEN_USED = (T.Q4_1, T.Q8_0, T.Q4_K, T.Q5_0, T.Q6_K, T.IQ3_S)
MIN_INT8_COLS = 512
each_type = pytest.mark.parametrize("type", ALL, ids=lambda t: t.name)
each_quantized = pytest.mark.parametrize("type", QUANTIZED, ids=lambda t: t.name)
each_mode = pytest.mark.parametrize("exact", [False, True], ids=["int8", "exact"])


@pytest.fixture(scope="module")
def team():
    team = start_team(1)
    yield team
    team.close()


@pytest.fixture(scope="module")
def pair():
    team = start_team(2)
    yield team
    team.close()


def n_cols_of(type):
    """Not a multiple of the 256 columns that the exact kernel takes at once, where that may be."""
    return {1: 301, 32: 544, 64: 576, 256: 768}[GGML_QUANT_SIZES[type][0]]


def set_scales(type, blocks, draw):
    """Write float16 scales and minimums to uint8 [n, type_size]; `draw` makes n at a time."""
    for first in HALVES.get(type, ()):
        scales = draw(len(blocks)).astype(np.float16)
        blocks[:, first : first + 2] = scales.view(np.uint8).reshape(-1, 2)
    if type is T.IQ1_M:  # its four nibbles stand on top of four words
        bits = draw(len(blocks)).astype(np.float16).view(np.uint16)
        for i in range(4):
            top = (bits >> 4 * i & 15).astype(np.uint8)
            blocks[:, 49 + 2 * i] = blocks[:, 49 + 2 * i] & 15 | top << 4


def random_raw(type, n_rows, n_cols=None, seed=0, draw=np.random.Generator.standard_normal):
    n_cols = n_cols or n_cols_of(type)
    rng = np.random.default_rng(seed)
    block_size, type_size = GGML_QUANT_SIZES[type]
    if type in FLOATS:
        values = rng.standard_normal((n_rows, n_cols), dtype=np.float32)
        data = gguf.quants.quantize(values, type).view(np.uint8)
    else:
        n_blocks = n_rows * n_cols // block_size
        data = rng.integers(0, 256, (n_blocks, type_size), dtype=np.uint8)
        set_scales(type, data, lambda n: 0.02 * draw(rng, n))
        if type is T.MXFP4:
            data[:, 0] = rng.integers(118, 124, n_blocks)
        if type is T.NVFP4:
            data[:, :4] = rng.integers(40, 72, (n_blocks, 4))
    data = data.reshape(n_rows, -1)
    data.flags.writeable = False
    return RawTensor(type.name, type, (n_rows, n_cols), data)


def weights_of(*raws):
    return np.concatenate([gguf.quants.dequantize(raw.data, raw.type) for raw in raws])


def random_x(n_rows, n_cols, seed=1):
    return torch.randn(n_rows, n_cols, generator=torch.Generator().manual_seed(seed))


def rounded_to_int8(x):
    groups = x.numpy().reshape(len(x), -1, 32)
    d = np.abs(groups).max(-1, keepdims=True) / np.float32(127)
    return (np.rint(groups / np.where(d > 0, d, 1)) * d.astype(np.float64)).reshape(x.shape)


def scaled_error(got, x, w):
    """Largest |error| / (|x| |W|ᵀ) against the product in float64."""
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    scale = np.abs(x) @ np.abs(w).T
    return (np.abs(got.numpy() - x @ w.T) / np.where(scale > 0, scale, 1)).max()


def product(matrix, x, team, exact, **extra):
    """`linear` into a buffer whose surroundings are checked."""
    n = len(x) * matrix.n_rows
    buffer = torch.full((n + 64,), 12345.0)
    out = buffer[32 : 32 + n].view(len(x), matrix.n_rows)
    assert matrix.linear(x, out, team=team, exact=exact, **extra) is out
    assert (buffer[:32] == 12345).all()
    assert (buffer[32 + n :] == 12345).all()
    assert out.isfinite().all()
    return out


def same_bits(a, b):
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@each_type
def test_rows_come_back_bit_for_bit(type, team):
    raw = random_raw(type, 37)
    matrix = PlaneMatrix.build([raw], team)
    out = torch.full((39, raw.n_cols), 7.0)
    matrix.dequantize(0, 37, out[1:38])
    assert same_bits(out[1:38], torch.from_numpy(weights_of(raw)))
    assert (out[0] == 7).all()
    assert (out[38] == 7).all()
    some = matrix.rows([36, 0, 8, 8], torch.empty(4, raw.n_cols))
    assert same_bits(some, out[1:38][[36, 0, 8, 8]])


@each_type
def test_planes_are_as_small_as_the_file(type, team):
    raw = random_raw(type, 64, 768)
    matrix = PlaneMatrix.build([raw], team)
    assert 0.97 < matrix.n_bytes / raw.n_bytes < 1.03


@each_mode
@each_type
def test_products_are_close_to_those_of_float64(type, exact, team):
    raw = random_raw(type, 37)
    x = random_x(33, raw.n_cols)
    got = product(PlaneMatrix.build([raw], team), x, team, exact)
    error = scaled_error(got, x, weights_of(raw))
    assert error < (2e-6 if exact or type in FLOATS else 4e-3)


@pytest.mark.parametrize("freedom", [3, 1000], ids=["heavy tails", "normal"])
@each_quantized
def test_no_width_is_too_narrow_for_int8_products(type, freedom, team):
    step = GGML_QUANT_SIZES[type][0]
    for n_cols in range(step, 1025, step if step == 256 else 3 * step):
        raw = random_raw(type, 32, n_cols, n_cols, lambda rng, n: rng.standard_t(freedom, n))
        x = random_x(16, n_cols, n_cols)
        matrix = PlaneMatrix.build([raw], team)
        got = product(matrix, x, team, exact=False)
        assert scaled_error(got, x, weights_of(raw)) < 4e-3, n_cols
        is_exact = same_bits(got, product(matrix, x, team, exact=True))
        assert is_exact == (n_cols < MIN_INT8_COLS)


@each_quantized
def test_int8_products_err_only_by_the_rounding_of_activations(type, team):
    raw = random_raw(type, 37)
    x = random_x(5, raw.n_cols)
    got = product(PlaneMatrix.build([raw], team), x, team, exact=False)
    assert scaled_error(got, rounded_to_int8(x), weights_of(raw)) < 2e-6


@each_mode
@pytest.mark.parametrize(
    "type",
    [t if t in OFTEN_USED else pytest.param(t, marks=pytest.mark.slow) for t in ALL],
    ids=lambda t: t.name,
)
def test_a_row_does_not_depend_on_its_company(type, exact, team, pair):
    raw = random_raw(type, 37)
    matrix = PlaneMatrix.build([raw], team)
    x = random_x(33, raw.n_cols)
    whole = product(matrix, x, team, exact)
    for n in range(1, 34):
        for first in {0, 33 - n, (33 - n) // 2}:
            rows = slice(first, first + n)
            for threads in (team, pair):
                assert same_bits(product(matrix, x[rows], threads, exact), whole[rows])


@each_mode
@pytest.mark.parametrize("type", OFTEN_USED, ids=lambda t: t.name)
def test_many_rows_equal_few(type, exact, team, pair):
    raw = random_raw(type, 72, 2048)
    matrix = PlaneMatrix.build([raw], pair)
    x = random_x(300, 2048)
    whole = product(matrix, x, pair, exact)
    for first in (0, 63, 127, 128, 255, 299):
        row = slice(first, first + 1)
        assert same_bits(product(matrix, x[row], team, exact), whole[row])


@pytest.mark.parametrize("byte", [0x00, 0x7F, 0x80, 0xFF])
@pytest.mark.parametrize("sign", [1, -1])
@each_quantized
def test_the_largest_sums_do_not_overflow(type, sign, byte, team):
    raw = random_raw(type, 16)
    data = np.full(raw.data.shape, byte, np.uint8).reshape(-1, GGML_QUANT_SIZES[type][1])
    set_scales(type, data, lambda n: np.full(n, 0.5))
    if type is T.MXFP4:
        data[:, 0] = 120
    raw = RawTensor("w", type, raw.shape, data.reshape(raw.data.shape))
    x = torch.full((5, raw.n_cols), float(sign))
    got = product(PlaneMatrix.build([raw], team), x, team, exact=False)
    assert scaled_error(got, x, weights_of(raw)) < 2e-6


@each_mode
@pytest.mark.parametrize("scale", [1e-30, 1e-10, 1e10, 1e30])
@each_type
def test_extreme_activations_lose_nothing(type, scale, exact, team):
    raw = random_raw(type, 9)
    x = random_x(6, raw.n_cols) * scale
    x[3] = 0
    got = product(PlaneMatrix.build([raw], team), x, team, exact)
    error = scaled_error(got, x, weights_of(raw))
    assert error < (2e-6 if exact or type in FLOATS else 4e-3)
    assert (got[3] == 0).all()


@each_mode
@each_quantized
def test_zero_scales_give_zeros(type, exact, team):
    raw = random_raw(type, 9)
    data = raw.data.copy().reshape(-1, GGML_QUANT_SIZES[type][1])
    set_scales(type, data, np.zeros)
    if type in (T.MXFP4, T.NVFP4):
        data[:, 1:] = 0
    raw = RawTensor("w", type, raw.shape, data.reshape(raw.data.shape))
    matrix = PlaneMatrix.build([raw], team)
    assert (product(matrix, random_x(6, raw.n_cols), team, exact) == 0).all()


@each_mode
def test_an_activation_that_is_not_finite_shows(exact, team):
    matrix = PlaneMatrix.build([random_raw(T.Q4_1, 9)], team)
    for bad in (torch.nan, torch.inf, -torch.inf):
        x = random_x(3, 544)
        x[1, 40] = bad
        out = matrix.linear(x, torch.empty(3, 9), team=team, exact=exact)
        assert not out[1].isfinite().any()
        assert out[[0, 2]].isfinite().all()


@each_mode
@pytest.mark.parametrize("type", [T.Q4_1, T.F16, T.IQ2_S], ids=lambda t: t.name)
def test_bias_and_addend_are_added_last(type, exact, team):
    raw = random_raw(type, 37)
    matrix = PlaneMatrix.build([raw], team)
    x, bias, add = random_x(7, raw.n_cols), random_x(1, 37, seed=2)[0], random_x(7, 37, seed=3)
    plain = product(matrix, x, team, exact)
    assert same_bits(product(matrix, x, team, exact, bias=bias), plain + bias)
    assert same_bits(product(matrix, x, team, exact, add=add), plain + add)
    assert same_bits(product(matrix, x, team, exact, bias=bias, add=add), plain + bias + add)
    matrix.linear(x, add, team=team, exact=exact, add=add)
    assert same_bits(add, plain + random_x(7, 37, seed=3))


@each_mode
def test_stacked_parts_equal_each_by_itself(exact, team, pair):
    types = (T.Q4_K, T.IQ2_S, T.Q6_K, T.F32, T.IQ1_S, T.Q8_0)
    raws = [random_raw(type, 13 + 8 * i, 768) for i, type in enumerate(types)]
    matrix = PlaneMatrix.build(raws, pair)
    assert matrix.n_rows == sum(raw.n_rows for raw in raws)
    x = random_x(6, 768)
    alone = [product(PlaneMatrix.build([raw], team), x, team, exact) for raw in raws]
    assert same_bits(product(matrix, x, pair, exact), torch.cat(alone, 1))
    everything = matrix.dequantize(0, matrix.n_rows, torch.empty(matrix.n_rows, 768))
    assert same_bits(everything, torch.from_numpy(weights_of(*raws)))


@each_mode
@pytest.mark.parametrize("type", [T.Q4_1, T.Q6_K, T.TQ2_0], ids=lambda t: t.name)
def test_experts_are_slices(type, exact, team):
    flat = random_raw(type, 4 * 11)
    raw = RawTensor(flat.name, type, (4, 11, flat.n_cols), flat.data)
    matrix = PlaneMatrix.build(split_experts(raw), team)
    x = random_x(3, flat.n_cols)
    whole = product(matrix, x, team, exact)
    for i in range(4):
        expert = matrix.slice_rows(11 * i, 11 * i + 11)
        assert (expert.n_rows, expert.n_cols) == (11, flat.n_cols)
        assert same_bits(product(expert, x, team, exact), whole[:, 11 * i : 11 * i + 11])


def test_a_slice_outlives_its_matrix_and_must_not_split_a_row_block(team):
    raw = random_raw(T.Q4_1, 37)
    matrix = PlaneMatrix.build([raw], team)
    inner = matrix.slice_rows(8, 32).slice_rows(8, 16)
    for first, stop in ((4, 16), (8, 17)):
        with pytest.raises(ValueError, match="not whole blocks of 8 rows"):
            matrix.slice_rows(first, stop)
    for first, stop in ((-8, 8), (8, 8), (32, 40)):
        with pytest.raises(ValueError, match="of 37"):
            matrix.slice_rows(first, stop)
    del matrix
    rows = inner.dequantize(0, 8, torch.empty(8, 544))
    assert same_bits(rows, torch.from_numpy(weights_of(raw))[16:24])


@each_mode
def test_two_teams_can_use_one_matrix_at_once(exact, team):
    matrix = PlaneMatrix.build([random_raw(T.Q4_1, 200)], team)
    x = random_x(9, 544)
    want = product(matrix, x, team, exact)
    results = []

    def work():
        own = start_team(2)
        same = [same_bits(product(matrix, x, own, exact), want) for _ in range(50)]
        own.close()
        results.append(all(same))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True, True]


def test_wrong_tensors_never_reach_a_kernel(team):
    matrix = PlaneMatrix.build([random_raw(T.Q4_1, 9)], team)
    x, out = random_x(2, 544), torch.empty(2, 9)
    wrong = [
        {"x": random_x(2, 543)},
        {"x": x.double()},
        {"x": random_x(544, 2).T},
        {"x": random_x(3, 544)},
        {"out": torch.empty(2, 8)},
        {"out": torch.empty(9, 2).T},
        {"bias": torch.empty(8)},
        {"add": torch.empty(9)},
        {"x": x.to("meta")},
    ]
    for change in wrong:
        with pytest.raises(ValueError, match="wanted"):
            matrix.linear(**{"x": x, "out": out, "team": team, "exact": True, **change})
    for ids in ([9], [-1], [0, 1 << 40]):
        with pytest.raises(IndexError):
            matrix.rows(ids, torch.empty(len(ids), 544))
    with pytest.raises(TypeError, match="expected a Team"):
        matrix.linear(x, out, team=1, exact=True)


def test_no_rows_are_no_work(team):
    matrix = PlaneMatrix.build([random_raw(T.Q4_1, 9)], team)
    assert product(matrix, torch.empty(0, 544), team, exact=False).shape == (0, 9)
    assert matrix.rows([], torch.empty(0, 544)).shape == (0, 544)


def test_parts_that_do_not_fit_are_refused(team):
    parts = [random_raw(T.Q4_1, 8, 544), random_raw(T.Q4_1, 8, 576)]
    with pytest.raises(FormatError, match="has 576 columns, Q4_1 has 544"):
        PlaneMatrix.build(parts, team)
    with pytest.raises(UnsupportedError, match="Q8_K"):
        PlaneMatrix.build([RawTensor("w", T.Q8_K, (1, 256), np.zeros((1, 292), np.uint8))], team)
    data = np.zeros((2, 19), np.uint8)
    for n_cols, part in (
        (32, (int(T.Q4_1), 0, 2, data)),
        (48, (int(T.Q4_1), 0, 2, data)),
        (32, (int(T.I32), 0, 2, data)),
        (32, (int(T.Q4_1), -1, 2, data)),
    ):
        with pytest.raises(ValueError, match=r"bytes|fit|no planes"):
            MODULE.Planes(n_cols, (part,), team)


@pytest.mark.parametrize("type", [T.F64, T.I8, T.I16, T.I32], ids=lambda t: t.name)
def test_other_numbers_become_float32(type, team):
    values = np.random.default_rng(0).integers(-99, 99, (9, 40))
    data = values.astype({"F64": "f8", "I8": "i1", "I16": "i2", "I32": "i4"}[type.name])
    raw = RawTensor("w", type, (9, 40), data.view(np.uint8))
    matrix = PlaneMatrix.build([raw, random_raw(T.F16, 3, 40)], team)
    assert matrix.rows([8, 0], torch.empty(2, 40)).tolist() == values[[8, 0]].tolist()
    x = random_x(3, 40)
    assert scaled_error(product(matrix, x, team, exact=False)[:, :9], x, values) < 2e-6


def test_a_codebook_is_taken_only_whole_and_is_needed_first():
    for type, n_bytes in ((T.IQ1_S, 8 * 2047), (T.IQ3_S, 8 * 512), (T.Q4_1, 8), (T.I32, 8)):
        with pytest.raises(ValueError, match=f"no codebook of {n_bytes} bytes"):
            MODULE.Planes.set_codebook(int(type), bytes(n_bytes))
    code = "from gguf_pp.native._kernels import *; Planes(256, ((19, 0, 1, bytes(50)),), Team(1))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ValueError: the codebook of type 19 was not set" in done.stderr
