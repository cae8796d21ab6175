"""What a trace tells: which device worked when, and why another waited. Functions of slices only.

A stage that does not compute waits, and every moment of that has one cause:

    starved   nothing to run: no ubatch was queued, or the pipeline was filling or draining
    uneven    stages differ: work was piled up at a slower one, before this stage or behind it
    transfer  the input was computed and not here yet, or the way out was occupied by transfers

The wait before a ubatch u is cut at the points in time below; what is behind us counts first.

    since ──── queued ───── computed ───── arrived ───── freed ──── start
       by the host    by the     by the edge    the output's    the device
                   stage before                copy            gets going

since..queued      starved; uneven while a ubatch that was there waited for another stage, transfer
                   while one waited for an edge
queued..computed   what the stage before had itself waited before u, it passes on, with its causes;
                   the rest is uneven: it had no gap, so it is slower
computed..arrived  transfer
arrived..freed     transfer while the edge behind us is busy, uneven while the stage behind us is,
                   else what holds that stage up, in the same way
freed..start       the hand-over between threads: transfer, on the first stage starved. To a worker
                   and back it is the network, less what its other devices computed: starved

A worker's devices are one stage. Its slice of a ubatch ends when the result is here and is as long
as the slowest of them computed: a worker tells how long each of its devices took, not when.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain, pairwise
from typing import TYPE_CHECKING

from gguf_pp.backend.trace import Kind, Slice

if TYPE_CHECKING:
    from gguf_pp.pipeline.remote import RemoteStage
    from gguf_pp.pipeline.stage import LayerStage

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Waiting:
    """Seconds without work, by cause."""

    starved: float = 0.0
    uneven: float = 0.0
    transfer: float = 0.0

    def __add__(self, other: "Waiting") -> "Waiting":
        return Waiting(
            self.starved + other.starved,
            self.uneven + other.uneven,
            self.transfer + other.transfer,
        )

    @property
    def total(self) -> float:
        """Seconds, whatever the cause."""
        return self.starved + self.uneven + self.transfer

    def scaled(self, factor: float) -> "Waiting":
        """Each cause times `factor`."""
        return Waiting(self.starved * factor, self.uneven * factor, self.transfer * factor)

    def shares(self) -> "Waiting | None":
        """Each cause as a share of all; None if nothing was waited for."""
        return self.scaled(1 / self.total) if self.total > 0 else None

    @property
    def main_cause(self) -> str:
        """The name of the largest."""
        return max((f.name for f in fields(self)), key=lambda name: float(getattr(self, name)))


@dataclass(frozen=True, slots=True)
class Summary:
    """One run in numbers, from the first computation's start to the last one's end (`span_s`).

    Per stage: `busy_s` and `waiting`, which add up to `span_s`; per edge: `edge_s` in transfers.
    `max_rows` are those of the largest ubatch, `edge_rows` those that crossed each edge.
    """

    n_ubatches: int
    n_copies: int
    max_rows: int
    span_s: float
    busy_s: tuple[float, ...]
    waiting: tuple[Waiting, ...]
    edge_s: tuple[float, ...]
    edge_rows: tuple[int, ...]
    host_s: float

    @property
    def busy_shares(self) -> tuple[float, ...]:
        """Share of the span in which each stage computed."""
        return tuple(busy / self.span_s if self.span_s else 0.0 for busy in self.busy_s)

    @property
    def bubble(self) -> float:
        """Share of device time that was idle: 1 - sum(busy) / (P span)."""
        return 1 - sum(self.busy_shares) / len(self.busy_s) if self.span_s else 0.0

    @property
    def all_waiting(self) -> Waiting:
        """Waiting of all stages together."""
        return sum(self.waiting, Waiting())


@dataclass(frozen=True, slots=True)
class Lane:
    """A stage: its devices, several if a worker has them, and the layers of each.

    An end of the model that is a stage of its own has none. `loads` are the seconds of each device
    as shares of the stage's slices.
    """

    devices: tuple[str, ...]
    layers: tuple[int, ...]
    loads: tuple[float, ...] = (1.0,)

    @property
    def name(self) -> str:
        """`cpu:0`, `tcp://host:port/cpu:0+cpu:1`."""
        return "+".join([self.devices[0], *(d.rpartition("/")[2] for d in self.devices[1:])])

    @property
    def hidden(self) -> float:
        """What devices take of a ubatch beside the slice, as a share of it."""
        return max(0.0, sum(self.loads) - 1)


def lanes_of(stages: "Sequence[LayerStage | RemoteStage]") -> tuple[Lane, ...]:
    """What a timeline says of stages. What devices of a worker take is taken from the ubatches that
    it computed last."""
    return tuple(_lane_of(stage) for stage in stages)


def _lane_of(stage: "LayerStage | RemoteStage") -> Lane:
    uses = stage.uses()
    rounds = [[s for _, _, s in each] for each in zip(*stage.recents, strict=False)]
    slowest_s = sum(map(max, rounds))
    loads = (
        [min(1.0, sum(each) / slowest_s) for each in zip(*rounds, strict=True)] if slowest_s else []
    )
    return Lane(
        devices=tuple(use.name for use in uses),
        layers=tuple(use.layers[1] - use.layers[0] for use in uses),
        loads=tuple(loads or [1.0] * len(uses)),
    )


@dataclass(frozen=True, slots=True)
class Timeline:
    """Slices of one run, and the stages they are of."""

    slices: tuple[Slice, ...]
    lanes: tuple[Lane, ...]

    @property
    def devices(self) -> tuple[str, ...]:
        """What each stage is on."""
        return tuple(lane.name for lane in self.lanes)

    def by_device(self) -> "Devices":
        """Add the slices up for each device that has layers, whatever else it does.

        It is busy with its ends of the model too, and does not wait meanwhile. What a device of a
        worker is faster by than the slowest one it waits for that one: uneven.
        """
        summary = summarize(self.slices, len(self.lanes), [lane.hidden for lane in self.lanes])
        busy, waiting, names, layers = [], [], [], []
        for i, lane in enumerate(self.lanes):
            all_s = _busy_s(self.slices, {i, *self._ends_on(lane)})
            for name, n_layers, load in zip(lane.devices, lane.layers, lane.loads, strict=True):
                if n_layers:
                    spare_s = (1 - load) * summary.busy_s[i]
                    waits = summary.waiting[i] + Waiting(uneven=spare_s)
                    left_s = summary.span_s - all_s + spare_s
                    busy.append(all_s - spare_s)
                    waiting.append(waits.scaled(left_s / waits.total if waits.total else 0.0))
                    names.append(name)
                    layers.append(n_layers)
        summary = replace(summary, busy_s=tuple(busy), waiting=tuple(waiting))
        return Devices(tuple(names), tuple(layers), summary)

    def _ends_on(self, lane: Lane) -> list[int]:
        """Stages without layers on the same device."""
        return [
            i
            for i, other in enumerate(self.lanes)
            if other.devices == lane.devices and not any(other.layers)
        ]


@dataclass(frozen=True, slots=True)
class Devices:
    """Devices by name in the order of their layers, how many they have, and `summary`, whose
    `busy_s` and `waiting` are theirs; edges are those between stages."""

    names: tuple[str, ...]
    layers: tuple[int, ...]
    summary: Summary


def ended(slices: Iterable[Slice]) -> tuple[Slice, ...]:
    """Those whose work is done. A worker that got its input from another one may have begun before
    it was asked here."""
    return tuple(s for s in slices if s.end_s >= max(s.start_s, s.queued_s))


def summarize(
    slices: Iterable[Slice], n_stages: int, hidden: Sequence[float] | None = None
) -> Summary:
    """Add up the slices that have ended. `hidden` is as in Lane, of each stage."""
    slices = ended(slices)
    view = _View(slices, n_stages, hidden or [0.0] * n_stages)
    edges = view.edges
    return Summary(
        n_ubatches=len({s.i_ubatch for s in slices if s.kind == "compute"}),
        n_copies=view.n_copies,
        max_rows=max((s.n_rows for s in slices), default=0),
        span_s=view.end - view.begin,
        busy_s=tuple(_seconds(lane) for lane in view.lanes),
        waiting=tuple(view.waiting(i) for i in range(n_stages)),
        edge_s=tuple(_seconds(edge) for edge in edges),
        edge_rows=tuple(sum(s.n_rows for s in lane) for lane in view.lanes[1:]),
        host_s=_seconds(s for s in slices if s.kind == "host"),
    )


def ready_times(slices: Sequence[Slice]) -> list[float]:
    """When each slice's input was there, in order: see Slice."""
    at = {(s.kind, s.i_stage, s.i_ubatch): s.end_s for s in slices}
    ready = []
    for s in slices:
        source: tuple[Kind, int, int] | None = None
        if s.kind == "transfer":
            source = ("compute", s.i_stage, s.i_ubatch)
        elif s.kind == "compute" and s.i_stage > 0:
            source = ("transfer", s.i_stage - 1, s.i_ubatch)
            # Between linked workers nothing passes here.
            source = source if source in at else ("compute", s.i_stage - 1, s.i_ubatch)
        there = s.queued_s if source is None else at.get(source, s.queued_s)
        ready.append(min(max(s.queued_s, there), s.start_s))
    return ready


