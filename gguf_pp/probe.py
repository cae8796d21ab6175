"""Times a real model on real devices, all devices at once: part by part where all are CPUs of this
machine, in a pipeline where some are not."""

import statistics
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from gguf_pp import arch
from gguf_pp.arch import Model
from gguf_pp.backend.base import Backend, OutOfMemory
from gguf_pp.backend.cpu import Budget, CpuBackend
from gguf_pp.backend.open import open_devices
from gguf_pp.batch import Span, UBatch
from gguf_pp.config import RuntimeConfig
from gguf_pp.errors import PlacementError
from gguf_pp.gguf import ModelFile
from gguf_pp.ops import make_ops
from gguf_pp.ops.base import LayerKV
from gguf_pp.pipeline.build import Pipeline
from gguf_pp.pipeline.devices import look_at
from gguf_pp.pipeline.groups import auto_ubatch_size
from gguf_pp.pipeline.load import DeviceLoader
from gguf_pp.pipeline.memory import MIN_CTX_SIZE, Rung
from gguf_pp.pipeline.placement import Device, fits, kv_bytes, measure, need_of, place
from gguf_pp.pipeline.remote import RemoteStage
from gguf_pp.pipeline.split import Part, ends_of
from gguf_pp.pipeline.stage import LayerStage, call
from gguf_pp.tune import Job

T = TypeVar("T")

DEPTH = 64
"""Tokens that every sequence has in the cache while layers are timed."""
MIN_SECONDS = 1.0
MIN_PASSES = 3
N_COPIES_TIMED = 20
_N_ALONE = 8
"""Ubatches that have all devices for themselves, to time edges."""
_N_REMEMBERED = 64
"""Ubatches of which stages know the times."""


class _Device:
    """A backend, and the thread and operations that parts are timed with on it."""

    def __init__(self, backend: Backend, config: RuntimeConfig) -> None:
        self.backend = backend
        self.stream = backend.stream("probe", compute=True)
        make = partial(make_ops, config.kernels, backend.n_threads, exact=config.exact)
        self.ops = call(self.stream, make).result()


class _Probe:
    """What a model and `devices` are, however they are timed. `config` names each device."""

    _overhead_rows: int

    def __init__(
        self, file: ModelFile, config: RuntimeConfig, n_ctx: int, devices: Sequence[Device]
    ) -> None:
        """Raises FormatError, UnsupportedError."""
        file.require_model()
        self.config = config
        self._file, self._n_ctx, self._places = file, n_ctx, devices
        self._model: Model = arch.build(file.metadata)
        self._sizes = measure(file, self._model, n_ctx)

    @property
    def kinds(self) -> list[Hashable]:
        """What each layer is like: the names, types and shapes of its tensors."""
        kinds: list[set[tuple[str, ...]]] = [set() for _ in self._sizes.layers]
        for name, info in self._file.tensors.items():
            prefix, _, rest = name.removeprefix("blk.").partition(".")
            if name.startswith("blk.") and prefix.isdecimal() and int(prefix) < len(kinds):
                kinds[int(prefix)].add((rest, info.type.name, str(info.shape)))
        return [frozenset(kind) for kind in kinds]

    @property
    def i_head(self) -> int:
        """As in tune.Probe."""
        return self._ends[1]

    @property
    def _ends(self) -> tuple[int, int]:
        return ends_of([device.local for device in self._places])

    def default_split(self) -> list[range]:
        """What a run without -ts and --layers does. Raises PlacementError."""
        hp = self._model.hp
        cell = kv_bytes(hp.n_kv_heads, hp.head_size, self.config.kv_types)
        cells = MIN_CTX_SIZE * self.config.n_slots
        return place(self.config, self._sizes, cell * cells, self._places)

    def ubatch_size(self, n_tokens: int) -> int:
        """Rows of the ubatches that a run cuts a prompt of `n_tokens` into."""
        limit = min(n_tokens, self.config.max_ubatch_size)
        if self.config.ubatch_size is not None:
            return limit
        return auto_ubatch_size(n_tokens, len(self._places), self._overhead_rows, limit)

    def fits(self, i_device: int, layers: range) -> bool:
        """Whether a device has the memory for layers, their KV cache and buffers, and for the ends
        of the model that are there."""
        rung = Rung(self.config.n_copies, self.config.max_ubatch_size, self._n_ctx)
        (i_embeds, i_heads), last = self._ends, len(self._places) - 1
        parts = [
            Part(layers, embeds=i_device == i_embeds == 0, heads=i_device == i_heads == last),
            *[Part(range(0), embeds=True, heads=False)] * (i_device == i_embeds != 0),
            *[Part(range(0), embeds=False, heads=True)] * (i_device == i_heads != last),
        ]
        place = self._places[i_device]
        needs = (need_of(self.config, self._model, self._sizes, p, rung, place) for p in parts)
        return fits([place], [sum(need.total for need in needs)])


