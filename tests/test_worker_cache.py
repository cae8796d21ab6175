import fcntl
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gguf_pp.errors import RemoteError
from gguf_pp.gguf import ModelFile, identity_of
from gguf_pp.worker.cache import Cache
from gguf_pp.worker.store import Store
from tests.manifests import (
    LARGE,
    N_BYTES,
    SIZES,
    assert_same,
    child,
    files,
    fill,
    named,
    open_in,
    send,
    write_model,
)


@pytest.fixture
def cache_dir(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path):
    with ModelFile.open(write_model(tmp_path / "model.gguf", SIZES)) as file:
        yield file


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


DAMAGE = {
    "first byte": lambda path: flip(path, 0),
    "a byte in the middle": lambda path: flip(path, 2000),
    "last byte": lambda path: flip(path, 3999),
    "magic": lambda path: flip(path, 4000),
    "digest": lambda path: flip(path, 4039),
    "cut by one": lambda path: os.truncate(path, 4039),
    "without trailer": lambda path: os.truncate(path, 4000),
    "half": lambda path: os.truncate(path, 2000),
    "empty": lambda path: os.truncate(path, 0),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "zeros": lambda path: path.write_bytes(bytes(4040)),
    "gone": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("same_store", [True, False])
def test_a_damaged_tensor_is_removed_and_sent_again(damage, same_store, file, cache_dir):
    store = Store([], cache_dir, LARGE)
    with open_in(store, file) as stored:
        send(stored, file)
    path = named(cache_dir, 4000)
    damage(path)
    with open_in(store if same_store else Store([], cache_dir, LARGE), file) as stored:
        assert (stored.missing, stored.origin) == ((0,), "client")
        assert not path.exists()
        send(stored, file)
        stored.finish()
        assert_same(stored, file)


@given(st.binary(max_size=4100), st.integers(0, 4040))
def test_no_bytes_but_those_that_were_written_are_believed(tmp_path_factory, junk, at):
    folder = tmp_path_factory.getbasetemp() / "junk"
    folder.mkdir(exist_ok=True)
    with ModelFile.open(write_model(folder / "model.gguf", SIZES)) as file:
        fill(folder / "cache", file)
        path = named(folder / "cache", 4000)
        before = path.read_bytes()
        after = (before[:at] + junk + before[at + len(junk) :])[:4040]
        path.write_bytes(after)
        with open_in(Store([], folder / "cache", LARGE), file) as stored:
            assert (stored.missing == ()) == (after == before)


def test_a_sound_tensor_under_the_name_of_another_is_not_believed(tmp_path, cache_dir):
    path = write_model(tmp_path / "model.gguf", {"a": 100, "b": 100})
    with ModelFile.open(path) as file:
        fill(cache_dir, file)
        one, two = files(cache_dir)
        one.write_bytes(two.read_bytes())
        with open_in(Store([], cache_dir, LARGE), file) as stored:
            assert len(stored.missing) == 1


def test_an_unchanged_file_is_verified_once(file, cache_dir, monkeypatch):
    fill(cache_dir, file)
    store, n_read = Store([], cache_dir, LARGE), []
    from gguf_pp.worker import cache

    whole = cache._is_whole
    monkeypatch.setattr(cache, "_is_whole", lambda *args: n_read.append(1) or whole(*args))
    for _ in range(2):
        with open_in(store, file) as stored:
            assert_same(stored, file)
    assert len(n_read) == len(SIZES)


def test_what_goes_away_while_it_is_open_is_an_error_without_paths(file, cache_dir):
    fill(cache_dir, file)
    with open_in(Store([], cache_dir, LARGE), file) as stored:
        flip(named(cache_dir, 4000), 5)
        named(cache_dir, 20).unlink()
        for name in ("a", "b"):
            with pytest.raises(RemoteError, match=f"'{name}' went away") as caught:
                stored.data(name)
            assert str(cache_dir) not in str(caught.value)


KILLED = """
with open_in(store, file) as stored:
    send(stored, file, [0])
    stored.write(2, 0, file.data("c").reshape(-1)[:5000].tobytes())
    say("half")
    sys.stdin.read()
"""


def test_a_writer_that_is_killed_leaves_whole_tensors_and_nothing_else(file, cache_dir):
    with child(KILLED, file, cache_dir) as process:
        assert process.stdout.readline() == "half\n"
        assert len(files(cache_dir, "tmp-*")) == 1
        other = Store([], cache_dir, LARGE)
        assert len(files(cache_dir, "tmp-*")) == 1, "it is still being written"
    with open_in(other, file) as stored:
        assert stored.missing == (1, 2)
    assert files(cache_dir, "tmp-*") == []
    assert len(files(cache_dir)) == 1


ENDLESS = """
say("open")
while is_wanted():
    for path in Path(sys.argv[2]).glob("*/*/*.bin"):
        path.unlink()
    with open_in(store, file) as stored:
        send(stored, file, chunk=100)
"""


@pytest.mark.parametrize("n_seen", [0, 1, 2])
def test_a_writer_killed_at_any_moment_leaves_nothing_that_is_wrong(n_seen, file, cache_dir):
    with child(ENDLESS, file, cache_dir) as process:
        assert process.stdout.readline() == "open\n"
        while len(files(cache_dir)) < n_seen and process.poll() is None:
            pass
    with open_in(Store([], cache_dir, LARGE), file) as stored:
        send(stored, file)
        assert_same(stored, file)
    assert files(cache_dir, "tmp-*") == []


TOGETHER = """
with open_in(store, file) as stored:
    say(len(stored.missing))
    sys.stdin.readline()
    send(stored, file, chunk=1000)
    stored.finish()
    assert_same(stored, file)
"""


def test_processes_that_write_the_same_tensors_do_not_disturb_each_other(file, cache_dir):
    with child(TOGETHER, file, cache_dir) as one, child(TOGETHER, file, cache_dir) as two:
        for process in (one, two):
            assert process.stdout.readline() == "3\n"
        for process in (one, two):
            process.stdin.write("go\n")
            process.stdin.flush()
        assert [process.wait() for process in (one, two)] == [0, 0]
    with open_in(Store([], cache_dir, LARGE), file) as stored:
        assert stored.missing == ()
        assert_same(stored, file)


def test_sessions_that_write_the_same_tensor_do_not_disturb_each_other(file, cache_dir):
    store = Store([], cache_dir, LARGE)
    with open_in(store, file) as one, open_in(store, file) as two:
        data = file.data("a").tobytes()
        one.write(0, 0, data[:1000])
        two.write(0, 0, data[:3000])
        one.write(0, 1000, data[1000:])
        assert one.data("a").tobytes() == data
        two.write(0, 3000, data[3000:])
        assert one.data("a").tobytes() == two.data("a").tobytes() == data


@pytest.fixture
def models(tmp_path, cache_dir):
    """Four models of the same size, cached in this order."""
    opened = []
    for i in range(4):
        path = write_model(tmp_path / f"{i}.gguf", SIZES, seed=i, name=f"model {i}")
        opened.append(ModelFile.open(path))
        fill(cache_dir, opened[-1])
    yield opened
    for file in opened:
        file.close()


def cached(cache_dir, models):
    """Which models are wholly there."""
    cache = Cache(cache_dir, LARGE)
    digests = [identity_of(model).digest for model in models]
    whole = [len(list((cache_dir / d[:2] / d).glob("*.bin"))) == 3 for d in digests]
    assert cache.usage().n_models == len({path.parent for path in files(cache_dir)})
    return [i for i, is_whole in enumerate(whole) if is_whole]


def test_the_model_that_was_not_used_for_longest_goes_first(models, cache_dir):
    store = Store([], cache_dir, LARGE)
    for i in (0, 1, 2, 3, 0):
        open_in(store, models[i]).close()
    store = Store([], cache_dir, 3 * N_BYTES)
    assert cached(cache_dir, models) == [0, 2, 3]
    assert store.usage() == (3, 3 * N_BYTES)
    Store([], cache_dir, N_BYTES)
    assert cached(cache_dir, models) == [0]
    assert len(list(cache_dir.glob("*/*"))) == 1, "nothing is left of those that went"


def test_no_more_is_removed_than_has_to_be(models, cache_dir):
    store = Store([], cache_dir, 4 * N_BYTES - 1)
    assert store.usage().n_models == 4
    assert 3 * N_BYTES <= store.usage().n_bytes < 4 * N_BYTES
    with open_in(store, models[0]) as stored:
        assert len(stored.missing) == 1


def test_room_is_made_before_a_model_is_written_and_never_in_one_that_is_open(models, cache_dir):
    store = Store([], cache_dir, 4 * N_BYTES)
    path = write_model(cache_dir.parent / "new.gguf", SIZES, seed=9, name="new")
    with ModelFile.open(path) as new, open_in(store, models[0]) as first:
        with open_in(store, models[1]), open_in(store, new) as stored:
            assert cached(cache_dir, models) == [0, 1, 2, 3]
            send(stored, new)
            assert cached(cache_dir, models) == [0, 1, 3]
        Store([], cache_dir, 1)
        assert cached(cache_dir, models) == [0]
        assert_same(first, models[0])
        with open_in(store, new) as stored:
            assert len(stored.missing) == 3


def test_a_model_that_another_process_has_open_stays(models, cache_dir):
    code = "with open_in(store, file) as stored:\n    say('open')\n    sys.stdin.read()\n"
    with child(code, models[1], cache_dir) as process:
        assert process.stdout.readline() == "open\n"
        Store([], cache_dir, 1)
        assert cached(cache_dir, models) == [1]
    Store([], cache_dir, 1)
    assert cached(cache_dir, models) == []


def test_what_is_not_ours_in_the_folder_stays(file, cache_dir):
    fill(cache_dir, file)
    home = files(cache_dir)[0].parent
    others = [cache_dir / "notes.txt", cache_dir / "ab", home / "note", cache_dir / "00" / "x"]
    (cache_dir / "00").mkdir(exist_ok=True)
    for other in others:
        other.write_text("mine")
    assert Cache(cache_dir, 1).usage() == (0, 0)
    assert all(other.read_text() == "mine" for other in others)
    fill(cache_dir, file)
    with open_in(Store([], cache_dir, LARGE), file) as stored:
        assert_same(stored, file)


def test_sessions_and_eviction_race_without_harm(file, cache_dir):
    """One process opens and closes while another removes all that is not open."""
    code = "say('start')\nwhile is_wanted():\n    Store([], Path(sys.argv[2]), 1)\n"
    with child(code, file, cache_dir) as process:
        assert process.stdout.readline() == "start\n"
        store = Store([], cache_dir, LARGE)
        for _ in range(50):
            with open_in(store, file) as stored:
                send(stored, file)
                stored.finish()
                assert_same(stored, file)


def test_a_folder_that_goes_while_it_is_made_is_made_again(file, cache_dir, monkeypatch):
    store, is_dir, removed = Store([], cache_dir, LARGE), Path.is_dir, []
    with open_in(store, file) as stored:
        send(stored, file)
    (home,) = cache_dir.glob("*/*")

    def late(path):
        if path == home and not removed:
            removed.append(shutil.rmtree(home))
        return is_dir(path)

    monkeypatch.setattr(Path, "is_dir", late)
    with open_in(store, file) as stored:
        assert removed
        send(stored, file)
        assert_same(stored, file)


def test_a_lock_of_what_was_just_removed_is_not_one(file, cache_dir, monkeypatch):
    """Another process evicts the model between opening its lock and having it."""
    store, flock, n_removed = Store([], cache_dir, LARGE), fcntl.flock, []

    def late(lock, how):
        if len(n_removed) < 2:
            (home,) = cache_dir.glob("*/*")
            n_removed.append(shutil.rmtree(home))
        flock(lock, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with open_in(store, file) as stored:
        assert len(n_removed) == 2
        assert len(files(cache_dir, "lock")) == 1
        send(stored, file)
        assert_same(stored, file)
