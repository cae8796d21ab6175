"""A model: one GGUF file, or several shards."""

import mmap
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from gguf_pp.errors import FormatError, UnsupportedError
from gguf_pp.gguf.header import Header, TensorInfo, parse_header
from gguf_pp.gguf.metadata import Metadata, overridden
from gguf_pp.gguf.shards import Split, shard_paths, split_of
from gguf_pp.gguf.sniff import check_magic
from gguf_pp.gguf.source import required


class ModelFile:
    """A model's header in memory and its tensors mapped; a context manager.

    `shards` are the files in order, with `shard_sizes` bytes each, of which those before
    `data_starts` are the header; `tensors` are those of all shards in order, `n_bytes` what they
    take. Views from `data` stay valid after `close`: each keeps its shard mapped.
    """

    def __init__(
        self, path: Path, shards: Sequence[tuple[Path, mmap.mmap, Header]], metadata: Metadata
    ) -> None:
        self.path = path
        self.metadata = metadata
        self.shards = tuple(shard for shard, _, _ in shards)
        self.shard_sizes = tuple(len(mapped) for _, mapped, _ in shards)
        self.data_starts = tuple(header.data_start for _, _, header in shards)
        self.tensors: dict[str, TensorInfo] = {}
        for _, _, header in shards:
            self.tensors |= header.tensors
        self.n_bytes = sum(info.n_bytes for info in self.tensors.values())
        self._maps = [mapped for _, mapped, _ in shards]

    @classmethod
    def open(cls, path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Self:
        """Open a model given its file or any of its shards.

        `overrides` are KEY=TYPE:VALUE, as for --override-kv. Raises FormatError,
        UnsupportedError, or ConfigError for an override.
        """
        path = Path(path)
        given = _open_one(path, 0)
        split = split_of(given[1], path)
        shards = [(path, *given)] if split is None else _open_shards(path, split, given)
        metadata = Metadata(overridden(shards[0][2].values, overrides), shards[0][0])
        return cls(path, shards, metadata)

    @property
    def architecture(self) -> str:
        """`general.architecture`. Raises FormatError if it is missing."""
        return self.metadata.str_of("general.architecture")

    def require_model(self) -> None:
        """Raise UnsupportedError if this is a valid GGUF file, but not a model to run."""
        kind = self.metadata.str_of("general.type", "model")
        if kind == "adapter":
            raise UnsupportedError(
                f"{self.path}: the file is an adapter, not a model",
                hint="adapters are not supported: give a model that has it merged in",
            )
        if kind != "model":
            raise UnsupportedError(f"{self.path}: the file is of type {kind!r}, not a model")
        if not self.tensors:
            raise UnsupportedError(
                f"{self.path}: the file has a vocabulary only, no tensors",
                hint="gguf-pp inspect shows it; to run a model, give the file with its weights",
            )

    def require(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        """Return the tensor `name`, which must have `shape` (numpy order, leading ones aside)."""
        return required(self.tensors, self.path, name, shape)

    def data(self, name: str) -> NDArray[np.uint8]:
        """Return a tensor's bytes, uint8 [n_rows, row_bytes]: a read-only view of the file."""
        assert self._maps, "the file is closed"
        info = self.tensors[name]
        flat = np.frombuffer(self._maps[info.i_shard], np.uint8, info.n_bytes, info.offset)
        return flat.reshape(info.n_rows, -1)

    def blocks(self, i_shard: int, ranges: Sequence[range]) -> Iterator[memoryview]:
        """Yield some ranges of a shard's bytes, its header included, read-only.

        The disk is asked for all of them at once, and for nothing around them: where the system
        reads megabytes ahead of every fault, that is the difference between 0.1 s and a minute.
        """
        mapped = self._maps[i_shard]
        for wanted in ranges:
            start = wanted.start // mmap.PAGESIZE * mmap.PAGESIZE
            if wanted and hasattr(mmap, "MADV_WILLNEED"):
                mapped.madvise(mmap.MADV_WILLNEED, start, wanted.stop - start)
        view = memoryview(mapped)
        yield from (view[wanted.start : wanted.stop] for wanted in ranges)

    def forget(self, name: str) -> None:
        """Let the system take back the memory of a tensor's pages; reading it again is possible."""
        info = self.tensors[name]
        first = -(-info.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        n_bytes = (info.offset + info.n_bytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
        if n_bytes > 0 and hasattr(mmap, "MADV_DONTNEED"):
            self._maps[info.i_shard].madvise(mmap.MADV_DONTNEED, first, n_bytes)

    def close(self) -> None:
        """Let go of the files. What views still use stays mapped until they go."""
        self._maps = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _open_one(path: Path, i_shard: int) -> tuple[mmap.mmap, Header]:
    mapped = _map(path)
    return mapped, parse_header(mapped, path, i_shard)


def _map(path: Path) -> mmap.mmap:
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise FormatError(f"{path}: a directory, not a GGUF file")
        if not stat.S_ISREG(mode):
            raise FormatError(f"{path}: not a regular file")
        with path.open("rb") as file:
            check_magic(file.read(512), path)
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError as exc:
        raise FormatError(f"{path}: no such file") from exc
    except OSError as exc:
        raise FormatError(f"{path}: cannot be read: {exc.strerror}") from exc


def _open_shards(
    path: Path, split: Split, given: tuple[mmap.mmap, Header]
) -> list[tuple[Path, mmap.mmap, Header]]:
    shards: list[tuple[Path, mmap.mmap, Header]] = []
    seen: set[str] = set()
    for i_shard, shard in enumerate(shard_paths(path, split)):
        # The usual shard to give is the first, and it has the vocabulary: parse it once.
        is_given = shard == path and i_shard == 0
        mapped, header = given if is_given else _open_one(shard, i_shard)
        split.check(i_shard, header, shard)
        if twice := seen & header.tensors.keys():
            raise FormatError(f"{shard}: tensor {min(twice)!r} occurs in an earlier shard too")
        seen |= header.tensors.keys()
        shards.append((shard, mapped, header))
    split.check_total(len(seen), path)
    return shards
