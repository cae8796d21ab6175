"""Which model a file holds, whatever it is called and wherever it lies."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from gguf_pp.gguf.file import ModelFile
from gguf_pp.gguf.header import TensorInfo

_N_BLOCKS: Final = 64
_BLOCK_BYTES: Final = 64 << 10
_TENSOR_BYTES: Final = 4 << 10


@dataclass(frozen=True, slots=True)
class Identity:
    """`sizes` of the shards in bytes, and the sha256 of a sample of them in lower-case hex."""

    sizes: tuple[int, ...]
    digest: str


def identity_of(file: ModelFile) -> Identity:
    """Read a sample of an open model: 4 MiB and the header of each shard, 4 KiB of each tensor.

    The digest covers the sizes of all shards, and then of each its header, 64 blocks of 64 KiB
    spread evenly over its data (all of it if it has less), and the middle of every tensor: a
    finetune differs even if it touched a single one. It does not depend on --override-kv.
    """
    digest = hashlib.sha256(b"gguf-pp model 1\n")
    for size in file.shard_sizes:
        digest.update(size.to_bytes(8, "little"))
    for i_shard, start in enumerate(file.data_starts):
        size = file.shard_sizes[i_shard]
        middles = [_middle(t) for t in file.tensors.values() if t.i_shard == i_shard]
        for block in file.blocks(
            i_shard, [range(min(start, size)), *_spread(start, size), *middles]
        ):
            digest.update(block)
    return Identity(file.shard_sizes, digest.hexdigest())


def _spread(start: int, end: int) -> Iterator[range]:
    """Blocks in [start, end), the first at its start and the last at its end."""
    if end - start <= _N_BLOCKS * _BLOCK_BYTES:
        yield range(start, end)
        return
    room = end - start - _BLOCK_BYTES
    for i_block in range(_N_BLOCKS):
        first = start + room * i_block // (_N_BLOCKS - 1)
        yield range(first, first + _BLOCK_BYTES)


def _middle(info: TensorInfo) -> range:
    start = info.offset + max(info.n_bytes - _TENSOR_BYTES, 0) // 2
    return range(start, min(start + _TENSOR_BYTES, info.offset + info.n_bytes))
