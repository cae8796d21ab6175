from functools import cache

import gguf.quants
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from gguf_pp.errors import UnsupportedError
from gguf_pp.quants.reference import SUPPORTED, check_supported, dequantize

T = GGMLQuantizationType
# Where the float16 of a block are; the rest of a block may be any bytes.
HALVES = {
    **dict.fromkeys(("F16", "Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS", "IQ1_S"), (0,)),
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}


@cache
def known_to_the_library(type):
    type_size = GGML_QUANT_SIZES[type][1]
    try:
        gguf.quants.dequantize(np.zeros((1, type_size), np.uint8), type)
    except NotImplementedError:
        return False
    return True


KNOWN = [t for t in T if known_to_the_library(t)]


def random_rows(type, n_rows, n_blocks, seed=0):
    """Random blocks whose scales are finite."""
    rng = np.random.default_rng(seed)
    type_size = GGML_QUANT_SIZES[type][1]
    blocks = rng.integers(0, 256, (n_rows * n_blocks, type_size), dtype=np.uint8)
    for first in HALVES.get(type.name, ()):
        blocks[:, first + 1] &= 0xBB
    if type in (T.F32, T.BF16):
        blocks[:, -1] &= 0xBF
    if type is T.IQ1_M:  # the top nibble of the scale is in the last byte
        blocks[:, -1] &= 0xBF
    if type is T.MXFP4:
        blocks[:, 0] &= 0xBF
    return torch.from_numpy(blocks.reshape(n_rows, -1))


def expected(data, type):
    return torch.from_numpy(gguf.quants.dequantize(data.numpy(), type).copy())


def weights_of(data, type):
    block_size, type_size = GGML_QUANT_SIZES[type]
    out = torch.full((len(data), data.shape[1] // type_size * block_size), torch.nan)
    assert dequantize(data, type, out) is out
    return out


def assert_same_bits(got, want):
    assert got.shape == want.shape
    assert torch.equal(got.view(torch.int32), want.view(torch.int32))


def test_every_type_of_the_library_is_supported():
    assert set(KNOWN) <= SUPPORTED


@pytest.mark.parametrize("type", KNOWN, ids=lambda t: t.name)
@settings(max_examples=12, deadline=None)
@given(
    n_rows=st.integers(1, 5), n_blocks=st.sampled_from((1, 2, 3, 8, 11)), seed=st.integers(0, 2**32)
)
def test_weights_equal_those_of_the_gguf_package_bit_for_bit(type, n_rows, n_blocks, seed):
    data = random_rows(type, n_rows, n_blocks, seed)
    got = weights_of(data, type)
    assert_same_bits(got, expected(data, type))
    assert got.isfinite().all()


@pytest.mark.parametrize("type", KNOWN, ids=lambda t: t.name)
def test_more_rows_than_one_step_come_out_the_same(type, monkeypatch):
    data = random_rows(type, 7, 3)
    whole = weights_of(data, type)
    monkeypatch.setattr("gguf_pp.quants.reference._CPU_STEP", 512)
    assert_same_bits(weights_of(data, type), whole)


@pytest.mark.parametrize("type", KNOWN, ids=lambda t: t.name)
def test_extreme_bytes_are_read_like_the_library_does(type):
    for byte in (0x00, 0x3B, 0x80, 0xBB):
        data = torch.full_like(random_rows(type, 2, 2), byte)
        assert_same_bits(weights_of(data, type), expected(data, type))


@pytest.mark.parametrize("type", KNOWN, ids=lambda t: t.name)
def test_nothing_is_written_around_the_output(type):
    data = random_rows(type, 3, 2)
    want = expected(data, type)
    buffer = torch.full((5, want.shape[1]), 7.5)
    dequantize(data, type, buffer[1:4])
    assert_same_bits(buffer[1:4], want)
    assert (buffer[0] == 7.5).all() and (buffer[4] == 7.5).all()


@pytest.mark.parametrize("type", KNOWN, ids=lambda t: t.name)
def test_blocks_may_start_at_any_byte_and_stay_as_they_are(type):
    data = random_rows(type, 2, 2)
    shifted = torch.zeros(data.numel() + 1, dtype=torch.uint8)[1:].view_as(data).copy_(data)
    assert_same_bits(weights_of(shifted, type), expected(data, type))
    assert torch.equal(shifted, data)


@pytest.mark.parametrize(
    ("type", "dtype"),
    [(T.F64, torch.float64), (T.I8, torch.int8), (T.I16, torch.int16), (T.I32, torch.int32)],
)
def test_plain_numbers_are_converted(type, dtype):
    values = torch.tensor([[1, -2, 3], [-100, 0, 127]], dtype=dtype)
    got = weights_of(values.view(torch.uint8), type)
    assert got.tolist() == [[1.0, -2.0, 3.0], [-100.0, 0.0, 127.0]]


def test_a_type_without_weights_is_named_with_the_tensor():
    with pytest.raises(UnsupportedError, match=r"output\.weight is of type Q8_K") as caught:
        check_supported(T.Q8_K, "output.weight")
    assert "Q4_K" in str(caught.value.hint)
    with pytest.raises(UnsupportedError, match="Q8_1"):
        dequantize(torch.zeros(1, 40, dtype=torch.uint8), T.Q8_1, torch.empty(1, 32))
