"""Matrices at rest on a CPU, in the layout of the native kernels (gguf_pp/native/planes.h)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType
from numpy.typing import NDArray
from torch import Tensor

from gguf_pp.errors import FormatError
from gguf_pp.native import Team, kernels
from gguf_pp.quants.blocks import as_tensor
from gguf_pp.quants.raw import RawTensor
from gguf_pp.quants.reference import check_supported, dequantize
from gguf_pp.quants.unpack import grid

_CODEBOOKS = frozenset(
    getattr(GGMLQuantizationType, name)
    for name in ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
)


def split_experts(raw: RawTensor) -> list[RawTensor]:
    """Cut [n_experts, n_rows, n_cols] into n_experts tensors [n_rows, n_cols].

    Each then starts at a row block of its own, where `PlaneMatrix.slice_rows` may cut.
    """
    n_rows = raw.shape[-2]
    starts = range(0, raw.n_rows, n_rows)
    return [replace(raw, shape=raw.shape[-2:], data=raw.data[i : i + n_rows]) for i in starts]


class PlaneMatrix:
    """Quantized tensors of equal width, stacked by rows: [n_rows, n_cols].

    Types with a codebook, TQ1_0 and NVFP4 keep their blocks; integers and F64 become F32. A
    matrix is immutable: several teams may use it at once.
    """

    def __init__(self, n_rows: int, n_cols: int, planes: Any) -> None:
        self.n_rows = n_rows
        self.n_cols = n_cols
        self.n_bytes: int = planes.n_bytes
        self._planes = planes

    @classmethod
    def build(cls, parts: Sequence[RawTensor], team: Team) -> "PlaneMatrix":
        """Copy `parts` into planes.

        FormatError if their widths differ, UnsupportedError for an unreadable type.
        """
        module = kernels("native")
        assert module is not None
        n_cols = parts[0].n_cols
        packed, n_rows = [], 0
        for raw in parts:
            if raw.n_cols != n_cols:
                raise FormatError(
                    f"{raw.name} has {raw.n_cols} columns, {parts[0].name} has {n_cols}"
                )
            if raw.type in _CODEBOOKS:
                module.Planes.set_codebook(int(raw.type), _codebook(raw.type))
            type, data = int(raw.type), np.ascontiguousarray(raw.data)
            if type not in module.PLANE_TYPES:
                type, data = int(GGMLQuantizationType.F32), _floats(raw).view(np.uint8)
            packed.append((type, n_rows, raw.n_rows, data))
            n_rows += raw.n_rows
        return cls(n_rows, n_cols, module.Planes(n_cols, tuple(packed), team))

    def linear(
        self,
        x: Tensor,
        out: Tensor,
        *,
        team: Team,
        exact: bool,
        bias: Tensor | None = None,
        add: Tensor | None = None,
    ) -> Tensor:
        """`out` [T, n_rows] = x [T, n_cols] Wᵀ + bias [n_rows] + add [T, n_rows]; returns `out`.

        All are contiguous float32 on the CPU; `add` may be `out`, `x` may not overlap it. With
        `exact`, or fewer than 512 columns, products are of float32 activations; otherwise
        activations are rounded to int8 in groups of 32 for quantized parts. A row of `out`
        depends on its row of `x` alone.
        """
        n = x.shape[0]
        addresses = (
            _address(x, (n, self.n_cols)),
            n,
            _address(out, (n, self.n_rows)),
            self.n_rows,
            exact,
            0 if bias is None else _address(bias, (self.n_rows,)),
            0 if add is None else _address(add, (n, self.n_rows)),
        )
        if n:
            self._planes.linear(team, *addresses)
        return out

    def rows(self, ids: Sequence[int] | Tensor, out: Tensor) -> Tensor:
        """Dequantize rows `ids` into `out` [len(ids), n_cols], bit for bit as the format says.

        Raises IndexError if an id is not a row.
        """
        wanted = torch.as_tensor(ids, dtype=torch.int64).contiguous()
        address = _address(out, (len(wanted), self.n_cols))
        self._planes.rows(wanted.data_ptr(), len(wanted), address)
        return out

    def dequantize(self, first: int, stop: int, out: Tensor) -> Tensor:
        """Rows [first, stop) into `out` [stop - first, n_cols]."""
        return self.rows(range(first, stop), out)

    def slice_rows(self, first: int, stop: int) -> "PlaneMatrix":
        """Share rows [first, stop), which start and end at a part's edge or 8 n rows after its
        start; ValueError otherwise.
        """
        if not 0 <= first < stop <= self.n_rows:
            raise ValueError(f"rows [{first}, {stop}) of {self.n_rows}")
        return PlaneMatrix(stop - first, self.n_cols, self._planes.slice(first, stop))


def _codebook(type: GGMLQuantizationType) -> NDArray[np.int8]:
    """Entries of an IQ type as the kernels want them; IQ1 shifts them by eighths."""
    values = grid(type.name, torch.device("cpu"))
    return (values * (8 if type.name.startswith("IQ1") else 1)).to(torch.int8).numpy()


def _floats(raw: RawTensor) -> NDArray[np.float32]:
    check_supported(raw.type, raw.name)
    out = torch.empty(raw.n_rows, raw.n_cols)
    return dequantize(as_tensor(raw.data), raw.type, out).numpy()


def _address(tensor: Tensor, shape: tuple[int, ...]) -> int:
    """Where the kernels find a float32 tensor that is laid out as they read it."""
    if tensor.shape != shape or tensor.dtype != torch.float32 or not tensor.is_contiguous():
        raise ValueError(
            f"wanted contiguous float32 {list(shape)}, "
            f"got {tensor.dtype} {list(tensor.shape)} with strides {tensor.stride()}"
        )
    if not tensor.is_cpu:
        raise ValueError(f"wanted a tensor on the CPU, got one on {tensor.device}")
    return tensor.data_ptr()
