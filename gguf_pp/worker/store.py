"""Weights of a client's model: from a copy of our own, from the cache, or as the client sends them.

A session opens the model that its client has. What the store then lacks is written piece by piece,
and read back by the loaders of the stages as if it were a file of this machine.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from gguf_pp.errors import RemoteError
from gguf_pp.gguf import Identity, Metadata, TensorInfo
from gguf_pp.gguf.source import required
from gguf_pp.wire import ProtocolError
from gguf_pp.worker.cache import Cache, Usage
from gguf_pp.worker.catalogue import Catalogue
from gguf_pp.worker.disk import usable
from gguf_pp.worker.manifest import check_identity, check_metadata, check_tensors
from gguf_pp.worker.scratch import Scratch

Origin = Literal["model-dir", "cache", "client"]


class Source(Protocol):
    """Where tensors are read from. `data` may be called from several threads."""

    def data(self, info: TensorInfo) -> NDArray[np.uint8]:
        """All bytes of a tensor, uint8 [n_bytes], read-only. Raises RemoteError."""

    def forget(self, info: TensorInfo) -> None:
        """Let the system take back the memory of a tensor's pages."""

    def close(self) -> None:
        """Let go of it, and drop what is half written; views stay valid. Can be called twice."""


class Shelf(Source, Protocol):
    """A source that tensors are first written to: the cache, or a scratch file.

    One at a time: `begin`, `append` until it has all its bytes, `commit`. All raise RemoteError if
    the disk refuses.
    """

    def missing(self, infos: Sequence[TensorInfo]) -> tuple[int, ...]:
        """Indices of the tensors that are not there whole and sound."""

    def prepare(self, infos: Sequence[TensorInfo]) -> None:
        """Make room for all that will be written; called once, before the first `begin`."""

    def begin(self, info: TensorInfo) -> None:
        """Start to write a tensor."""

    def append(self, data: memoryview) -> None:
        """Write its next bytes."""

    def commit(self) -> None:
        """All its bytes are there: keep it."""

    def drop(self) -> None:
        """Nothing more will be written: remove what is half written."""


class Receiver:
    """Takes the tensors that are missing, one after another, each in pieces from its start."""

    def __init__(self, shelf: Shelf, infos: Sequence[TensorInfo], missing: Sequence[int]) -> None:
        self._shelf = shelf
        self._infos = infos
        self.missing = tuple(missing)
        self._left = set(missing)
        self._is_prepared = False
        self._i_tensor: int | None = None
        self._n_written = 0
        self._failure: RemoteError | None = None

    def write(self, i_tensor: int, offset: int, data: memoryview) -> None:
        """Take a piece; raises ProtocolError for one that is not the next, as `finish` does."""
        if self._failure is not None:
            raise self._failure
        self._check(i_tensor, offset, len(data))
        try:
            self._take(i_tensor, data)
        except RemoteError as exc:
            self._failure = exc
            self._shelf.drop()
            raise

    def _take(self, i_tensor: int, data: memoryview) -> None:
        if not self._is_prepared:
            self._shelf.prepare([self._infos[i] for i in self.missing])
            self._is_prepared = True
        if self._i_tensor is None:
            self._shelf.begin(self._infos[i_tensor])
            self._i_tensor = i_tensor
        self._shelf.append(data)
        self._n_written += len(data)
        if self._n_written == self._infos[i_tensor].n_bytes:
            self._shelf.commit()
            self._left.remove(i_tensor)
            self._i_tensor, self._n_written = None, 0

    def _check(self, i_tensor: int, offset: int, n_bytes: int) -> None:
        if i_tensor not in self._left:
            raise ProtocolError(f"a piece of tensor {i_tensor}, which is not missing")
        if self._i_tensor not in (None, i_tensor):
            raise ProtocolError(f"a piece of tensor {i_tensor} before {self._i_tensor} was whole")
        size = self._infos[i_tensor].n_bytes
        if offset != self._n_written or not 0 < n_bytes <= size - offset:
            raise ProtocolError(
                f"{n_bytes} bytes at byte {offset} of tensor {i_tensor}, "
                f"which has {size} bytes and so far got {self._n_written}"
            )

    def finish(self) -> None:
        """Raise ProtocolError unless all is there, RemoteError if the disk refused."""
        if self._failure is not None:
            raise self._failure
        if self._left:
            raise ProtocolError(f"{len(self._left)} tensors were not sent to their end")


