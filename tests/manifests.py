"""What a client says of a model file, and how it sends the tensors."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from gguf_pp.gguf import Identity, ModelFile, identity_of
from gguf_pp.worker.store import Store
from tests.gguf_bytes import STRING, gguf, key, tensor

ROOT = Path(__file__).parents[1]
CHUNK = 1 << 20
LARGE = 1 << 30
SIZES = {"a": 1000, "b": 5, "c": 3000}
N_BYTES = 4 * sum(SIZES.values()) + 3 * 40
PRELUDE = """
import os, resource, sys
from pathlib import Path
from gguf_pp.errors import RemoteError
from gguf_pp.gguf import ModelFile
from gguf_pp.worker.store import Store
from tests.manifests import assert_same, open_in, send
file = ModelFile.open(sys.argv[1])
store = Store([], Path(sys.argv[2]), 1 << 30)

parent = os.getppid()

def say(*what):
    print(*what, flush=True)

def is_wanted():
    return os.getppid() == parent
"""


def write_model(path: Path, sizes: dict[str, int], seed: int = 0, name: str = "model") -> Path:
    """Write F32 tensors of `sizes` elements with random bytes; `name` sets models apart."""
    entries, offset = [], 0
    for tensor_name, n in sizes.items():
        entries.append(tensor(tensor_name, [n], offset=offset))
        offset += -(-4 * n // 32) * 32
    keys = [key("general.architecture", STRING, "llama"), key("general.name", STRING, name)]
    path.write_bytes(gguf(keys, entries, np.random.default_rng(seed).bytes(offset)))
    return path


def identity_at(path: Path) -> Identity:
    with ModelFile.open(path) as file:
        return identity_of(file)


def declared(file: ModelFile) -> list[list[object]]:
    """The tensors as OPEN has them."""
    return [[t.name, int(t.type), list(t.shape), t.n_bytes] for t in file.tensors.values()]


def scalars(file: ModelFile) -> dict[str, object]:
    """The metadata as OPEN has it: no tokenizer."""
    values = {k: v for k, v in file.metadata.items() if not k.startswith("tokenizer.")}
    return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in values.items()}


def open_in(store, file):
    return store.open(identity_of(file), scalars(file), declared(file))


def send(stored, file, indices=None, chunk=CHUNK):
    """Write what is missing, or only the tensors at `indices`."""
    names = list(file.tensors)
    for i in stored.missing if indices is None else indices:
        data = memoryview(file.data(names[i]).reshape(-1))
        for offset in range(0, len(data), chunk):
            stored.write(i, offset, data[offset : offset + chunk])


def assert_same(stored, file):
    for name, info in file.tensors.items():
        data = stored.data(name)
        assert data.shape == (info.n_rows, info.n_bytes // info.n_rows)
        assert not data.flags.writeable
        assert data.ctypes.data % 32 == 0, "as in the file: kernels load whole vectors"
        assert np.array_equal(data, file.data(name)), name


@contextmanager
def child(code: str, file: ModelFile, cache_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has `file` and `store`, talks through its pipes, and is killed at the end."""
    with subprocess.Popen(
        [sys.executable, "-c", PRELUDE + code, str(file.path), str(cache_dir)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def fill(cache_dir: Path, file: ModelFile) -> None:
    with open_in(Store([], cache_dir, LARGE), file) as stored:
        send(stored, file)


def files(cache_dir: Path, pattern: str = "*.bin") -> list[Path]:
    return sorted(cache_dir.glob(f"*/*/{pattern}"))


def named(cache_dir: Path, n_bytes: int) -> Path:
    """The file of the tensor of this size."""
    (path,) = [path for path in files(cache_dir) if path.stat().st_size == n_bytes + 40]
    return path
