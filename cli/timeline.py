"""`gguf-pp timeline`: what a recorded run says about who waited for what."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gguf_pp import trace_file
from gguf_pp.timeline import Summary, Timeline, Waiting, advice, ended, summarize

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
    uses = llm.devices()
    layers = tuple(stop - start for start, stop in (use.layers for use in uses))
    return Timeline(ended(llm.trace.slices), tuple(use.name for use in uses), layers)


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
    summary = summarize(recorded.slices, len(recorded.devices))
    if as_json:
        print_json(as_dict(recorded, summary))
        return
    print(
        f"{_many(summary.n_ubatches, 'ubatch', 'es')} over "
        f"{_many(len(recorded.devices), 'stage', 's')} in {summary.span_s:.3f} s"
    )
    _show_stages(recorded, summary)
    print(_verdict(recorded, summary))


def as_dict(recorded: Timeline, summary: Summary) -> dict[str, object]:
    """What --json prints: seconds and shares, lists in the order of the devices."""
    return {
        "devices": list(recorded.devices),
        "layers_per_device": list(recorded.layers),
        "n_ubatches": summary.n_ubatches,
        "n_copies": summary.n_copies,
        "span_s": summary.span_s,
        "busy_s": list(summary.busy_s),
        "edge_s": list(summary.edge_s),
        "host_s": summary.host_s,
        "bubble_share": summary.bubble,
        "starved_s": [w.starved for w in summary.waiting],
        "uneven_s": [w.uneven for w in summary.waiting],
        "transfer_s": [w.transfer for w in summary.waiting],
        "advice": _advice(recorded, summary),
    }


def _show_stages(recorded: Timeline, summary: Summary) -> None:
    def shares(w: Waiting) -> Iterator[str]:
        for seconds in (w.starved, w.uneven, w.transfer):
            yield _percent(seconds / summary.span_s if summary.span_s else 0.0)

    rows = [
        [device, str(n_layers), _percent(busy), *shares(waiting)]
        for device, n_layers, busy, waiting in zip(
            recorded.devices, recorded.layers, summary.busy_shares, summary.waiting, strict=True
        )
    ]
    print_table(("device", "layers", "busy", *_CAUSES), rows)


def _verdict(recorded: Timeline, summary: Summary) -> str:
    waiting = summary.all_waiting
    shares = waiting.shares()
    if shares is None:
        return "no device waited"
    cause = waiting.main_cause
    verdict = (
        f"devices waited {_percent(summary.bubble)} of the time, "
        f"{_percent(getattr(shares, cause))} of that {_CAUSES[cause]}"
    )
    hint = _advice(recorded, summary)
    return verdict if hint is None else f"{verdict}\n{hint}"


def _advice(recorded: Timeline, summary: Summary) -> str | None:
    found = advice(
        summary.all_waiting, summary.bubble, summary.busy_s, recorded.layers, summary.n_copies
    )
    return None if found is None else str(found)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _many(n: int, what: str, ending: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}{ending}"
