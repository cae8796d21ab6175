"""What the cache and the scratch file do with the disk, and what it may refuse."""

import errno
import mmap
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

import numpy as np
from numpy.typing import NDArray

from gguf_pp.errors import ConfigError, RemoteError

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@contextmanager
def disk_errors(doing: str) -> Iterator[None]:
    """Turn an OSError into a RemoteError; its message is for the client and names no path."""
    try:
        yield
    except OSError as exc:
        hint = None
        if exc.errno in _FULL:
            hint = "free some space on the worker, or start it with --cache on a larger disk"
        raise RemoteError(f"the worker cannot {doing}: {exc.strerror}", hint=hint) from exc


def usable(folder: Path) -> Path:
    """Make a folder for the cache if there is none; raises ConfigError if it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as exc:
        raise ConfigError(
            f"the cache {folder} cannot be written: {exc.strerror}",
            hint="name another folder with --cache",
        ) from exc
    return folder


def check_space(folder: Path, n_bytes: int) -> None:
    """Raise RemoteError unless the disk of `folder` has `n_bytes` free."""
    with disk_errors("look how much space is free"):
        free = shutil.disk_usage(folder).free
    if n_bytes > free:
        raise RemoteError(
            f"the worker has no room for {n_bytes} bytes of weights: its disk has {free} free",
            hint="free some space on the worker, or start it with --cache on a larger disk",
        )


def mapped(fd: int, start: int, n_bytes: int) -> NDArray[np.uint8]:
    """Bytes of an open file, read-only; the view keeps them mapped."""
    skip = start % mmap.ALLOCATIONGRANULARITY
    pages = mmap.mmap(fd, skip + n_bytes, access=mmap.ACCESS_READ, offset=start - skip)
    return np.frombuffer(pages, np.uint8, n_bytes, skip)


def write_all(file: IO[bytes], data: memoryview) -> None:
    """Write to an unbuffered file, which may take less than it is given."""
    while data:
        data = data[file.write(data) :]
