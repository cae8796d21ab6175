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
freed..start       the hand-over between threads: transfer, on the first stage starved
"""

from bisect import bisect_right
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import chain, pairwise

from gguf_pp.backend.trace import Kind, Slice
from gguf_pp.pipeline.split import split_evenly

Interval = tuple[float, float]

IDLE_WORTH_SAYING = 0.1
"""Share of idle device time below which there is nothing to advise."""
SLOWER_WORTH_SAYING = 1.05
"""A split that promises less speed-up than this is not worth a suggestion."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """Slices of one run, and what its stages are: device names, numbers of layers."""

    slices: tuple[Slice, ...]
    devices: tuple[str, ...]
    layers: tuple[int, ...]


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


def ended(slices: Iterable[Slice]) -> tuple[Slice, ...]:
    """Those whose work is done."""
    return tuple(s for s in slices if s.end_s >= s.start_s >= s.queued_s)


def summarize(slices: Iterable[Slice], n_stages: int) -> Summary:
    """Add up the slices that have ended."""
    slices = ended(slices)
    view = _View(slices, n_stages)
    edges = view.edges
    return Summary(
        n_ubatches=len({s.i_ubatch for s in slices if s.kind == "compute"}),
        n_copies=view.n_copies,
        max_rows=max((s.n_rows for s in slices), default=0),
        span_s=view.end - view.begin,
        busy_s=tuple(_seconds(lane) for lane in view.lanes),
        waiting=tuple(view.waiting(i) for i in range(n_stages)),
        edge_s=tuple(_seconds(edge) for edge in edges),
        edge_rows=tuple(sum(s.n_rows for s in edge) for edge in edges),
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
        there = s.queued_s if source is None else at.get(source, s.queued_s)
        ready.append(min(max(s.queued_s, there), s.start_s))
    return ready


def faster_layers(busy: Sequence[float], layers: Sequence[int]) -> tuple[int, ...] | None:
    """Layers per stage that would even out `busy` (seconds or shares of each stage).

    Within a stage all layers count the same. None if that promises nothing worth it.
    """
    if min(busy) <= 0:
        return None
    speeds = [n / seconds for n, seconds in zip(layers, busy, strict=True)]
    better = [len(part) for part in split_evenly([1] * sum(layers), speeds)]
    slowest = max(n / speed for n, speed in zip(better, speeds, strict=True))
    return tuple(better) if slowest * SLOWER_WORTH_SAYING < max(busy) else None


@dataclass(frozen=True, slots=True)
class Advice:
    """What keeps devices idle, and one or more things to try."""

    cause: str
    remedies: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.cause}: try {', or '.join(self.remedies)}"

    def without(self, tried: Container[str]) -> "Advice | None":
        """The same less what was tried already; None if nothing is left."""
        left = tuple(remedy for remedy in self.remedies if remedy not in tried)
        return Advice(self.cause, left) if left else None


MORE_COPIES = "more copies (--n-copies)"
MORE_STREAMS = "more streams"
SMALLER_UBATCHES = "smaller ubatches (-ub)"
LARGER_UBATCHES = "larger ubatches (-ub)"
FEWER_DEVICES = "fewer devices"


def layers_flag(layers: Iterable[int]) -> str:
    """The flag for these numbers of layers, as a remedy."""
    return f"--layers {','.join(map(str, layers))}"


def advice(
    waiting: Waiting, bubble: float, busy: Sequence[float], layers: Sequence[int], n_copies: int
) -> Advice | None:
    """What to do about the cause that dominates; None if nothing is worth it.

    `busy` are seconds or shares of each stage.
    """
    if len(busy) < 2 or bubble < IDLE_WORTH_SAYING:
        return None
    if waiting.main_cause == "starved":
        if n_copies == 1:
            return Advice("one ubatch is in flight, devices take turns", ("--n-copies 2",))
        cause = f"too little is in flight for {len(busy)} devices"
        return Advice(cause, (MORE_STREAMS, SMALLER_UBATCHES))
    if waiting.main_cause == "transfer":
        return Advice("devices wait for transfers", (FEWER_DEVICES, LARGER_UBATCHES))
    return _even_out(busy, layers)


def _even_out(busy: Sequence[float], layers: Sequence[int]) -> Advice:
    slow, fast = max(busy), min(busy)
    better = faster_layers(busy, layers)
    if better is None or fast <= 0:
        return Advice("stages are even on average but vary", (MORE_COPIES,))
    cause = f"stage {busy.index(slow)} is {slow / fast:.1f} times slower"
    return Advice(cause, (layers_flag(better),))


class _View:
    """Slices sorted into lanes, with an index, and the waits between them."""

    def __init__(self, slices: Sequence[Slice], n_stages: int) -> None:
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
        return (
            self._unqueued(since, queued)
            + upstream
            + Waiting(transfer=arrived - computed)
            + self._blocked(i_stage, [(arrived, freed)])
            + (Waiting(transfer=handed_over) if i_stage else Waiting(starved=handed_over))
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
