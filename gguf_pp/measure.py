"""Runs the cases of a benchmark. A model is loaded once for all cases that share a placement."""

import platform
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from math import prod
from pathlib import Path

import torch
from gguf import LlamaFileType

from gguf_pp import __version__
from gguf_pp.backend.trace import Slice
from gguf_pp.bench import Case, Row
from gguf_pp.engine import Engine
from gguf_pp.gguf import ModelFile
from gguf_pp.net import is_remote, parse_endpoint
from gguf_pp.pipeline.build import Pipeline
from gguf_pp.pipeline.plan import bubble
from gguf_pp.pipeline.remote import RemoteStage
from gguf_pp.pipeline.stage import LayerStage
from gguf_pp.request import Request
from gguf_pp.sampling import SamplingParams
from gguf_pp.timeline import Devices, Timeline, Waiting, lanes_of

SEED = 1
WARM_UP_TOKENS = 32
"""Tokens that a warm-up makes at most: enough for the engine to choose its groups."""
WIRE_BYTES = {"f32": 4, "f16": 2}
GREEDY = SamplingParams(temperature=0)


@dataclass(frozen=True, slots=True)
class Result:
    """A row, and the timeline of the repetition in its middle."""

    row: Row
    timeline: Timeline


@dataclass(frozen=True, slots=True)
class _Run:
    """One repetition."""

    tokens_per_s: float
    slices: tuple[Slice, ...]


