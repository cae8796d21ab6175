"""Chat templates: messages to the text that a model was trained on."""

import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NoReturn

import jinja2

from gguf_pp.errors import TemplateError
from gguf_pp.tokenizer.sandbox import MAX_CHARS, MAX_SECONDS, BoundedEnvironment, deadline

# What a source can make Jinja, or an operator in it, raise.
_FAILURES = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
)


class ChatTemplate:
    """A compiled chat template, with the helpers that Hugging Face's templates expect.

    `bos` and `eos` are the texts of those tokens. Raises TemplateError if `source` does not
    compile. Rendering is bounded in time, in the size of the result and in that of values.
    """

    def __init__(self, source: str, *, bos: str, eos: str) -> None:
        self._names = {"bos_token": bos, "eos_token": eos}
        environment = BoundedEnvironment()
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        token = deadline.set(time.monotonic() + MAX_SECONDS)
        try:
            self._template = environment.bounded_template(source)
        except _FAILURES as exc:
            raise _failure("does not compile", exc) from exc
        finally:
            deadline.reset(token)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        **kwargs: object,
    ) -> str:
        """Return the prompt for `messages`; `kwargs` are further variables of the template.

        Raises TemplateError if the template fails, refuses the messages, or passes a bound.
        """
        names = {
            **self._names,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **kwargs,
        }
        chunks: list[str] = []
        n_chars = 0
        token = deadline.set(time.monotonic() + MAX_SECONDS)
        try:
            for chunk in self._template.generate(names):
                n_chars += len(chunk)
                if n_chars > MAX_CHARS:
                    raise TemplateError(
                        f"the chat template writes more than {MAX_CHARS} characters"
                    )
                chunks.append(chunk)
        except _FAILURES as exc:
            raise _failure("does not render", exc) from exc
        finally:
            deadline.reset(token)
        return "".join(chunks)


def _failure(what: str, exc: BaseException) -> TemplateError:
    line = exc.lineno if isinstance(exc, jinja2.TemplateSyntaxError) else _line_of(exc)
    where = f" (line {line})" if line else ""
    return TemplateError(
        f"the chat template {what}{where}: {exc or type(exc).__name__}",
        hint="give another one with --chat-template-file",
    )


def _line_of(exc: BaseException) -> int | None:
    """Return the line of the source that raised; Jinja gives its frames the source's lines."""
    line = None
    traceback = exc.__traceback__
    while traceback is not None:
        if "__jinja_exception__" in traceback.tb_frame.f_globals:
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
