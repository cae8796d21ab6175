"""What goes to stderr: errors, warnings, progress. Rich is imported where something is drawn."""

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gguf_pp.errors import GgufPpError

if TYPE_CHECKING:
    from rich.progress import Progress


class Misuse(GgufPpError):
    """Flags that contradict each other, or one that is missing; exit code 2."""


def show_error(message: str, hint: str | None) -> None:
    """Print a failure as one line, and what to do about it as another."""
    print(f"error: {message}", file=sys.stderr)
    if hint:
        print(f" hint: {hint}", file=sys.stderr)


def show_warning(message: str) -> None:
    """Print a warning as one line."""
    print(f"warning: {message}", file=sys.stderr)


def show_table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows in columns, all but the first flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        first, *rest = (
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print(first, *rest, sep="  ", file=sys.stderr)


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        # sys.stderr is looked up each time: a progress bar replaces it while it is shown.
        print(f"{record.levelname.lower()}: {record.getMessage()}", file=sys.stderr)


@contextmanager
def logs(*, verbose: bool) -> Iterator[None]:
    """Show what the package logs on stderr: warnings, and with `verbose` the rest."""
    logger, handler = logging.getLogger("gguf_pp"), _Lines()
    level = logger.level
    logger.setLevel(logging.INFO if verbose else logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@contextmanager
def progress(text: str, *, in_bytes: bool) -> Iterator[Callable[[int, int], None]]:
    """Lend a function of (so far, in all) that draws a bar, from its first call on.

    The bar vanishes at the end; where stderr is no terminal there is none.
    """
    bar: Progress | None = None

    def update(so_far: int, total: int) -> None:
        nonlocal bar
        if bar is None:
            bar = _bar(text, in_bytes=in_bytes)
        bar.update(bar.task_ids[0], completed=so_far, total=total)
        bar.start()

    try:
        yield update if _has_terminal() else _no_bar
    finally:
        if bar is not None:
            bar.stop()


def _has_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def _no_bar(so_far: int, total: int) -> None:
    pass


def _bar(text: str, *, in_bytes: bool) -> "Progress":
    from rich import progress as rich
    from rich.console import Console

    columns = [rich.TextColumn(text, markup=False), rich.BarColumn()]
    if in_bytes:
        columns += [rich.DownloadColumn(), rich.TransferSpeedColumn()]
    else:
        columns += [rich.MofNCompleteColumn(), rich.TimeRemainingColumn()]
    out = Console(stderr=True, highlight=False, markup=False, emoji=False)
    bar = rich.Progress(*columns, console=out, transient=True, disable=not out.is_terminal)
    bar.add_task(text, total=None)
    return bar
