"""From token ids to text that may be shown: whole characters, and never a stop string."""

from collections.abc import Sequence

from gguf_pp.tokenizer import StreamDecoder, Tokenizer


class StopFilter:
    """Passes text through until a stop string appears.

    Text that may be the beginning of one is held back, and released when it turns out not to be.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Take more text, return what may be shown. After a stop string nothing may."""
        if self.stopped:
            return ""
        self._held += text
        # The one complete first counts, so that nothing depends on how the text was cut up.
        places = [(i + len(stop), i) for stop in self._stops if (i := self._held.find(stop)) >= 0]
        if places:
            self.stopped = True
            shown, self._held = self._held[: min(places)[1]], ""
            return shown
        n_held = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - n_held
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def flush(self) -> str:
        """Return what is still held back: no more text will complete it."""
        shown, self._held = self._held, ""
        return shown


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


class TextStream:
    """Token ids in, text out."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._decoder = StreamDecoder(tokenizer)
        self._filter = StopFilter(stops)

    @property
    def stopped(self) -> bool:
        """Whether a stop string has appeared."""
        return self._filter.stopped

    def push(self, token: int) -> str:
        """Take one token, return the text that it lets through."""
        return self._filter.push(self._decoder.push(token))

    def flush(self) -> str:
        """Return the rest at the end of generation."""
        return self._filter.push(self._decoder.flush()) + self._filter.flush()