class _View:
    """Slices sorted into lanes, with an index, and the waits between them."""

    def __init__(self, slices: Sequence[Slice], n_stages: int, hidden: Sequence[float]) -> None:
        self.hidden = hidden
        self.n_copies = 1 + max((s.i_copy for s in slices), default=0)
        self.lanes = [_lane(slices, "compute", i) for i in range(n_stages)]
        self.edges = [_lane(slices, "transfer", i) for i in range(n_stages - 1)]
        computes = [s for lane in self.lanes for s in lane]
        self.begin = min((s.start_s for s in computes), default=0.0)
        self.end = max((s.end_s for s in computes), default=0.0)
        self._at = {(s.kind, s.i_stage, s.i_ubatch): s for s in slices}
        self._ready = dict(zip(map(id, slices), ready_times(slices), strict=True))
        self._busy = [_union((s.start_s, s.end_s) for s in lane) for lane in self.lanes]
        self._moving = [_union((s.start_s, s.end_s) for s in edge) for edge in self.edges]
        self._piled_up = _union(self._backlogs(self.lanes))
        self._jammed = _union(self._backlogs(self.edges))
        self._before: list[dict[int, Waiting]] = [{} for _ in range(n_stages)]
        for i_stage, lane in enumerate(self.lanes):
            since = self.begin
            for piece in lane:
                first = piece is lane[0]
                self._before[i_stage][piece.i_ubatch] = self._explain(piece, since, first=first)
                since = max(since, piece.end_s)

    def waiting(self, i_stage: int) -> Waiting:
        """All of a stage's waiting: before each ubatch, and after the last."""
        lane = self.lanes[i_stage]
        since = max((s.end_s for s in lane), default=self.begin)
        return sum(self._before[i_stage].values(), self._unqueued(since, self.end))

    def _backlogs(self, lanes: Iterable[Sequence[Slice]]) -> Iterator[Interval]:
        """When what was ready waited behind another slice of its lane."""
        for before, piece in chain.from_iterable(map(pairwise, lanes)):
            yield self._ready[id(piece)], before.end_s

    def _explain(self, piece: Slice, since: float, *, first: bool) -> Waiting:
        """The wait of a stage from `since` to the start of `piece`, cut as drawn above."""
        i_stage, u = piece.i_stage, piece.i_ubatch

        def point(kind: Kind, i_stage: int, i_ubatch: int, after: float) -> float:
            found = self._at.get((kind, i_stage, i_ubatch))
            return after if found is None else min(max(found.end_s, after), start)

        start = max(since, piece.start_s)
        queued = min(max(piece.queued_s, since), start)
        computed = point("compute", i_stage - 1, u, queued)
        arrived = point("transfer", i_stage - 1, u, computed)
        freed = point("transfer", i_stage, u - self.n_copies, arrived)
        late = computed - queued
        upstream = Waiting(starved=late) if first else self._passed_on(i_stage - 1, u, late)
        handed_over = start - freed
        hidden = min(handed_over, self.hidden[i_stage] * (piece.end_s - piece.start_s))
        handed = Waiting(starved=hidden, transfer=handed_over - hidden)
        return (
            self._unqueued(since, queued)
            + upstream
            + Waiting(transfer=arrived - computed)
            + self._blocked(i_stage, [(arrived, freed)])
            + (handed if i_stage else Waiting(starved=handed_over))
        )

    def _unqueued(self, start: float, end: float) -> Waiting:
        uneven, others = _cut([(start, end)], self._piled_up)
        transfer, others = _cut(others, self._jammed)
        return Waiting(starved=_length(others), uneven=uneven, transfer=transfer)

    def _passed_on(self, i_stage: int, i_ubatch: int, seconds: float) -> Waiting:
        before = self._before[i_stage].get(i_ubatch, Waiting()) if i_stage >= 0 else Waiting()
        share = min(1.0, seconds / before.total) if before.total > 0 else 0.0
        inherited = before.scaled(share)
        return inherited + Waiting(uneven=max(0.0, seconds - inherited.total))

    def _blocked(self, i_stage: int, pieces: list[Interval]) -> Waiting:
        waiting = Waiting()
        for i in range(i_stage, len(self.edges)):
            transfer, pieces = _cut(pieces, self._moving[i])
            uneven, pieces = _cut(pieces, self._busy[i + 1])
            waiting += Waiting(uneven=uneven, transfer=transfer)
        return waiting + Waiting(transfer=_length(pieces))


