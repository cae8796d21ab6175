"""One generation on stdout, which Ctrl-C can end."""

import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gguf_pp.api import LLM, Completion, Generation
    from gguf_pp.sampling import SamplingOptions

log = logging.getLogger("gguf_pp")


class Generator:
    """Generates with the flags of one command; remembers what was made."""

    def __init__(
        self,
        llm: "LLM",
        max_tokens: int,
        stop: Sequence[str],
        sampling: "SamplingOptions",
        *,
        shown: bool,
    ) -> None:
        self.completions: list[Completion] = []
        self._llm = llm
        self._max_tokens = max_tokens
        self._stop = stop
        self._sampling = sampling
        self._shown = shown

    def __call__(self, prompt: Sequence[int], *, end: str = "") -> "Completion":
        """Continue `prompt`, show the pieces as they come, then `end`. Raises RequestError."""
        generation = self._llm.generate(
            prompt, max_tokens=self._max_tokens, stop=self._stop, **self._sampling
        )
        with generation, interruptible(generation):
            log.info("generating from %d tokens", len(prompt))
            for piece in generation:
                if self._shown:
                    sys.stdout.write(piece)
                    sys.stdout.flush()
        completion = generation.completion()
        if self._shown:
            _end_line(completion.text, end)
        self.completions.append(completion)
        return completion


@contextmanager
def interruptible(generation: "Generation") -> Iterator[None]:
    """Let Ctrl-C end the generation, and a second one the program.

    Raising KeyboardInterrupt would leave the engine in the middle of a step.
    """

    def end_program(signum: int, frame: FrameType | None) -> None:
        # Everything shown was flushed, and an orderly end would wait for the devices.
        os._exit(130)

    def end_generation(signum: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, end_program)
        generation.interrupt()

    previous = signal.signal(signal.SIGINT, end_generation)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _end_line(text: str, end: str) -> None:
    """Finish the line that a person sees; a file gets the text as it is, and `end`."""
    if text.endswith("\n"):
        return
    if end or sys.stdout.isatty():
        sys.stdout.write("\n")
        sys.stdout.flush()
    else:
        sys.stderr.write("\n")
