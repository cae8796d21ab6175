"""The tokenizer of a model, of whichever family."""

from collections.abc import Iterable
from typing import Protocol

from gguf_pp.errors import FormatError, RequestError, UnsupportedError
from gguf_pp.gguf import Metadata
from gguf_pp.tokenizer.bpe import BpeEncoder
from gguf_pp.tokenizer.special import SpecialTokens
from gguf_pp.tokenizer.spm import SpmEncoder
from gguf_pp.tokenizer.vocab import TokenType, Vocab, read_vocab

_HIDDEN = frozenset((TokenType.CONTROL, TokenType.UNKNOWN))
_LITERAL = _HIDDEN | {TokenType.USER_DEFINED}
_TEMPLATE = "tokenizer.chat_template"


class Encoder(Protocol):
    """What a family of tokenizers does with the text between special tokens."""

    add_bos: bool
    space_prefix: bool

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`; special tokens in it are plain text."""

    def token_bytes(self, i: int) -> bytes:
        """Return the bytes that token `i`, neither control nor user-defined, stands for."""


class NoEncoder:
    """Stands in for a model without a vocabulary: it knows ids, but no text."""

    add_bos = False
    space_prefix = False

    def encode(self, text: str) -> list[int]:
        """Raise UnsupportedError."""
        raise UnsupportedError(
            "this model has no vocabulary, so text cannot become token ids",
            hint="give token ids, or use a GGUF file that has tokenizer.ggml.tokens",
        )

    def token_bytes(self, i: int) -> bytes:
        """Raise UnsupportedError."""
        raise UnsupportedError("this model has no vocabulary, so token ids cannot become text")


class Tokenizer:
    """Text to token ids and back, the same ids that llama.cpp gets from the file.

    `bos_id` and `eos_id` are None if the model has none; `eog_ids` are all ids that end a reply.
    `chat_templates` are the sources of the file's chat templates by name, one named "default".
    """

    def __init__(self, vocab: Vocab, encoder: Encoder, metadata: Metadata) -> None:
        self._vocab = vocab
        self._encoder = encoder
        self.n_vocab = vocab.n_vocab
        self.bos_id = vocab.bos_id
        self.eos_id = vocab.eos_id
        self.eog_ids = vocab.eog_ids
        self.add_bos = metadata.bool_of("tokenizer.ggml.add_bos_token", encoder.add_bos)
        self.add_eos = metadata.bool_of("tokenizer.ggml.add_eos_token", False)
        _check_added("bos", self.add_bos, self.bos_id)
        _check_added("eos", self.add_eos, self.eos_id)
        self.chat_templates = _chat_templates(metadata)
        rstrip = _stripping(vocab, metadata)
        user_defined = vocab.of_type(TokenType.USER_DEFINED)
        self._user_defined = SpecialTokens(((vocab.tokens[i], i) for i in user_defined), rstrip)
        self._special = SpecialTokens(
            ((vocab.tokens[i], i) for i in vocab.of_type(*_LITERAL)), rstrip
        )

    @classmethod
    def from_metadata(cls, metadata: Metadata) -> "Tokenizer":
        """Build the tokenizer that the metadata of a GGUF file describes.

        Raises FormatError if the vocabulary contradicts itself and UnsupportedError for a family
        other than BPE and SentencePiece. A model without a vocabulary has a tokenizer that knows
        `n_vocab` (0 if the file does not say), and raises UnsupportedError when given text.
        """
        model = metadata.str_of("tokenizer.ggml.model", "none")
        if model == "gpt2":
            vocab = read_vocab(metadata, bos=None, eos=None, unk=None)
            return cls(vocab, BpeEncoder(vocab, metadata), metadata)
        if model == "llama":
            vocab = read_vocab(metadata, bos=1, eos=2, unk=0)
            return cls(vocab, SpmEncoder(vocab, metadata), metadata)
        if model in ("no_vocab", "none"):
            architecture = metadata.str_of("general.architecture", "")
            n_vocab = metadata.int_of(f"{architecture}.vocab_size", 0)
            return cls(Vocab.without_texts(n_vocab), NoEncoder(), metadata)
        raise UnsupportedError(
            f"tokenizer {model!r} is not supported",
            hint="supported are gpt2 (byte-level BPE) and llama (SentencePiece BPE)",
        )

    @property
    def chat_template(self) -> str | None:
        """The source of the file's default chat template, if it has one."""
        return self.chat_templates.get("default")

    @property
    def bos_text(self) -> str:
        """The text of the BOS token; empty if there is none."""
        return "" if self.bos_id is None else self._vocab.tokens[self.bos_id]

    @property
    def eos_text(self) -> str:
        """The text of the EOS token; empty if there is none."""
        return "" if self.eos_id is None else self._vocab.tokens[self.eos_id]

    def encode(self, text: str, *, special: bool = False, add_bos: bool | None = None) -> list[int]:
        """Return the ids of `text`.

        With `special`, control tokens are found in the text; otherwise they are plain text.
        User-defined tokens are always found. With `add_bos` None the model decides whether BOS and
        EOS are added; True and False say it of BOS, and add no EOS. A lone surrogate counts as
        U+FFFD. Raises RequestError if a BOS is wanted that the model lacks.
        """
        ids = self._bos() if (self.add_bos if add_bos is None else add_bos) else []
        after_special = True
        for piece in (self._special if special else self._user_defined).split(_valid(text)):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                prefix = " " if after_special and self._encoder.space_prefix else ""
                ids += self._encoder.encode(prefix + piece)
            after_special = isinstance(piece, int)
        if add_bos is None and self.add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids

    def encode_chat(self, rendered: str) -> list[int]:
        """Return the ids of a rendered chat template: special tokens are found, BOS comes once."""
        ids = self.encode(rendered, special=True, add_bos=False)
        n_bos = next((n for n, i in enumerate(ids) if i != self.bos_id), len(ids))
        return (self._bos() if self.add_bos or n_bos else []) + ids[n_bos:]

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Return the text of `ids`; invalid UTF-8 becomes U+FFFD.

        Control tokens are left out unless `special`. The space that SentencePiece puts before a
        text is taken off again. Raises RequestError for an unknown id.
        """
        ids = list(ids)
        pieces = [self.piece(i, special=special) for i in ids]
        n_bos = int(bool(ids) and ids[0] == self.bos_id)
        if self._encoder.space_prefix and len(ids) > n_bos:
            pieces[n_bos] = pieces[n_bos].removeprefix(b" ")
        return b"".join(pieces).decode("utf-8", "replace")

    def piece(self, i: int, *, special: bool = False) -> bytes:
        """Return what token `i` adds to a text: nothing for control tokens unless `special`."""
        hidden = not special and 0 <= i < len(self._vocab.types) and self._vocab.types[i] in _HIDDEN
        return b"" if hidden else self.token_bytes(i)

    def token_bytes(self, i: int) -> bytes:
        """Return the bytes of token `i`, control or not. Raises RequestError for an unknown id."""
        if not 0 <= i < self.n_vocab:
            raise RequestError(f"token id {i} is not in the vocabulary of {self.n_vocab}")
        if self._vocab.types and self._vocab.types[i] in _LITERAL:
            return self._vocab.tokens[i].encode()
        return self._encoder.token_bytes(i)

    def _bos(self) -> list[int]:
        if self.bos_id is None:
            raise RequestError("the model has no BOS token")
        return [self.bos_id]


def _check_added(name: str, wanted: bool, i: int | None) -> None:
    if wanted and i is None:
        raise FormatError(
            f"the model wants {name.upper()} added, but has no tokenizer.ggml.{name}_token_id"
        )


def _chat_templates(metadata: Metadata) -> dict[str, str]:
    named = {
        key.removeprefix(f"{_TEMPLATE}."): metadata.str_of(key)
        for key in metadata
        if key.startswith(f"{_TEMPLATE}.")
    }
    default = metadata.str_of(_TEMPLATE, None)
    return named if default is None else {**named, "default": default}


def _stripping(vocab: Vocab, metadata: Metadata) -> frozenset[int]:
    """Return the tokens that swallow white space after them; only the name of a model tells."""
    name = metadata.str_of("general.name", "").lower()
    if "phi-3" not in name and "phi3" not in name:
        return frozenset()
    kept = ("<unk>", "<s>", "<|endoftext|>")
    return frozenset(i for i in vocab.of_type(*_LITERAL) if vocab.tokens[i] not in kept)


def _valid(text: str) -> str:
    # Surrogates in pairs are characters, as in JSON escapes; alone they are nothing.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
