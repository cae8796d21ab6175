"""Tensors that are kept for one session only."""

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Final

import numpy as np
from numpy.typing import NDArray

from gguf_pp.gguf import TensorInfo
from gguf_pp.worker.disk import check_space, disk_errors, mapped, write_all

_ALIGNMENT: Final = 64


class Scratch:
    """One file without a name: however the process ends, the system takes it back. A Shelf."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = Path(tempfile.gettempdir()) if folder is None else folder
        self._open = ExitStack()
        self._file: IO[bytes] | None = None
        self._starts: dict[str, int] = {}

    def missing(self, infos: Sequence[TensorInfo]) -> tuple[int, ...]:
        """All of them."""
        return tuple(range(len(infos)))

    def prepare(self, infos: Sequence[TensorInfo]) -> None:
        """Open the file."""
        check_space(self._folder, sum(info.n_bytes for info in infos))
        with disk_errors("open a temporary file"):
            self._file = self._open.enter_context(_nameless(self._folder))

    def begin(self, info: TensorInfo) -> None:
        """The tensor goes to the end of the file."""
        assert self._file is not None
        start = -(-self._file.tell() // _ALIGNMENT) * _ALIGNMENT
        self._starts[info.name] = self._file.seek(start)

    def append(self, data: memoryview) -> None:
        """Write the next bytes."""
        assert self._file is not None
        with disk_errors("keep weights for this session"):
            write_all(self._file, data)

    def commit(self) -> None:
        """Nothing: the file is no longer than what was written."""

    def data(self, info: TensorInfo) -> NDArray[np.uint8]:
        """A tensor that was written, uint8 [n_bytes]."""
        assert self._file is not None
        with disk_errors(f"read tensor {info.name!r}"):
            return mapped(self._file.fileno(), self._starts[info.name], info.n_bytes)

    def forget(self, info: TensorInfo) -> None:
        """Nothing: the pages go with the view."""

    def drop(self) -> None:
        """Give back the space: without all tensors none is of use."""
        self.close()

    def close(self) -> None:
        """Let go of the file; views of it stay valid."""
        self._open.close()


def _nameless(folder: Path) -> IO[bytes]:
    return tempfile.TemporaryFile(buffering=0, dir=folder)
