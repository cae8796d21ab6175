import json

import pytest

from gguf_pp.gguf import ModelFile
from gguf_pp.tokenizer import Tokenizer
from tests.vocabs import DATA, REAL, SHARED, STORED, cases, stored


@pytest.mark.parametrize("name", STORED)
def test_ids_equal_those_of_llama_cpp(name):
    golden = cases(DATA / "vocab", name)
    assert len(golden) > 40
    for text, ids in golden:
        assert stored(name).encode(text, add_bos=False) == ids, text
        assert stored(name).decode(ids, special=True) == text


@pytest.mark.parametrize("name", ["llama-bpe", "refact", "starcoder"])
def test_ids_of_the_larger_vocabularies_equal_those_of_llama_cpp(name):
    path = SHARED / f"ggml-vocab-{name}.gguf"
    if not path.exists():
        pytest.skip(f"{path.name} is not beside the checkout: it is too big to be part of it")
    with ModelFile.open(path) as model:
        tokenizer = Tokenizer.from_metadata(model.metadata)
    for text, ids in cases(SHARED, path.name):
        assert tokenizer.encode(text, add_bos=False) == ids, text


@pytest.mark.parametrize("name", REAL)
def test_ids_of_awkward_texts_equal_those_of_llama_cpp(name):
    tokenizer = stored(name)
    for case in json.loads((DATA / "real_tokens" / f"{name}.json").read_text()):
        assert tokenizer.encode(case["text"], add_bos=False) == case["ids"], case["text"]
        assert tokenizer.encode(case["text"], special=True) == case["ids_special"], case["text"]
        assert tokenizer.decode(case["ids"]) == case["text"]


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("gemma3-270m", {"<eos>", "<end_of_turn>", "</s>"}),
        ("smollm2-135m", {"<|endoftext|>", "<|im_end|>", "<reponame>"}),
        ("phi-3", {"</s>", "<|endoftext|>", "<|end|>"}),
        ("gpt-2", {"<|endoftext|>"}),
    ],
)
def test_a_reply_ends_at_any_token_that_llama_cpp_stops_at(name, texts):
    tokenizer = stored(name)
    assert {tokenizer.token_bytes(i).decode() for i in tokenizer.eog_ids} == texts
