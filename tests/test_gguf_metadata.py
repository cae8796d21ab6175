import struct
from pathlib import Path

import numpy as np
import pytest

from gguf_pp.errors import ConfigError, FormatError
from gguf_pp.gguf import Metadata, ModelFile
from gguf_pp.gguf.metadata import overridden
from tests.gguf_bytes import ARRAY, BOOL, F32, F64, FORMATS, I32, STRING, U32, gguf, key

VALUES = {
    "n": 3,
    "x": 0.5,
    "b": True,
    "s": "text",
    "ns": np.array([1, 2], np.uint32),
    "xs": np.array([0.5], np.float32),
    "bs": np.array([True, False]),
    "ss": ["a", "b"],
    "none": [],
    "nan": float("nan"),
}


@pytest.fixture
def metadata():
    return Metadata(VALUES, Path("m.gguf"))


def test_values_come_out_typed(metadata):
    assert metadata.int_of("n") == 3
    assert metadata.float_of("x") == 0.5
    assert metadata.bool_of("b") is True
    assert metadata.str_of("s") == "text"
    assert metadata.list_of("ns", int) == [1, 2]
    assert metadata.list_of("xs", float) == [0.5]
    assert metadata.list_of("bs", bool) == [True, False]
    assert metadata.list_of("ss", str) == ["a", "b"]
    assert metadata.list_of("none", str) == []


def test_a_default_stands_in_for_a_missing_key(metadata):
    assert metadata.int_of("absent", 7) == 7
    assert metadata.float_of("absent", float("inf")) == float("inf")
    assert metadata.str_of("absent", None) is None
    assert metadata.list_of("absent", int, []) == []


@pytest.mark.parametrize("getter", ["int_of", "float_of", "bool_of", "str_of"])
def test_a_missing_key_is_named(metadata, getter):
    with pytest.raises(FormatError, match=r"m.gguf: metadata key 'absent' is missing"):
        getattr(metadata, getter)("absent")


def test_a_missing_list_is_named(metadata):
    with pytest.raises(FormatError, match="'absent' is missing"):
        metadata.list_of("absent", int)


@pytest.mark.parametrize(
    ("getter", "key", "wanted", "found"),
    [
        ("int_of", "b", "int", "bool"),
        ("int_of", "s", "int", "str"),
        ("int_of", "ns", "int", "list of int"),
        ("float_of", "n", "float", "int"),
        ("bool_of", "n", "bool", "int"),
        ("str_of", "n", "str", "int"),
        ("str_of", "ss", "str", "list of str"),
    ],
)
def test_an_ill_typed_key_names_both_types(metadata, getter, key, wanted, found):
    with pytest.raises(FormatError, match=f"'{key}' should be {wanted}, but is {found}$"):
        getattr(metadata, getter)(key, None)


@pytest.mark.parametrize(
    ("key", "kind", "found"),
    [
        ("xs", int, "list of float"),
        ("bs", int, "list of bool"),
        ("ss", int, "list of str"),
        ("n", int, "int"),
    ],
)
def test_an_ill_typed_list_names_both_types(metadata, key, kind, found):
    with pytest.raises(FormatError, match=f"should be list of int, but is {found}$"):
        metadata.list_of(key, kind)


def test_a_float_is_finite(metadata):
    with pytest.raises(FormatError, match="'nan' is nan"):
        metadata.float_of("nan")


@pytest.mark.parametrize("kind", sorted(FORMATS.keys() - {BOOL, F32, F64}))
def test_integers_of_every_width_are_read_whole(tmp_path, kind):
    bits = 8 * struct.calcsize("<" + FORMATS[kind])
    signed = FORMATS[kind].islower()
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    path = tmp_path / "m.gguf"
    path.write_bytes(
        gguf([key("a", kind, low), key("b", kind, high), key("l", ARRAY, (kind, [low, high]))])
    )
    metadata = ModelFile.open(path).metadata
    assert (metadata.int_of("a"), metadata.int_of("b")) == (low, high)
    assert metadata.list_of("l", int) == [low, high]


def test_overrides_replace_and_add():
    values = overridden(
        VALUES, ["n=int:-4", "x=float:1e-5", "b=bool:false", "s=str:a=b:c", "new=str:"]
    )
    assert values["n"] == -4
    assert values["x"] == 1e-5
    assert values["b"] is False
    assert values["s"] == "a=b:c"
    assert values["new"] == ""
    assert VALUES["n"] == 3


@pytest.mark.parametrize(
    "text",
    ["", "n", "n=", "n=int", "n=3", "=int:3", "n=int:", "n=int:3.5", "n=int:1_0", "n=int: 3",
     "n=int:9223372036854775808", "n=int:" + "9" * 5000, "n=u32:3", "x=float:", "x=float:abc",
     "x=float:nan", "x=float:inf", "b=bool:yes", "b=bool:True", "n=INT:3"],
)  # fmt: skip
def test_malformed_overrides_are_named(text):
    with pytest.raises(ConfigError, match="--override-kv"):
        overridden(VALUES, [text])


@pytest.mark.parametrize("text", ["n=float:3", "n=bool:true", "s=int:3", "ns=int:3", "ss=str:a"])
def test_an_override_keeps_the_type(text):
    with pytest.raises(ConfigError, match="in the file"):
        overridden(VALUES, [text])


def test_a_key_is_overridden_once():
    with pytest.raises(ConfigError, match="sets 'n' twice"):
        overridden(VALUES, ["n=int:1", "n=int:1"])


def test_a_model_opens_with_overrides(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf([key("n", U32, 1), key("l", ARRAY, (I32, [])), key("s", STRING, "x")]))
    with ModelFile.open(path, ["n=int:5"]) as model:
        assert dict(model.metadata) | {"l": []} == {"n": 5, "l": [], "s": "x"}
