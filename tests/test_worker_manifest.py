from math import inf, nan
from pathlib import Path

import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st

from gguf_pp.errors import UnsupportedError
from gguf_pp.gguf import Identity, ModelFile
from gguf_pp.wire import ProtocolError, pack_json, unpack_json
from gguf_pp.worker.manifest import check_identity, check_metadata, check_tensors
from tests.manifests import declared, identity_at, scalars
from tests.tiny import NAMES, write_tiny

IDENTITY = Identity((1 << 20,), "0" * 64)
PATH = Path("model")


@pytest.mark.parametrize("name", NAMES)
def test_what_a_client_says_of_a_real_file_is_believed(name, tmp_path):
    path = write_tiny(name, tmp_path / "model.gguf")
    with ModelFile.open(path) as file:
        infos = check_tensors(declared(file), check_identity(identity_at(path)))
        assert [(i.name, i.type, i.shape, i.n_bytes) for i in infos] == [
            (i.name, i.type, i.shape, i.n_bytes) for i in file.tensors.values()
        ]
        values = unpack_json(pack_json(scalars(file))).values()
        metadata = check_metadata(values, PATH)
        prefix = f"{file.architecture}."
        for key in (key for key in file.metadata if key.startswith(prefix)):
            kept, own = metadata[key], file.metadata[key]
            assert kept == (own if not hasattr(own, "tolist") else own.tolist())


def test_lists_keep_their_type():
    metadata = check_metadata({"a": [1, 2], "b": [0.5], "c": ["x"], "d": [True], "e": []}, PATH)
    assert metadata.list_of("a", int) == [1, 2]
    assert metadata.list_of("b", float) == [0.5]
    assert metadata.list_of("c", str) == ["x"]
    assert metadata.list_of("d", bool) == [True]
    assert metadata.list_of("e", int) == []


@pytest.mark.parametrize(
    "value",
    [None, {}, {"a": 1}, [1, "a"], [1, True], [[1]], [None], 1 << 64, -(1 << 63) - 1, inf, [nan]],
)
def test_metadata_that_no_file_has_is_refused(value):
    with pytest.raises(ProtocolError, match="'key'"):
        check_metadata({"key": value}, PATH)


@pytest.mark.parametrize(
    ("sizes", "digest"),
    [((), "0" * 64), ((0,), "0" * 64), ((5, -1), "0" * 64), ((1,) * 65536, "0" * 64)]
    + [((1,), d) for d in ("", "0" * 63, "0" * 64 + "\n", "A" * 64, "../" * 21 + "x", "\0" * 64)],
)
def test_an_identity_that_is_none_is_refused(sizes, digest):
    with pytest.raises(ProtocolError):
        check_identity(Identity(sizes, digest))


GOOD = ["t", 0, [2, 4], 32]
BAD = {
    "nothing": [],
    "three": GOOD[:3],
    "five": [*GOOD, 1],
    "text": "abcd",
    "number": 7,
    "no name": ["", *GOOD[1:]],
    "long name": ["n" * 1025, *GOOD[1:]],
    "half a pair": ["\ud800", *GOOD[1:]],
    "name of another type": [1, *GOOD[1:]],
    "type of another type": ["t", "0", [2, 4], 32],
    "type is true": ["t", False, [2, 4], 32],
    "type below 0": ["t", -1, [2, 4], 32],
    "no dimension": ["t", 0, [], 4],
    "five dimensions": ["t", 0, [1, 1, 1, 2, 4], 32],
    "zero": ["t", 0, [0, 4], 0],
    "negative": ["t", 0, [-2, -4], 32],
    "dimension of another type": ["t", 0, [2.0, 4], 32],
    "shape of another type": ["t", 0, 8, 32],
    "overflow": ["t", 0, [1 << 32, 1 << 32], 1 << 40],
    "a dimension of 4,000 digits": ["t", 0, [10**4000], 40],
    "a size of 4,000 digits": ["t", 0, [8], 10**4000],
    "fewer bytes": ["t", 0, [2, 4], 31],
    "more bytes": ["t", 0, [2, 4], 33],
    "bytes of another type": ["t", 0, [2, 4], 32.0],
    "half a block": ["t", int(GGMLQuantizationType.Q4_0), [2, 16], 18],
    "larger than the model": ["t", 0, [1 << 20], 1 << 22],
}


@pytest.mark.parametrize("item", BAD.values(), ids=BAD)
def test_a_tensor_that_cannot_be_is_refused(item):
    assert check_tensors([GOOD], IDENTITY)
    with pytest.raises(ProtocolError):
        check_tensors([["first", 0, [1], 4], item], IDENTITY)


def test_counts_and_repetitions_are_refused():
    for items in ([], [GOOD, GOOD], [GOOD] * ((1 << 18) + 1)):
        with pytest.raises(ProtocolError):
            check_tensors(items, IDENTITY)


def test_tensors_together_fit_the_files():
    half = (1 << 20) // 8
    items = [["a", 0, [half], 4 * half], ["b", 0, [half], 4 * half]]
    assert len(check_tensors(items, IDENTITY)) == 2
    with pytest.raises(ProtocolError, match="1048580 bytes in a model of 1048576"):
        check_tensors([*items, ["c", 0, [1], 4]], IDENTITY)


@pytest.mark.parametrize("number", [4, 5, 999])
def test_a_type_that_we_lack_is_named(number):
    with pytest.raises(UnsupportedError, match=f"tensor 0 has .*type {number}"):
        check_tensors([["t", number, [32], 18]], IDENTITY)


scalar = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
anything = st.recursive(scalar, lambda inner: st.lists(inner, max_size=5), max_leaves=8)
close = st.tuples(
    st.text(max_size=3) | anything,
    st.sampled_from([0, 2, 3, 12, 14]) | anything,
    st.lists(st.integers(-1, 300), max_size=5) | anything,
    st.integers(-1, 500) | anything,
).map(list)


@given(st.lists(close | anything, max_size=4))
def test_whatever_is_declared_is_checked_in_full_or_refused(items):
    try:
        infos = check_tensors(items, IDENTITY)
    except (ProtocolError, UnsupportedError):
        return
    for info, (name, number, shape, n_bytes) in zip(infos, items, strict=True):
        block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(number)]
        n_elements = 1
        for dim in shape:
            assert dim > 0
            n_elements *= dim
        assert info.n_bytes == n_bytes == n_elements // block_size * block_bytes
        assert shape[-1] % block_size == 0
        assert info.name == name


@given(st.dictionaries(st.text(), anything, max_size=4))
def test_whatever_metadata_comes_has_types_of_a_file_or_is_refused(values):
    try:
        metadata = check_metadata(values, PATH)
    except ProtocolError:
        return
    for value in metadata.values():
        kinds = {type(item) for item in (value if isinstance(value, list) else [value])}
        assert len(kinds) <= 1 and kinds <= {int, float, bool, str}