class StoredModel:
    """A client's model as far as it was declared: a TensorSource, and a context manager.

    `origin` says where the tensors come from, and `missing` which of them, by index as declared,
    the client has to send. `write` and `finish` belong to one thread at a time; `data` may be
    called from several, after `finish`.
    """

    def __init__(
        self,
        path: Path,
        metadata: Metadata,
        infos: Sequence[TensorInfo],
        source: Source,
        receiver: Receiver | None = None,
    ) -> None:
        self.path = path
        self.metadata = metadata
        self.tensors = {info.name: info for info in infos}
        self.missing = () if receiver is None else receiver.missing
        self.missing_bytes = sum(infos[i].n_bytes for i in self.missing)
        self.origin: Origin = "model-dir" if receiver is None else "cache"
        if self.missing:
            self.origin = "client"
        self._source = source
        self._receiver = receiver

    def require(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        """Return the tensor `name`, which must have `shape`. Raises FormatError."""
        return required(self.tensors, self.path, name, shape)

    def data(self, name: str) -> NDArray[np.uint8]:
        """Return a tensor's bytes, uint8 [n_rows, row_bytes], read-only; valid after `close`.

        Raises RemoteError if they went away or were damaged.
        """
        info = self.tensors[name]
        return self._source.data(info).reshape(info.n_rows, -1)

    def forget(self, name: str) -> None:
        """Let the system take back the memory of a tensor's pages."""
        self._source.forget(self.tensors[name])

    def write(self, i_tensor: int, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Take the next piece of a missing tensor, which must be whole before another begins.

        Raises ProtocolError for any other piece, RemoteError if the disk refuses, and then the
        same for every further piece.
        """
        if self._receiver is None:
            raise ProtocolError(f"a piece of tensor {i_tensor}, and none is missing")
        self._receiver.write(i_tensor, offset, memoryview(data).cast("B"))

    def finish(self) -> None:
        """Raise ProtocolError unless all that was missing is there, RemoteError if `write` did."""
        if self._receiver is not None:
            self._receiver.finish()

    def close(self) -> None:
        """Drop what is half written, and let go of the rest. Can be called twice."""
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class Store:
    """What a worker has of all models. Its methods may be called from several threads.

    `cache_dir` None or `cache_bytes` 0: what clients send is kept for their session only, as is a
    model of which more was declared than the whole cache may take. Raises ConfigError for folders
    that cannot be used.
    """

    def __init__(
        self, model_dirs: Sequence[Path], cache_dir: Path | None, cache_bytes: int
    ) -> None:
        self._catalogue = Catalogue(model_dirs)
        self._cache_dir = None if cache_dir is None else usable(cache_dir)
        self._cache = Cache(cache_dir, cache_bytes) if cache_dir and cache_bytes else None

    def where(self, identity: Identity) -> Literal["model-dir", "cache"] | None:
        """Where there is at least something of a model. Raises ProtocolError."""
        check_identity(identity)
        if self._catalogue.has(identity):
            return "model-dir"
        return "cache" if self._cache and self._cache.holds(identity.digest) else None

    def open(
        self, identity: Identity, metadata: Mapping[str, object], tensors: Sequence[Any]
    ) -> StoredModel:
        """Open a client's model; `tensors` are [name, ggml type id, shape, n_bytes] each.

        Reads what is cached of it to verify it: seconds, the first time. Raises ProtocolError for
        what no client of ours says, UnsupportedError for an unknown type, RemoteError for disks.
        """
        check_identity(identity)
        infos = check_tensors(tensors, identity)
        path = Path(f"model {identity.digest[:12]}")
        checked = check_metadata(metadata, path)
        if found := self._catalogue.find(identity):
            with ExitStack() as stack:
                stack.callback(found.close)
                _check_same(infos, found.tensors)
                stack.pop_all()
            return StoredModel(path, checked, infos, found)
        with ExitStack() as stack:
            shelf = self._shelf(identity, infos)
            stack.callback(shelf.close)
            receiver = Receiver(shelf, infos, shelf.missing(infos))
            stack.pop_all()
        return StoredModel(path, checked, infos, shelf, receiver)

    def _shelf(self, identity: Identity, infos: Sequence[TensorInfo]) -> Shelf:
        if self._cache and self._cache.fits(infos):
            return self._cache.open(identity.digest)
        return Scratch(self._cache_dir)

    def usage(self) -> Usage:
        """What the cache has, for the log."""
        return Usage(0, 0) if self._cache is None else self._cache.usage()


def _check_same(infos: Sequence[TensorInfo], own: Mapping[str, TensorInfo]) -> None:
    for info in infos:
        mine = own.get(info.name)
        if mine is None or (mine.type, mine.shape) != (info.type, info.shape):
            raise ProtocolError(f"tensor {info.name!r} is not in the model as it was declared")
