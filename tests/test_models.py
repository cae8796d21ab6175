"""Every architecture through the same checks, on a tiny model and llama.cpp's logits of it."""

import re

import numpy as np
import pytest

import gguf_pp
from gguf_pp.arch import known
from gguf_pp.errors import FormatError, GgufPpError
from gguf_pp.native import kernels
from tests.tiny import NAMES, SPECS, golden, write_tiny

KERNELS = ["torch", *(["native"] if kernels() is not None else [])]
LAYOUTS = {
    "one device": {},
    "two devices": {"devices": ["cpu:0", "cpu:1"]},
    "three devices, three copies": {"devices": ["cpu:0", "cpu:1", "cpu:2"], "n_copies": 3},
    "two devices, not pipelined": {"devices": ["cpu:0", "cpu:1"], "n_copies": 1},
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return {name: write_tiny(name, folder / f"{name}.gguf") for name in NAMES}


def logits(path, kernel, **options):
    exact = {"exact": True, "cache_type_k": "f32", "cache_type_v": "f32"}
    with gguf_pp.load(path, kernels=kernel, ctx_size=64, **exact, **options) as llm:
        return llm.logits([int(t) for t in golden(path.stem)[0]])


def relative_error(a, b):
    # Of the whole, not of the worst element: Gemma's activation goes through float16 in llama.cpp,
    # where a last bit of difference before can become 0.05 % of one activation after.
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def test_every_architecture_has_a_tiny_model():
    assert {SPECS[name]["architecture"] for name in NAMES} == set(known())


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_llama_cpp(tiny, name, kernel):
    assert relative_error(logits(tiny[name], kernel), golden(name)[1]) < 1e-4


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("ubatch_size", [1, 7, 64])
@pytest.mark.parametrize("name", NAMES)
def test_native_bits_do_not_depend_on_devices_copies_or_ubatches(tiny, name, layout, ubatch_size):
    if "native" not in KERNELS:
        pytest.skip("the native kernels were not built")
    whole = logits(tiny[name], "native")
    pieces = logits(tiny[name], "native", ubatch_size=ubatch_size, **LAYOUTS[layout])
    assert np.array_equal(whole, pieces)


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("name", NAMES)
def test_torch_bits_do_not_depend_on_devices_or_copies(tiny, name, layout):
    # The BLAS sums in another order for another number of threads and rows, so both are fixed.
    whole = logits(tiny[name], "torch", ubatch_size=7, threads="1")
    pieces = logits(tiny[name], "torch", ubatch_size=7, threads="1", **LAYOUTS[layout])
    assert np.array_equal(whole, pieces)


@pytest.mark.parametrize("name", NAMES)
def test_torch_differs_between_ubatch_sizes_by_rounding_only(tiny, name):
    whole = logits(tiny[name], "torch")
    for ubatch_size in (1, 7):
        pieces = logits(tiny[name], "torch", ubatch_size=ubatch_size)
        assert relative_error(pieces, whole) < (1e-3 if "gemma" in name else 1e-5)


def test_a_missing_tensor_is_named(tmp_path):
    path = write_tiny("llama", tmp_path / "llama.gguf")
    data = path.read_bytes().replace(b"blk.1.ffn_norm.weight", b"blk.1.ffn_xxxx.weight")
    path.write_bytes(data)
    with pytest.raises(FormatError, match=r"blk\.1\.ffn_norm\.weight"):
        gguf_pp.load(path)


@pytest.mark.parametrize(
    ("name", "key", "value", "says"),
    [
        ("gemma2", "gemma2.attention.sliding_window", "int:-5", "is -5, outside of"),
        ("gemma3", "gemma3.attention.sliding_window", f"int:{1 << 62}", "outside of"),
        ("gemma3", "gemma3.rope.freq_base_swa", "float:0", "is 0.0, and must be above 1"),
        ("llama", "llama.rope.freq_base", "float:-5", "is -5.0, and must be above 1"),
        ("llama", "general.type", "str:adapter", "is an adapter, not a model"),
        ("llama", "general.architecture", "str:bert", "'bert' is not supported"),
    ],
)
def test_metadata_that_no_model_can_mean_is_named(tiny, name, key, value, says):
    overrides = (f"{key}={value}", "tokenizer.ggml.model=str:unknown")
    with pytest.raises(GgufPpError, match=re.escape(says)):
        gguf_pp.load(tiny[name], override_kv=overrides).close()


def test_a_vocabulary_of_another_size_than_the_embedding_is_refused(tiny):
    with pytest.raises(FormatError, match="vocabulary has 170 tokens, the embedding 160 rows"):
        gguf_pp.load(tiny["llama"], override_kv=("llama.vocab_size=int:170",)).close()
