"""Timelines as files: Chrome trace-event JSON, which Perfetto (ui.perfetto.dev) and
chrome://tracing open.

A file is one object. `traceEvents` has a complete event ("X", times in microseconds) per slice, on
a track (`tid`) per stage, per edge and for the host, and metadata events ("M") that name and order
the tracks; `otherData` has what a reader cannot see from them. Source of the layout: the "Trace
Event Format" document of the Chromium project.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import NoReturn, TypeVar, get_args

from gguf_pp.backend.trace import Kind, Slice
from gguf_pp.errors import FormatError
from gguf_pp.timeline import Lane, Timeline, ready_times

MAX_BYTES = 64 << 20
MAX_STAGES = 64
MAX_NAME = 100
MAX_DEVICE = 300
MAX_US = 1e15  # 30 years
MAX_COUNT = 1 << 40

T = TypeVar("T")


def to_json(timeline: Timeline) -> str:
    """The file's text. Times count from the first slice."""
    slices = timeline.slices
    zero = min((s.queued_s for s in slices), default=0.0)
    events = list(_tracks(timeline.devices))
    events += [_event(s, ready, zero) for s, ready in zip(slices, ready_times(slices), strict=True)]
    document = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"stages": [asdict(lane) for lane in timeline.lanes]},
    }
    return json.dumps(document, allow_nan=False)


def _tracks(devices: Sequence[str]) -> Iterator[dict[str, object]]:
    names = {_track("host", -1): "host"}
    for i, device in enumerate(devices):
        names[_track("compute", i)] = f"{device} compute"
    for i, (source, target) in enumerate(pairwise(devices)):
        names[_track("transfer", i)] = f"{source} to {target}"
    yield {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "gguf-pp"}}
    for tid, name in names.items():
        yield {"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": name}}
        index = {"sort_index": tid}
        yield {"ph": "M", "name": "thread_sort_index", "pid": 1, "tid": tid, "args": index}


def _track(kind: Kind, i_stage: int) -> int:
    """The host first, then each device with its edge below it."""
    return {"host": 0, "compute": 1 + 2 * i_stage, "transfer": 2 + 2 * i_stage}[kind]


def _event(s: Slice, ready_s: float, zero: float) -> dict[str, object]:
    where = "queue" if s.kind == "host" else f"stage {s.i_stage}"
    if s.kind == "transfer":
        where = f"stage {s.i_stage} to {s.i_stage + 1}"
    start, end = _us(s.start_s - zero), _us(s.end_s - zero)
    return {
        "ph": "X",
        "name": f"{where} u{s.i_ubatch} c{s.i_copy} {s.n_rows} rows",
        "cat": s.kind,
        "pid": 1,
        "tid": _track(s.kind, s.i_stage),
        "ts": start,
        "dur": _us(end / 1e6 - start / 1e6),
        "args": {
            "stage": s.i_stage,
            "ubatch": s.i_ubatch,
            "copy": s.i_copy,
            "rows": s.n_rows,
            "queued_us": _us(s.queued_s - zero),
            "ready_us": _us(ready_s - zero),
        },
    }


def _us(seconds: float) -> float:
    """Microseconds, to the nanosecond: so that what does not overlap does not as text either."""
    return round(seconds * 1e6, 3)


def read(path: Path) -> Timeline:
    """Read a file that `to_json` wrote. It may come from anyone: everything is checked.

    Raises FormatError: not such a file, or larger than MAX_BYTES.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as exc:
        raise FormatError(f"{path} cannot be read: {exc.strerror}") from exc
    if len(raw) > MAX_BYTES:
        raise FormatError(f"{path} is larger than {MAX_BYTES >> 20} MiB, the limit of a timeline")
    try:
        document = json.loads(raw, parse_constant=_no_number)
        return _timeline(document)
    except (ValueError, RecursionError) as exc:
        raise FormatError(f"{path} is not JSON: {str(exc)[:MAX_NAME]}") from exc
    except _Unexpected as exc:
        raise FormatError(
            f"{path} is not a timeline of gguf-pp: {exc}", hint="--timeline FILE writes one"
        ) from exc


class _Unexpected(Exception):
    """What is wrong with a document that is JSON."""


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def _timeline(document: object) -> Timeline:
    root = _as(dict, document, "the file")
    other = _as(dict, root.get("otherData"), "otherData")
    stages = _as(list, other.get("stages"), "stages")
    if not 1 <= len(stages) <= MAX_STAGES:
        raise _Unexpected(f"{len(stages)} stages")
    lanes = tuple(_lane(_as(dict, stage, "a stage")) for stage in stages)
    if not any(any(lane.layers) for lane in lanes):
        raise _Unexpected("no stage has layers")
    events = (_as(dict, e, "an event") for e in _as(list, root.get("traceEvents"), "traceEvents"))
    slices = tuple(_slice(event, len(lanes)) for event in events if event.get("ph") == "X")
    return Timeline(slices, lanes)


def _lane(stage: dict[str, object]) -> Lane:
    names = tuple(_name(d) for d in _as(list, stage.get("devices"), "devices"))
    layers = tuple(_count(n, "layers", 0, 10_000) for n in _as(list, stage.get("layers"), "layers"))
    loads = tuple(_share(x) for x in _as(list, stage.get("loads"), "loads"))
    if not 1 <= len(names) == len(layers) == len(loads) <= MAX_STAGES:
        raise _Unexpected(
            f"{len(names)} devices with {len(layers)} numbers of layers and {len(loads)} loads"
        )
    return Lane(names, layers, loads)


def _slice(event: dict[str, object], n_stages: int) -> Slice:
    kind = _as(str, event.get("cat"), "cat")
    if kind not in get_args(Kind):
        raise _Unexpected(f"an event of category {kind[:MAX_NAME]!r}")
    args = _as(dict, event.get("args"), "args")
    low, high = {"host": (-1, -1), "compute": (0, n_stages - 1), "transfer": (0, n_stages - 2)}[
        kind
    ]
    start = _time(event.get("ts"), "ts")
    return Slice(
        kind=kind,  # type: ignore[arg-type]
        i_stage=_count(args.get("stage"), "stage", low, high),
        i_ubatch=_count(args.get("ubatch"), "ubatch", 0, MAX_COUNT),
        i_copy=_count(args.get("copy"), "copy", 0, 1 << 10),
        n_rows=_count(args.get("rows"), "rows", 0, MAX_COUNT),
        queued_s=min(start, _time(args.get("queued_us"), "queued_us")),
        start_s=start,
        end_s=start + _time(event.get("dur"), "dur"),
    )


def _as(kind: type[T], value: object, what: str) -> T:
    if not isinstance(value, kind):
        raise _Unexpected(f"{what} is no {kind.__name__}")
    return value


def _name(value: object) -> str:
    """A device's name, which will be printed: no control characters."""
    name = _as(str, value, "a device")
    if not 0 < len(name) <= MAX_DEVICE or not name.isprintable():
        raise _Unexpected(f"a device called {name[:MAX_NAME]!r}")
    return name


def _count(value: object, what: str, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise _Unexpected(f"{what} is {str(value)[:MAX_NAME]!r}, not in {low} to {high}")
    return value


def _share(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
        raise _Unexpected(f"a load is {str(value)[:MAX_NAME]!r}, not in 0 to 1")
    return float(value)


def _time(value: object, what: str) -> float:
    """Seconds from microseconds."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _Unexpected(f"{what} is no number")
    if not 0 <= value <= MAX_US or not math.isfinite(value):
        raise _Unexpected(f"{what} is {str(value)[:MAX_NAME]}")
    return value / 1e6
