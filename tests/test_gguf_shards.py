import struct

import pytest

from gguf_pp.errors import FormatError
from gguf_pp.gguf import ModelFile
from tests.gguf_bytes import I32, STRING, U16, gguf, key, tensor


def split_keys(no, count, n_tensors):
    return [
        key("split.no", U16, no),
        key("split.count", U16, count),
        key("split.tensors.count", I32, n_tensors),
    ]


def shard(no, count=3, n_tensors=2, names=None):
    """Shard 0 has only metadata, as with --no-tensor-first-split; the others one tensor each."""
    keys = split_keys(no, count, n_tensors)
    if no == 0:
        return gguf([key("general.architecture", STRING, "llama"), *keys])
    names = [f"t{no}"] if names is None else names
    entries = [tensor(name, [1], offset=32 * i) for i, name in enumerate(names)]
    return gguf(keys, entries, struct.pack("<f", no).ljust(32, b"\0") * len(names))


@pytest.fixture
def paths(tmp_path):
    paths = [tmp_path / f"model-q4-{i + 1:05}-of-00003.gguf" for i in range(3)]
    for i, path in enumerate(paths):
        path.write_bytes(shard(i))
    return paths


@pytest.mark.parametrize("given", [0, 1, 2])
def test_any_shard_opens_the_model(paths, given):
    with ModelFile.open(paths[given]) as model:
        assert model.shards == tuple(paths)
        assert model.architecture == "llama"
        assert [t.i_shard for t in model.tensors.values()] == [1, 2]
        assert [model.data(t).view("<f4").item() for t in model.tensors] == [1, 2]
        assert model.n_bytes == 8


def test_a_split_into_one_is_a_whole_model(tmp_path):
    path = tmp_path / "anything.gguf"
    path.write_bytes(gguf(split_keys(0, 1, 1), [tensor("t", [1])], bytes(4)))
    assert ModelFile.open(path).shards == (path,)


def broken(paths, given, match):
    with pytest.raises(FormatError, match=match) as caught:
        ModelFile.open(paths[given])
    return str(caught.value)


def test_missing_shards_are_named_and_counted(paths):
    paths[0].unlink()
    paths[2].unlink()
    assert str(paths[0]) in broken(paths, 1, r"shard 1 of 3 is missing \(2 missing in all\)")


def test_an_empty_shard_is_named(paths):
    paths[1].write_bytes(b"")
    assert str(paths[1]) in broken(paths, 0, "shard 2 of 3 is empty")


@pytest.mark.parametrize("given", [0, 1, 2])
def test_swapped_shards_are_named(paths, given):
    one, two = paths[1].read_bytes(), paths[2].read_bytes()
    paths[1].write_bytes(two)
    paths[2].write_bytes(one)
    assert str(paths[1]) in broken(paths, given, "shard 2 of 3 says that it is shard 3: .*swapped")


def test_concatenated_shards_are_named(paths):
    paths[1].write_bytes(paths[1].read_bytes() + paths[2].read_bytes())
    assert str(paths[1]) in broken(paths, 0, "concatenated")


def test_a_truncated_shard_is_named(paths):
    paths[2].write_bytes(paths[2].read_bytes()[:-31])
    assert str(paths[2]) in broken(paths, 0, "truncated")


def test_a_shard_of_another_split_is_named(paths):
    paths[2].write_bytes(shard(2, n_tensors=9))
    broken(paths, 0, "shard 3 of 3 belongs to another split: 3 shards with 9 tensors, not 3 with 2")


def test_a_whole_model_among_shards_is_named(paths):
    paths[2].write_bytes(gguf())
    broken(paths, 0, "shard 3 of 3 says that it is a whole model")


def test_a_tensor_in_two_shards_is_named(paths):
    paths[2].write_bytes(shard(2, names=["t1"]))
    broken(paths, 0, "'t1' occurs in an earlier shard too")


def test_the_number_of_tensors_is_checked(paths):
    paths[2].write_bytes(shard(2, names=["t2", "t3"]))
    broken(paths, 0, "have 3 tensors, and should have 2")


@pytest.mark.parametrize("name", ["renamed.gguf", "model-00001-of-00002.gguf"])
def test_a_renamed_shard_is_named(paths, name):
    broken([paths[0].rename(paths[0].with_name(name))], 0, "shard 1 of 3 has a name by which")


@pytest.mark.parametrize(("no", "count"), [(3, 3), (7, 2)])
def test_a_shard_beyond_its_count_is_named(paths, no, count):
    paths[0].write_bytes(shard(no, count=count))
    broken(paths, 0, f"split.no is {no} and split.count is {count}")
