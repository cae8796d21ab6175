"""`gguf-pp timeline`: what a recorded run says about who waited for what."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gguf_pp import trace_file
from gguf_pp.bench import advice
from gguf_pp.timeline import Devices, Timeline, Waiting, ended

from .perplexity import written
from .session import print_json
from .tables import print_table

if TYPE_CHECKING:
    from gguf_pp.api import LLM

_CAUSES = {
    "starved": "with nothing to run",
    "uneven": "for a slower stage",
    "transfer": "for transfers",
}


def recorded_by(llm: "LLM") -> Timeline:
    """What the model's trace holds, less what has not ended."""
    return Timeline(ended(llm.trace.slices), llm.lanes())


def write_timeline(path: Path, timeline: Timeline) -> None:
    """Write a Chrome trace, which Perfetto opens. Raises ConfigError."""
    with written(path) as file:
        assert file is not None
        file.write(trace_file.to_json(timeline))


def timeline(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="What --timeline of run or bench wrote.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say how busy each device was in a recorded run, what it waited for, and what to try.

    Waiting has three causes: nothing to run (starved), a stage slower than its neighbours
    (uneven), and transfers between devices (transfer).
    """
    recorded = trace_file.read(file)
    devices = recorded.by_device()
    if as_json:
        print_json(as_dict(recorded, devices))
        return
    summary = devices.summary
    print(
        f"{_many(summary.n_ubatches, 'ubatch', 'es')} over "
        f"{_many(len(devices.names), 'device', 's')} in {summary.span_s:.3f} s"
    )
    _show_devices(devices)
    print(_verdict(devices))


def as_dict(recorded: Timeline, devices: Devices) -> dict[str, object]:
    """What --json prints: seconds and shares, lists in the order of the devices, or of the edges
    between stages."""
    summary = devices.summary
    return {
        "devices": list(devices.names),
        "layers_per_device": list(devices.layers),
        "n_ubatches": summary.n_ubatches,
        "n_copies": summary.n_copies,
        "span_s": summary.span_s,
        "busy_s": list(summary.busy_s),
        "edges": [f"{a} to {b}" for a, b in pairwise(recorded.devices)],
        "edge_s": list(summary.edge_s),
        "host_s": summary.host_s,
        "bubble_share": summary.bubble,
        "starved_s": [w.starved for w in summary.waiting],
        "uneven_s": [w.uneven for w in summary.waiting],
        "transfer_s": [w.transfer for w in summary.waiting],
        "advice": _advice(devices),
    }


def _show_devices(devices: Devices) -> None:
    summary = devices.summary

    def shares(w: Waiting) -> Iterator[str]:
        for seconds in (w.starved, w.uneven, w.transfer):
            yield _percent(seconds / summary.span_s if summary.span_s else 0.0)

    rows = [
        [name, str(n_layers), _percent(busy), *shares(waiting)]
        for name, n_layers, busy, waiting in zip(
            devices.names, devices.layers, summary.busy_shares, summary.waiting, strict=True
        )
    ]
    print_table(("device", "layers", "busy", *_CAUSES), rows)


def _verdict(devices: Devices) -> str:
    summary = devices.summary
    waiting = summary.all_waiting
    shares = waiting.shares()
    if shares is None:
        return "no device waited"
    cause = waiting.main_cause
    verdict = (
        f"devices waited {_percent(summary.bubble)} of the time, "
        f"{_percent(getattr(shares, cause))} of that {_CAUSES[cause]}"
    )
    hint = _advice(devices)
    return verdict if hint is None else f"{verdict}\n{hint}"


def _advice(devices: Devices) -> str | None:
    summary = devices.summary
    found = advice(
        summary.all_waiting,
        summary.bubble,
        summary.busy_s,
        summary.n_copies,
        devices.names,
        devices.layers,
    )
    return None if found is None else str(found)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _many(n: int, what: str, ending: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}{ending}"
