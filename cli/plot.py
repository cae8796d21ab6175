"""Figures of a benchmark, with matplotlib, which is optional."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gguf_pp.bench import Row
from gguf_pp.errors import ConfigError
from gguf_pp.timeline import Timeline

from .console import Misuse

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SUFFIXES = (".png", ".svg")
_MAX_BARS = 20_000
"""Pieces of a timeline that are drawn; more would only be ink."""


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
    timeline of one run. Raises ConfigError if `path` cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 12), layout="constrained")
    prompt, decode, tracks = figure.subplots(3, 1)
    _draw_speeds(prompt, "prompt", [row for row in rows if row.n_prompt])
    _draw_speeds(decode, "decode", [row for row in rows if row.n_gen])
    _draw_timeline(tracks, timeline)
    try:
        figure.savefig(path)
    except OSError as exc:
        raise ConfigError(f"{path} cannot be written: {exc.strerror}") from exc


def _draw_speeds(axes: "Axes", title: str, rows: Sequence[Row]) -> None:
    lines: dict[str, list[Row]] = {}
    for row in rows:
        label = f"{row.test}, {','.join(row.devices)} ({','.join(map(str, row.layers_per_device))})"
        label += f", ubatch {row.ubatch_size}" if row.n_prompt else ""
        lines.setdefault(label, []).append(row)
    for label, mine in lines.items():
        mine.sort(key=lambda row: row.n_copies)
        axes.errorbar(
            [row.n_copies for row in mine],
            [row.tokens_per_s for row in mine],
            yerr=[row.tokens_per_s_sd for row in mine],
            marker="o",
            capsize=3,
            label=label,
        )
    axes.set(title=title, xlabel="copies", ylabel="tokens/s")
    axes.set_xticks(sorted({row.n_copies for row in rows}))
    axes.set_ylim(bottom=0)
    if lines:
        axes.legend(fontsize="small")


def _draw_timeline(axes: "Axes", timeline: Timeline) -> None:
    slices = timeline.slices[:_MAX_BARS]
    zero = min((s.start_s for s in slices), default=0.0)
    n_stages = len(timeline.devices)
    names = []
    for i in range(2 * n_stages - 1):
        kind = "transfer" if i % 2 else "compute"
        device = timeline.devices[i // 2]
        names.append(f"{device} to {timeline.devices[i // 2 + 1]}" if i % 2 else device)
        mine = [s for s in slices if s.kind == kind and s.i_stage == i // 2]
        axes.broken_barh(
            [(1e3 * (s.start_s - zero), 1e3 * (s.end_s - s.start_s)) for s in mine],
            (i - 0.4, 0.8),
            facecolors=[f"C{s.i_ubatch % 10}" for s in mine],
        )
    axes.set(title="timeline of the last row", xlabel="ms")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
