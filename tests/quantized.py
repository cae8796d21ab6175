"""Random quantized tensors, and how products with them are judged."""

import gguf.quants
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from gguf_pp.quants.raw import RawTensor
from tests.test_quants_reference import random_rows

T = GGMLQuantizationType
BLOCKS = [
    T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0, T.IQ4_NL, T.MXFP4, T.IQ4_XS,
    T.Q2_K, T.Q3_K, T.Q4_K, T.Q5_K, T.Q6_K,
]  # fmt: skip
PLAIN = [T.F32, T.F16, T.BF16]


def name_of(type):
    return type.name


def random_raw(type, n_rows, n_cols, seed=0, name="w"):
    """Any bytes whose scales are finite: many are negative or subnormal."""
    block_size, type_size = GGML_QUANT_SIZES[type]
    data = random_rows(type, n_rows, n_cols // block_size, seed).numpy()
    if type is T.MXFP4:  # powers of two: of all that there are, one block would be all that counts
        exponents = data.reshape(-1, type_size)[:, 0]
        exponents[:] = exponents % 16 + 112
    return RawTensor(name, type, (n_rows, n_cols), data)


def width(type, n):
    """About n columns, in whole blocks, and no round number of them."""
    block_size = GGML_QUANT_SIZES[type][0]
    return max(1, n // block_size) * block_size + (block_size if block_size < 256 else 0)


def weights(*raws):
    """What the library makes of the tensors, stacked: float64."""
    return torch.cat(
        [torch.from_numpy(gguf.quants.dequantize(raw.data, raw.type).copy()) for raw in raws]
    ).double()


def random_x(n_rows, n_cols, seed=0):
    """Normal, with columns and rows of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n_rows, n_cols, generator=generator)
    x[:, ::7] *= 3
    return x * (10.0 ** torch.randint(-3, 4, (n_rows, 1), generator=generator))


def worst(y, x, w):
    """The largest |error| of y = x Wᵀ, in units of the sum of |x| |w|."""
    x = x.double()
    return float(((y.double() - x @ w.t()).abs() / (x.abs() @ w.abs().t())).max())
