import struct
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gguf_pp.errors import GgufPpError
from gguf_pp.gguf import ModelFile
from tests.gguf_bytes import ARRAY, BOOL, F32, STRING, U8, U16, U32, U64, gguf, key, tensor

GOOD = gguf(
    [
        key("general.architecture", STRING, "llama"),
        key("general.alignment", U32, 64),
        key("split.count", U16, 1),
        key("b", BOOL, 1),
        key("tokens", ARRAY, (STRING, ["a", "bc", "", "é"])),
        key("scores", ARRAY, (F32, [1, 2, 3, 4])),
        key("nested", ARRAY, (ARRAY, [(U8, [1]), (STRING, ["x"])])),
        key("last", U64, 1),
    ],
    [
        tensor("a", [32, 2], kind=8),
        tensor("b", [3, 1, 2], offset=128),
    ],
    bytes(152),
    alignment=64,
)
# Numbers that parsers get wrong: small ones, and those next to the ends of their range.
NUMBERS = st.one_of(
    st.integers(0, 40),
    st.sampled_from([1 << n for n in range(5, 64)]),
    st.integers((1 << 64) - 64, (1 << 64) - 1),
    st.integers((1 << 63) - 8, (1 << 63) + 8),
)
PATCHES = st.lists(
    st.tuples(
        st.integers(4, len(GOOD) - 1),
        st.one_of(
            st.binary(min_size=1, max_size=8),
            NUMBERS.map(lambda n: struct.pack("<Q", n)),
            NUMBERS.map(lambda n: struct.pack("<I", n & 0xFFFFFFFF)),
        ),
    ),
    min_size=1,
    max_size=4,
)


@pytest.fixture(scope="module")
def path():
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "m-00001-of-00002.gguf"


def survives(path: Path, content: bytes) -> None:
    """Open `content`; touch all that opens. Only our own errors, and soon."""
    path.write_bytes(content)
    start = time.process_time()
    try:
        with ModelFile.open(path) as model:
            for info in model.tensors.values():
                assert model.data(info.name).nbytes == info.n_bytes
                model.data(info.name).sum()
            model.metadata.list_of("tokens", str, [])
            model.require_model()
            _ = model.architecture
    except GgufPpError as exc:
        assert str(path) in str(exc)
    assert time.process_time() - start < 2


def test_the_file_to_mutate_is_good(path):
    path.write_bytes(GOOD)
    with ModelFile.open(path) as model:
        assert len(model.tensors) == 2
        model.require_model()


@settings(max_examples=1500, deadline=None)
@given(patches=PATCHES)
def test_mutations_fail_only_with_our_errors(path, patches):
    content = bytearray(GOOD)
    for start, patch in patches:
        content[start : start + len(patch)] = patch
    survives(path, bytes(content))


@settings(max_examples=300, deadline=None)
@given(start=st.integers(4, len(GOOD)), n_bytes=st.integers(0, 64), new=st.binary(max_size=64))
def test_cuts_and_insertions_fail_only_with_our_errors(path, start, n_bytes, new):
    survives(path, GOOD[:start] + new + GOOD[start + n_bytes :])


@settings(max_examples=300, deadline=None)
@given(tail=st.binary(max_size=300), version=st.sampled_from([2, 3]))
def test_random_bytes_fail_only_with_our_errors(path, tail, version):
    survives(path, tail)
    survives(path, b"GGUF" + struct.pack("<I", version) + tail)


def test_every_byte_set_to_either_end_fails_only_with_our_errors(path):
    for i in range(len(GOOD)):
        for byte in (b"\0", b"\xff"):
            survives(path, GOOD[:i] + byte + GOOD[i + 1 :])
