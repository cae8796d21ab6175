"""Results for people: tables on stdout, and text from files that a terminal may be shown."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import JustifyMethod

_WIDE = 10_000
_GAP = 2


def print_table(titles: Sequence[str], rows: Iterable[Sequence[str]], *, n_left: int = 1) -> None:
    """Print rows below titles; all but the first `n_left` columns are flush right.

    Nothing is ever cut: on a narrow terminal cells fold between words, or run over its edge.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    lines = [list(titles), *map(list, rows)]
    columns = list(zip(*lines, strict=True))
    out = Console(markup=False, highlight=False, emoji=False)
    natural = sum(max(map(len, column)) + _GAP for column in columns)
    folds = out.is_terminal and natural > out.width
    widths = [max(map(len, " ".join(column).split()), default=0) for column in columns]
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
    for i, (column, width) in enumerate(zip(columns, widths, strict=True)):
        justify: JustifyMethod = "left" if i < n_left else "right"
        table.add_column(
            Text(column[0]), justify=justify, width=width if folds else None, overflow="fold"
        )
    for line in lines[1:]:
        table.add_row(*map(Text, line))
    out.width = max(out.width, sum(widths) + _GAP * len(widths)) if folds else _WIDE
    out.print(table)


def size(n_bytes: int) -> str:
    """Bytes for people, in units of 1024."""
    if abs(n_bytes) >= 10 << 30:
        return f"{n_bytes / (1 << 30):.1f} GiB"
    if abs(n_bytes) >= 1 << 20:
        return f"{n_bytes / (1 << 20):.1f} MiB"
    if abs(n_bytes) >= 1 << 10:
        return f"{n_bytes / (1 << 10):.1f} KiB"
    return f"{n_bytes} B" if n_bytes else "0"


def count(n: int, what: str) -> str:
    """`1 row`, `2 rows`."""
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def printable(text: str, *, lines: bool = False) -> str:
    """Return `text` with whatever could steer a terminal, or hide, written as an escape.

    Of control characters line ends and tabs stay with `lines`.
    """
    kept = "\n\t" if lines else ""
    return "".join(c if c.isprintable() or c in kept else _escape(c) for c in text)


def _escape(char: str) -> str:
    short = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}
    code = ord(char)
    width, letter = (2, "x") if code < 0x100 else (4, "u") if code < 0x10000 else (8, "U")
    return short.get(char, f"\\{letter}{code:0{width}x}")
