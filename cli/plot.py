"""Figures of a benchmark, with matplotlib, which is optional."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gguf_pp.backend.trace import Kind
from gguf_pp.bench import Row
from gguf_pp.errors import ConfigError
from gguf_pp.timeline import Timeline, ended, summarize

from .console import Misuse

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SUFFIXES = (".png", ".svg")
_MAX_UBATCHES = 40
"""Ubatches of a timeline that are drawn; more would be too narrow to tell apart."""
_NAMED = 0.012
"""Share of the time axis from which on a ubatch has room for its number."""


def require_matplotlib(path: Path) -> None:
    """Raise ConfigError, before anything is measured, if no figure can be drawn to `path`."""
    if path.suffix.lower() not in _SUFFIXES:
        raise Misuse(f"--plot {path}: a figure is a .png or a .svg")
    try:
        import matplotlib  # noqa: F401
    except ImportError as exc:
        raise ConfigError(
            "--plot needs matplotlib, which is not installed",
            hint="pip install 'gguf-pp[plot]'",
        ) from exc


def draw(path: Path, rows: Sequence[Row], timeline: Timeline) -> None:
    """Write a figure: speed against copies, a line per ubatch size and number of streams, and the
    timeline of one run, that of the last row. Raises ConfigError if `path` cannot be written."""
    from matplotlib.figure import Figure

    prompts, decodes = [row for row in rows if row.n_prompt], [row for row in rows if row.n_gen]
    speeds = {"Prompts": prompts, "Decoding": decodes}
    shown = {title: mine for title, mine in speeds.items() if mine}
    figure = Figure(figsize=(11, 3.5 * (len(shown) + 1)), layout="constrained")
    figure.suptitle(f"{rows[0].model}, {rows[0].quantization}")
    *panels, tracks = figure.subplots(len(shown) + 1, 1, squeeze=False)[:, 0]
    for axes, (title, mine) in zip(panels, shown.items(), strict=True):
        _draw_speeds(axes, title, mine)
    _draw_timeline(tracks, rows[-1], timeline)
    try:
        figure.savefig(path)
    except OSError as exc:
        raise ConfigError(f"{path} cannot be written: {exc.strerror}") from exc


def lines(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows that differ in copies only, sorted by them, by label.

    Ubatch sizes that were chosen by us differ with copies and make no lines of their own.
    """
    placed = {(row.devices, row.layers_per_device, row.threads) for row in rows}
    places = [(r.test, r.devices, r.layers_per_device, r.threads, r.n_copies) for r in rows]
    swept = len(set(places)) < len(rows)
    found: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.n_copies):
        label = row.test
        if len(placed) > 1:
            label += f", {_place(row)}"
        if swept and row.n_prompt:
            label += f", ubatch {row.ubatch_size}"
        found.setdefault(label, []).append(row)
    return found


def _place(row: Row) -> str:
    """`cpu:0,cpu:1 (19,11)`."""
    return f"{','.join(row.devices)} ({','.join(map(str, row.layers_per_device))})"


def _draw_speeds(axes: "Axes", title: str, rows: Sequence[Row]) -> None:
    for label, mine in lines(rows).items():
        axes.errorbar(
            [row.n_copies for row in mine],
            [row.tokens_per_s for row in mine],
            yerr=[row.tokens_per_s_sd for row in mine],
            marker="o",
            capsize=3,
            label=label,
        )
    places = {_place(row) for row in rows}
    where = f" on {places.pop()}" if len(places) == 1 else ""
    spread = ", bars are standard deviations" if any(row.tokens_per_s_sd for row in rows) else ""
    axes.set_title(f"{title}{where}: speed against copies{spread}")
    axes.set(xlabel="copies of each input buffer (1: no pipelining)", ylabel="tokens/s")
    axes.set_xticks(sorted({row.n_copies for row in rows}))
    axes.set_ylim(0, 1.1 * max(row.tokens_per_s + row.tokens_per_s_sd for row in rows))
    axes.grid(axis="y", alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small")


def _draw_timeline(axes: "Axes", row: Row, timeline: Timeline) -> None:
    """A lane per device, and one per edge between two; a ubatch has one colour in all of them."""
    slices = [s for s in ended(timeline.slices) if s.kind != "host"]
    all_of_them = sorted({s.i_ubatch for s in slices})
    numbers = {u: i for i, u in enumerate(all_of_them[:_MAX_UBATCHES])}
    slices = [s for s in slices if s.i_ubatch in numbers]
    zero = min((s.start_s for s in slices), default=0.0)
    span_ms = 1e3 * (max((s.end_s for s in slices), default=zero) - zero)
    lanes = _lanes(timeline)
    rank = {lane: i for i, lane in enumerate(lanes)}
    for s in slices:
        start, end = 1e3 * (s.start_s - zero), 1e3 * (s.end_s - zero)
        named = end - start > _NAMED * span_ms
        _draw_bar(axes, rank[s.kind, s.i_stage], numbers[s.i_ubatch], start, end, named=named)
    axes.set_xlim(0, span_ms or 1)
    axes.set_yticks(range(len(lanes)), list(lanes.values()))
    axes.invert_yaxis()
    part = f"first {len(numbers)} of " if len(numbers) < len(all_of_them) else ""
    copies = "1 copy" if row.n_copies == 1 else f"{row.n_copies} copies"
    axes.set_title(f"Timeline of {row.test} with {copies}: {part}{len(all_of_them)} ubatches")
    axes.set_xlabel("ms; a colour and a number are a ubatch")


def _lanes(timeline: Timeline) -> dict[tuple[Kind, int], str]:
    """Labels of what has a lane of its own, in pipeline order."""
    devices = timeline.devices
    busy = summarize(timeline.slices, len(devices)).busy_shares
    lanes: dict[tuple[Kind, int], str] = {}
    for i, device in enumerate(devices):
        lanes["compute", i] = f"{device}\nbusy {100 * busy[i]:.0f} %"
        if i + 1 < len(devices):
            lanes["transfer", i] = f"{device} to\n{devices[i + 1]}"
    return lanes


def _draw_bar(
    axes: "Axes", i_lane: int, number: int, start_ms: float, end_ms: float, *, named: bool
) -> None:
    width, colour = end_ms - start_ms, f"C{number % 10}"
    # The line keeps visible what takes less than a pixel, such as most transfers.
    axes.barh(i_lane, width, left=start_ms, color=colour, edgecolor=colour, linewidth=0.7)
    if named:
        middle = start_ms + width / 2
        axes.text(middle, i_lane, str(number), ha="center", va="center", fontsize="x-small")
