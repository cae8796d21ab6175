"""Find special tokens in text, with llama.cpp's rule for those that overlap."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Set


class SpecialTokens:
    """Cuts text at tokens that are matched before anything else is.

    The longest token (in UTF-8 bytes) takes its places first, from left to right; shorter ones get
    what is left. Tokens in `rstrip` also swallow the white space that follows them.
    """

    def __init__(self, tokens: Iterable[tuple[str, int]], rstrip: Set[int] = frozenset()) -> None:
        by_size: defaultdict[tuple[int, int], dict[str, int]] = defaultdict(dict)
        for text, i in tokens:
            by_size[len(text.encode()), len(text)][text] = i
        self._by_size = [(size, by_size[_, size]) for _, size in sorted(by_size, reverse=True)]
        self._rstrip = rstrip
        first = {re.escape(text[0]) for _, ids in self._by_size for text in ids}
        self._first = re.compile(f"[{''.join(sorted(first))}]" if first else "(?!)")

    def split(self, text: str) -> Iterator[str | int]:
        """Yield the pieces of `text` in order: a token's id, or text (never empty) between."""
        start = 0
        for begin, end, token in sorted(self._find(text)):
            if start < begin:
                yield text[start:begin]
            yield token
            start = end
            if token in self._rstrip:
                start += len(text[end:]) - len(text[end:].lstrip(_SPACE))
        if start < len(text):
            yield text[start:]

    def _find(self, text: str) -> list[tuple[int, int, int]]:
        found: list[tuple[int, int, int]] = []
        open_starts = [match.start() for match in self._first.finditer(text)]
        taken = bytearray(len(text))
        for size, ids in self._by_size:
            n_found = len(found)
            for begin in open_starts:
                token = ids.get(text[begin : begin + size])
                if token is not None and taken.find(1, begin, begin + size) < 0:
                    found.append((begin, begin + size, token))
                    taken[begin : begin + size] = b"\1" * size
            if len(found) > n_found:
                open_starts = [begin for begin in open_starts if not taken[begin]]
        return found


_SPACE = " \t\n\v\f\r"
