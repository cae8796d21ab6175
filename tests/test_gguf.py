import gc
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from gguf_pp.errors import FormatError, UnsupportedError
from gguf_pp.gguf import ModelFile
from tests.gguf_bytes import (
    ARRAY,
    BOOL,
    F32,
    STRING,
    U8,
    U16,
    U32,
    gguf,
    key,
    string,
    tensor,
)
from tests.sockets import no_more_than, usage
from tests.tiny import SPECS, write_tiny

ARCH = key("general.architecture", STRING, "llama")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "m.gguf"


def opened(path: Path, content: bytes) -> ModelFile:
    path.write_bytes(content)
    return ModelFile.open(path)


def fails(path: Path, content: bytes, *words: str, error=FormatError) -> None:
    """Assert that `content` fails with an `error` that names the path and all `words`."""
    with pytest.raises(error) as caught:
        opened(path, content)
    assert type(caught.value) is error
    for word in (str(path), *words):
        assert word in str(caught.value)


def test_a_tiny_model_is_read_back(path):
    write_tiny("llama-moe", path)
    spec = SPECS["llama-moe"]
    with ModelFile.open(path) as model:
        assert model.architecture == spec["architecture"]
        assert model.shards == (path,)
        assert {name: list(t.shape) for name, t in model.tensors.items()} == spec["tensors"]
        assert model.n_bytes == sum(t.n_bytes for t in model.tensors.values())
        assert model.metadata.int_of("llama.block_count") == 4
        info = model.tensors["blk.0.ffn_gate_exps.weight"]
        data = model.data(info.name)
        assert info.type is GGMLQuantizationType.F32
        assert data.shape == (info.n_rows, 4 * info.shape[-1])
        assert data.tobytes() == path.read_bytes()[info.offset : info.offset + info.n_bytes]
        model.require_model()


def test_a_view_outlives_its_file(path):
    write_tiny("llama", path)
    model = ModelFile.open(path)
    view = model.data("output_norm.weight")
    before = view.tobytes()
    model.close()
    del model
    gc.collect()
    path.unlink()
    assert view.tobytes() == before
    assert not view.flags.writeable


def test_nothing_stays_open_without_views(path):
    write_tiny("llama", path)
    before = usage()
    with ModelFile.open(path) as model:
        model.data("output_norm.weight")
    assert no_more_than(before)


def test_versions_2_and_3_have_one_layout(path):
    for version in (2, 3):
        content = gguf([ARCH], [tensor("t", [2])], struct.pack("<2f", 1, 2), version=version)
        assert opened(path, content).data("t").view("<f4").tolist() == [[1.0, 2.0]]


def test_alignment_moves_the_data(path):
    keys = [key("general.alignment", U32, 256)]
    content = gguf(keys, [tensor("t", [1])], struct.pack("<f", 7), alignment=256)
    model = opened(path, content)
    assert model.tensors["t"].offset == 256
    assert model.data("t").view(np.float32).item() == 7


def test_quantized_rows_count_blocks(path):
    model = opened(path, gguf([], [tensor("t", [64, 3, 2], kind=8)], bytes(6 * 68)))
    assert model.tensors["t"].shape == (2, 3, 64)
    assert model.data("t").shape == (6, 68)


def test_a_file_without_tensors_opens_for_inspection(path):
    model = opened(path, gguf([ARCH]))
    assert (model.tensors, model.n_bytes) == ({}, 0)
    with pytest.raises(UnsupportedError, match="vocabulary only"):
        model.require_model()


@pytest.mark.parametrize(("kind", "words"), [("adapter", "an adapter"), ("mmproj", "'mmproj'")])
def test_what_is_no_model_is_named(path, kind, words):
    keys = [ARCH, key("general.type", STRING, kind)]
    model = opened(path, gguf(keys, [tensor("t", [1])], bytes(4)))
    with pytest.raises(UnsupportedError, match=words):
        model.require_model()


def test_a_missing_or_misshapen_tensor_is_named(path):
    model = opened(path, gguf([ARCH], [tensor("t", [3, 2, 1])], bytes(24)))
    assert model.require("t", (2, 3)).shape == (1, 2, 3)
    with pytest.raises(FormatError, match=r"'output\.weight' is missing"):
        model.require("output.weight", (1,))
    with pytest.raises(FormatError, match=r"'t' has shape \[1, 2, 3\], but .* \[3, 2\]"):
        model.require("t", (3, 2))


