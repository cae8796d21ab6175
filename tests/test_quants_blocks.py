import warnings

import gguf.quants
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from gguf_pp.errors import FormatError, UnsupportedError
from gguf_pp.quants.blocks import BlockMatrix, as_tensor
from gguf_pp.quants.raw import RawTensor

T = GGMLQuantizationType
N_COLS = 64
KINDS = (T.F32, T.F16, T.Q4_1, T.Q8_0)
SCRATCH = N_COLS * 5


def raw_tensor(type, n_rows, n_cols=N_COLS, seed=0, name="w"):
    weights = np.random.default_rng(seed).standard_normal((n_rows, n_cols), dtype=np.float32)
    data = gguf.quants.quantize(weights, type).view(np.uint8).reshape(n_rows, -1)
    data.flags.writeable = False
    return RawTensor(name, type, (n_rows, n_cols), data)


def weights_of(*raws):
    each = [gguf.quants.dequantize(raw.data, raw.type).astype(np.float32) for raw in raws]
    return torch.from_numpy(np.concatenate(each))


def product(matrix, x, n_scratch=SCRATCH):
    out = torch.full((len(x), matrix.n_rows), torch.nan)
    assert matrix.linear(x, out, torch.full((n_scratch,), torch.nan)) is out
    return out


def rows_of(matrix, ids):
    out = torch.full((len(ids), matrix.n_cols), torch.nan)
    assert matrix.rows(torch.tensor(ids, dtype=torch.int64), out) is out
    return out


def inputs(n_tokens, seed=1):
    return torch.randn(n_tokens, N_COLS, generator=torch.Generator().manual_seed(seed))


def assert_close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("type", KINDS, ids=lambda t: t.name)
@pytest.mark.parametrize("n_tokens", (1, 2, 7))
def test_a_product_equals_that_with_dequantized_weights(type, n_tokens):
    raw, x = raw_tensor(type, 23), inputs(n_tokens)
    assert_close(product(BlockMatrix([raw]), x), x @ weights_of(raw).T)


@pytest.mark.parametrize("n_tokens", (1, 3))
def test_the_size_of_the_scratch_does_not_matter(n_tokens):
    raw, x = raw_tensor(T.Q4_1, 23), inputs(n_tokens)
    for n_scratch in (N_COLS, N_COLS * 2 + 1, N_COLS * 23, N_COLS * 100):
        assert_close(product(BlockMatrix([raw]), x, n_scratch), x @ weights_of(raw).T)


def test_float32_needs_no_scratch():
    raw, x = raw_tensor(T.F32, 9), inputs(2)
    assert_close(product(BlockMatrix([raw]), x, n_scratch=0), x @ weights_of(raw).T)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.sampled_from(KINDS), st.integers(1, 9)), min_size=1, max_size=4),
    n_tokens=st.integers(1, 3),
)
def test_stacked_tensors_equal_separate_ones(sizes, n_tokens):
    raws = [raw_tensor(type, n, seed=i) for i, (type, n) in enumerate(sizes)]
    x = inputs(n_tokens)
    stacked = BlockMatrix(raws)
    separate = [product(BlockMatrix([raw]), x) for raw in raws]
    assert_close(product(stacked, x), torch.cat(separate, dim=1))
    assert (stacked.n_rows, stacked.n_cols) == (sum(n for _, n in sizes), N_COLS)
    assert stacked.n_bytes == sum(raw.n_bytes for raw in raws)


@settings(max_examples=40, deadline=None)
@given(ids=st.lists(st.integers(0, 16), max_size=12), n_parts=st.integers(1, 3))
def test_looked_up_rows_equal_full_dequantization(ids, n_parts):
    raws = [raw_tensor(T.Q4_1, 17), raw_tensor(T.F32, 3, seed=1), raw_tensor(T.Q8_0, 4, seed=2)]
    raws = raws[:n_parts]
    weights = weights_of(*raws)
    ids = [i * len(weights) // 17 for i in ids]
    assert torch.equal(rows_of(BlockMatrix(raws), ids), weights[ids])


def test_rows_beyond_the_matrix_are_an_error():
    with pytest.raises(IndexError):
        rows_of(BlockMatrix([raw_tensor(T.Q8_0, 3)]), [3])


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_slice_of_rows_is_that_part_of_the_matrix(data):
    raws = [raw_tensor(T.Q4_1, 5), raw_tensor(T.Q8_0, 4, seed=1), raw_tensor(T.F32, 3, seed=2)]
    first = data.draw(st.integers(0, 11))
    stop = data.draw(st.integers(first + 1, 12))
    part = BlockMatrix(raws).slice_rows(first, stop)
    weights = weights_of(*raws)[first:stop]
    assert torch.equal(rows_of(part, list(range(part.n_rows))), weights)
    assert_close(product(part, inputs(2)), inputs(2) @ weights.T)


def test_an_expert_of_a_flattened_tensor_stands_alone_and_shares_its_memory():
    flat = raw_tensor(T.Q4_1, 3 * 8)
    experts = RawTensor("experts", T.Q4_1, (3, 8, N_COLS), flat.data)
    matrix = BlockMatrix([experts])
    expert = matrix.slice_rows(8, 16)
    assert (matrix.n_rows, expert.n_rows, expert.n_bytes) == (24, 8, matrix.n_bytes // 3)
    assert torch.equal(rows_of(expert, [0, 7]), weights_of(flat)[[8, 15]])
    assert expert._parts[0].data.untyped_storage().data_ptr() == flat.data.ctypes.data


def test_products_write_only_their_own_columns():
    raw, x = raw_tensor(T.Q4_1, 6), inputs(3)
    canvas = torch.full((3, 10), 7.5)
    BlockMatrix([raw]).linear(x, canvas[:, 2:8], torch.empty(SCRATCH))
    assert_close(canvas[:, 2:8], x @ weights_of(raw).T)
    assert (canvas[:, :2] == 7.5).all() and (canvas[:, 8:] == 7.5).all()


def test_read_only_memory_is_taken_without_a_copy_or_a_warning(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(64)))
    mapped = np.memmap(path, dtype=np.uint8, mode="r")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = as_tensor(mapped[8:].reshape(2, 28))
    address = mapped.ctypes.data + 8
    del mapped  # the tensor keeps the mapping alive
    assert tensor.data_ptr() == address
    assert tensor[1].tolist() == list(range(36, 64))


def test_a_matrix_of_two_widths_is_refused():
    narrow = raw_tensor(T.Q8_0, 2, n_cols=32, name="k")
    with pytest.raises(FormatError, match="k has 32 columns, but q has 64"):
        BlockMatrix([raw_tensor(T.Q8_0, 2, name="q"), narrow])


def test_a_matrix_of_an_unreadable_type_is_refused_by_name():
    blocks = np.zeros((1, GGML_QUANT_SIZES[T.Q8_K][1]), np.uint8)
    with pytest.raises(UnsupportedError, match=r"ffn_up\.weight is of type Q8_K"):
        BlockMatrix([RawTensor("ffn_up.weight", T.Q8_K, (1, 256), blocks)])
