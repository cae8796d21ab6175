"""What recording a timeline costs: microseconds per ubatch, and its share of real ubatches.

    python tests/perf/recording_cost.py [MODEL] [--devices cpu:0,cpu:1] [--ubatches 500]

Whole runs differ from one to the next by more than recording costs. So the executor queues
ubatches on stages that are made to compute nothing, with the trace off and on in turns: what
differs is recording, on the clock and in seconds of all threads together. The larger of the two is
set against the time between two ubatches of the real model.
"""

import argparse
from collections import deque
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import NamedTuple

from gguf_pp import fetch
from gguf_pp.batch import Span, UBatch
from gguf_pp.bench import Case
from gguf_pp.config import Options, RuntimeConfig, resolve
from gguf_pp.gguf import ModelFile
from gguf_pp.measure import measure
from gguf_pp.pipeline.build import Pipeline
from gguf_pp.pipeline.executor import Executor, Ticket
from gguf_pp.timeline import summarize

IN_FLIGHT = 4
ROUNDS = 41


class Seconds(NamedTuple):
    """Of one ubatch: on the clock, and of all threads together."""

    clock: float
    threads: float


def recording_s(path: Path, config: RuntimeConfig, n_ubatches: int) -> Seconds:
    """What recording adds to a ubatch: medians of pairs."""
    with ModelFile.open(path) as file:
        pipeline = Pipeline(file, config, lambda done, total: None)
    try:
        for stage in pipeline.stages:
            stage.load = stage.forward = lambda copy, ubatch, take=None: None
        added = []
        for _ in range(ROUNDS):
            off = run(pipeline.executor, n_ubatches, recorded=False)
            on = run(pipeline.executor, n_ubatches, recorded=True)
            added.append(Seconds(on.clock - off.clock, on.threads - off.threads))
        return Seconds(median(s.clock for s in added), median(s.threads for s in added))
    finally:
        pipeline.close()


def run(executor: Executor, n_ubatches: int, *, recorded: bool) -> Seconds:
    """Queue and wait as the engine does, a few in flight."""
    ubatch = UBatch((0,), (Span(0, 0, 1),), ())
    tickets: deque[Ticket] = deque()
    executor.trace.enabled = recorded
    clock, threads = perf_counter(), process_time()
    for _ in range(n_ubatches):
        tickets.append(executor.submit(ubatch, lambda logits, rows: None))
        if len(tickets) == IN_FLIGHT:
            tickets.popleft().wait()
    while tickets:
        tickets.popleft().wait()
    seconds = Seconds(perf_counter() - clock, process_time() - threads)
    executor.trace.slices.clear()
    return Seconds(*(s / n_ubatches for s in seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--devices", default="cpu:0,cpu:1")
    parser.add_argument("--ubatches", type=int, default=500)
    args = parser.parse_args()
    path = fetch.resolve(args.model)
    config = resolve(Options(device=args.devices, ctx_size=512))
    added = recording_s(path, config, args.ubatches)
    print(
        f"recording adds {1e6 * added.clock:.1f} us to a ubatch on {len(config.devices)} devices, "
        f"{1e6 * added.threads:.1f} us of all threads together"
    )
    cases = [Case(config, 0, 32, 1, 0), Case(config, 0, 32, 8, 0), Case(config, 512, 0, 1, 0)]
    for result in measure(path, cases):
        summary = summarize(result.timeline.slices, len(config.devices))
        ubatch_s = summary.span_s / summary.n_ubatches
        print(
            f"{result.row.test:8} {1e3 * ubatch_s:7.2f} ms from one ubatch to the next: "
            f"{max(added) / ubatch_s:.2%}"
        )


if __name__ == "__main__":
    main()