@pytest.mark.parametrize(
    ("head", "guess"),
    [
        (b"", "the file is empty"),
        (b"\n<!DOCTYPE HTML><html>", "an HTML page"),
        (b"<html><body>Sign in", "an HTML page"),
        (b'\x40\x00\x00\x00\x00\x00\x00\x00{"__metadata__"', "a safetensors file"),
        (b"PK\x03\x04", "PyTorch"),
        (b"\x80\x02}q", "pickle"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a git-lfs pointer"),
        (b"lmgg\x00\x00", "(ggml)"),
        (b"tjgg\x03\x00", "(ggjt)"),
        (b"abcdef", "it begins with b'abcd'"),
    ],
)
def test_what_is_no_gguf_is_guessed(path, head, guess):
    fails(path, head, guess)


def test_a_directory_is_named(tmp_path):
    with pytest.raises(FormatError, match="a directory"):
        ModelFile.open(tmp_path)


def test_a_missing_file_is_named(path):
    with pytest.raises(FormatError, match="no such file"):
        ModelFile.open(path)


def test_a_fifo_does_not_block(path):
    os.mkfifo(path)
    with pytest.raises(FormatError, match="not a regular file"):
        ModelFile.open(path)


def test_big_endian_is_named(path):
    content = b"GGUF" + struct.pack(">IQQ", 3, 0, 0)
    fails(path, content, "big-endian", error=UnsupportedError)


@pytest.mark.parametrize("version", [0, 1, 4])
def test_other_versions_are_named(path, version):
    fails(path, gguf(version=version), f"version {version};", error=UnsupportedError)


@pytest.mark.parametrize(
    ("number", "words"), [(4, "(Q4_2)"), (33, "(Q4_0_8_8)"), (38, "(IQ4_NL_8_8)"), (999, "unknown")]
)
def test_unsupported_tensor_types_are_named(path, number, words):
    content = gguf([], [tensor("t", [32], kind=number)], bytes(512))
    fails(path, content, "'t'", f"type {number}", words, error=UnsupportedError)


def test_truncated_data_says_how_much_is_missing(path):
    content = gguf([], [tensor("a", [8]), tensor("b", [8], offset=32)], bytes(60))
    n = len(content)
    fails(path, content, "truncated", f"need {n + 4} bytes", f"{n} are present")


def test_every_truncation_is_a_format_error(path):
    keys = [ARCH, key("tokens", ARRAY, (STRING, ["a", "bc"])), key("scores", ARRAY, (F32, [1, 2]))]
    content = gguf(keys, [tensor("a", [8]), tensor("b", [8], offset=32)], bytes(64))
    for n_bytes in range(4, len(content)):
        with pytest.raises(FormatError, match=r"truncated: .* and \d+ are (left|present)"):
            opened(path, content[:n_bytes])
    opened(path, content)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (gguf(n_tensors=1 << 40), "1099511627776 tensors"),
        (gguf(n_keys=(1 << 64) - 1), "18446744073709551615 metadata keys"),
        (gguf([struct.pack("<Q", 1 << 62)], [tensor("t", [1])]), "4611686018427387904 bytes"),
        (gguf([string("k") + struct.pack("<IQ", STRING, 1 << 62), bytes(64)]), "truncated"),
        (gguf([string("k") + struct.pack("<IIQ", ARRAY, U8, 1 << 40)]), "1099511627776 items"),
        (gguf([string("k") + struct.pack("<IIQ", ARRAY, STRING, 1 << 40)]), "1099511627776 items"),
        (gguf([string("k") + struct.pack("<IIQ", ARRAY, ARRAY, 1 << 40)]), "1099511627776 items"),
    ],
)
def test_counts_beyond_the_file_fail_at_once(path, content, words):
    fails(path, content, words)


def test_a_string_that_ends_the_file_is_not_cut(path):
    content = gguf([key("k", STRING, "text")]).rstrip(b"\0")
    assert opened(path, content).metadata["k"] == "text"
    fails(path, content[:-1], "truncated", "'k' needs 4 bytes", "3 are left")
    fails(path, content[:-5], "the length of a string of metadata key 'k' needs 8 bytes")


def test_more_entries_than_any_model_has_fail(path):
    n_keys = (1 << 18) + 1
    fails(path, gguf(data=bytes(13 * n_keys), n_keys=n_keys), f"{n_keys} metadata keys")


