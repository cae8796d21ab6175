"""A weight matrix as it lies in the file, multiplied by way of `reference.dequantize`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType
from numpy.typing import NDArray
from torch import Tensor

from gguf_pp.errors import FormatError
from gguf_pp.quants.raw import RawTensor
from gguf_pp.quants.reference import check_supported, dequantize

# Weights that are made, multiplied and forgotten at a time on a CPU: they stay in its cache.
_CPU_TILE = 1 << 19


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of one GGUF tensor: `data` is uint8 [n, row_bytes], or float32 [n, n_cols] if F32."""

    type: GGMLQuantizationType
    data: Tensor

    def weights(self, first: int, stop: int, out: Tensor | None) -> Tensor:
        """Rows [first, stop) as float32: dequantized into `out`, or the data if they are F32."""
        rows = self.data[first:stop]
        return rows if out is None else dequantize(rows, self.type, out)


class BlockMatrix:
    """GGUF tensors [n_i, n_cols] stacked by rows, their blocks kept as they are: y = x Wᵀ.

    On the CPU the blocks are those of the file's mapping, not a copy, and must not be written.
    """

    n_rows: int
    n_cols: int
    n_bytes: int

    def __init__(self, raws: Sequence[RawTensor], device: torch.device | str = "cpu") -> None:
        """Raise FormatError if the widths differ, UnsupportedError for an unreadable type."""
        n_cols = raws[0].n_cols
        for raw in raws:
            check_supported(raw.type, raw.name)
            if raw.n_cols != n_cols:
                raise FormatError(
                    f"{raw.name} has {raw.n_cols} columns, but {raws[0].name} has {n_cols}",
                    hint="these tensors are used together and must be equally wide",
                )
        self._set([_part(raw, torch.device(device)) for raw in raws], n_cols)

    def _set(self, parts: Sequence[_Part], n_cols: int) -> None:
        self._parts = tuple(parts)
        self.n_cols = n_cols
        self.n_rows = sum(len(part.data) for part in parts)
        self.n_bytes = sum(part.data.nbytes for part in parts)

    def slice_rows(self, first: int, stop: int) -> "BlockMatrix":
        """Rows [first, stop) as a matrix on the same memory, such as one expert of many."""
        assert 0 <= first < stop <= self.n_rows, (first, stop, self.n_rows)
        view = object.__new__(BlockMatrix)
        spans = ((part, first - at, stop - at) for at, part in self._starts())
        view._set(
            [
                _Part(part.type, part.data[max(begin, 0) : end])
                for part, begin, end in spans
                if begin < len(part.data) and end > 0
            ],
            self.n_cols,
        )
        return view

    def linear(self, x: Tensor, out: Tensor, scratch: Tensor) -> Tensor:
        """x [T, n_cols] times Wᵀ into `out` [T, n_rows], both float32.

        `scratch` is flat float32 and holds dequantized rows; room for one is enough, for
        half a million weights is as fast as it gets. Returns `out`.
        """
        for at, part in self._starts():
            for first, stop in self._tiles(part, scratch):
                rows = stop - first
                room = None if _is_direct(part) else scratch[: rows * self.n_cols].view(rows, -1)
                w = part.weights(first, stop, room)
                target = out[:, at + first : at + stop]
                if len(x) == 1:
                    torch.mv(w, x[0], out=target[0])
                else:
                    torch.mm(x, w.t(), out=target)
        return out

    def rows(self, ids: Tensor, out: Tensor) -> Tensor:
        """Rows `ids` (int64 [T]) into `out`, contiguous float32 [T, n_cols]; returns `out`."""
        for at, part in self._starts():
            if len(self._parts) == 1:
                _gather(part, ids, out)
                break
            places = ((ids >= at) & (ids < at + len(part.data))).nonzero().flatten()
            found = out.new_empty(len(places), self.n_cols)
            out.index_copy_(0, places, _gather(part, ids[places] - at, found))
        return out

    def _starts(self) -> Iterator[tuple[int, _Part]]:
        """Each part with the row of the matrix at which it starts."""
        at = 0
        for part in self._parts:
            yield at, part
            at += len(part.data)

    def _tiles(self, part: _Part, scratch: Tensor) -> Iterator[tuple[int, int]]:
        """Ranges of rows that partition `part`, each small enough for the scratch."""
        n_rows = len(part.data)
        if _is_direct(part):
            yield 0, n_rows
            return
        room = scratch.numel()
        if scratch.device.type == "cpu":
            room = min(room, max(_CPU_TILE, self.n_cols))
        step = room // self.n_cols
        assert step > 0, f"{scratch.numel()} floats of scratch for rows of {self.n_cols}"
        for first in range(0, n_rows, step):
            yield first, min(first + step, n_rows)


def _is_direct(part: _Part) -> bool:
    return part.type is GGMLQuantizationType.F32


def _gather(part: _Part, ids: Tensor, out: Tensor) -> Tensor:
    if _is_direct(part):
        return torch.index_select(part.data, 0, ids, out=out)
    return dequantize(part.data.index_select(0, ids), part.type, out)


def _part(raw: RawTensor, device: torch.device) -> _Part:
    data = as_tensor(raw.data).to(device)
    return _Part(
        raw.type, data.view(torch.float32) if raw.type is GGMLQuantizationType.F32 else data
    )


class _Unprotected:
    """Claims that an array may be written, so that torch takes it without a copy or a warning."""

    def __init__(self, owner: NDArray[np.uint8]) -> None:
        self._owner = owner
        address, _ = owner.__array_interface__["data"]
        self.__array_interface__: dict[str, Any] = {
            **owner.__array_interface__,
            "data": (address, False),
        }


def as_tensor(array: NDArray[np.uint8]) -> Tensor:
    """The same memory as a tensor, also when it is read-only; nobody may write to the result."""
    return torch.from_numpy(np.asarray(_Unprotected(array)))
