import hashlib
import re

import pytest

from gguf_pp.errors import FormatError
from gguf_pp.gguf import ModelFile, TensorSource, identity_of
from tests.gguf_bytes import STRING, gguf, key
from tests.manifests import identity_at, write_model
from tests.test_gguf_shards import shard
from tests.tiny import write_tiny

MIB = 1 << 20


@pytest.fixture
def path(tmp_path):
    return write_tiny("llama", tmp_path / "model.gguf")


def changed(path, at):
    """The identity with one bit flipped at byte `at`."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    other = path.with_name("changed.gguf")
    other.write_bytes(data)
    return identity_at(other)


def test_the_identity_does_not_depend_on_name_or_place(path, tmp_path):
    before = identity_at(path)
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    assert identity_at(path.rename(folder / "other.gguf")) == before
    assert re.fullmatch("[0-9a-f]{64}", before.digest)


def test_the_identity_does_not_depend_on_overrides(path):
    with ModelFile.open(path, ["general.name=str:other"]) as file:
        assert identity_of(file) == identity_at(path)


def test_sizes_are_those_of_the_files(path):
    assert identity_at(path).sizes == (path.stat().st_size,)


def test_header_and_data_of_a_small_model_count_to_the_last_byte(path):
    known = identity_at(path)
    with ModelFile.open(path) as file:
        start, size = file.data_starts[0], file.shard_sizes[0]
    in_header = path.read_bytes().index(b"context_length")
    assert in_header < start
    for at in (in_header, start, (start + size) // 2, size - 1):
        assert changed(path, at) != known


def test_every_tensor_of_a_large_model_counts(tmp_path):
    sizes = {"large": MIB, **{f"small.{i}": 1000 for i in range(40)}, "other": MIB}
    path = write_model(tmp_path / "large.gguf", sizes)
    known = identity_at(path)
    with ModelFile.open(path) as file:
        for name in ("large", "small.0", "small.23", "small.39", "other"):
            info = file.tensors[name]
            assert changed(path, info.offset + info.n_bytes // 2) != known, name


def test_a_large_model_is_sampled_from_end_to_end(tmp_path):
    """Blocks of 64 KiB at the 64 places that the layout names, and not between them."""
    path = write_model(tmp_path / "large.gguf", {"t": 2 * MIB})
    known = identity_at(path)
    with ModelFile.open(path) as file:
        start, end = file.data_starts[0], file.shard_sizes[0]
    block, room = 64 << 10, end - start - (64 << 10)
    for i in (0, 1, 40, 63):
        first = start + room * i // 63
        assert changed(path, first) != known
        assert changed(path, first + block - 1) != known
    assert changed(path, start + block + 1000) == known
    assert changed(path, end - 1) != known


def test_bytes_after_the_tensors_count_as_size(path):
    known = identity_at(path)
    with path.open("ab") as file:
        file.write(bytes(64))
    assert identity_at(path) != known


def test_a_file_without_tensors_has_an_identity(tmp_path):
    path = tmp_path / "vocabulary.gguf"
    path.write_bytes(gguf([key("general.architecture", STRING, "llama")])[:-5])
    assert identity_at(path).sizes == (path.stat().st_size,)


@pytest.fixture
def shards(tmp_path):
    paths = [tmp_path / f"model-{i + 1:05}-of-00003.gguf" for i in range(3)]
    for i, path in enumerate(paths):
        path.write_bytes(shard(i))
    return paths


def test_all_shards_count_whichever_is_given(shards):
    identities = {identity_at(path) for path in shards}
    assert len(identities) == 1
    known = identities.pop()
    assert known.sizes == tuple(path.stat().st_size for path in shards)
    for path in shards[1:]:
        before = path.read_bytes()
        path.write_bytes(before[:-32] + b"\1" + before[-31:])
        assert identity_at(shards[0]) != known
        path.write_bytes(before)


def test_the_digest_is_what_the_docstring_says(path):
    """Written out once more: a worker of another version must find the same."""
    data = path.read_bytes()
    digest = hashlib.sha256(b"gguf-pp model 1\n" + len(data).to_bytes(8, "little") + data)
    with ModelFile.open(path) as file:
        for info in file.tensors.values():
            middle = info.offset + max(info.n_bytes - 4096, 0) // 2
            digest.update(data[middle : min(middle + 4096, info.offset + info.n_bytes)])
    assert identity_at(path).digest == digest.hexdigest()


def test_a_model_file_is_a_tensor_source(path):
    def shape_of(source: TensorSource, name: str) -> tuple[int, ...]:
        return source.require(name, source.tensors[name].shape).shape

    with ModelFile.open(path) as file:
        assert shape_of(file, "output_norm.weight") == (file.tensors["output_norm.weight"].shape)
        with pytest.raises(FormatError, match="'nothing' is missing"):
            file.require("nothing", (1,))
