"""Rows of a benchmark on stdout, in the formats of -o."""

import csv
import io
import json
import sys
from collections.abc import Callable, Iterable, Sequence

from gguf_pp.bench import Row, keys, remarks

from .console import Misuse
from .tables import print_table, size


def show_rows(name: str | None) -> Callable[[Sequence[Row]], None]:
    """What prints rows as `name`; None is for people. Raises Misuse."""
    if name is None:
        return _show_table if sys.stdout.isatty() else _show_markdown
    formats = {"md": _show_markdown, "csv": _show_csv, "json": _show_json, "jsonl": _show_jsonl}
    if name not in formats:
        raise Misuse(f"-o cannot be {name!r}", hint=f"choose one of {', '.join(formats)}")
    return formats[name]


def _show_json(rows: Sequence[Row]) -> None:
    print(json.dumps([row.as_dict() for row in rows], indent=1, allow_nan=False))


def _show_jsonl(rows: Sequence[Row]) -> None:
    for row in rows:
        print(json.dumps(row.as_dict(), allow_nan=False))


def _show_csv(rows: Sequence[Row]) -> None:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(keys())
    writer.writerows([_cell(value) for value in row.as_dict().values()] for row in rows)
    print(out.getvalue(), end="")


def _cell(value: object) -> str:
    """Lists with slashes, as -ts takes them; nothing for null."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "/".join(f"{key} {item}" for key, item in value.items())
    if isinstance(value, tuple):
        return "/".join(map(_cell, value))
    return "" if value is None else str(value)


_TITLES = (
    *("test", "devices", "layers", "copies", "ubatch", "tokens/s", "speed-up", "one device"),
    *("busy %", "bubble %", "formula", "starved/uneven/transfer %", "memory"),
)


def _show_table(rows: Sequence[Row]) -> None:
    if rows:
        print(_heading(rows[0]))
        print_table(_TITLES, map(_cells, rows), n_left=2)
        _show_remarks(rows)


def _show_markdown(rows: Sequence[Row]) -> None:
    if rows:
        print(f"{_heading(rows[0])}\n")
        print(_line(_TITLES))
        print(_line([":--", ":--", *("--:" for _ in _TITLES[2:])]))
        for row in rows:
            print(_line(_cells(row)))
        print()
        _show_remarks(rows)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _show_remarks(rows: Sequence[Row]) -> None:
    for remark in remarks(rows):
        print(f"{remark}.")


def _heading(row: Row) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in row.versions.items())
    what = f"{row.quantization}, {size(row.size)}, {row.params / 1e6:.1f} M weights"
    return f"{row.model}: {what}; {versions}"


def _cells(row: Row) -> list[str]:
    waiting = (row.waiting.starved, row.waiting.uneven, row.waiting.transfer)
    return [
        row.test,
        ",".join(row.devices),
        ",".join(map(str, row.layers_per_device)),
        str(row.n_copies),
        str(row.ubatch_size),
        f"{row.tokens_per_s:.1f} ± {row.tokens_per_s_sd:.1f}",
        _times(row.speedup),
        _times(row.speedup_one_device),
        _percents(row.busy_share),
        _percents([row.bubble_share]),
        _percents([row.bubble_predicted]),
        _percents(waiting) if len(row.devices) > 1 else "",
        size(sum(row.peak_memory)),
    ]


def _times(factor: float | None) -> str:
    return "" if factor is None else f"{factor:.2f}x"


def _percents(shares: Iterable[float]) -> str:
    return "/".join(f"{100 * share:.0f}" for share in shares)
