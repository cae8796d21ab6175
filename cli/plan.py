"""`gguf-pp plan`: what a run would do, from the header of the file and the memory of devices."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from gguf_pp import fetch
from gguf_pp.errors import PlacementError
from gguf_pp.pipeline.plan import bubble, format_plan, plan_steps

from .console import logs, progress, show_warning
from .flags import EngineFlags
from .session import print_json
from .tables import count, print_table, printable, size

if TYPE_CHECKING:
    from gguf_pp.gguf import ModelFile
    from gguf_pp.pipeline.estimate import Plan, PlannedStage, Pool

IN_FLIGHT = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanFlags(EngineFlags):
    """The flags of a run, and devices that need not exist."""

    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            "-dev",
            metavar="NAME,...",
            help="Devices in pipeline order: cpu, cpu:0,cpu:1,..., tcp://host:port, which is asked "
            "what it has, and any whose memory is given, such as cuda:0.",
            show_default="those of --memory, else cpu",
            rich_help_panel="Devices and split",
        ),
    ] = None
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            metavar="NAME=SIZE,...",
            help="Free memory by device, such as cuda:0=24GiB,cuda:1=12GiB; a SIZE alone is the "
            "RAM of all CPU devices.",
            show_default="what is available",
            rich_help_panel="Devices and split",
        ),
    ] = None
    parallel: Annotated[
        int,
        typer.Option(
            "--parallel",
            "-np",
            metavar="N",
            help="Sequences at once, each with a whole context.",
            rich_help_panel="Context and batches",
        ),
    ] = 1
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False


def plan(flags: PlanFlags) -> None:
    """Say what a run would do: what each device holds, what fits, what overlaps.

    Reads the header of the file only. Workers are asked what they have; devices and workers need
    not exist if their memory is given. A model that does not fit ends with what is missing and exit
    code 1.
    """
    from gguf_pp.gguf import ModelFile
    from gguf_pp.pipeline.estimate import estimate
    from gguf_pp.pipeline.planned import resolve

    name = flags.model_name()
    settled, devices = resolve(replace(flags.options(), parallel=flags.parallel))
    with logs(verbose=flags.verbose), progress(f"downloading {name}", in_bytes=True) as update:
        path = fetch.resolve(name, flags.cache_dir, update)
    with ModelFile.open(path, settled.override_kv) as file:
        planned = estimate(file, settled, devices)
        if flags.as_json:
            print_json(as_json(file, planned))
        else:
            _show(file, planned)
    if not planned.fits:
        lacking = [pool for pool in planned.pools if pool.margin_bytes < 0]
        what = ", ".join(f"{pool.memory.pool} lacks {size(-pool.margin_bytes)}" for pool in lacking)
        hint = "use a smaller quantization, a smaller context (-c), or more devices"
        if planned.alone:
            hint = f"split another way: {' or '.join(planned.alone)} alone can hold it"
        raise PlacementError(f"the model does not fit: {what}", hint=hint)


def _show(file: "ModelFile", planned: "Plan") -> None:
    """Print the plan for people."""
    for note in planned.notes:
        show_warning(note)
    rung, slots = planned.rung, count(planned.n_slots, "slot")
    print(f"{printable(file.path.name)}: {printable(file.architecture)}, {size(_weights(planned))}")
    print(f"n_ctx {rung.ctx_size} of {planned.n_ctx_train}, {slots}, ubatch {rung.ubatch_size}")
    if not planned.fits:
        print("\nit does not fit, not even as little as this:")
    elif rung != planned.asked:
        print(f"less than asked, since that does not fit: {_rung(planned)}")
    print()
    _show_stages(planned)
    if not planned.fits:
        print("\nwhat is missing:")
        _show_missing(planned)
        return
    print()
    for line in sentences(planned):
        print(line)
    if len(planned.stages) > 1:
        print()
        _show_bubble(len(planned.stages))
    if not planned.not_pipelined_because:
        n_stages = len(planned.stages)
        print(f"\nschedule of {n_stages + 2} ubatches (u) on {rung.n_copies} copies (c)")
        print(format_plan(list(plan_steps(n_stages, n_stages + 2, rung.n_copies))))


def _weights(planned: "Plan") -> int:
    return sum(stage.need.weights for stage in planned.stages)


def _rung(planned: "Plan") -> str:
    asked, rung = planned.asked, planned.rung
    pairs = (
        ("n_copies", asked.n_copies, rung.n_copies),
        ("ubatch", asked.ubatch_size, rung.ubatch_size),
        ("n_ctx", asked.ctx_size, rung.ctx_size),
    )
    return ", ".join(f"{what} {new} instead of {old}" for what, old, new in pairs if new != old)


def _show_stages(planned: "Plan") -> None:
    titles = ["device", "layers", "weights", "embed", "head", "KV"]
    titles += [f"copies (x{planned.rung.n_copies})", "scratch", "total", "free", "margin"]
    pools = {name: pool for pool in planned.pools for name in pool.devices}
    sources = {stage.device.name: stage.device.source for stage in planned.stages}

    def row(stage: "PlannedStage") -> list[str]:
        need, pool = stage.need, pools[stage.device.name]
        weights = [need.weights, stage.embedding_bytes, stage.head_bytes]
        others = [need.kv, need.copies, need.scratch, need.total]
        left = [pool.memory.free_bytes, pool.margin_bytes]
        layers = f"{stage.layers.start}-{stage.layers.stop - 1}"
        return [stage.device.name, layers, *map(size, weights + others + left)]

    print_table(titles, map(row, planned.stages))
    for pool in planned.pools:
        if len(pool.devices) > 1:
            hardware = pool.memory.pool.rpartition(" ")[2]  # behind the worker's address
            shared = "the RAM" if hardware == "ram" else f"the memory of {hardware}"
            print(f"{', '.join(pool.devices)} share {shared}: free and margin are of all together")
        if any(sources[name] == "worker" for name in pool.devices):
            free, total = size(pool.memory.free_bytes), size(pool.memory.total_bytes)
            print(f"{', '.join(pool.devices)}: the worker says it has {free} free of {total}")


def _show_missing(planned: "Plan") -> None:
    def row(pool: "Pool") -> list[str]:
        figures = (pool.planned_bytes, pool.memory.free_bytes, max(0, -pool.margin_bytes))
        return [pool.memory.pool, *map(size, figures)]

    print_table(("memory", "needed", "free", "missing"), map(row, planned.pools))


def sentences(planned: "Plan") -> list[str]:
    """What the figures mean, a line each."""
    why_not, n_copies = planned.not_pipelined_because, planned.rung.n_copies
    lines = [f"pipelining off: {why_not}" if why_not else f"pipelining on: {n_copies} copies"]
    lines.append(f"largest context that fits: {_context(planned)}")
    if len(planned.stages) == 1:
        return lines
    for what, rows in _boundary(planned).items():
        crossing = size(rows * planned.row_bytes)
        lines.append(f"{what}: {crossing} cross each boundary per ubatch ({count(rows, 'row')})")
    for how, counts in (("time", planned.by_time), ("memory", planned.by_memory)):
        lines.append(f"split by {how}: --layers {','.join(map(str, counts or ()))}")
    if planned.alone:
        lines.append(
            f"the model fits {' or '.join(planned.alone)} alone: a split adds capacity and prompt "
            "throughput, not single-stream decode speed"
        )
    return lines


def _context(planned: "Plan") -> str:
    most, train = planned.max_ctx_size, planned.n_ctx_train
    return f"{most}, all of the model's" if most == train else f"{most} of {train}"


def _boundary(planned: "Plan") -> dict[str, int]:
    """Rows of a full ubatch."""
    return {"prefill": planned.rung.ubatch_size, "decode": planned.decode_rows}


def _show_bubble(n_stages: int) -> None:
    titles = ("in flight", "prompt: bubble", "speed-up at most", "decode: idle")
    rows = [
        (str(m), f"{prompt:.0%}", f"{(1 - prompt) * n_stages:.2f}", f"{idle:.0%}")
        for m, prompt, idle in _waiting(n_stages)
    ]
    print_table(titles, rows)
    print("in flight: ubatches of a prompt, or groups of streams in decode")


def _waiting(n_stages: int) -> list[tuple[int, float, float]]:
    """(M, idle share while M ubatches pass, idle share while M streams go round and round)."""
    return [(m, bubble(n_stages, m), max(0.0, 1 - m / n_stages)) for m in IN_FLIGHT]


def as_json(file: "ModelFile", planned: "Plan") -> dict[str, object]:
    """What --json prints. Sizes are bytes, `layers` are half open."""
    n_stages, rung = len(planned.stages), planned.rung
    steps = (
        [] if planned.not_pipelined_because else plan_steps(n_stages, n_stages + 2, rung.n_copies)
    )
    return {
        "model": str(file.path),
        "architecture": file.architecture,
        "weight_bytes": _weights(planned),
        "fits": planned.fits,
        "ctx_size": rung.ctx_size,
        "ctx_train": planned.n_ctx_train,
        "max_ctx_size": planned.max_ctx_size,
        "parallel": planned.n_slots,
        "ubatch_size": rung.ubatch_size,
        "n_copies": rung.n_copies,
        "pipeline": {
            "enabled": not planned.not_pipelined_because,
            "reason": planned.not_pipelined_because or None,
        },
        "devices": [_stage_json(stage) for stage in planned.stages],
        "memory": [
            {
                "name": pool.memory.pool,
                "devices": list(pool.devices),
                "total_bytes": pool.memory.total_bytes,
                "free_bytes": pool.memory.free_bytes,
                "planned_bytes": pool.planned_bytes,
                "margin_bytes": pool.margin_bytes,
            }
            for pool in planned.pools
        ],
        "boundary": {
            what: {"rows": rows, "n_bytes": rows * planned.row_bytes}
            for what, rows in _boundary(planned).items()
        },
        "waiting": [
            {"in_flight": m, "prompt_bubble": prompt, "decode_idle": idle}
            for m, prompt, idle in _waiting(n_stages)
        ],
        "split": {"by_time": planned.by_time, "by_memory": planned.by_memory},
        "fits_alone": list(planned.alone),
        "schedule": [{"tick": step.tick, **step._asdict()} for step in steps],
        "notes": list(planned.notes),
    }


def _stage_json(stage: "PlannedStage") -> dict[str, object]:
    return {
        "name": stage.device.name,
        "source": stage.device.source,
        "layers": [stage.layers.start, stage.layers.stop],
        "weight_bytes": stage.need.weights,
        "embedding_bytes": stage.embedding_bytes,
        "head_bytes": stage.head_bytes,
        "kv_bytes": stage.need.kv,
        "copy_bytes": stage.need.copies,
        "scratch_bytes": stage.need.scratch,
        "total_bytes": stage.need.total,
    }
