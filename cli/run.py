"""`gguf-pp run`: continue a prompt, or chat. Only generated text goes to stdout."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .chat import ChatFlags, Conversation
from .console import Misuse
from .flags import EngineFlags, SamplingFlags
from .generate import Generator
from .session import Session, open_session, placement, print_json, read_text, show_rates

if TYPE_CHECKING:
    from gguf_pp.api import Completion


@dataclass(frozen=True, kw_only=True, slots=True)
class TextFlags:
    """What is asked of the model, and when it ends."""

    prompt: Annotated[
        str | None,
        typer.Option("--prompt", "-p", metavar="TEXT", help="The prompt.", show_default=False),
    ] = None
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            metavar="FILE",
            help="Read the prompt from a UTF-8 file, less one newline at its end; - is stdin.",
            show_default=False,
        ),
    ] = None
    predict: Annotated[
        int,
        typer.Option(
            "--predict", "--n-predict", "-n", metavar="N", min=-1, help="Tokens to make; -1: all."
        ),
    ] = -1
    stop: Annotated[
        list[str] | None,
        typer.Option(
            "--reverse-prompt",
            "--stop",
            "-r",
            metavar="TEXT",
            help="End where the model writes this. Repeatable.",
            show_default=False,
        ),
    ] = None
    special: Annotated[
        bool, typer.Option("--special", help="Find control tokens, such as <s>, in the prompt.")
    ] = False
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of the text.")
    ] = False
    timeline: Annotated[
        Path | None,
        typer.Option(
            "--timeline",
            metavar="FILE.json",
            help="Write what ran when, for Perfetto and gguf-pp timeline.",
            show_default=False,
        ),
    ] = None
    no_display_prompt: Annotated[
        bool, typer.Option("--no-display-prompt", hidden=True, help="The prompt is never shown.")
    ] = False

    def read(self) -> str | None:
        """The prompt, wherever it is. Raises Misuse, ConfigError."""
        if self.prompt is not None and self.file is not None:
            raise Misuse("-p and -f both give a prompt")
        if self.file is None:
            return self.prompt
        return read_text(self.file).removesuffix("\n")


def run(engine: EngineFlags, text: TextFlags, chat: ChatFlags, sampling: SamplingFlags) -> None:
    """Generate text, or chat.

    Generated text, and nothing else, goes to stdout. Ctrl-C ends an answer, twice the program. In a
    chat, /exit or Ctrl-D ends.
    """
    options, choice = engine.options(), sampling.options()
    prompt = text.read()
    from_stdin = text.file is not None and str(text.file) == "-"
    talk = chat.wanted(interactive=_interactive() and not from_stdin and not text.as_json)
    if talk and text.as_json and not chat.single_turn:
        raise Misuse("--json is for one answer", hint="add -st for a single turn of a chat")
    if talk is False and prompt is None:
        raise Misuse("no prompt", hint="give one with -p TEXT or -f FILE")
    with open_session(engine, options) as session:
        llm = session.llm
        llm.trace.enabled = text.timeline is not None
        if talk is None:
            talk = llm.tokenizer.chat_template is not None or chat.has_template
        generator = Generator(llm, text.predict, text.stop or (), choice, shown=not text.as_json)
        if talk:
            conversation = Conversation(llm, chat, generator)
            conversation.hold(prompt, single_turn=chat.single_turn)
        else:
            chat.refuse()
            if prompt is None:
                raise Misuse("no prompt, and the model has no chat template", hint="give -p TEXT")
            generator(llm.tokenize(prompt, special=text.special))
        if text.timeline is not None:
            from .timeline import recorded_by, write_timeline

            write_timeline(text.timeline, recorded_by(llm))
        goes_on = talk and not chat.single_turn
        _finish(session, generator.completions, as_json=text.as_json, goes_on=goes_on)


def _finish(
    session: Session, completions: "list[Completion]", *, as_json: bool, goes_on: bool
) -> None:
    if as_json:
        print_json(summary(session, completions[-1]))
    show_rates(completions)
    if completions and completions[-1].finish_reason == "cancelled" and not goes_on:
        raise typer.Exit(130)


def summary(session: Session, completion: "Completion") -> dict[str, object]:
    """What --json prints."""
    return {
        "text": completion.text,
        "ids": completion.ids,
        "prompt_ids": completion.prompt_ids,
        "finish_reason": completion.finish_reason,
        "timings": {
            "load_s": session.load_s,
            "first_token_s": completion.first_token_s,
            "prompt_tokens": completion.prompt_tokens,
            "prompt_tokens_per_s": completion.prompt_tokens_per_s,
            "decode_tokens": completion.decode_tokens,
            "decode_tokens_per_s": completion.decode_tokens_per_s,
        },
        **placement(session.llm),
    }


def _interactive() -> bool:
    streams = (sys.stdin, sys.stdout)
    return all(stream is not None and stream.isatty() for stream in streams)
