"""Models split over several files.

llama.cpp's llama-gguf-split names shards PREFIX-00001-of-00003.gguf and gives each `split.no`
(from 0), `split.count` and `split.tensors.count`; the other metadata is in the first shard.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gguf_pp.errors import FormatError
from gguf_pp.gguf.header import Header
from gguf_pp.gguf.metadata import Metadata

_NAME: Final = re.compile(r"(?P<prefix>.*)-[0-9]{5}-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)
_MAX_COUNT: Final = 65535


@dataclass(frozen=True, slots=True)
class Split:
    """What a shard says of the whole: `n_shards` files with `n_tensors` tensors.

    `no` is the shard's own index, from 0; `n_tensors` is None if the shard does not say.
    """

    no: int
    n_shards: int
    n_tensors: int | None

    def check(self, i_shard: int, header: Header, path: Path) -> None:
        """Raise FormatError unless `header` is that of shard `i_shard` of this split."""
        other = split_of(header, path)
        what = f"{path}: shard {i_shard + 1} of {self.n_shards}"
        if other is None:
            raise FormatError(f"{what} says that it is a whole model, not a shard")
        if (other.n_shards, other.n_tensors) != (self.n_shards, self.n_tensors):
            raise FormatError(
                f"{what} belongs to another split: {other.n_shards} shards with "
                f"{other.n_tensors} tensors, not {self.n_shards} with {self.n_tensors}"
            )
        if other.no != i_shard:
            raise FormatError(
                f"{what} says that it is shard {other.no + 1}: files were swapped or renamed",
                hint="give each shard its own name back",
            )

    def check_total(self, n_tensors: int, path: Path) -> None:
        """Raise FormatError unless the shards together have the tensors they should."""
        if self.n_tensors not in (None, n_tensors):
            raise FormatError(
                f"{path}: the {self.n_shards} shards have {n_tensors} tensors, "
                f"and should have {self.n_tensors}"
            )


def split_of(header: Header, path: Path) -> Split | None:
    """Return the split that a file is part of; None if it is a whole model."""
    metadata = Metadata(header.values, path)
    n_shards = metadata.int_of("split.count", 0)
    if n_shards in (0, 1):
        return None
    no = metadata.int_of("split.no")
    if not (1 < n_shards <= _MAX_COUNT and 0 <= no < n_shards):
        raise FormatError(f"{path}: split.no is {no} and split.count is {n_shards}")
    return Split(no, n_shards, metadata.int_of("split.tensors.count", None))


def shard_paths(path: Path, split: Split) -> list[Path]:
    """Return the paths of all shards, given that of one. All exist and none is empty."""
    match = _NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != split.n_shards:
        raise FormatError(
            f"{path}: shard {split.no + 1} of {split.n_shards} has a name by which the others "
            "cannot be found",
            hint=f"call it PREFIX-{split.no + 1:05}-of-{split.n_shards:05}.gguf, beside the others",
        )
    paths = [
        path.with_name(f"{match['prefix']}-{i + 1:05}-of-{split.n_shards:05}.gguf")
        for i in range(split.n_shards)
    ]
    missing = [i for i, shard in enumerate(paths) if not shard.exists()]
    if missing:
        raise FormatError(
            f"{paths[missing[0]]}: shard {missing[0] + 1} of {split.n_shards} is missing "
            f"({len(missing)} missing in all)",
            hint="download every shard into one folder",
        )
    for i, shard in enumerate(paths):
        if shard.stat().st_size == 0:
            raise FormatError(
                f"{shard}: shard {i + 1} of {split.n_shards} is empty",
                hint="the download failed: fetch it again",
            )
    return paths
