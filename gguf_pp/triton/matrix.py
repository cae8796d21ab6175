"""A weight matrix at rest on a device: planes of several GGUF tensors, stacked by rows."""

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch

from gguf_pp.errors import FormatError
from gguf_pp.quants.blocks import as_tensor
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

    def __init__(self, raws: Sequence[RawTensor], device: torch.device | str) -> None:
        """Raise FormatError if the widths differ, UnsupportedError for an unreadable type."""
        n_cols = raws[0].n_cols
        for raw in raws:
            check_supported(raw.type, raw.name)
            if raw.n_cols != n_cols:
                raise FormatError(
                    f"{raw.name} has {raw.n_cols} columns, but {raws[0].name} has {n_cols}",
                    hint="these tensors are used together and must be equally wide",
                )
        parts = []
        for type, group in groupby(raws, key=lambda raw: raw.type):
            sources = [as_tensor(raw.data) for raw in group]
            parts.append(to_planes(type, n_cols, sources, torch.device(device)))
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
