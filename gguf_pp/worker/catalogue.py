"""Models that lie on this machine, found by what is in them."""

import os
import stat
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gguf_pp.errors import ConfigError, GgufPpError, RemoteError
from gguf_pp.gguf import Identity, ModelFile, TensorInfo, identity_of

SCAN_INTERVAL_S: Final = 60.0

_Stamp = tuple[int, int, int, int]


class FoundModel:
    """An open model of this machine. A Source."""

    def __init__(self, file: ModelFile, stamps: Sequence[_Stamp | None]) -> None:
        self.tensors = file.tensors
        self._file = file
        self._stamps = stamps

    def data(self, info: TensorInfo) -> NDArray[np.uint8]:
        """A tensor's bytes, uint8 [n_bytes]; raises RemoteError if they were overwritten.

        A file that was replaced or removed is still mapped, and as good as it was.
        """
        own = self.tensors[info.name]
        now, then = _stamp(self._file.shards[own.i_shard]), self._stamps[own.i_shard]
        if now and then and now[:2] == then[:2] and now != then:
            raise RemoteError(
                "the worker's own copy of the model was overwritten while it was in use",
                hint="connect again: the worker looks at it anew",
            )
        return self._file.data(info.name).reshape(-1)

    def forget(self, info: TensorInfo) -> None:
        """Let the system take back the memory of a tensor's pages."""
        self._file.forget(info.name)

    def close(self) -> None:
        """Let go of the file; views of it stay valid."""
        self._file.close()


class Catalogue:
    """The GGUF files below some folders; looks at the folders at most once a minute.

    What cannot be read, is damaged or goes away is passed over. Raises ConfigError for a folder
    that is none.
    """

    def __init__(
        self, folders: Sequence[Path], clock: Callable[[], float] = time.monotonic
    ) -> None:
        for folder in folders:
            if not folder.is_dir():
                raise ConfigError(f"--model-dir {folder}: no such folder")
        self._folders = tuple(folders)
        self._clock = clock
        self._lock = threading.Lock()
        self._scanned_at: float | None = None
        self._by_size: dict[int, list[Path]] = {}
        self._seen: dict[Path, _Seen] = {}

    def has(self, identity: Identity) -> bool:
        """Whether there is such a model; opens no file that was looked at before."""
        with self._lock:
            if any(s.identity == identity and s.is_unchanged() for s in self._seen.values()):
                return True
        found = self.find(identity)
        if found is not None:
            found.close()
        return found is not None

    def find(self, identity: Identity) -> FoundModel | None:
        """Open the model with this identity if there is one."""
        with self._lock:
            return self._known(identity) or (self._scan() and self._known(identity)) or None

    def _known(self, identity: Identity) -> FoundModel | None:
        for path in self._by_size.get(identity.sizes[0], ()):
            # Many finetunes have the same size: parse each header once, not for every client.
            seen = self._seen.get(path)
            if seen and seen.identity != identity and seen.is_unchanged():
                continue
            if found := self._opened(path, identity):
                return found
        return None

    def _opened(self, path: Path, identity: Identity) -> FoundModel | None:
        with ExitStack() as stack:
            try:
                file = stack.enter_context(ModelFile.open(path))
            except (GgufPpError, OSError):
                return None
            # Taken before the content is read, so that no later change goes unseen.
            stamps = tuple(_stamp(shard) for shard in file.shards)
            seen = _Seen(file.shards, stamps, identity_of(file))
            self._seen[path] = seen
            if seen.identity != identity:
                return None
            stack.pop_all()
        return FoundModel(file, stamps)

    def _scan(self) -> bool:
        """Look for files, unless that was done a moment ago."""
        now = self._clock()
        if self._scanned_at is not None and now - self._scanned_at < SCAN_INTERVAL_S:
            return False
        self._scanned_at = now
        by_size: defaultdict[int, list[Path]] = defaultdict(list)
        for path in _walk(self._folders):
            if stamp := _stamp(path):
                by_size[stamp[2]].append(path)
        self._by_size = dict(by_size)
        return True


class _Seen(NamedTuple):
    """What was in some files when they were as stamped."""

    shards: tuple[Path, ...]
    stamps: tuple[_Stamp | None, ...]
    identity: Identity

    def is_unchanged(self) -> bool:
        return None not in self.stamps and tuple(map(_stamp, self.shards)) == self.stamps


def _walk(folders: Sequence[Path]) -> Iterator[Path]:
    """Names that end in .gguf, each folder once, whatever links lead to it."""
    seen: set[tuple[int, int]] = set()
    for start in folders:
        for root, folders_below, names in os.walk(start, followlinks=True):
            try:
                status = Path(root).stat()
            except OSError:
                folders_below.clear()
                continue
            if (status.st_dev, status.st_ino) in seen:
                folders_below.clear()
                continue
            seen.add((status.st_dev, status.st_ino))
            yield from (Path(root, name) for name in sorted(names) if _is_model(name))


def _is_model(name: str) -> bool:
    return name.lower().endswith(".gguf")


def _stamp(path: Path) -> _Stamp | None:
    """device, inode, size, mtime_ns of a regular file; None for anything else."""
    try:
        status = path.stat()
    except OSError:
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
