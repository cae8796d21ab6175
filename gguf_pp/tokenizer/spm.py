"""SentencePiece BPE: merge the pair of symbols whose union scores best, until none is a token."""

import math
import re
from heapq import heapify, heappop, heappush

from gguf_pp.errors import FormatError
from gguf_pp.gguf import Metadata
from gguf_pp.tokenizer.vocab import TokenType, Vocab, check_length

SPACE = "\u2581"  # stands for a space in token texts
_BEFORE_SPACE = re.compile(f"(.)(?={SPACE})", re.DOTALL)
_MAX_CACHED_WORDS = 1 << 16
_MAX_CACHED_CHARS = 32


class SpmEncoder:
    """Encodes text as llama.cpp does: best score first, the leftmost of equals, bytes for the rest.

    Raises FormatError if scores are missing, too many or too few, or not numbers.
    """

    def __init__(self, vocab: Vocab, metadata: Metadata) -> None:
        scores: list[float] = metadata.list_of("tokenizer.ggml.scores", float)
        check_length("scores", scores, vocab.tokens)
        if any(map(math.isnan, scores)):
            raise FormatError("tokenizer.ggml.scores has a value that is not a number")
        self.add_bos = True
        self.space_prefix = metadata.bool_of("tokenizer.ggml.add_space_prefix", True)
        self._vocab = vocab
        self._ids = vocab.ids
        self._costs = [-score for score in scores]
        self._byte_ids = _byte_ids(vocab)
        self._word = _word_pattern(vocab.tokens)
        self._cache: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`; special tokens in it are plain text."""
        ids: list[int] = []
        for match in self._word.finditer(text.replace(" ", SPACE)):
            ids += self._encode_word(match.group())
        return ids

    def token_bytes(self, i: int) -> bytes:
        """Return the bytes that token `i`, neither control nor user-defined, stands for."""
        text = self._vocab.tokens[i]
        kind = self._vocab.types[i]
        if kind == TokenType.BYTE:
            return bytes((int(text[3:5], 16),))
        return text.replace(SPACE, " ").encode() if kind == TokenType.NORMAL else b""

    def _encode_word(self, word: str) -> list[int]:
        if (ids := self._cache.get(word)) is not None:
            return ids
        ids = []
        for symbol in self._merge(word):
            if (token := self._ids.get(symbol)) is not None:
                ids.append(token)
            else:
                ids += [self._byte_ids[byte] for byte in symbol.encode()]
        if len(word) <= _MAX_CACHED_CHARS:
            if len(self._cache) >= _MAX_CACHED_WORDS:
                self._cache.clear()
            self._cache[word] = ids
        return ids

    def _merge(self, word: str) -> list[str]:
        ids, costs = self._ids, self._costs
        n = len(word)
        # Symbol i spans [i, ends[i]), and is gone if ends[i] is 0; before[i] is its left neighbour.
        ends = list(range(1, n + 1))
        before = list(range(-1, n))
        heap = [
            (costs[token], i, i + 1, i + 2)
            for i in range(n - 1)
            if (token := ids.get(word[i : i + 2])) is not None
        ]
        heapify(heap)
        while heap:
            _, left, right, end = heappop(heap)
            if ends[left] != right or ends[right] != end:
                continue  # one of the two has merged with another symbol since
            ends[left] = end
            ends[right] = 0
            before[end] = left
            if left > 0:
                first = before[left]
                if (token := ids.get(word[first:end])) is not None:
                    heappush(heap, (costs[token], first, left, end))
            if end < n:
                last = ends[end]
                if (token := ids.get(word[left:last])) is not None:
                    heappush(heap, (costs[token], left, end, last))
        return [word[i:end] for i, end in enumerate(ends) if end]


def _byte_ids(vocab: Vocab) -> list[int]:
    """Return the token for each byte: <0xNN>, else the character itself, else the unknown token."""
    ids = []
    for byte in range(256):
        same = vocab.ids.get(chr(byte), vocab.unk_id) if byte < 0x80 else vocab.unk_id
        found = vocab.ids.get(f"<0x{byte:02X}>", same)
        if found is None:
            raise FormatError(f"the vocabulary has a token neither for byte {byte} nor for unknown")
        ids.append(found)
    return ids


def _word_pattern(tokens: list[str]) -> re.Pattern[str]:
    """Return what matches the next word: a stretch of text that no merge can leave.

    Words end before a space, but not where some token has a space after that character. Words
    encode alone, so they can be cached, and their merges need only small heaps.
    """
    glued = {c for text in tokens if SPACE in text[1:] for c in _BEFORE_SPACE.findall(text)}
    if not glued:
        return re.compile(f".[^{SPACE}]*", re.DOTALL)
    group = "".join(map(re.escape, sorted(glued)))
    return re.compile(f".(?:[^{SPACE}]|(?<=[{group}]){SPACE})*", re.DOTALL)
