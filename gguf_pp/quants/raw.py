"""A tensor as it lies in the file."""

from dataclasses import dataclass

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class RawTensor:
    """Quantized rows: `data` is uint8 [n_rows, row_bytes], usually a read-only view of the mmap.

    `shape` is in numpy order (rows first, as PyTorch writes it): the reverse of the order in the
    file. Leading dimensions are flattened into n_rows; vectors have one row.
    """

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    data: NDArray[np.uint8]

    @property
    def n_rows(self) -> int:
        """Product of all dimensions but the last."""
        return int(self.data.shape[0])

    @property
    def n_cols(self) -> int:
        """Elements of one row."""
        return self.shape[-1]

    @property
    def n_bytes(self) -> int:
        """Bytes in the file."""
        return self.data.nbytes