def _lane(slices: Iterable[Slice], kind: Kind, i_stage: int) -> list[Slice]:
    mine = (s for s in slices if s.kind == kind and s.i_stage == i_stage)
    return sorted(mine, key=lambda s: (s.start_s, s.end_s))


def _busy_s(slices: Iterable[Slice], stages: set[int]) -> float:
    """Seconds in which any of some stages computed."""
    mine = (s for s in ended(slices) if s.kind == "compute" and s.i_stage in stages)
    return _length(_union((s.start_s, s.end_s) for s in mine))


def _seconds(slices: Iterable[Slice]) -> float:
    return sum(s.end_s - s.start_s for s in slices)


def _length(pieces: Iterable[Interval]) -> float:
    return sum(end - start for start, end in pieces)


def _union(pieces: Iterable[Interval]) -> list[Interval]:
    """The same moments as intervals that are sorted and apart; empty ones are dropped."""
    merged: list[Interval] = []
    for start, end in sorted(p for p in pieces if p[0] < p[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _cut(pieces: Iterable[Interval], cover: list[Interval]) -> tuple[float, list[Interval]]:
    """Seconds of `pieces` inside of `cover` (a union), and the parts outside of it."""
    inside, outside = 0.0, []
    for at, end in pieces:
        for i in range(max(0, bisect_right(cover, at, key=lambda c: c[0]) - 1), len(cover)):
            low, high = max(at, cover[i][0]), min(end, cover[i][1])
            if cover[i][0] >= end:
                break
            if low < high:
                outside.append((at, low))
                inside += high - low
                at = high
        outside.append((at, end))
    return inside, [(start, end) for start, end in outside if start < end]
