"""Tensors that clients sent, kept for the next time.

    FOLDER/DIGEST[:2]/DIGEST/lock       shared by who has the model open, exclusive to evict
                             KEY.bin    a tensor's bytes, then a trailer: magic and sha256
                             tmp-*      one that is being written

DIGEST is that of the model, KEY the sha256 of a tensor's name, type and shape. A tensor appears
under its name in one rename. Nothing is synced: after a power failure the trailer tells whether a
file is whole. Locks are the kernel's and end with their process, so a half written file in a model
that nobody has open is nobody's. The access time of a file, set explicitly, says when a session
last wanted it.
"""

import fcntl
import hashlib
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from io import FileIO
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gguf_pp.errors import RemoteError
from gguf_pp.gguf import TensorInfo
from gguf_pp.worker.disk import check_space, disk_errors, mapped, write_all

_MAGIC: Final = b"ggpp-t1\n"
_TRAILER_BYTES: Final = len(_MAGIC) + 32
_READ_BYTES: Final = 1 << 20
_N_READERS: Final = 4
_N_TRIES: Final = 100

_Stamp = tuple[int, int, int]


class Usage(NamedTuple):
    """What lies in the cache."""

    n_models: int
    n_bytes: int


class Cache:
    """A folder of tensors that is kept below `limit` bytes, except for models that are open.

    The folder exists; several processes may share one.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder
        self.limit = limit
        self.sound: dict[Path, _Stamp] = {}
        """Files that were verified, as they were then."""
        self._trimming = threading.Lock()
        self.trim()

    def fits(self, infos: Sequence[TensorInfo]) -> bool:
        """Whether these stay below the limit when nothing else is there."""
        return sum(map(_file_bytes, infos)) <= self.limit

    def holds(self, digest: str) -> bool:
        """Whether there is any tensor of a model, sound or not."""
        return any(not entry.is_temp for entry in _entries(self._home(digest)))

    def open(self, digest: str) -> "CachedModel":
        """Open a model, whether there is anything of it or not. Raises RemoteError."""
        home = self._home(digest)
        for _ in range(_N_TRIES):
            with disk_errors("open its cache"):
                lock = _locked(home, fcntl.LOCK_SH)
            if lock is not None:
                return CachedModel(self, home, lock)
        raise RemoteError("the worker cannot open its cache: others keep removing it")

    def usage(self) -> Usage:
        """Count what is there."""
        kept = [[e.n_bytes for e in _entries(home) if not e.is_temp] for home in self._homes()]
        return Usage(sum(map(bool, kept)), sum(map(sum, kept)))

    def trim(self, n_needed: int = 0) -> None:
        """Remove what was not wanted for longest until `n_needed` more bytes fit.

        Models that are open, here or in another process, stay. Remains of writers that died go.
        """
        with self._trimming:
            models = [(home, _entries(home)) for home in self._homes()]
            models.sort(key=lambda model: max((e.used_ns for e in model[1]), default=0))
            excess = sum(e.n_bytes for _, entries in models for e in entries)
            excess += n_needed - self.limit
            for home, _ in models:
                with suppress(OSError):
                    excess -= self._clear(home, excess)

    def _clear(self, home: Path, excess: int) -> int:
        """Remove about `excess` bytes of a model that nobody has open; return how many it were."""
        lock = _locked(home, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if lock is None:
            return 0
        freed = 0
        with lock:
            for entry in sorted(_entries(home), key=lambda e: (not e.is_temp, e.used_ns)):
                if entry.is_temp or freed < excess:
                    entry.path.unlink(missing_ok=True)
                    self.sound.pop(entry.path, None)
                    freed += entry.n_bytes
            if not _entries(home):
                (home / "lock").unlink()
                home.rmdir()
        return freed

    def _home(self, digest: str) -> Path:
        return self.folder / digest[:2] / digest

    def _homes(self) -> Iterator[Path]:
        return (path for path in self.folder.glob("[0-9a-f][0-9a-f]/*") if len(path.name) == 64)


class CachedModel:
    """One model of the cache, open: nobody evicts it. A Shelf."""

    def __init__(self, cache: Cache, home: Path, lock: BinaryIO) -> None:
        self._cache = cache
        self._home = home
        self._lock = lock
        self._writing: _Writing | None = None

    def missing(self, infos: Sequence[TensorInfo]) -> tuple[int, ...]:
        """Verify what is there, each file once in the life of the cache; remove what is damaged."""
        with ThreadPoolExecutor(_N_READERS) as pool:
            sound = list(pool.map(self._is_sound, infos))
        return tuple(i for i, is_sound in enumerate(sound) if not is_sound)

    def _is_sound(self, info: TensorInfo) -> bool:
        file = self._open(info)
        if file is not None:
            file.close()
        return file is not None

    def prepare(self, infos: Sequence[TensorInfo]) -> None:
        """Evict others until these fit."""
        n_bytes = sum(map(_file_bytes, infos))
        self._cache.trim(n_bytes)
        check_space(self._home, n_bytes)

    def begin(self, info: TensorInfo) -> None:
        """Start to write a tensor."""
        with disk_errors("write to its cache"):
            fd, name = tempfile.mkstemp(prefix="tmp-", dir=self._home)
        self._writing = _Writing(fd, Path(name), self._path(info))

    def append(self, data: memoryview) -> None:
        """Write its next bytes."""
        assert self._writing is not None
        with disk_errors("write to its cache"):
            self._writing.append(data)

    def commit(self) -> None:
        """Give it its name."""
        assert self._writing is not None
        with disk_errors("write to its cache"):
            self._cache.sound[self._writing.path] = self._writing.commit()
        self._writing = None

    def data(self, info: TensorInfo) -> NDArray[np.uint8]:
        """All bytes of a tensor, uint8 [n_bytes]; raises RemoteError if it is gone or damaged."""
        file = self._open(info)
        if file is None:
            raise RemoteError(
                f"tensor {info.name!r} went away from the worker's cache, or was damaged there",
                hint="connect again: it will be sent again",
            )
        with file, disk_errors("read its cache"):
            return mapped(file.fileno(), 0, info.n_bytes)

    def forget(self, info: TensorInfo) -> None:
        """Nothing: the pages go with the view."""

    def drop(self) -> None:
        """Remove what is half written."""
        if self._writing is not None:
            self._writing.drop()
            self._writing = None

    def close(self) -> None:
        """Let others evict what is not half written."""
        if not self._lock.closed:
            self.drop()
            self._lock.close()
            self._cache.trim()

    def _path(self, info: TensorInfo) -> Path:
        # The name comes last: what precedes it has no spaces of its own.
        key = f"{info.type} {'x'.join(map(str, info.shape))} {info.name}"
        return self._home / f"{hashlib.sha256(key.encode()).hexdigest()}.bin"

    def _open(self, info: TensorInfo) -> FileIO | None:
        """Open a tensor that is as it was written; remove it if it is not."""
        path = self._path(info)
        with disk_errors("read its cache"), ExitStack() as stack:
            try:
                file = stack.enter_context(path.open("rb", buffering=0))
            except FileNotFoundError:
                return None
            stamp = _stamp(file)
            if self._cache.sound.get(path) != stamp:
                if stamp[1] != _file_bytes(info) or not _is_whole(file, path, info.n_bytes):
                    path.unlink(missing_ok=True)
                    return None
                self._cache.sound[path] = stamp
            os.utime(file.fileno(), ns=(time.time_ns(), stamp[2]))
            stack.pop_all()
            return file


class _Writing:
    """A tensor on its way into the cache."""

    def __init__(self, fd: int, temp: Path, path: Path) -> None:
        self.path = path
        self._temp = temp
        self._file = FileIO(fd, "wb")
        self._digest = _digest(path)

    def append(self, data: memoryview) -> None:
        write_all(self._file, data)
        self._digest.update(data)

    def commit(self) -> _Stamp:
        write_all(self._file, memoryview(_MAGIC + self._digest.digest()))
        stamp = _stamp(self._file)
        self._file.close()
        self._temp.replace(self.path)
        return stamp

    def drop(self) -> None:
        with suppress(OSError):
            self._file.close()
        with suppress(OSError):
            self._temp.unlink()


def _file_bytes(info: TensorInfo) -> int:
    return info.n_bytes + _TRAILER_BYTES


class _Entry(NamedTuple):
    path: Path
    n_bytes: int
    used_ns: int
    is_temp: bool


def _entries(home: Path) -> list[_Entry]:
    """Tensors of a model, and what is half written; other things are not ours."""
    entries = []
    with suppress(FileNotFoundError, NotADirectoryError):
        for path in home.iterdir():
            is_temp = path.name.startswith("tmp-")
            if is_temp or path.suffix == ".bin":
                with suppress(FileNotFoundError):
                    status = path.lstat()
                    entries.append(_Entry(path, status.st_size, status.st_atime_ns, is_temp))
    return entries


def _locked(home: Path, how: int) -> BinaryIO | None:
    """Lock a model; None if others hold it, or removed it in between."""
    path = home / "lock"
    try:
        home.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            file = stack.enter_context(path.open("ab"))
            fcntl.flock(file, how)
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                stack.pop_all()
                return file
    except FileExistsError:
        # The folder was there, and gone when mkdir looked whether it is one.
        if home.is_file():
            raise
    except (FileNotFoundError, BlockingIOError):
        pass
    return None


def _stamp(file: FileIO) -> _Stamp:
    status = os.fstat(file.fileno())
    return status.st_ino, status.st_size, status.st_mtime_ns


def _digest(path: Path) -> "hashlib._Hash":
    """Begun with where the file belongs: one that is sound elsewhere is not here."""
    return hashlib.sha256(f"{path.parent.name}/{path.name}\n".encode())


def _is_whole(file: FileIO, path: Path, n_bytes: int) -> bool:
    digest = _digest(path)
    buffer = memoryview(bytearray(min(n_bytes, _READ_BYTES)))
    left = n_bytes
    try:
        while left:
            n_read = file.readinto(buffer[:left])
            if not n_read:
                return False
            digest.update(buffer[:n_read])
            left -= n_read
        return file.read(_TRAILER_BYTES) == _MAGIC + digest.digest()
    except OSError:  # a sector that cannot be read
        return False
