"""A conversation: the history, and what is typed next."""

import os
import select
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gguf_pp.errors import ConfigError, RequestError

from .console import Misuse, show_error
from .generate import Generator
from .session import read_text

if TYPE_CHECKING:
    from gguf_pp.api import LLM
    from gguf_pp.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatFlags:
    """Whether to chat, and how."""

    conversation: Annotated[
        bool | None,
        typer.Option(
            "--conversation/--no-conversation",
            "-cnv/-no-cnv",
            help="Chat, or only continue the prompt. In a terminal, a model with a template chats.",
            show_default=False,
            rich_help_panel="Chat",
        ),
    ] = None
    single_turn: Annotated[
        bool,
        typer.Option("--single-turn", "-st", help="End after one answer.", rich_help_panel="Chat"),
    ] = False
    system_prompt: Annotated[
        str | None,
        typer.Option(
            "--system-prompt",
            "-sys",
            metavar="TEXT",
            help="The system message.",
            show_default=False,
            rich_help_panel="Chat",
        ),
    ] = None
    chat_template: Annotated[
        str | None,
        typer.Option(
            "--chat-template",
            metavar="NAME|SOURCE",
            help="One of the model's templates by name, or a Jinja template.",
            show_default=False,
            rich_help_panel="Chat",
        ),
    ] = None
    chat_template_file: Annotated[
        Path | None,
        typer.Option(
            "--chat-template-file",
            metavar="FILE",
            help="A Jinja template in a file.",
            show_default=False,
            rich_help_panel="Chat",
        ),
    ] = None

    @property
    def has_template(self) -> bool:
        """Whether a template was given."""
        return self.chat_template is not None or self.chat_template_file is not None

    def wanted(self, *, interactive: bool) -> bool | None:
        """Whether to chat; None if it is for the model to say. Raises Misuse."""
        if self.chat_template is not None and self.chat_template_file is not None:
            raise Misuse("--chat-template and --chat-template-file both give a template")
        if self.conversation is False and self.single_turn:
            raise Misuse("-st is a turn of a chat, and -no-cnv is no chat")
        if self.conversation or self.single_turn:
            return True
        if self.conversation is None and interactive:
            return None
        self.refuse()
        return False

    def refuse(self) -> None:
        """Raise Misuse if a flag was given that only a chat can follow."""
        flags = {
            "-sys": self.system_prompt is not None,
            "--chat-template": self.chat_template is not None,
            "--chat-template-file": self.chat_template_file is not None,
        }
        if given := [flag for flag, is_given in flags.items() if is_given]:
            raise Misuse(f"{given[0]} is for a chat", hint="add -st for one turn, or -cnv")

    def template(self, tokenizer: "Tokenizer") -> str | None:
        """The source of the template; None is the model's own. Raises ConfigError."""
        if self.chat_template_file is not None:
            return read_text(self.chat_template_file)
        if self.chat_template is None:
            return None
        if self.chat_template in tokenizer.chat_templates:
            return tokenizer.chat_templates[self.chat_template]
        if "{" in self.chat_template:
            return self.chat_template
        known = ", ".join(sorted(tokenizer.chat_templates)) or "none"
        raise ConfigError(
            f"the model has no chat template {self.chat_template!r}",
            hint=f"its templates: {known}; or give the source of one",
        )


class Conversation:
    """Messages so far. The engine finds what it has computed of them by their common beginning."""

    def __init__(self, llm: "LLM", flags: ChatFlags, generate: Generator) -> None:
        self._llm = llm
        self._template = flags.template(llm.tokenizer)
        self._generate = generate
        system = flags.system_prompt
        self._messages = [] if system is None else [{"role": "system", "content": system}]

    def hold(self, first: str | None, *, single_turn: bool) -> None:
        """Answer `first`, then what is typed, until there is no more. Raises GgufPpError."""
        if single_turn:
            said = _ask() if first is None else first
            if said is None:
                raise Misuse("no prompt", hint="give one with -p TEXT or -f FILE")
            self._answer(said, end="")
            return
        if sys.stdin.isatty():
            print("/exit or Ctrl-D ends, Ctrl-C interrupts an answer", file=sys.stderr)
        said = _ask() if first is None else first
        while said is not None:
            try:
                self._answer(said, end="\n")
            except RequestError as exc:
                show_error(str(exc), exc.hint)
            said = _ask()

    def _answer(self, said: str, *, end: str) -> None:
        messages = [*self._messages, {"role": "user", "content": said}]
        answer = self._generate(self._llm.chat_prompt(messages, self._template), end=end)
        self._messages = [*messages, {"role": "assistant", "content": answer.text}]


def _ask() -> str | None:
    """The next message that is not blank; None at the end, or at /exit."""
    while True:
        if sys.stdin.isatty():
            _wait_for_input()
        line = sys.stdin.readline() if sys.stdin else ""
        said = line.strip()
        if not line or said == "/exit":
            return None
        if said:
            return said


def _wait_for_input() -> None:
    """Show that it is the user's turn. Ctrl-C ends the program."""
    try:
        print("> ", end="", file=sys.stderr, flush=True)
        # A Ctrl-C just before a blocking read would be seen only after the next line.
        while not select.select([sys.stdin], [], [], 0.1)[0]:
            pass
    except KeyboardInterrupt:
        # Everything shown was flushed, and an orderly end would wait for the devices.
        os._exit(130)
