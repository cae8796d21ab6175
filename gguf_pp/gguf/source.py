"""Where loaders get tensors from: a file of this machine, or what a client sent to a worker."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gguf_pp.errors import FormatError
from gguf_pp.gguf.header import TensorInfo
from gguf_pp.gguf.metadata import Metadata


class TensorSource(Protocol):
    """A model's metadata and tensors. ModelFile is one."""

    @property
    def path(self) -> Path:
        """What messages call it."""

    @property
    def metadata(self) -> Metadata:
        """The model's keys and values."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """What is there."""

    def require(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        """Return the tensor `name`, which must have `shape` (numpy order, leading ones aside).

        Raises FormatError.
        """

    def data(self, name: str) -> NDArray[np.uint8]:
        """Return a tensor's bytes, uint8 [n_rows, row_bytes], read-only; valid after `close`."""

    def forget(self, name: str) -> None:
        """Let the system take back the memory of a tensor's pages; reading it again is possible."""


def required(
    tensors: Mapping[str, TensorInfo], path: Path, name: str, shape: tuple[int, ...]
) -> TensorInfo:
    """`TensorSource.require` for these tensors."""
    info = tensors.get(name)
    if info is None:
        raise FormatError(f"{path}: tensor {name!r} is missing")
    if _trimmed(info.shape) != _trimmed(shape):
        raise FormatError(
            f"{path}: tensor {name!r} has shape {list(info.shape)}, "
            f"but the metadata asks for {list(shape)}"
        )
    return info


def _trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
    first = next((i for i, dim in enumerate(shape) if dim != 1), len(shape))
    return shape[first:]
