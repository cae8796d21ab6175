"""The vocabulary of a GGUF file: token texts, their types, and the ids with a meaning."""

import re
from collections.abc import Iterable, Mapping, Sized
from dataclasses import dataclass
from enum import IntEnum

from gguf_pp.errors import FormatError
from gguf_pp.gguf import Metadata


class TokenType(IntEnum):
    """The values of tokenizer.ggml.token_type."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# No metadata key says that a token ends a reply; llama.cpp knows them by their text.
_END_NAMES = """
<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|>
</s> <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|>
<|tool_response> <｜end▁of▁sentence｜> [e~[
"""
END_NAMES = frozenset(_END_NAMES.split())
# Markers of code completion that end a reply; the first name that a vocabulary has counts.
FIM_END_NAMES = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
_FIM_NAMES = """
<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> <|prefix|>
<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> <|suffix|>
<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|> <|middle|>
"""
FIM_NAMES = frozenset(_FIM_NAMES.split())
# Parts of a message in gpt-oss: control by type, but text that the reader of a reply needs.
VISIBLE_NAMES = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
_OUTER_ENDS = ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"})
_ID_KEYS = ("bos", "eos", "eot", "eom", "unknown", *FIM_END_NAMES)


@dataclass(frozen=True)
class Vocab:
    """Token texts as stored in the file, a type for each, and the special ids.

    Holds: texts are unique and not empty, `types` is as long as `tokens`, every id is in range.
    A file without a vocabulary has `n_vocab` ids and no texts.
    """

    tokens: list[str]
    types: list[int]
    ids: dict[str, int]
    bos_id: int | None
    eos_id: int | None
    unk_id: int | None
    eog_ids: frozenset[int]
    n_vocab: int

    @classmethod
    def without_texts(cls, n_vocab: int) -> "Vocab":
        """Return the vocabulary of a file that says no more than how many ids there are."""
        return cls([], [], {}, None, None, None, frozenset(), n_vocab)

    def of_type(self, *types: TokenType) -> list[int]:
        """Return the ids of all tokens of these types, in order."""
        return _of_type(self.types, *types)


def read_vocab(metadata: Metadata, *, bos: int | None, eos: int | None, unk: int | None) -> Vocab:
    """Read the vocabulary; `bos`, `eos` and `unk` are the ids of files that name none.

    Raises FormatError if lengths differ, a text is there twice, or an id is out of range.
    """
    tokens = _read_tokens(metadata)
    types: list[int] | None = metadata.list_of("tokenizer.ggml.token_type", int, None)
    types = [int(TokenType.NORMAL)] * len(tokens) if types is None else types
    check_length("token_type", types, tokens)
    _check_bytes(tokens, types)
    ids = {text: i for i, text in enumerate(tokens)}
    if len(ids) != len(tokens):
        twice = next(text for i, text in enumerate(tokens) if ids[text] != i)
        raise FormatError(f"the vocabulary has the token {twice!r} twice")
    special = {name: _special_id(metadata, name, len(tokens)) for name in _ID_KEYS}
    for name, default in {"bos": bos, "eos": eos, "unknown": unk}.items():
        if special[name] is None and default is not None and default < len(tokens):
            special[name] = default
    eog_ids = _end_of_generation(ids, types, special)
    return Vocab(
        tokens,
        types,
        ids,
        special["bos"],
        special["eos"],
        special["unknown"],
        frozenset(eog_ids),
        len(tokens),
    )


def _of_type(kinds: Iterable[int], *types: TokenType) -> list[int]:
    wanted = frozenset(map(int, types))
    return [i for i, kind in enumerate(kinds) if kind in wanted]


def check_length(name: str, values: Sized, tokens: Sized) -> None:
    """Raise FormatError unless there is one value for each token."""
    if len(values) != len(tokens):
        raise FormatError(
            f"tokenizer.ggml.{name} has {len(values)} values, but there are {len(tokens)} tokens"
        )


def _read_tokens(metadata: Metadata) -> list[str]:
    tokens: list[str] = metadata.list_of("tokenizer.ggml.tokens", str)
    if not tokens:
        raise FormatError("tokenizer.ggml.tokens is empty")
    return tokens if all(tokens) else [text or f"[EMPTY_{i}]" for i, text in enumerate(tokens)]


def _check_bytes(tokens: list[str], types: list[int]) -> None:
    for i in _of_type(types, TokenType.BYTE):
        if not re.fullmatch("<0x[0-9A-Fa-f]{2}>", tokens[i]):
            raise FormatError(f"token {i} has the type of a byte, but its text is {tokens[i]!r}")


def _special_id(metadata: Metadata, name: str, n_vocab: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = metadata.int_of(key, None)
    if value is not None and not 0 <= value < n_vocab:
        raise FormatError(f"{key} is {value}, but the vocabulary has {n_vocab} tokens")
    return value


def _ids_of(names: Iterable[str], ids: Mapping[str, int]) -> list[int]:
    return [ids[name] for name in names if name in ids]


def _end_of_generation(
    ids: Mapping[str, int], types: list[int], special: Mapping[str, int | None]
) -> set[int]:
    """Return the ids that end a generation, and set the types of tokens known by their text."""
    ends = set(_ids_of(END_NAMES, ids))
    by_text = ends | set(_ids_of(FIM_NAMES, ids))
    for name, texts in FIM_END_NAMES.items():
        found = _ids_of(texts, ids)[:1] if special[name] is None else []
        by_text.update(found)
        ends.update(found)
    for i in by_text:
        types[i] = TokenType.CONTROL
    for i in _ids_of(VISIBLE_NAMES, ids):
        types[i] = TokenType.USER_DEFINED
    named = (special[name] for name in ("eos", "eot", "eom", *FIM_END_NAMES))
    ends.update(i for i in named if i is not None)
    _keep_inner_ends(ids, types, ends)
    return ends


def _keep_inner_ends(ids: Mapping[str, int], types: list[int], ends: set[int]) -> None:
    """Take out tokens that end a part of a message in some vocabularies, and a reply in others."""
    texts = {text for text in END_NAMES if ids.get(text) in ends}
    if "<|end|>" in texts and any(outer <= texts for outer in _OUTER_ENDS):
        types[ids["<|end|>"]] = TokenType.USER_DEFINED
        ends.discard(ids["<|end|>"])
    if {"<|tool_response>", "</s>"} <= texts:
        types[ids["</s>"]] = TokenType.NORMAL
        ends.discard(ids["</s>"])
