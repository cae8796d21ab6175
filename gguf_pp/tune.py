"""Finds the split that keeps all devices equally busy, from times measured on them."""

import math
import statistics
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal, Protocol

from gguf_pp.errors import PlacementError

Workload = Literal["prefill", "decode"]

LAYERS_PER_KIND = 8
"""Layers of a kind that are timed: one alone would stay in the cache."""
T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""97.5 % quantiles of Student's distribution, from one degree of freedom on."""


@dataclass(frozen=True, slots=True)
class Job:
    """The work to be fast at: a prompt of `n_tokens` in ubatches of `n_rows`, or a token each of
    `n_tokens` streams, which decode in groups of `n_rows`."""

    workload: Workload
    n_tokens: int
    n_rows: int

    @property
    def n_ubatches(self) -> int:
        """Ubatches of the prompt, or groups."""
        return -(-self.n_tokens // self.n_rows)


class Probe(Protocol):
    """Times parts of a model on each of the devices, in seconds of one ubatch of a job.

    All devices are timed at once: what they share makes them as slow as it will in the pipeline.
    `i_head` is the device with the head: the last one, or the last of this machine.
    """

    @property
    def i_head(self) -> int:
        """Index of the device that computes norm and logits."""
        ...

    def layers_s(self, layers: Sequence[int], job: Job) -> Sequence[float]:
        """One of `layers`, which are alike, per device."""
        ...

    def head_s(self, job: Job) -> Sequence[float | None]:
        """Norm and logits, per device; None where that was not timed."""
        ...

    def edges_s(self, job: Job) -> Sequence[float]:
        """Hidden states on their way from stage to stage, which are devices and, where the model
        ends on a worker, its ends."""
        ...


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of one ubatch: `layers[d][i]` is layer i on device d, `heads[d]` the head there, if
    it was timed, `edges` the ways between stages. The head is on device `i_head`."""

    job: Job
    layers: tuple[tuple[float, ...], ...]
    heads: tuple[float | None, ...]
    edges: tuple[float, ...]
    i_head: int = -1

    def stages_s(self, split: Sequence[range]) -> list[float]:
        """Seconds of each stage."""
        return [self.stage_s(i, part.start, part.stop) for i, part in enumerate(split)]

    def stage_s(self, i_device: int, start: int, stop: int) -> float:
        """Seconds of layers [start, stop) on a device, and of the head if it is there."""
        return sum(self.layers[i_device][start:stop]) + self.head_on(i_device)

    def head_on(self, i_device: int) -> float:
        """Seconds of the head if it is on that device, else 0."""
        is_there = i_device == self.i_head % len(self.heads)
        return (self.heads[i_device] or 0.0) if is_there else 0.0

    def tokens_per_s(self, split: Sequence[range]) -> float:
        """What a pipeline makes of it: fill, then the slowest of stages and edges sets the pace.

        A group of decoding streams cannot go again before it came round.
        """
        parts = [*self.stages_s(split), *self.edges]
        n, slowest, once = self.job.n_ubatches, max(parts), sum(parts)
        if self.job.workload == "prefill":
            return self.job.n_tokens / (once + (n - 1) * slowest)
        return self.job.n_tokens / max(n * slowest, once)


@dataclass(frozen=True, slots=True)
class Comparison:
    """How many times as fast one split is as another at a job: as predicted, and as measured in
    `rounds`, in each of which both ran, so that what slows the machine down for a while counts for
    both. Without rounds nothing was measured."""

    predicted: float
    rounds: tuple[float, ...] = ()

    @property
    def measured(self) -> float | None:
        """The median round."""
        return statistics.median(self.rounds) if self.rounds else None

    @property
    def error(self) -> float:
        """Half the width of the 95 % confidence interval, by Student's t; of less than two rounds
        it is infinite."""
        n = len(self.rounds)
        if n < 2:
            return math.inf
        t = T_95[min(n - 2, len(T_95) - 1)]
        return t * statistics.stdev(self.rounds) / math.sqrt(n)

    @property
    def clear(self) -> bool:
        """Whether what was measured is more than noise."""
        return self.measured is not None and abs(self.measured - 1) > self.error

    @property
    def speedup(self) -> float:
        """What to go by: the measurement if it is clear, else the prediction."""
        return self.measured if self.measured is not None and self.clear else self.predicted


def probe_costs(probe: Probe, kinds: Sequence[Hashable], job: Job) -> Costs:
    """Time a few layers of each kind, and both ends. `kinds[i]` is what layer i is like."""
    by_kind: dict[Hashable, Sequence[float]] = {}
    for kind in dict.fromkeys(kinds):
        alike = [i for i, other in enumerate(kinds) if other == kind]
        by_kind[kind] = probe.layers_s(_spread(alike, LAYERS_PER_KIND), job)
    heads = tuple(probe.head_s(job))
    return Costs(
        job=job,
        layers=tuple(tuple(by_kind[kind][d] for kind in kinds) for d in range(len(heads))),
        heads=heads,
        edges=tuple(probe.edges_s(job)),
        i_head=probe.i_head,
    )


def fastest_split(
    costs: Sequence[Costs], fits: Callable[[int, range], bool] = lambda i_device, layers: True
) -> list[range]:
    """The contiguous split with the fastest slowest stage, for all jobs of `costs` alike.

    `fits` says whether a device can hold layers. Of several jobs each counts by how much slower a
    stage is than the slowest of that job's own best split. Raises PlacementError if nothing fits.
    """
    scales = [1.0] if len(costs) == 1 else [_slowest(c, fastest_split([c], fits)) for c in costs]
    n_devices, n_layers = len(costs[0].layers), len(costs[0].layers[0])
    sums = [list(accumulate(_weighted(costs, scales, d), initial=0.0)) for d in range(n_devices)]
    weighted = list(zip(costs, scales, strict=True))
    heads = [sum(c.head_on(d) / scale for c, scale in weighted) for d in range(n_devices)]

    def load(i_device: int, start: int, stop: int) -> float:
        if not fits(i_device, range(start, stop)):
            return math.inf
        return sums[i_device][stop] - sums[i_device][start] + heads[i_device]

    return _least_slowest(n_layers, n_devices, load)


def _weighted(costs: Sequence[Costs], scales: Sequence[float], i_device: int) -> list[float]:
    rows = [[s / scale for s in c.layers[i_device]] for c, scale in zip(costs, scales, strict=True)]
    return [sum(column) for column in zip(*rows, strict=True)]


def _slowest(costs: Costs, split: Sequence[range]) -> float:
    return max(costs.stages_s(split))


def _least_slowest(
    n_layers: int, n_devices: int, load: Callable[[int, int, int], float]
) -> list[range]:
    """The split whose largest `load(i_device, start, stop)` is least, no device without a layer."""
    # best[end]: the largest load so far and the edges, when the devices so far end at layer `end`.
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}
    for i_device in range(n_devices):
        last = i_device == n_devices - 1
        ends = [n_layers] if last else range(i_device + 1, n_layers)
        best = {
            end: min(
                (max(worst, load(i_device, start, end)), (*edges, end))
                for start, (worst, edges) in best.items()
                if start < end
            )
            for end in ends
            if any(start < end for start in best)
        }
    worst, edges = best.get(n_layers, (math.inf, ()))
    if worst == math.inf:
        raise PlacementError(
            f"no split of {n_layers} layers fits the memory of {n_devices} devices",
            hint="gguf-pp plan shows what is missing",
        )
    return [range(start, stop) for start, stop in pairwise(edges)]


def _spread(items: Sequence[int], n: int) -> list[int]:
    """At most `n` of the items, evenly spread."""
    n = min(n, len(items))
    return [items[i * len(items) // n] for i in range(n)]
