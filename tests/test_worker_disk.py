import subprocess

import pytest

from gguf_pp.errors import ConfigError, RemoteError
from gguf_pp.gguf import ModelFile
from gguf_pp.worker.store import Store
from tests.manifests import (
    LARGE,
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


FULL = """
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
with open_in(store, file) as stored:
    def again():
        send(stored, file)
    for attempt in (again, again, stored.finish):
        try:
            attempt()
        except RemoteError as exc:
            say(f"{exc}|{exc.hint}")
    say(len(list(Path(sys.argv[2]).glob("*/*/tmp-*"))))
"""


def test_a_disk_that_refuses_is_an_error_that_stays_and_leaves_nothing_half_written(
    file, cache_dir
):
    with child(FULL, file, cache_dir) as process:
        lines = process.stdout.read().splitlines()
        assert process.wait() == 0
    message = "the worker cannot write to its cache: File too large"
    hint = "free some space on the worker, or start it with --cache on a larger disk"
    assert lines == [f"{message}|{hint}"] * 3 + ["0"]
    with open_in(Store([], cache_dir, LARGE), file) as stored:
        assert stored.missing == (2,)


@pytest.mark.parametrize("limit", [0, LARGE])
def test_no_room_on_the_disk_is_said_before_anything_is_written(
    limit, file, cache_dir, monkeypatch
):
    usage = type("Usage", (), {"free": 100})
    monkeypatch.setattr("gguf_pp.worker.disk.shutil.disk_usage", lambda folder: usage)
    with open_in(Store([], cache_dir, limit), file) as stored:
        with pytest.raises(
            RemoteError, match=r"no room for 16[0-9]{3} bytes .*: its disk has 100 free"
        ):
            send(stored, file)
        assert files(cache_dir, "[!l]*") == []


@pytest.fixture
def tmpfs(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", "size=32k", "none", str(folder)]
    try:
        done = subprocess.run(["mount", *options], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount")
    if done.returncode:
        pytest.skip(f"mount is not permitted: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_fills_up_is_an_error_and_empties_again(file, tmpfs):
    store = Store([], tmpfs, LARGE)
    with open_in(store, file) as stored:
        send(stored, file, [0, 1])
        filler = tmpfs / "filler"
        with pytest.raises(OSError, match="No space"), filler.open("wb", buffering=0) as other:
            while other.write(bytes(4096)):
                pass
        with pytest.raises(RemoteError, match="No space left on device"):
            send(stored, file, [2])
        filler.unlink()
    with open_in(store, file) as stored:
        assert stored.missing == (2,)
        send(stored, file)
        assert_same(stored, file)
    assert files(tmpfs, "tmp-*") == []


def test_a_cache_that_cannot_be_written_is_said_at_the_start(tmp_path, tmpfs):
    (tmp_path / "file").write_text("")
    subprocess.run(["mount", "-o", "remount,ro", str(tmpfs)], check=True)
    for folder in (tmp_path / "file" / "cache", tmpfs, tmpfs / "cache"):
        with pytest.raises(
            ConfigError, match=r"cannot be written: (Not a dir|Read-only)"
        ) as caught:
            Store([], folder, LARGE)
        assert str(folder) in str(caught.value)


def test_a_cache_that_becomes_unwritable_is_an_error_of_the_session(file, tmpfs):
    fill(tmpfs, file)
    store = Store([], tmpfs, LARGE)
    named(tmpfs, 20).unlink()
    subprocess.run(["mount", "-o", "remount,ro", str(tmpfs)], check=True)
    with pytest.raises(RemoteError, match="Read-only file system"):
        open_in(store, file)