def measure(
    path: Path,
    cases: Sequence[Case],
    *,
    repetitions: int = 3,
    warm_up: bool = True,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Generator[Result, None, None]:
    """Yield the result of each case in order, as soon as it is there; raises GgufPpError.

    Speed-ups are against cases that came before; a case may come again. `progress` is told cases
    done and in all.
    """
    speeds: dict[Case, float] = {}
    n_done = 0
    progress(n_done, len(cases))
    if not cases:
        return
    with ModelFile.open(path, cases[0].config.override_kv) as file:
        for _, group in groupby(cases, key=lambda case: case.config):
            alike = list(group)
            with _loaded(file, alike) as bench:
                for i, case in enumerate(alike):
                    runs = bench.repeat(
                        case, repetitions, warm_up=warm_up and case not in alike[:i]
                    )
                    speeds[case] = statistics.median(run.tokens_per_s for run in runs)
                    yield bench.result(case, runs, speeds)
                    n_done += 1
                    progress(n_done, len(cases))


@contextmanager
def _loaded(file: ModelFile, cases: Sequence[Case]) -> Iterator["_Bench"]:
    """A model loaded with slots and context for all `cases`, which share a configuration."""
    config = replace(
        cases[0].config,
        n_slots=max(case.parallel for case in cases),
        ctx_size=max(case.n_cells for case in cases),
    )
    pipeline = Pipeline(file, config, lambda done, total: None)
    try:
        yield _Bench(file, pipeline)
    finally:
        pipeline.close()


class _Bench:
    """A loaded model that runs cases."""

    def __init__(self, file: ModelFile, pipeline: Pipeline) -> None:
        self._file = file
        self._pipeline = pipeline
        # No token ends a generation here.
        self._engine = Engine(pipeline, ())
        self._random = random.Random(SEED)

    def repeat(self, case: Case, repetitions: int, *, warm_up: bool) -> list[_Run]:
        """Run a case several times, and before that if `warm_up`: twice, as GPUs compile a size of
        step when it comes first, and make a graph of it when it comes again."""
        for _ in range(2 if warm_up else 0):
            self._run(replace(case, n_gen=min(case.n_gen, WARM_UP_TOKENS)))
        return [self._run(case) for _ in range(repetitions)]

    def _run(self, case: Case) -> _Run:
        """One repetition, with prompts of its own: a cache that knows them would help."""
        prompts = [self._ids((case.depth or 1) + case.n_prompt) for _ in range(case.parallel)]
        if case.depth:
            self._add([prompt[: case.depth] for prompt in prompts], 1)
            self._finish()
        elif case.n_prompt:
            prompts = [prompt[1:] for prompt in prompts]
        run = self._read if case.n_prompt else self._decode
        try:
            return run(prompts, case)
        finally:
            self._pipeline.trace.enabled = False
            self._pipeline.trace.slices.clear()

    def _ids(self, n: int) -> list[int]:
        return self._random.choices(range(self._pipeline.n_vocab), k=n)

    def _read(self, prompts: list[list[int]], case: Case) -> _Run:
        """From the first ubatch queued to the last one's logits."""
        start = self._start()
        requests = self._add(prompts, 1)
        self._finish()
        seconds = time.perf_counter() - start
        _raise_failure(requests)
        return _Run(case.n_prompt * case.parallel / seconds, self._slices())

    def _decode(self, prompts: list[list[int]], case: Case) -> _Run:
        """From when every stream has its first token."""
        requests = self._add(prompts, case.n_gen + 1)
        while not all(r.generated or r.error for r in requests) and self._engine.step():
            pass
        n_before = sum(len(r.tokens) for r in requests)
        start = self._start()
        self._finish()
        seconds = time.perf_counter() - start
        _raise_failure(requests)
        n_made = sum(len(r.tokens) for r in requests) - n_before
        return _Run(n_made / seconds, self._slices())

    def _add(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Request]:
        return [self._engine.add(prompt, GREEDY, max_tokens) for prompt in prompts]

    def _finish(self) -> None:
        while self._engine.step():
            pass

    def _start(self) -> float:
        self._pipeline.trace.enabled = True
        return time.perf_counter()

    def _slices(self) -> tuple[Slice, ...]:
        return tuple(self._pipeline.trace.slices)

    def result(self, case: Case, runs: Sequence[_Run], speeds: dict[Case, float]) -> Result:
        """Put the numbers of a case together."""
        middle = sorted(runs, key=lambda run: run.tokens_per_s)[len(runs) // 2]
        timeline = Timeline(middle.slices, lanes_of(self._pipeline.stages))
        return Result(self._row(case, runs, speeds, timeline), timeline)

    def _row(
        self,
        case: Case,
        runs: Sequence[_Run],
        speeds: dict[Case, float],
        timeline: Timeline,
    ) -> Row:
        pipeline, file = self._pipeline, self._file
        devices = timeline.by_device()
        summary = devices.summary
        uses, threads = pipeline.uses(), _threads(pipeline.stages)
        edges = _edges(timeline, pipeline.model.hp.n_embd, WIRE_BYTES[pipeline.config.wire])
        groups = _groups(case, timeline.slices) if case.phase == "decode" else None
        waiting = summary.all_waiting.shares()
        speed = speeds[case]
        rates = [run.tokens_per_s for run in runs]
        return Row(
            test=case.name,
            model=file.path.name,
            size=file.n_bytes,
            params=sum(prod(info.shape) for info in file.tensors.values()),
            quantization=quantization(file),
            devices=devices.names,
            layers_per_device=devices.layers,
            threads=tuple(threads[use.name] for use in uses),
            kernels=tuple(use.kernels for use in uses),
            n_copies=pipeline.rung.n_copies,
            pipeline=not pipeline.reason,
            pipeline_reason=pipeline.reason or None,
            groups_in_flight=groups,
            ubatch_size=pipeline.rung.ubatch_size if case.config.ubatch_size else summary.max_rows,
            n_prompt=case.n_prompt,
            n_gen=case.n_gen,
            parallel=case.parallel,
            depth=case.depth,
            tokens_per_s=speed,
            tokens_per_s_sd=statistics.stdev(rates) if len(rates) > 1 else 0.0,
            speedup=_ratio(speed, speeds.get(case.serial())),
            speedup_one_device=_ratio(speed, speeds.get(case.alone())),
            busy_share=summary.busy_shares,
            bubble_share=summary.bubble,
            bubble_predicted=_predicted(devices, groups, pipelined=not pipeline.reason),
            **_shares(waiting),
            edges=tuple(name for name, _ in edges),
            bytes_per_edge=tuple(n_bytes for _, n_bytes in edges),
            peak_memory=tuple(u.weight_bytes + u.kv_bytes + u.buffer_bytes for u in uses),
            versions=versions(),
        )


def _threads(stages: Sequence[LayerStage | RemoteStage]) -> dict[str, int]:
    """Of each device by name."""
    threads = {stage.name: stage.n_threads for stage in stages}
    for stage in stages:
        if isinstance(stage, RemoteStage):
            threads |= {device.name: device.n_threads for device in stage.peer.devices}
    return threads


def _edges(timeline: Timeline, n_embd: int, wire_bytes: int) -> list[tuple[str, int]]:
    """The way through the devices, and the bytes of hidden states on each edge of it."""
    computed = (s for s in timeline.slices if s.kind == "compute" and s.i_stage == 0)
    n_values = n_embd * sum(s.n_rows for s in computed)
    path = [name for lane in timeline.lanes for name in lane.devices]
    return [
        (f"{a} to {b}", n_values * (4 if _machine(a) == _machine(b) else wire_bytes))
        for a, b in pairwise(path)
    ]


def _machine(name: str) -> str:
    return parse_endpoint(name).peer if is_remote(name) else ""


def quantization(file: ModelFile) -> str:
    """The file's type by name; where it has none, the type that most bytes have."""
    known = {kind.value: kind.name for kind in LlamaFileType}
    name = known.get(file.metadata.int_of("general.file_type", -1))
    if name is not None:
        return name.removeprefix("MOSTLY_").removeprefix("ALL_")
    n_bytes = Counter[str]()
    for info in file.tensors.values():
        n_bytes[info.type.name] += info.n_bytes
    return n_bytes.most_common(1)[0][0]


def versions() -> dict[str, str]:
    """Of what a speed depends on."""
    return {
        "gguf_pp": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _raise_failure(requests: Sequence[Request]) -> None:
    for request in requests:
        if request.error is not None:
            raise request.error


def _groups(case: Case, slices: Sequence[Slice]) -> int:
    """Groups in flight, from the rows that a ubatch had."""
    rows = [s.n_rows for s in slices if s.kind == "compute" and s.i_stage == 0]
    return round(case.parallel / statistics.median(rows)) if rows else 1


def _predicted(devices: Devices, groups: int | None, *, pipelined: bool) -> float:
    """The bubble by the formula. What decodes in G < P groups has G in flight, never more."""
    n_stages = len(devices.names)
    in_flight = 1 if not pipelined else n_stages if groups is None else groups
    if in_flight < n_stages:
        return 1 - in_flight / n_stages
    return bubble(n_stages, devices.summary.n_ubatches)


def _ratio(speed: float, baseline: float | None) -> float | None:
    return speed / baseline if baseline else None


def _shares(waiting: Waiting | None) -> dict[str, float | None]:
    names = ("starved", "uneven", "transfer")
    return {f"waiting_{name}": getattr(waiting, name, None) for name in names}
