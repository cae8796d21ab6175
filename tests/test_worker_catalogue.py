import os

import numpy as np
import pytest

from gguf_pp.errors import ConfigError, RemoteError
from gguf_pp.gguf import Identity
from gguf_pp.worker.catalogue import SCAN_INTERVAL_S, Catalogue
from tests.gguf_bytes import gguf, tensor
from tests.manifests import identity_at, write_model
from tests.test_gguf_shards import shard
from tests.tiny import write_tiny


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "models"
    folder.mkdir()
    return folder


@pytest.fixture
def path(folder):
    return write_tiny("llama", folder / "model.gguf")


def finds(catalogue, identity):
    found = catalogue.find(identity)
    assert catalogue.has(identity) == (found is not None)
    if found is None:
        return False
    found.close()
    return True


def test_a_model_is_found_by_content_whatever_it_is_called(path, tmp_path):
    identity = identity_at(path)
    deep = tmp_path / "models" / "a" / "b"
    deep.mkdir(parents=True)
    path.rename(deep / "SOMETHING ELSE.GGUF")
    found = Catalogue([tmp_path]).find(identity)
    info = found.tensors["output_norm.weight"]
    start = info.offset
    data = next(deep.iterdir()).read_bytes()
    assert found.data(info).tobytes() == data[start : start + info.n_bytes]
    found.close()


def test_another_model_of_the_same_size_is_not_it(folder):
    one = write_model(folder / "one.gguf", {"t": 100}, seed=1)
    write_model(folder / "another.gguf", {"t": 100}, seed=2)
    found = Catalogue([folder]).find(identity_at(one))
    assert np.array_equal(
        found.data(found.tensors["t"]),
        np.frombuffer(one.read_bytes(), np.uint8)[found.tensors["t"].offset :][:400],
    )
    found.close()


def test_a_digest_without_its_sizes_finds_nothing(path, folder):
    known = identity_at(path)
    catalogue = Catalogue([folder])
    assert finds(catalogue, known)
    assert not finds(catalogue, Identity((known.sizes[0] + 1,), known.digest))
    assert not finds(catalogue, Identity((*known.sizes, 5), known.digest))


def test_shards_are_found_together(folder):
    paths = [folder / f"model-{i + 1:05}-of-00003.gguf" for i in range(3)]
    for i, path in enumerate(paths):
        path.write_bytes(shard(i))
    identity = identity_at(paths[1])
    catalogue = Catalogue([folder])
    found = catalogue.find(identity)
    values = [found.data(info).view("<f4").item() for info in found.tensors.values()]
    assert values == [1, 2]
    found.close()
    paths[2].unlink()
    assert not finds(catalogue, identity)


def test_links_that_go_round_are_followed_once(path, folder):
    (folder / "below").mkdir()
    (folder / "below" / "up").symlink_to(folder)
    (folder / "self").symlink_to(folder / "self")
    (folder / "loop.gguf").symlink_to(folder / "loop.gguf")
    (folder / "gone.gguf").symlink_to(folder / "nothing")
    assert finds(Catalogue([folder, folder / "below"]), identity_at(path))


def test_a_linked_model_is_found(path, tmp_path):
    store = tmp_path / "snapshots"
    store.mkdir()
    blob = path.rename(path.with_name("0123abcd"))
    (store / "model.gguf").symlink_to(blob)
    assert finds(Catalogue([store]), identity_at(blob))


def test_what_is_no_model_is_passed_over(path, folder):
    identity = identity_at(path)
    size = identity.sizes[0]
    (folder / "a-damaged.gguf").write_bytes(bytes(size))
    (folder / "a-truncated.gguf").write_bytes(gguf([], [tensor("t", [size])]).ljust(size, b"\0"))
    (folder / "a-folder.gguf").mkdir()
    os.mkfifo(folder / "a-pipe.gguf")
    (folder / "a-file-of-another-kind.bin").write_bytes(path.read_bytes())
    assert finds(Catalogue([folder]), identity)


def test_folders_are_looked_at_once_a_minute(folder, clock):
    catalogue = Catalogue([folder], clock)
    assert not finds(catalogue, Identity((1,), "0" * 64))
    path = write_tiny("llama", folder / "late.gguf")
    identity = identity_at(path)
    clock.now += SCAN_INTERVAL_S - 1
    assert not finds(catalogue, identity)
    clock.now += 1
    assert finds(catalogue, identity)
    moved = path.rename(folder / "moved.gguf")
    assert not finds(catalogue, identity)
    clock.now += SCAN_INTERVAL_S
    assert finds(catalogue, identity)
    moved.unlink()
    assert not finds(catalogue, identity)


def test_a_file_that_changed_since_is_looked_at_anew(folder, clock):
    path = write_model(folder / "model.gguf", {"t": 100}, seed=1)
    first = identity_at(path)
    catalogue = Catalogue([folder], clock)
    assert finds(catalogue, first)
    write_model(folder / "new", {"t": 100}, seed=2).replace(path)
    second = identity_at(path)
    assert first.sizes == second.sizes
    assert not finds(catalogue, first)
    assert finds(catalogue, second)


def test_a_header_that_was_seen_is_not_parsed_for_other_models(folder, monkeypatch):
    one = write_model(folder / "one.gguf", {"t": 100}, seed=1)
    catalogue = Catalogue([folder])
    other = Identity(identity_at(one).sizes, "0" * 64)
    assert not finds(catalogue, other)
    known, opened = identity_at(one), []
    with monkeypatch.context() as patch:
        patch.setattr("gguf_pp.worker.catalogue.ModelFile.open", opened.append)
        assert not finds(catalogue, other)
        assert catalogue.has(known)
    assert opened == []
    one.unlink()
    assert not catalogue.has(known)


def test_a_replaced_or_removed_file_is_still_what_it_was(path, folder):
    before = path.read_bytes()
    found = Catalogue([folder]).find(identity_at(path))
    info = found.tensors["output_norm.weight"]
    wanted = before[info.offset : info.offset + info.n_bytes]
    path.unlink()
    assert found.data(info).tobytes() == wanted
    path.write_bytes(bytes(len(before)))
    assert found.data(info).tobytes() == wanted
    found.close()


def test_a_file_that_is_overwritten_in_place_is_not_used(path, folder):
    found = Catalogue([folder]).find(identity_at(path))
    info = found.tensors["output_norm.weight"]
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(info.offset)
        file.write(b"\1\2\3")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(RemoteError, match="was overwritten") as caught:
        found.data(info)
    assert str(folder) not in str(caught.value)
    found.close()


def test_a_folder_that_is_none_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"--model-dir .*nothing"):
        Catalogue([tmp_path / "nothing"])


def test_a_folder_that_goes_away_finds_nothing(folder):
    catalogue = Catalogue([folder])
    folder.rmdir()
    assert not finds(catalogue, Identity((1,), "0" * 64))
