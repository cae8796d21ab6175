import logging
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gguf_pp.errors import FormatError, RequestError, UnsupportedError
from gguf_pp.tokenizer import StreamDecoder, Tokenizer
from tests.vocabs import metadata, stored

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


def spm(tokens: dict[str, float], **more: object) -> Tokenizer:
    """A SentencePiece vocabulary: <unk> <s> </s>, the 256 bytes, then `tokens` with scores."""
    texts = ["<unk>", "<s>", "</s>", *BYTE_TOKENS, *tokens]
    return Tokenizer.from_metadata(
        metadata(
            {
                "tokenizer.ggml.model": "llama",
                "tokenizer.ggml.tokens": texts,
                "tokenizer.ggml.scores": [0.0] * 259 + list(tokens.values()),
                "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(tokens)],
                **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
            }
        )
    )


def bpe_values(**more: object) -> dict[str, object]:
    values = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": ["a", "b", "c", "ab", "abc", "<|im_end|>", "<u>"],
        "token_type": [1, 1, 1, 1, 1, 3, 4],
        "merges": ["a b", "ab c"],
        **more,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


def bpe(**more: object) -> Tokenizer:
    return Tokenizer.from_metadata(metadata(bpe_values(**more)))


@settings(deadline=None, max_examples=200)
@given(TEXTS)
def test_a_text_comes_back_from_its_ids(text):
    for name in ("gpt-2", "qwen2", "deepseek-coder", "llama-spm", "gemma3-270m"):
        tokenizer = stored(name)
        assert tokenizer.decode(tokenizer.encode(text, add_bos=False), special=True) == text
        assert tokenizer.decode(tokenizer.encode(text, add_bos=True), special=False) == text


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 49151), max_size=40))
def test_a_stream_says_what_the_whole_says_and_loses_no_byte(ids):
    tokenizer = stored("smollm2-135m")
    decoder = StreamDecoder(tokenizer)
    parts = [decoder.push(i) for i in ids]
    assert "".join(parts) + decoder.flush() == tokenizer.decode(ids)
    assert tokenizer.decode(ids, special=True) == b"".join(map(tokenizer.token_bytes, ids)).decode(
        "utf-8", "replace"
    )


def test_a_stream_holds_back_only_what_may_become_a_code_point():
    tokenizer = spm({})
    decoder = StreamDecoder(tokenizer)
    ids = [3 + byte for byte in "é€".encode() + b"\xe2\x82A\xff"]
    assert [decoder.push(i) for i in ids] == ["", "é", "", "", "€", "", "", "\ufffdA", "\ufffd"]
    decoder.push(3 + 0xE2)
    assert decoder.flush() == "\ufffd"
    assert decoder.push(3 + ord("A")) == "A"


def test_a_stream_keeps_the_space_that_joins_a_reply_to_its_prompt():
    tokenizer = spm({"▁": -1.0, "a": -2.0, "▁a": -3.0})
    ids = tokenizer.encode("a", add_bos=False)
    assert [tokenizer.token_bytes(i) for i in ids] == [b" a"]
    assert tokenizer.decode(ids) == tokenizer.decode([tokenizer.bos_id, *ids]) == "a"
    assert StreamDecoder(tokenizer).push(ids[0]) == " a"


def test_spm_merges_the_best_score_first_and_the_leftmost_of_equals():
    tokenizer = spm(
        {"a": 0.0, "b": 0.0, "ab": -2.0, "ba": -1.0, "aa": -1.0}, add_space_prefix=False
    )

    def texts(text):
        return [tokenizer.token_bytes(i).decode() for i in tokenizer.encode(text, add_bos=False)]

    assert texts("ababa") == ["a", "ba", "ba"]
    assert texts("aaa") == ["aa", "a"]
    assert texts("aba") == ["a", "ba"]


def test_spm_merges_across_a_space_if_a_token_does():
    tokenizer = spm({"▁": -9.0, "a": -9.0, "b": -9.0, "a▁": -1.0, "a▁b": -2.0, "▁b": -3.0})
    ids = tokenizer.encode("a b a b b", add_bos=False)
    assert [tokenizer.token_bytes(i) for i in ids] == [b" ", b"a b", b" ", b"a b", b" b"]


def test_control_tokens_are_text_unless_asked_for_and_user_defined_ones_never():
    tokenizer = bpe()
    assert tokenizer.encode("ab<u>abc<|im_end|>") == [3, 6, 4]
    assert tokenizer.encode("ab<u>abc<|im_end|>", special=True) == [3, 6, 4, 5]
    assert tokenizer.decode([3, 6, 5]) == "ab<u>"
    assert tokenizer.decode([3, 6, 5], special=True) == "ab<u><|im_end|>"


def test_the_longest_special_token_is_found_first_wherever_it_stands():
    tokens = ["a", "b", "c", "d", "ab", "bcd", "cd"]
    tokenizer = bpe(tokens=tokens, token_type=[1, 1, 1, 1, 4, 4, 4], merges=[])
    assert tokenizer.encode("abcd") == [0, 5]
    assert tokenizer.encode("ababcdcdd") == [4, 0, 5, 6, 3]


