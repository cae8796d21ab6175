"""Byte-level BPE, as in GPT-2: cut text into words, then merge pairs of symbols by rank."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain

import tokenizers
from tokenizers import Regex, models, pre_tokenizers

from gguf_pp.errors import FormatError
from gguf_pp.gguf import Metadata
from gguf_pp.tokenizer.vocab import TokenType, Vocab

logger = logging.getLogger("gguf_pp")


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut into words: each pattern in turn cuts what the ones before it left.

    Text that a pattern does not match becomes words too. With `ignore_merges` a word that is a
    token is taken whole, even where merges would not lead to it.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_SUFFIX = "'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT4 = rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|NUMBER| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_HEAD = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_BODY = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# Cuts camelCase; a word is a head and a body of which one may be empty.
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_HEAD}*{_BODY}+SUFFIX|[^\r\n\p{{L}}\p{{N}}]?{_HEAD}+{_BODY}*SUFFIX"
    rf"|NUMBER| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_QWEN3_5 = (
    rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_THREE_DIGITS = r"\p{N}{1,3}"

_BY_GPT2 = PreTokenizer((_GPT2,))
_BY_DIGIT = PreTokenizer((r"\p{N}", _GPT2))
_BY_GPT4 = PreTokenizer((_GPT4.replace("NUMBER", _THREE_DIGITS),))
_BY_QWEN = PreTokenizer((_GPT4.replace("NUMBER", r"\p{N}"),))
_BY_LLAMA3 = replace(_BY_GPT4, ignore_merges=True, add_bos=True)
_BY_GPT4O = PreTokenizer(
    (_TEKKEN.replace("NUMBER", _THREE_DIGITS).replace("SUFFIX", f"(?:{_SUFFIX})?"),)
)
_BY_TEKKEN = PreTokenizer(
    (_TEKKEN.replace("NUMBER", r"\p{N}").replace("SUFFIX", ""),), ignore_merges=True, add_bos=True
)
_BY_DEEPSEEK_CODER = PreTokenizer(
    (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
)

# What tokenizer.ggml.pre can say, and what llama.cpp does then.
_NAMES: Mapping[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "deepseek-coder": _BY_DEEPSEEK_CODER,
    "deepseek-v3": PreTokenizer((_THREE_DIGITS, "[\u4e00-\u9fa5\u3040-\u30ff]+", _DEEPSEEK3)),
    "qwen35": PreTokenizer((_QWEN3_5,)),
    "tekken": _BY_TEKKEN,
    "gpt-4o llama4 kanana2": _BY_GPT4O,
    "gpt-2 phi-2 mpt olmo jais exaone4 mellum trillion granite-docling gigachat": _BY_GPT2,
    "starcoder refact smollm command-r codeshell exaone minerva-7b mellum2": _BY_DIGIT,
    "qwen2 deepseek-r1-qwen stablelm2 hunyuan megrez kormo solar-open grok-2": _BY_QWEN,
    "dbrx smaug-bpe glm4 chatglm-bpe": _BY_GPT4,
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2": _BY_LLAMA3,
}
PRE_TOKENIZERS = {name: pre for names, pre in _NAMES.items() for name in names.split()}


class BpeEncoder:
    """Encodes text with the merges of the file.

    Raises FormatError if a merge is not a pair of tokens that join into a third.
    """

    def __init__(self, vocab: Vocab, metadata: Metadata) -> None:
        self._vocab = vocab
        pre = _pre_tokenizer(metadata)
        self.add_bos = pre.add_bos
        self.space_prefix = False
        merges = _merges(vocab, metadata)
        model = models.BPE(vocab.ids, merges, ignore_merges=pre.ignore_merges)
        self._tokenizer = tokenizers.Tokenizer(model)
        cuts = [pre_tokenizers.Split(Regex(text), "isolated") for text in pre.patterns]
        to_chars = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_chars])

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`; special tokens in it are plain text."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def token_bytes(self, i: int) -> bytes:
        """Return the bytes that token `i`, neither control nor user-defined, stands for."""
        text = self._vocab.tokens[i]
        kind = self._vocab.types[i]
        if kind == TokenType.BYTE:
            return bytes((int(text[3:5], 16),))
        if kind != TokenType.NORMAL:
            return b""
        return b"".join(_BYTE_OF.get(char) or char.encode() for char in text)


def _byte_chars() -> dict[str, bytes]:
    """Return the byte behind each character of a token text.

    Printable Latin-1 stands for itself; the other bytes, in order, are U+0100 and up.
    """
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in plain)
    chars = {byte: chr(byte) for byte in plain} | {b: chr(256 + n) for n, b in enumerate(others)}
    return {char: bytes((byte,)) for byte, char in chars.items()}


_BYTE_OF = _byte_chars()


def _pre_tokenizer(metadata: Metadata) -> PreTokenizer:
    name = metadata.str_of("tokenizer.ggml.pre", None)
    if name is None:
        logger.warning("the model names no pre-tokenizer; using 'default', so ids may differ")
        name = "default"
    elif name not in PRE_TOKENIZERS:
        logger.warning("unknown pre-tokenizer %r; using 'default', so ids may differ", name)
        name = "default"
    return PRE_TOKENIZERS[name]


def _merges(vocab: Vocab, metadata: Metadata) -> list[tuple[str, str]]:
    """Return the merges by rank; of a pair that is there twice, the first counts."""
    texts: list[str] = metadata.list_of("tokenizer.ggml.merges", str)
    pairs = [(left, right) for left, _, right in (t.partition(" ") for t in dict.fromkeys(texts))]
    known = vocab.ids.__contains__
    # A file has up to half a million merges: the loops over good ones are not in Python.
    if not all(map(known, chain.from_iterable(pairs))) or not all(map(known, map("".join, pairs))):
        left, right = next(p for p in pairs if not all(map(known, (*p, "".join(p)))))
        raise FormatError(f"the merge {left!r} + {right!r} needs a token that the vocabulary lacks")
    return pairs
