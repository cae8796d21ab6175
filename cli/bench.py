"""`gguf-pp bench`: measure how fast a model runs, over lists of settings."""

import re
import sys
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gguf_pp import bench as library
from gguf_pp import fetch
from gguf_pp.bench import Row, Sweep
from gguf_pp.config import resolve

from .console import Misuse, logs, progress
from .flags import EngineFlags, number_or_auto
from .plot import draw, require_matplotlib
from .rows import show_rows
from .timeline import write_timeline

if TYPE_CHECKING:
    from gguf_pp.config import RuntimeConfig
    from gguf_pp.timeline import Timeline

_PLACE = "Devices and split"
_SIZE = "Context and batches"
_MEASURE = "Measuring"
_MAX_TOKENS = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepFlags(EngineFlags):
    """The flags of a run, of which some are lists here."""

    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            "-dev",
            metavar="NAME,...;...",
            help="Sets of devices, separated by semicolons: 'cpu;cpu:0,cpu:1'.",
            show_default="cpu",
            rich_help_panel=_PLACE,
        ),
    ] = None
    split_mode: Annotated[
        str,
        typer.Option(
            "--split-mode",
            "-sm",
            metavar="none|layer,...",
            help="One device, or layers over all.",
            rich_help_panel=_PLACE,
        ),
    ] = "layer"
    tensor_split: Annotated[
        str | None,
        typer.Option(
            "--tensor-split",
            "-ts",
            metavar="N,...;...",
            help="Splits, separated by semicolons: '1,1;3,1'.",
            show_default="by bytes",
            rich_help_panel=_PLACE,
        ),
    ] = None
    layers: Annotated[
        str | None,
        typer.Option(
            "--layers",
            metavar="N,...;...",
            help="The same as exact numbers of layers.",
            show_default=False,
            rich_help_panel=_PLACE,
        ),
    ] = None
    threads: Annotated[
        str | None,
        typer.Option(
            "--threads",
            "-t",
            metavar="N,...;...",
            help="Threads of every device, or of each; separated by semicolons.",
            show_default="its cores",
            rich_help_panel=_PLACE,
        ),
    ] = None
    n_copies: Annotated[
        str | None,
        typer.Option(
            "--n-copies",
            metavar="N|auto,...",
            help="Rotating input buffers per device; 1 is serial.",
            show_default="auto",
            rich_help_panel=_PLACE,
        ),
    ] = None  # type: ignore[assignment]
    ubatch_size: Annotated[
        str | None,
        typer.Option(
            "--ubatch-size",
            "-ub",
            metavar="N|auto,...",
            help="Tokens that cross a device at once.",
            show_default="auto",
            rich_help_panel=_SIZE,
        ),
    ] = None  # type: ignore[assignment]
    parallel: Annotated[
        str,
        typer.Option(
            "--parallel", "-np", metavar="N,...", help="Streams at once.", rich_help_panel=_SIZE
        ),
    ] = "1"
    n_depth: Annotated[
        str,
        typer.Option(
            "--n-depth",
            "-d",
            metavar="N,...",
            help="Tokens of each stream that are in the cache before.",
            rich_help_panel=_SIZE,
        ),
    ] = "0"

    def configs(self) -> "list[RuntimeConfig]":
        """All ways to place the model. Raises ConfigError, Misuse."""
        if self.ctx_size is not None:
            raise Misuse("-c has no place here", hint="the context is what each case needs; see -d")
        plain = replace(self, n_copies=None, ubatch_size=None).options()
        return [
            resolve(
                replace(
                    plain,
                    device=device,
                    split_mode=mode,
                    tensor_split=shares,
                    layers=layers,
                    threads=threads,
                    n_copies=n_copies,
                    ubatch_size=ubatch_size,
                )
            )
            for device, mode, shares, layers, threads, n_copies, ubatch_size in product(
                _sets(self.device),
                self.split_mode.split(","),
                _sets(self.tensor_split),
                _sets(self.layers),
                _sets(self.threads),
                _numbers_or_auto(self.n_copies),
                _numbers_or_auto(self.ubatch_size),
            )
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureFlags:
    """What is timed, how often, and what becomes of it."""

    n_prompt: Annotated[
        str,
        typer.Option(
            "--n-prompt",
            "-p",
            metavar="N,...",
            help="Tokens of a prompt; 0 leaves prompts out.",
            rich_help_panel=_MEASURE,
        ),
    ] = "512"
    n_gen: Annotated[
        str,
        typer.Option(
            "--n-gen",
            "-n",
            metavar="N,...",
            help="Tokens made; 0 leaves decoding out.",
            rich_help_panel=_MEASURE,
        ),
    ] = "128"
    repetitions: Annotated[
        int,
        typer.Option(
            "--repetitions",
            "-r",
            metavar="N",
            min=1,
            help="How often each case runs.",
            rich_help_panel=_MEASURE,
        ),
    ] = 3
    no_warmup: Annotated[
        bool,
        typer.Option("--no-warmup", help="Time the first run too.", rich_help_panel=_MEASURE),
    ] = False
    baseline: Annotated[
        bool,
        typer.Option(
            "--baseline",
            help="Measure the first device alone as well; a CPU alone has all cores.",
            rich_help_panel=_MEASURE,
        ),
    ] = False
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="md|csv|json|jsonl",
            help="How rows are printed.",
            show_default="a table, or md where stdout is no terminal",
        ),
    ] = None
    timeline: Annotated[
        Path | None,
        typer.Option(
            "--timeline",
            metavar="FILE.json",
            help="Write what ran when in the last case, for Perfetto and gguf-pp timeline.",
            show_default=False,
        ),
    ] = None
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            metavar="FILE.png|svg",
            help="Draw speed against copies, and the last case's timeline.",
            show_default=False,
        ),
    ] = None


