"""`gguf-pp tune`: find the split that is fastest on these devices."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from gguf_pp import fetch
from gguf_pp.bench import Case
from gguf_pp.config import resolve
from gguf_pp.tune import Comparison, Costs, Job, fastest_split, probe_costs

from .console import Misuse, logs, progress
from .flags import EngineFlags
from .session import print_json
from .tables import print_table

if TYPE_CHECKING:
    from gguf_pp.config import RuntimeConfig

_JOBS = {"prefill": ("prefill",), "decode": ("decode",), "both": ("prefill", "decode")}
_PANEL = "Workload"
_N_GEN = 32
_MIN_ROUNDS, _MAX_ROUNDS = 3, 7
_ENOUGH_S = 120.0
"""Seconds of measuring after which no round begins, once there is the minimum of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneFlags:
    """What the split is to be fast at."""

    target: Annotated[
        str,
        typer.Option(
            "--for",
            metavar="prefill|decode|both",
            help="Work to be fast at.",
            rich_help_panel=_PANEL,
        ),
    ] = "both"
    n_prompt: Annotated[
        int,
        typer.Option(
            "--n-prompt",
            "-p",
            metavar="N",
            min=1,
            help="Tokens of a prompt.",
            rich_help_panel=_PANEL,
        ),
    ] = 512
    parallel: Annotated[
        int,
        typer.Option(
            "--parallel",
            "-np",
            metavar="N",
            min=1,
            max=1024,
            help="Streams that decode at once.",
            rich_help_panel=_PANEL,
        ),
    ] = 8
    no_verify: Annotated[
        bool,
        typer.Option("--no-verify", help="Do not measure what was predicted."),
    ] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """A split with its tokens per second per job: as predicted, and in each round measured."""

    name: str
    layers: tuple[int, ...]
    predicted: tuple[float, ...]
    rounds: tuple[tuple[float, ...], ...] = ()


def tune(engine: EngineFlags, flags: TuneFlags) -> None:
    """Find the split of the layers that is fastest on these devices.

    Times a few layers of each kind on every device, with real weights and on all devices at once,
    and the head and the transfers; where a device is a GPU or a worker's, the time that each takes
    in a run with the default split. Of all contiguous splits that fit the memory it takes the one
    whose slowest stage is fastest, and compares it with the default: predicted, then measured in
    rounds, in which both take turns. A difference that is within the noise counts for nothing: the
    prediction stands. The flags that it prints name every device of a worker.
    """
    name = engine.model_name()
    if flags.target not in _JOBS:
        raise Misuse(f"--for cannot be {flags.target!r}", hint=f"one of {', '.join(_JOBS)}")
    if engine.tensor_split is not None or engine.layers is not None:
        raise Misuse("-ts and --layers are what tune finds", hint="leave them out")
    config = replace(resolve(engine.options()), n_slots=flags.parallel)
    if len(config.devices) < 2 and not _may_be_several(config):
        raise _nothing_to_split()
    with logs(verbose=engine.verbose):
        with progress(f"downloading {name}", in_bytes=True) as update:
            path = fetch.resolve(name, engine.cache_dir, update)
        config, costs, outcomes = _solve(path, config, flags)
        if not flags.no_verify:
            outcomes = _verify(path, config, [c.job for c in costs], outcomes)
    if flags.as_json:
        print_json(_as_dict(config, costs, outcomes))
    else:
        _show(config, costs, outcomes)


def _may_be_several(config: "RuntimeConfig") -> bool:
    """Whether a device is a worker's, of which a name may mean several, or -ngl may add the CPU."""
    lent = any(device.endpoint is not None for device in config.devices)
    return lent or config.n_gpu_layers is not None


def _nothing_to_split() -> Misuse:
    return Misuse("there is nothing to split on one device", hint="try --device cpu:0,cpu:1")


