"""`gguf-pp`: find the subcommand, run it, turn failures into two lines and an exit code."""

import atexit
import errno
import gc
import io
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import typer

from gguf_pp import __version__
from gguf_pp.errors import GgufPpError

from .console import Misuse, show_error
from .flags import flatten

COMMANDS = {
    "run": "Generate text, or chat.",
    "bench": "Measure how fast a model runs, over lists of settings.",
    "timeline": "Say what a recorded run waited for.",
    "tune": "Find the split that is fastest on these devices.",
    "plan": "Say what a run would do, without loading the model.",
    "inspect": "Show what is in a GGUF file.",
    "devices": "List the devices of this machine.",
    "doctor": "Try what a run relies on, and say what it would use.",
    "worker": "Lend this machine's devices to another one.",
    "perplexity": "Measure how well a model predicts a text.",
    "pull": "Download a known model, or list those that are known.",
}
"""One line of help by name. A command is the function of that name in the module of that name,
imported only when it is wanted; its docstring is its own help."""

ALIASES = {"rpc-server": "worker", "remote-backend": "worker"}

_SETTINGS = {"help_option_names": ["-h", "--help"]}


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 on success, 1 on a failure the user can fix, 2 on bad usage, 130 on ^C."""
    args = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    args[0] = ALIASES.get(args[0], args[0])
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A character that the terminal's encoding lacks must not end a generation.
        sys.stdout.reconfigure(errors="replace")
    # What is still there at the exit goes with the process; a last look for garbage takes longer
    # than the rest of the exit.
    atexit.register(gc.freeze)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    try:
        command = typer.main.get_command(_app(args[0]))
        with command.make_context("gguf-pp", list(args)) as context:
            command.invoke(context)
        sys.stdout.flush()
    except typer.Exit as exc:
        return exc.exit_code
    except GgufPpError as exc:
        show_error(str(exc), exc.hint)
        return 2 if isinstance(exc, Misuse) else 1
    except typer.TyperException as exc:
        show_error(exc.format_message(), f"{_prog(args[0])} --help lists what there is")
        return exc.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:  # the reader of our output, such as `head`, has seen enough
        _drop_output()
    except OSError as exc:
        if exc.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise
        _drop_output()
        show_error(f"the output cannot be written: {exc.strerror}", None)
        return 1
    return 0


def _drop_output() -> None:
    """Write what is left in stdout's buffer nowhere, or it would fail once more at the exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _app(wanted: str) -> typer.Typer:
    """Build the command line; of the subcommands only `wanted` is real, the others have a name."""
    app = typer.Typer(
        add_completion=False,
        context_settings=_SETTINGS,
        # Rich takes longer to import than all the rest: boxes are for the long help of a command.
        rich_markup_mode="rich" if wanted in COMMANDS else None,
    )
    app.callback()(_global_flags)
    for name, text in COMMANDS.items():
        if name == wanted:
            command = flatten(getattr(import_module(f"gguf_pp.cli.{name}"), name))
            app.command(name, context_settings=_SETTINGS)(command)
        else:
            app.command(name, help=text)(_unloaded)
    return app


def _prog(first: str) -> str:
    return f"gguf-pp {first}" if first in COMMANDS else "gguf-pp"


def _unloaded() -> None:
    raise AssertionError("only the first argument can be a command")


def _show_version(asked: bool) -> None:
    if asked:
        print(f"gguf-pp {__version__}")
        raise typer.Exit


def _global_flags(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Run one GGUF model across several devices, as a pipeline."""
