"""Holds what an Ops makes of quantized matrices against the reference, for every block type."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray
from torch import Tensor

from gguf_pp.errors import in_short
from gguf_pp.ops.base import Matrix
from gguf_pp.quants.raw import RawTensor
from gguf_pp.quants.reference import PLAIN, SUPPORTED, dequantize

EXACT_LIMIT, ROUNDED_LIMIT = 1e-5, 1e-2
"""The most that a product may be off, as a share of Σ|x||w|: with float32 activations, and with
those rounded to int8 in groups of 32. Several times what sound kernels are off."""

LARGEST_WEIGHT = 1e3


@dataclass(frozen=True, slots=True)
class KernelCheck:
    """One block type: the largest error as a share of Σ|x||w|, None if there is no number, and
    what is wrong, or ""."""

    type: str
    error: float | None
    fault: str


class Products(Protocol):
    """What is checked of an Ops."""

    name: str

    def matrix(self, parts: Sequence[RawTensor]) -> Matrix:
        """As in Ops."""
        ...

    def ids(self, tokens: Sequence[int]) -> Tensor:
        """As in Ops."""
        ...

    def embed(self, table: Matrix, ids: Tensor) -> Tensor:
        """As in Ops."""
        ...

    def linear(self, x: Tensor, w: Matrix) -> Tensor:
        """As in Ops."""
        ...


def weight_types() -> list[GGMLQuantizationType]:
    """Types that a matrix may have, by name."""
    numbers = {t for t in PLAIN if t.name not in ("F32", "F16", "BF16")}
    return sorted(SUPPORTED - numbers, key=lambda t: t.name)


def check_kernels(
    make: Callable[[bool], Products],
    device: str = "cpu",
    n_rows: int = 24,
    n_cols: int = 512,
    tell: Callable[[str], None] = lambda type: None,
) -> tuple[KernelCheck, ...]:
    """Check what `make(exact)` computes on `device`: rows, and products of 1 and of 12 rows.

    Matrices [n_rows, n_cols] are random. `tell` gets the name of each type before it is tried.
    Failures are reported, not raised.
    """
    modes = [(make(True), EXACT_LIMIT)]
    if modes[0][0].name != "torch":  # which is always exact
        modes.append((make(False), ROUNDED_LIMIT))
    checks = []
    for type in weight_types():
        tell(type.name)
        checks.append(_check(type, modes, device, n_rows, n_cols))
    return tuple(checks)


def _check(
    type: GGMLQuantizationType,
    modes: Sequence[tuple[Products, float]],
    device: str,
    n_rows: int,
    n_cols: int,
) -> KernelCheck:
    raw, weights = random_matrix(type, n_rows, n_cols)
    errors: list[float] = []
    try:
        for ops, limit in modes:
            errors.append(_largest_error(ops, raw, weights, device))
            if not errors[-1] <= limit:
                fault = f"off by {errors[-1]:.1e}, at most {limit:.0e} is right"
                error = errors[-1] if math.isfinite(errors[-1]) else None
                return KernelCheck(type.name, error, fault)
    except Exception as exc:  # noqa: BLE001 - of whatever kind, it is reported
        return KernelCheck(type.name, None, in_short(exc))
    return KernelCheck(type.name, max(errors), "")


def _largest_error(ops: Products, raw: RawTensor, weights: Tensor, device: str) -> float:
    """Of rows as a share of their largest weight, of products as one of Σ|x||w|."""
    matrix = ops.matrix([raw])
    rows = ops.embed(matrix, ops.ids(range(raw.n_rows))).cpu()
    errors = [(rows - weights).abs().double() / weights.abs().amax(dim=1, keepdim=True)]
    x = torch.randn(12, raw.n_cols, generator=torch.Generator().manual_seed(1))
    for some in (x[:1], x):
        wanted = some.double() @ weights.double().T
        scale = some.abs().double() @ weights.abs().double().T
        got = ops.linear(some.contiguous().to(device), matrix).cpu()
        errors.append((got - wanted).abs() / scale.clamp_min(1e-30))
    return float(torch.stack([error.max() for error in errors]).max())  # NaN is the largest


def random_matrix(
    type: GGMLQuantizationType, n_rows: int, n_cols: int, seed: int = 1
) -> tuple[RawTensor, Tensor]:
    """Random blocks [n_rows, n_cols] whose weights are of ordinary size, and those weights.

    Every pattern of bits is a block; those with scales that are huge or no numbers are left out.
    """
    random = np.random.Generator(np.random.PCG64(seed))
    block_size, type_size = GGML_QUANT_SIZES[type]
    n_blocks = n_rows * n_cols // block_size
    kept = np.empty((0, type_size), dtype=np.uint8)
    while len(kept) < n_blocks:
        blocks = random.integers(0, 256, (2 * n_blocks, type_size), dtype=np.uint8)
        sizes = _weights(blocks, type, block_size).abs().amax(dim=1)
        kept = np.concatenate([kept, blocks[(sizes < LARGEST_WEIGHT).numpy()]])
    data = kept[:n_blocks].reshape(n_rows, -1)
    raw = RawTensor(type.name, type, (n_rows, n_cols), data)
    return raw, _weights(data, type, n_cols)


def _weights(data: NDArray[np.uint8], type: GGMLQuantizationType, n_cols: int) -> Tensor:
    blocks: Any = torch.from_numpy(data)
    return dequantize(blocks, type, torch.empty(len(data), n_cols))
