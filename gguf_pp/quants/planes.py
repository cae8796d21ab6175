"""Matrices at rest on a CPU, in the layout of the native kernels (gguf_pp/native/planes.h)."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from gguf_pp.errors import FormatError
from gguf_pp.native import Team, kernels
from gguf_pp.quants.raw import RawTensor
from gguf_pp.quants.reference import check_supported, dequantize

_F32 = int(GGMLQuantizationType.F32)
_RAW_ROWS = 256  # rows of a type without planes that are dequantized at once


def split_experts(raw: RawTensor) -> list[RawTensor]:
    """Cut [n_experts, n_rows, n_cols] into n_experts tensors [n_rows, n_cols].

    Each then starts at a row block of its own, where `PlaneMatrix.slice_rows` may cut.
    """
    n_rows = raw.shape[-2]
    starts = range(0, raw.n_rows, n_rows)
    return [replace(raw, shape=raw.shape[-2:], data=raw.data[i : i + n_rows]) for i in starts]


class PlaneMatrix:
    """Quantized tensors of equal width, stacked by rows: [n_rows, n_cols].

    Types that have no planes (IQ1 to IQ3, ternary) stay as they are in the file and are
    dequantized when they are used. A matrix is immutable: several teams may use it at once.
    """

    def __init__(
        self, n_rows: int, n_cols: int, planes: Any, raws: Sequence[tuple[int, RawTensor]]
    ) -> None:
        self.n_rows = n_rows
        self.n_cols = n_cols
        self._planes = planes
        self._raws = tuple(raws)
        self.n_bytes = planes.n_bytes + sum(raw.n_bytes for _, raw in self._raws)

    @classmethod
    def build(cls, parts: Sequence[RawTensor], team: Team) -> "PlaneMatrix":
        """Copy `parts` into planes; FormatError if their widths differ."""
        module = kernels("native")
        assert module is not None
        n_cols = parts[0].n_cols
        packed, raws, n_rows = [], [], 0
        for raw in parts:
            if raw.n_cols != n_cols:
                raise FormatError(
                    f"{raw.name} has {raw.n_cols} columns, {parts[0].name} has {n_cols}"
                )
            if raw.type in module.PLANE_TYPES:
                data = np.ascontiguousarray(raw.data)
                packed.append((int(raw.type), n_rows, raw.n_rows, data))
            else:
                check_supported(raw.type, raw.name)
                raws.append((n_rows, raw))
            n_rows += raw.n_rows
        return cls(n_rows, n_cols, module.Planes(n_cols, tuple(packed), team), raws)

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
        `exact`, products are of float32 activations; otherwise activations are rounded to int8
        in groups of 32 for quantized parts. A row of `out` depends on its row of `x` alone.
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
        if not n:
            return out
        self._planes.linear(team, *addresses)
        for planes in self._raw_planes(team):
            planes.linear(team, *addresses)
        return out

    def rows(self, ids: Sequence[int] | Tensor, out: Tensor) -> Tensor:
        """Dequantize rows `ids` into `out` [len(ids), n_cols], bit for bit as the format says.

        Raises IndexError if an id is not a row.
        """
        wanted = torch.as_tensor(ids, dtype=torch.int64).contiguous()
        address = _address(out, (len(wanted), self.n_cols))
        if not self._raws:
            self._planes.rows(wanted.data_ptr(), len(wanted), address)
            return out
        if len(wanted) and not 0 <= int(wanted.min()) <= int(wanted.max()) < self.n_rows:
            raise IndexError(f"a row of {wanted.tolist()} is not in [0, {self.n_rows})")
        in_planes = torch.ones(len(wanted), dtype=torch.bool)
        for first, raw in self._raws:
            here = (wanted >= first) & (wanted < first + raw.n_rows)
            in_planes &= ~here
            out[here] = _dequantized(raw, (wanted[here] - first).numpy())
        some = wanted[in_planes].contiguous()
        rows = torch.empty(len(some), self.n_cols)
        self._planes.rows(some.data_ptr(), len(some), rows.data_ptr())
        out[in_planes] = rows
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
        raws = []
        for start, raw in self._raws:
            begin, end = max(first, start), min(stop, start + raw.n_rows)
            if begin < end:
                part = replace(raw, shape=(end - begin, self.n_cols))
                data = raw.data[begin - start : end - start]
                raws.append((begin - first, replace(part, data=data)))
        return PlaneMatrix(stop - first, self.n_cols, self._planes.slice(first, stop), raws)

    def _raw_planes(self, team: Team) -> Iterator[Any]:
        module = kernels("native")
        assert module is not None
        for first, raw in self._raws:
            for i in range(0, raw.n_rows, _RAW_ROWS):
                ids = np.arange(i, min(i + _RAW_ROWS, raw.n_rows))
                weights = _dequantized(raw, ids).numpy()
                yield module.Planes(self.n_cols, ((_F32, first + i, len(ids), weights),), team)


def _dequantized(raw: RawTensor, ids: np.ndarray[Any, np.dtype[np.int64]]) -> Tensor:
    out = torch.empty(len(ids), raw.n_cols)
    return dequantize(torch.from_numpy(raw.data[ids]), raw.type, out) if len(ids) else out


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
