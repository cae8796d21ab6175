"""Bytes of tokens to text, as they come."""

import codecs

from gguf_pp.tokenizer.tokenizer import Tokenizer


class StreamDecoder:
    """Turns ids into text of whole code points; holds back only what may be part of one.

    Invalid bytes become U+FFFD. Nothing is stripped, so that a reply joins onto its prompt.
    """

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, i: int) -> str:
        """Return the text that token `i` completes. Raises RequestError for an unknown id."""
        return self._utf8.decode(self._tokenizer.piece(i, special=self._special))

    def flush(self) -> str:
        """Return what was held back, and start afresh."""
        return self._utf8.decode(b"", final=True)