def _solve(
    path: Path, config: "RuntimeConfig", flags: TuneFlags
) -> tuple["RuntimeConfig", list[Costs], list[Outcome]]:
    """The configuration with each device by name; costs per job; the default split and the fastest
    one."""
    from gguf_pp.gguf import ModelFile
    from gguf_pp.probe import DEPTH, ModelProbe, PipelineProbe

    n_ctx = DEPTH + max(flags.n_prompt, _N_GEN) + 2
    only_cpus = all(device.kind == "cpu" for device in config.devices)
    costs = []
    with (
        ModelFile.open(path, config.override_kv) as file,
        closing((ModelProbe if only_cpus else PipelineProbe)(file, config, n_ctx)) as probe,
        progress("timing layers", in_bytes=False) as update,
    ):
        config = probe.config
        if len(config.devices) < 2:
            raise _nothing_to_split()
        workloads = _JOBS[flags.target]
        jobs = {
            "prefill": Job("prefill", flags.n_prompt, probe.ubatch_size(flags.n_prompt)),
            "decode": Job("decode", flags.parallel, -(-flags.parallel // len(config.devices))),
        }
        for i, workload in enumerate(workloads):
            update(i, len(workloads))
            costs.append(probe_costs(probe, probe.kinds, jobs[workload]))
        splits = {
            "default": probe.default_split(),
            "fastest": fastest_split(costs, probe.fits),
        }
    return (
        config,
        costs,
        [
            Outcome(name, tuple(map(len, split)), tuple(c.tokens_per_s(split) for c in costs))
            for name, split in splits.items()
        ],
    )


def _cases(config: "RuntimeConfig", jobs: Sequence[Job]) -> list[Case]:
    config = replace(config, n_slots=1, notes=())
    return [
        Case(config, job.n_tokens, 0, 1, 0)
        if job.workload == "prefill"
        else Case(config, 0, _N_GEN, job.n_tokens, 0)
        for job in jobs
    ]


def _verify(
    path: Path, config: "RuntimeConfig", jobs: Sequence[Job], outcomes: Sequence[Outcome]
) -> list[Outcome]:
    """Run the splits that differ in turns, A B B A A B ..."""
    from gguf_pp.measure import measure

    splits = list(dict.fromkeys(outcome.layers for outcome in outcomes))
    by_split = {layers: _cases(replace(config, layers=layers), jobs) for layers in splits}
    n_rounds = _MAX_ROUNDS if len(splits) > 1 else _MIN_ROUNDS
    order = [splits if i % 2 == 0 else splits[::-1] for i in range(n_rounds)]
    cases = [case for round_ in order for layers in round_ for case in by_split[layers]]
    per_round = len(cases) // n_rounds
    speeds: dict[Case, list[float]] = {}
    start = time.monotonic()
    with (
        progress("measuring", in_bytes=False) as update,
        closing(measure(path, cases, repetitions=1, progress=update)) as results,
    ):
        for i, (case, result) in enumerate(zip(cases, results, strict=False), 1):
            speeds.setdefault(case, []).append(result.row.tokens_per_s)
            late = time.monotonic() - start > _ENOUGH_S
            if late and i % per_round == 0 and i // per_round >= _MIN_ROUNDS:
                break
    return [
        replace(o, rounds=tuple(tuple(speeds[case]) for case in by_split[o.layers]))
        for o in outcomes
    ]


def _flags(config: "RuntimeConfig", layers: Sequence[int]) -> str:
    # The second name of one device is for tables only.
    flags = f"--device {','.join(d.name.partition('#')[0] for d in config.devices)}"
    flags += f" --layers {','.join(map(str, layers))}"
    threads = [d.threads for d in config.devices]
    return flags + (f" -t {','.join(map(str, threads))}" if threads[0] is not None else "")


def _as_dict(
    config: "RuntimeConfig", costs: Sequence[Costs], outcomes: Sequence[Outcome]
) -> dict[str, object]:
    """What --json prints; lists in the order of the devices."""
    return {
        "devices": [device.name for device in config.devices],
        "jobs": [
            {
                "workload": c.job.workload,
                "n_tokens": c.job.n_tokens,
                "n_rows": c.job.n_rows,
                "layer_s": [list(times) for times in c.layers],
                "head_s": list(c.heads),
                "edge_s": list(c.edges),
            }
            for c in costs
        ],
        "splits": [
            {
                "name": o.name,
                "layers_per_device": list(o.layers),
                "predicted_tokens_per_s": list(o.predicted),
                "measured_tokens_per_s": [median(rounds) for rounds in o.rounds] or None,
            }
            for o in outcomes
        ],
        "speedups": [
            {
                "workload": c.job.workload,
                "predicted": found.predicted,
                "measured": found.measured,
                "error": found.error if found.rounds else None,
                "clear": found.clear,
            }
            for c, found in zip(costs, compare(*outcomes), strict=True)
        ],
        "flags": _flags(config, choose(*outcomes).layers),
    }


def _show(config: "RuntimeConfig", costs: Sequence[Costs], outcomes: Sequence[Outcome]) -> None:
    titles = ["device", *(f"{c.job.workload} ms a layer" for c in costs)]
    titles += [f"{c.job.workload} ms head" for c in costs]
    rows = []
    for i, device in enumerate(config.devices):
        means = [1e3 * sum(c.layers[i]) / len(c.layers[i]) for c in costs]
        heads = ["" if (s := c.heads[i]) is None else f"{1e3 * s:.3f}" for c in costs]
        rows.append([device.name, *(f"{ms:.3f}" for ms in means), *heads])
    print_table(titles, rows)
    print()
    titles = ["split", "layers"]
    for c in costs:
        titles += [f"{c.job.workload} tokens/s predicted", "measured"]
    print_table(titles, [_line(outcome) for outcome in outcomes], n_left=2)
    print()
    for line in _verdict([c.job.workload for c in costs], *outcomes):
        print(line)
    print(f"use {_flags(config, choose(*outcomes).layers)}")


def _line(outcome: Outcome) -> list[str]:
    cells = [outcome.name, ",".join(map(str, outcome.layers))]
    for i, predicted in enumerate(outcome.predicted):
        cells += [f"{predicted:.1f}", f"{median(outcome.rounds[i]):.1f}" if outcome.rounds else ""]
    return cells


def compare(default: Outcome, fastest: Outcome) -> list[Comparison]:
    """How much faster the second is, per job."""
    rounds = [
        tuple(b / a for a, b in zip(*pair, strict=True))
        for pair in zip(default.rounds, fastest.rounds, strict=True)
    ]
    predicted = [b / a for a, b in zip(default.predicted, fastest.predicted, strict=True)]
    return [Comparison(p, rounds[i] if rounds else ()) for i, p in enumerate(predicted)]


def choose(default: Outcome, fastest: Outcome) -> Outcome:
    """The faster one over all jobs; of equals the default."""
    return fastest if math.prod(c.speedup for c in compare(default, fastest)) > 1 else default


def _verdict(workloads: Sequence[str], default: Outcome, fastest: Outcome) -> Iterator[str]:
    """What the comparison found for each workload."""
    if default.layers == fastest.layers:
        yield "the default split is the fastest"
        return
    split = f"--layers {','.join(map(str, fastest.layers))}"
    chosen = choose(default, fastest)
    for workload, found in zip(workloads, compare(default, fastest), strict=True):
        predicted = f"predicted {found.predicted:.2f} times as fast as the default"
        if found.measured is None:
            yield f"{workload}: {split} is {predicted}"
        else:
            noise = "" if found.clear else ", which is within the noise: the prediction stands"
            measured = f"{found.measured:.2f} ± {found.error:.2f} in {len(found.rounds)} rounds"
            yield f"{workload}: {split} is {predicted}, measured {measured}{noise}"
        if found.speedup < 1 if chosen is fastest else found.speedup > 1:
            other = default if chosen is fastest else fastest
            yield f"for {workload} alone the {other.name} split is better: tune --for {workload}"