class ModelProbe(_Probe):
    """A `tune.Probe` for CPU devices of this machine.

    Weights are loaded for one measurement and dropped after it, so that a model which fits no
    single device can be timed.
    """

    def __init__(self, file: ModelFile, config: RuntimeConfig, n_ctx: int) -> None:
        """Raises FormatError, UnsupportedError, ConfigError."""
        self._backends = open_devices(config.devices, Budget(config.memory_bytes))
        super().__init__(file, config, n_ctx, self._backends)
        self._devices = [_Device(backend, config) for backend in self._backends]
        self._overhead_rows = max(device.ops.overhead_rows for device in self._devices)

    def layers_s(self, layers: Sequence[int], job: Job) -> list[float]:
        """Seconds of one of `layers`, per device."""

        def load(device: _Device) -> list[Any]:
            loader = self._loader(device)
            return [self._model.load_layer(loader, i) for i in layers]

        def timed(device: _Device, weights: list[Any]) -> float:
            return self._pass_s(device, weights, job) / len(layers)

        return self._at_once(load, timed, sum(self._sizes.layers[i] for i in layers))

    def _pass_s(self, device: _Device, weights: Sequence[Any], job: Job) -> float:
        """Seconds of one ubatch through all `weights`."""
        hp, config = self._model.hp, self.config
        n_slots = job.n_rows if job.workload == "decode" else 1
        n_cells = DEPTH + job.n_rows
        size = (n_slots, n_cells, hp.n_kv_heads, hp.head_size)
        caches = [device.ops.layer_kv(*size, *config.kv_types) for _ in weights]
        for slot in range(n_slots):
            self._walk(device, weights, caches, _ubatch([Span(slot, 0, DEPTH)]))
        spans = [Span(slot, DEPTH, job.n_rows // n_slots) for slot in range(n_slots)]
        return timed_s(partial(self._walk, device, weights, caches, _ubatch(spans)))

    def _walk(
        self, device: _Device, weights: Sequence[Any], caches: Sequence[LayerKV], ubatch: UBatch
    ) -> None:
        x = self._hidden(ubatch.n_rows)
        for w, kv in zip(weights, caches, strict=True):
            x = self._model.layer(device.ops, w, x, kv, ubatch)

    def _hidden(self, n_rows: int) -> Tensor:
        """Hidden states [n_rows, E] of ordinary size."""
        width = self._model.hp.n_embd
        return torch.linspace(-1, 1, n_rows * width).reshape(n_rows, width)

    def head_s(self, job: Job) -> Sequence[float]:
        """Seconds of the head per ubatch: of a prompt only one row, in the last, has logits."""
        n_rows, per = (job.n_rows, 1) if job.workload == "decode" else (1, job.n_ubatches)

        def load(device: _Device) -> Any:
            return self._model.load_head(self._loader(device))

        def timed(device: _Device, head: Any) -> float:
            x = self._hidden(n_rows)
            return timed_s(lambda: self._model.logits(device.ops, head, x)) / per

        return self._at_once(load, timed, self._sizes.head)

    def edges_s(self, job: Job) -> list[float]:
        """Seconds from a device's queue to the next one's buffer."""
        width, times = self._model.hp.n_embd, []
        for source, target in zip(self._backends, self._backends[1:], strict=False):
            src = source.buffer(job.n_rows, width, "output to time")
            dst = target.buffer(job.n_rows, width, "input to time")
            stream, passed = source.stream("probe transfer"), source.event()

            def copy() -> None:
                stream.copy(dst, src, job.n_rows)  # noqa: B023 - called before the next edge
                stream.record(passed)  # noqa: B023
                passed.synchronize()  # noqa: B023

            times.append(timed_s(copy, 0.0, N_COPIES_TIMED))
            source.release(src.n_bytes)
            target.release(dst.n_bytes)
        return times

    def _loader(self, device: _Device) -> DeviceLoader:
        return DeviceLoader(self._file, self._n_ctx, device.ops, lambda n_bytes: None)

    def _at_once(
        self, load: Callable[[_Device], T], timed: Callable[[_Device, T], float], n_bytes: int
    ) -> list[float]:
        """Load `n_bytes` of weights on every device, then time them on all at the same time."""
        taken: list[CpuBackend] = []
        try:
            for backend in self._backends:
                backend.reserve(n_bytes, "weights to time")
                taken.append(backend)
            loaded = [call(d.stream, partial(load, d)) for d in self._devices]
            weights = [future.result() for future in loaded]
            pairs = zip(self._devices, weights, strict=True)
            futures = [call(d.stream, partial(timed, d, w)) for d, w in pairs]
            return [future.result() for future in futures]
        except OutOfMemory as exc:
            raise PlacementError(
                f"{exc.device} has {exc.free_bytes >> 20} MiB free for "
                f"{exc.asked_bytes >> 20} MiB of weights to time"
            ) from exc
        finally:
            for backend in taken:
                backend.release(n_bytes)

    def close(self) -> None:
        """Stop the devices."""
        for backend in self._backends:
            backend.close()


@dataclass(frozen=True, slots=True)
class _Times:
    """Seconds of one ubatch: of each device's layers, of the head, of the edges."""

    devices: list[float]
    head: float
    edges: list[float]


class PipelineProbe(_Probe):
    """A `tune.Probe` for devices of which some are GPUs, or a worker's.

    They are timed, each by its own clock, while a job runs over all of them, split by default: what
    a device takes for its layers is divided among them by their bytes. `config` has a device for
    each that a name means, and the CPU where -ngl puts it.
    """

    def __init__(self, file: ModelFile, config: RuntimeConfig, n_ctx: int) -> None:
        """Load the model. Raises what Pipeline does."""
        config, places = look_at(file, replace(config, ctx_size=n_ctx))
        super().__init__(file, config, n_ctx, places)
        self._split = self.default_split()
        self._times: dict[Job, _Times] = {}
        loaded = replace(config, layers=tuple(map(len, self._split)))
        self._pipeline = Pipeline(file, loaded, lambda done, total: None)
        self._overhead_rows = max(stage.overhead_rows for stage in self._pipeline.stages)

    def layers_s(self, layers: Sequence[int], job: Job) -> list[float]:
        """Seconds of one of `layers`, per device."""
        sizes = self._sizes.layers
        n_bytes = statistics.mean(sizes[i] for i in layers)
        taken = [sum(sizes[i] for i in mine) for mine in self._split]
        pairs = zip(self._of(job).devices, taken, strict=True)
        return [seconds * n_bytes / all_bytes for seconds, all_bytes in pairs]

    def head_s(self, job: Job) -> Sequence[float | None]:
        """Seconds of the head per ubatch, where it is."""
        head = self._of(job).head
        return [head if i == self.i_head else None for i in range(len(self._places))]

    def edges_s(self, job: Job) -> list[float]:
        """Seconds between stages: what a ubatch takes that has all devices for itself, less what
        they compute. To a worker is the way there and back."""
        return self._of(job).edges

    def _of(self, job: Job) -> _Times:
        if job not in self._times:
            self._times[job] = self._run(job)
        return self._times[job]

    def _run(self, job: Job) -> _Times:
        if job.workload == "decode":
            depth = _pieces(DEPTH, self._pipeline.rung.ubatch_size)
            for slot in range(job.n_tokens):
                self._pass([_ubatch([Span(slot, p.start, len(p))]) for p in depth])
        bare, whole = self._rows(job, heads=False), self._rows(job, heads=True)
        work, n_ubatches = bare, 1
        if job.workload == "prefill":
            prompt = _pieces(job.n_tokens, job.n_rows)
            work, n_ubatches = [_ubatch([Span(0, p.start, len(p))]) for p in prompt], len(prompt)
        layers, less, more = self._taken(work, bare, whole)
        stages = [stage for stage, clocks in self._clocks() for _ in clocks]
        head = more[-1]
        if stages[-1].layers:
            # The difference of two times is mostly noise on a machine that is busy otherwise.
            sizes = self._sizes
            beside = sum(sizes.layers[i] for i in self._split[self.i_head])
            by_bytes = head * sizes.head / (sizes.head + beside)
            head = min(max(head - less[-1], by_bytes / 2), by_bytes * 2)
        return _Times(
            [seconds for seconds, stage in zip(layers, stages, strict=True) if stage.layers],
            head / n_ubatches,
            self._edges(work),
        )

    def _rows(self, job: Job, *, heads: bool) -> list[UBatch]:
        """Some rounds of all groups, a row per stream, or as many ubatches of one row, as
        after a prompt. With `heads` all rows have logits."""
        n, cell = (job.n_tokens, DEPTH) if job.workload == "decode" else (1, job.n_tokens)
        groups = _pieces(n, min(job.n_rows, self._pipeline.rung.ubatch_size))
        n_rounds = max(1, min(_N_REMEMBERED, 4 * len(self._places)) // len(groups))
        return [
            _ubatch([Span(slot, cell, 1) for slot in group], range(len(group)) if heads else ())
            for _ in range(n_rounds)
            for group in groups
        ]

    def _taken(self, *kinds: Sequence[UBatch]) -> list[list[float]]:
        """Seconds of one ubatch of each kind by clock: the median of passes, which take turns."""
        passes = [[self._pass(kind) for kind in kinds]]  # the first is not counted
        start = time.perf_counter()
        while len(passes) <= MIN_PASSES or time.perf_counter() - start < MIN_SECONDS:
            passes.append([self._pass(kind) for kind in kinds])
        by_kind = zip(*passes[1:], strict=True)
        return [[statistics.median(times) for times in zip(*k, strict=True)] for k in by_kind]

    def _clocks(self) -> list[tuple[LayerStage | RemoteStage, list[deque[tuple[int, int, float]]]]]:
        """Of each stage what its devices took of late, those with layers or the end it is."""
        return [
            (stage, stage.recents if isinstance(stage, RemoteStage) else [stage.recent])
            for stage in self._pipeline.stages
        ]

    def _pass(self, ubatches: Sequence[UBatch]) -> list[float]:
        """Seconds of one ubatch by clock, of as many of the last ones as are remembered."""
        executor = self._pipeline.executor
        tickets = [executor.submit(ubatch, lambda logits, rows: None) for ubatch in ubatches]
        for ticket in tickets:
            ticket.wait()
        return [
            statistics.mean(seconds for _, _, seconds in list(clock)[-len(ubatches) :])
            for _, clocks in self._clocks()
            for clock in clocks
        ]

    def _edges(self, ubatches: Sequence[UBatch]) -> list[float]:
        """Seconds on each edge while nothing else is on its way."""
        trace, times = self._pipeline.trace, []
        trace.enabled = True
        for ubatch in ubatches[:_N_ALONE]:
            self._pass([ubatch])
            ends = [s.end_s for s in trace.slices if s.kind == "compute"]
            taken = [sum(clock[-1][2] for clock in clocks) for _, clocks in self._clocks()]
            trace.slices.clear()
            times.append([b - a - s for (a, b), s in zip(pairwise(ends), taken[1:], strict=True)])
        trace.enabled = False
        return [max(0.0, statistics.median(edge)) for edge in zip(*times, strict=True)]

    def close(self) -> None:
        """Stop the devices, and leave the workers."""
        self._pipeline.close()


def _pieces(n: int, size: int) -> list[range]:
    """`size` after `size`, up to `n`."""
    return [range(start, min(start + size, n)) for start in range(0, n, size)]


def _ubatch(spans: Sequence[Span], outputs: Sequence[int] = ()) -> UBatch:
    n_rows = sum(span.n_rows for span in spans)
    return UBatch((0,) * n_rows, tuple(spans), tuple(outputs))


def timed_s(
    work: Callable[[], object], min_seconds: float = MIN_SECONDS, min_passes: int = MIN_PASSES
) -> float:
    """Median seconds of `work`, called for a while after a call that is not counted."""
    work()
    times: list[float] = []
    while len(times) < min_passes or sum(times) < min_seconds:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