def test_phi_3_swallows_white_space_after_control_tokens():
    ids = stored("phi-3").encode("<|user|>\n hi<|end|>\n", special=True, add_bos=False)
    assert [stored("phi-3").token_bytes(i) for i in ids] == [b"<|user|>", b" hi", b"<|end|>"]


def test_bos_and_eos_are_added_as_the_model_says_unless_told():
    more = {"bos_token_id": 0, "eos_token_id": 1, "add_bos_token": True, "add_eos_token": True}
    tokenizer = bpe(**more)
    assert tokenizer.encode("c") == [0, 2, 1]
    assert tokenizer.encode("c", add_bos=False) == [2]
    assert tokenizer.encode("c", add_bos=True) == [0, 2]
    assert (tokenizer.bos_text, tokenizer.eos_text) == ("a", "b")
    with pytest.raises(RequestError, match="no BOS"):
        bpe().encode("c", add_bos=True)


@pytest.mark.parametrize("rendered", ["<bos>hi", "hi", "<bos><bos>hi"])
def test_a_chat_has_one_bos(rendered):
    tokenizer = stored("gemma3-270m")
    assert tokenizer.encode_chat(rendered) == [2, *tokenizer.encode("hi", add_bos=False)]


def test_a_chat_has_no_bos_that_neither_model_nor_template_wants():
    assert stored("smollm2-135m").encode_chat("<|im_end|>hi")[0] == 2


def test_a_lone_surrogate_counts_as_the_replacement_character():
    for name in ("smollm2-135m", "gemma3-270m"):
        tokenizer = stored(name)
        assert tokenizer.encode("a\ud800b") == tokenizer.encode("a\ufffdb")
        assert tokenizer.encode("\ud83d\ude00") == tokenizer.encode("😀")


def test_an_unknown_pre_tokenizer_is_reported(caplog):
    with caplog.at_level(logging.WARNING, "gguf_pp"):
        tokenizer = bpe(pre="no-such")
    assert "unknown pre-tokenizer 'no-such'" in caplog.text
    assert tokenizer.encode("abc") == [4]


def test_a_model_without_a_vocabulary_refuses_text():
    values = {
        "tokenizer.ggml.model": "no_vocab",
        "general.architecture": "llama",
        "llama.vocab_size": 160,
    }
    tokenizer = Tokenizer.from_metadata(metadata(values))
    assert (tokenizer.n_vocab, tokenizer.bos_id, tokenizer.eog_ids) == (160, None, frozenset())
    with pytest.raises(UnsupportedError, match="no vocabulary"):
        tokenizer.encode("hi")
    with pytest.raises(UnsupportedError, match="no vocabulary"):
        tokenizer.decode([1])


@pytest.mark.parametrize("model", ["bert", "t5", "rwkv", "plamo2"])
def test_another_family_is_named_as_unsupported(model):
    with pytest.raises(UnsupportedError, match=f"'{model}' is not supported") as caught:
        bpe(model=model)
    assert "gpt2" in caught.value.hint


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"merges": ["a b", "b x"]}, "'b' \\+ 'x'"),
        ({"merges": ["b c"]}, "'b' \\+ 'c'"),
        ({"merges": ["ab"]}, "'ab' \\+ ''"),
        ({"merges": None}, "merges"),
        ({"tokens": []}, "empty"),
        ({"tokens": None}, "tokens"),
        ({"token_type": [1, 1]}, "2 values, but there are 7 tokens"),
        ({"token_type": [6, 1, 1, 1, 1, 1, 1]}, "type of a byte"),
        ({"bos_token_id": 7}, "is 7, but the vocabulary has 7"),
        ({"eot_token_id": -1}, "is -1"),
        ({"add_bos_token": True}, "wants BOS"),
        ({"tokens": ["a", "b", "a", "ab", "abc", "d", "e"]}, "'a' twice"),
    ],
)
def test_a_bpe_vocabulary_that_contradicts_itself_is_refused(more, message):
    with pytest.raises(FormatError, match=message):
        bpe(**more)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"scores": [0.0]}, "1 values, but there are 260 tokens"),
        ({"scores": [float("nan")] * 260}, "not a number"),
        ({"unknown_token_id": 300}, "300"),
    ],
)
def test_an_spm_vocabulary_that_contradicts_itself_is_refused(more, message):
    with pytest.raises(FormatError, match=message):
        spm({"a": 0.0}, **more)


@pytest.mark.parametrize("i", [-1, 49152])
def test_an_unknown_id_is_the_requests_fault(i):
    with pytest.raises(RequestError, match=f"{i} is not in the vocabulary of 49152"):
        stored("smollm2-135m").decode([i])


@pytest.mark.parametrize("unit", ["a", " ", "\n", "<", " \n", "x1!", "日本", "\u0301"])
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_time_grows_with_the_length_of_a_text_not_its_square(name, unit):
    tokenizer = stored(name)

    def seconds(n_chars):
        begin = time.process_time()
        tokenizer.encode(unit * (n_chars // len(unit)), special=True)
        return time.process_time() - begin

    assert seconds(100_000) < 20 * seconds(12_500) + 0.5  # a square would be 64 times
