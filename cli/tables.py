"""Results for people: tables on stdout, and text from files that a terminal may be shown."""

from collections.abc import Iterable, Sequence

_PIPE_WIDTH = 10_000
"""Nothing is cut or folded where a program, or a file, takes the place of the terminal."""


def print_table(titles: Sequence[str], rows: Iterable[Sequence[str]], *, n_left: int = 1) -> None:
    """Print rows below titles; all but the first `n_left` columns are flush right."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for i, title in enumerate(titles):
        justify = "left" if i < n_left else "right"
        table.add_column(Text(title), justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*map(Text, row))
    out = Console(markup=False, highlight=False, emoji=False)
    if not out.is_terminal:
        out.width = _PIPE_WIDTH
    out.print(table)


def size(n_bytes: int) -> str:
    """Bytes for people, in KiB, MiB or GiB."""
    if abs(n_bytes) >= 10 << 30:
        return f"{n_bytes / (1 << 30):.1f} GiB"
    if abs(n_bytes) >= 1 << 20:
        return f"{n_bytes / (1 << 20):.1f} MiB"
    return f"{n_bytes / (1 << 10):.1f} KiB" if n_bytes else "0"


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