def bench(sweep: SweepFlags, flags: MeasureFlags) -> None:
    """Measure the speed of a model for every combination of the lists given.

    Prompts (pp) and decoding (tg) are timed apart, with random tokens, greedily, and to full
    length. A pipelined case is compared with its serial baseline: n_copies 1 on the same devices,
    measured in the same sweep whether asked for or not. Ctrl-C ends the sweep and prints the rows
    that are done.
    """
    name = sweep.model_name()
    show = show_rows(flags.output)
    if flags.plot is not None:
        require_matplotlib(flags.plot)
    wanted = Sweep(
        configs=sweep.configs(),
        n_prompts=_numbers("-p", flags.n_prompt, 0),
        n_gens=_numbers("-n", flags.n_gen, 0),
        parallel=_numbers("--parallel", sweep.parallel, 1),
        depths=_numbers("-d", sweep.n_depth, 0),
        one_device=flags.baseline,
    )
    if not wanted.cases():
        raise Misuse("nothing to measure: both -p and -n are 0")
    with logs(verbose=sweep.verbose):
        with progress(f"downloading {name}", in_bytes=True) as update:
            path = fetch.resolve(name, sweep.cache_dir, update)
        for config in wanted.added():
            print(f"added as a baseline: {_described(config)}", file=sys.stderr)
        rows: list[Row] = []
        try:
            last = _measure(path, wanted, flags, rows)
        finally:
            show(rows)
    if last is not None and flags.timeline is not None:
        write_timeline(flags.timeline, last)
    if last is not None and flags.plot is not None:
        draw(flags.plot, rows, last)


def _measure(path: Path, wanted: Sweep, flags: MeasureFlags, rows: list[Row]) -> "Timeline | None":
    """Append rows as they are done; the last one's timeline."""
    from gguf_pp.measure import measure

    timeline = None
    with progress("measuring", in_bytes=False) as update:
        for result in measure(
            path,
            wanted.cases(),
            repetitions=flags.repetitions,
            warm_up=not flags.no_warmup,
            progress=update,
        ):
            rows.append(result.row)
            timeline = result.timeline
    return timeline


def _sets(text: str | None) -> list[str | None]:
    return [None] if text is None else [part.strip() for part in text.split(";")]


def _numbers_or_auto(text: str | None) -> list[int | None]:
    return [None] if text is None else [number_or_auto(part.strip()) for part in text.split(",")]


def _numbers(flag: str, text: str, low: int) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"\d{1,10}", p) and low <= int(p) <= _MAX_TOKENS for p in parts):
        raise Misuse(f"{flag} {text!r} is not a list of whole numbers from {low} on")
    return [int(part) for part in parts]


def _described(config: "RuntimeConfig") -> str:
    return f"{','.join(d.name for d in config.devices)} with n_copies {config.n_copies}"


# The keys are explained where they are declared; \b keeps the lines of a paragraph.
bench.__doc__ = f"{bench.__doc__}\n    \b\n    Keys of a row in csv, json and jsonl:\n" + "\n".join(
    f"    {key}: {text}" for key, text in library.keys().items()
)
