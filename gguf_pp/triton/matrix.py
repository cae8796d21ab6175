"""Weight matrices at rest on a device: planes of several GGUF tensors, stacked by rows."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor

from gguf_pp.backend.cuda_host import Uploads
from gguf_pp.errors import FormatError
from gguf_pp.quants.blocks import as_tensor
from gguf_pp.quants.planes import split_experts
from gguf_pp.quants.raw import RawTensor
from gguf_pp.quants.reference import check_supported
from gguf_pp.triton.planes import Planes, to_planes


class DeviceMatrix:
    """Quantized tensors of equal width on one device: [n_rows, n_cols], y = x Wᵀ.

    Neighbours of equal type become one part, so that one launch serves them. Immutable.
    """

    n_rows: int
    n_cols: int
    n_bytes: int

    def __init__(
        self,
        raws: Sequence[RawTensor],
        device: torch.device | str,
        uploads: Uploads | None = None,
    ) -> None:
        """Raise FormatError if the widths differ, UnsupportedError for an unreadable type."""
        n_cols = _width(raws)
        parts = []
        for type, group in groupby(raws, key=lambda raw: raw.type):
            sources = [as_tensor(raw.data) for raw in group]
            parts.append(to_planes(type, n_cols, sources, torch.device(device), uploads))
        self._set(parts, n_cols)

    def _set(self, parts: Sequence[Planes], n_cols: int) -> None:
        self._parts = tuple(parts)
        self.n_cols = n_cols
        self.n_rows = sum(part.n_rows for part in parts)
        self.n_bytes = sum(part.n_bytes for part in parts)

    def parts(self) -> Iterator[tuple[int, Planes]]:
        """Rows of one type with the row of the matrix at which they start, in order."""
        at = 0
        for part in self._parts:
            yield at, part
            at += part.n_rows

    def slice_rows(self, first: int, stop: int) -> "DeviceMatrix":
        """Rows [first, stop) as a matrix on the same memory, such as one expert of many."""
        assert 0 <= first < stop <= self.n_rows, (first, stop, self.n_rows)
        view = object.__new__(DeviceMatrix)
        spans = ((part, max(first - at, 0), stop - at) for at, part in self.parts())
        view._set(
            [
                part.rows(begin, min(end, part.n_rows))
                for part, begin, end in spans
                if begin < part.n_rows and end > 0
            ],
            self.n_cols,
        )
        return view

    @classmethod
    def of(cls, parts: Sequence[Planes]) -> "DeviceMatrix":
        """Rows that are there already, on the same memory."""
        matrix = object.__new__(cls)
        matrix._set(parts, parts[0].n_cols)
        return matrix


class DeviceExperts:
    """The matrices of all experts on one device, [n_experts, n_rows, n_cols], from quantized
    tensors [n_experts, n_i, n_cols].

    As in a DeviceMatrix, neighbours of equal type become one part. It holds the rows of one expert
    after those of another. Immutable.
    """

    def __init__(
        self,
        raws: Sequence[RawTensor],
        device: torch.device | str,
        uploads: Uploads | None = None,
    ) -> None:
        """Raise FormatError if the widths differ, UnsupportedError for an unreadable type."""
        self.n_cols = _width(raws)
        self.n_experts = raws[0].shape[0]
        parts = []
        for type, group in groupby(raws, key=lambda raw: raw.type):
            together = list(group)
            if len(together) > 1:
                by_expert = zip(*map(split_experts, together), strict=True)
                together = [raw for each in by_expert for raw in each]
            sources = [as_tensor(raw.data) for raw in together]
            parts.append(to_planes(type, self.n_cols, sources, torch.device(device), uploads))
        self._parts = tuple(parts)
        self.n_rows = sum(part.n_rows for part in parts) // self.n_experts
        self.n_bytes = sum(part.n_bytes for part in parts)

    def parts(self) -> Iterator[tuple[int, int, Planes]]:
        """Rows of one type of all experts, with the rows [first, stop) that they are of each."""
        first = 0
        for part in self._parts:
            stop = first + part.n_rows // self.n_experts
            yield first, stop, part
            first = stop

    def expert(self, i: int) -> DeviceMatrix:
        """The matrix of expert `i`, on the same memory."""
        return DeviceMatrix.of(
            [
                part.rows(i * (stop - first), (i + 1) * (stop - first))
                for first, stop, part in self.parts()
            ]
        )

    def picked(self, i: Tensor) -> DeviceMatrix:
        """A copy of the matrix of expert `i`, int [1] on the device, for which no one waits."""
        return DeviceMatrix.of([self._picked(part, i) for part in self._parts])

    def _picked(self, part: Planes, i: Tensor) -> Planes:
        planes = {}
        for name, plane in part.planes.items():
            planes[name] = plane.view(self.n_experts, -1, plane.shape[1]).index_select(0, i)[0]
        return replace(part, planes=planes)


def _width(raws: Sequence[RawTensor]) -> int:
    """Columns of all of them."""
    n_cols = raws[0].n_cols
    for raw in raws:
        check_supported(raw.type, raw.name)
        if raw.n_cols != n_cols:
            raise FormatError(
                f"{raw.name} has {raw.n_cols} columns, but {raws[0].name} has {n_cols}",
                hint="these tensors are used together and must be equally wide",
            )
    return n_cols