def test_values_of_unknown_type_are_named(path):
    fails(path, gguf([string("k") + struct.pack("<IQ", 13, 0)]), "'k'", "unknown type 13")


def test_a_bool_is_0_or_1(path):
    assert opened(path, gguf([key("k", BOOL, 1)])).metadata["k"] is True
    fails(path, gguf([key("k", BOOL, 2)]), "'k'", "neither 0 nor 1")


def test_arrays_nest_to_a_depth(path):
    value = (U8, [1, 2])
    for _ in range(3):
        value = (ARRAY, [value])
    model = opened(path, gguf([key("k", ARRAY, value)]))
    assert model.metadata["k"] == [[[[1, 2]]]]
    fails(path, gguf([key("k", ARRAY, (ARRAY, [value]))]), "'k'", "nested more than 4 deep")


def test_duplicate_keys_are_named(path):
    fails(path, gguf([ARCH, ARCH]), "'general.architecture' occurs twice")


def test_duplicate_tensors_are_named(path):
    tensors = [tensor("t", [1]), tensor("t", [1], offset=32)]
    fails(path, gguf([], tensors, bytes(64)), "'t' occurs twice")


def test_names_must_be_utf8(path):
    fails(path, gguf([key(b"\xff", U8, 1)]), "metadata key 0", "not UTF-8")
    fails(path, gguf([], [tensor(b"\xff", [1])], bytes(4)), "tensor name", "not UTF-8")


def test_string_values_need_not_be_utf8(path):
    model = opened(path, gguf([key("k", ARRAY, (STRING, [b"a\xff", "é", ""]))]))
    assert model.metadata["k"] == ["a\ufffd", "é", ""]


@pytest.mark.parametrize("value", [0, 24, 1 << 20])
def test_alignment_is_a_power_of_two_in_reason(path, value):
    fails(path, gguf([key("general.alignment", U32, value)]), "general.alignment", str(value))


def test_alignment_is_a_number(path):
    fails(path, gguf([key("general.alignment", STRING, "32")]), "general.alignment", "'32'")
    fails(path, gguf([key("general.alignment", BOOL, 1)]), "general.alignment", "True")


@pytest.mark.parametrize(
    ("dims", "words"),
    [
        ([], "0 dimensions"),
        ([1] * 5, "5 dimensions"),
        ([0], "must be positive"),
        ([4, 0], "must be positive"),
        ([1 << 63], "must be positive"),
        ([1 << 32, 1 << 32], "product overflows"),
        ([1 << 40], "truncated"),
    ],
)
def test_bad_dimensions_are_named(path, dims, words):
    fails(path, gguf([], [tensor("t", dims)], bytes(64)), words)


def test_rows_are_whole_blocks(path):
    content = gguf([], [tensor("t", [48, 2], kind=8)], bytes(256))
    fails(path, content, "'t'", "48 elements", "32 in a block of Q8_0")


@pytest.mark.parametrize(
    ("offset", "words"),
    [
        (4, "not a multiple of the alignment 32"),
        (0, "'a' and 't' overlap"),
        (32, "'a' and 't' overlap"),
        (1 << 20, "past the end"),
        ((1 << 64) - 32, "past the end"),
    ],
)
def test_bad_offsets_are_named(path, offset, words):
    tensors = [tensor("a", [16]), tensor("t", [8], offset=offset)]
    fails(path, gguf([], tensors, bytes(96)), words)


@pytest.mark.parametrize("first", [gguf([ARCH], [tensor("a", [7])], bytes(28)), gguf([ARCH])])
@pytest.mark.parametrize("padding", [0, 4])
def test_concatenated_files_are_named(path, first, padding):
    padding = padding if len(first) % 32 else 0
    content = first + bytes(padding) + gguf([], [tensor("b", [1])], bytes(4))
    fails(path, content, "another GGUF", "concatenated")


def test_a_missing_architecture_is_named(path):
    with pytest.raises(FormatError, match=r"'general.architecture' is missing"):
        _ = opened(path, gguf([key("k", U16, 1)])).architecture


def test_a_forgotten_tensor_reads_the_same_again(tmp_path):
    path = write_tiny("llama", tmp_path / "llama.gguf")
    with ModelFile.open(path) as file:
        for name in file.tensors:
            before = file.data(name).tobytes()
            file.forget(name)
            assert file.data(name).tobytes() == before
