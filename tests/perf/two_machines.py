"""Two workers of one core each against two devices of one core in one process, in one run.

    python tests/perf/two_machines.py [MODEL] [--repetitions 5]

Prints medians in tokens per second, and ratios: workers against devices of this process; pipelined
against one copy; the same workers behind links with 20 ms in each direction against without; and
the bytes that a second start sends. Leave the machine alone meanwhile.
"""

import argparse
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from time import perf_counter

sys.path.insert(0, str(Path(__file__).parents[2]))

from peers import Job, Ours, alternate, ratio

from gguf_pp import fetch
from tests.slow_link import slow_link
from tests.workers import WorkerProcess

DELAY_S = 0.02


def sent_bytes(llm: object) -> int:
    stages = llm._pipeline.remote_stages  # type: ignore[attr-defined]
    return sum(stage.peer.stats.sent_bytes for stage in stages)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--layers", help="decode with this split too, such as 20,10")
    parser.add_argument("--n-copies", type=int, default=4, help="and with so many copies")
    args = parser.parse_args()
    path = str(fetch.resolve(args.model))
    cores = sorted(os.sched_getaffinity(0))[:2]
    prefill, decode = Job(args.model, 1024, 1), Job(args.model, 32, 48, 16)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        made = [
            WorkerProcess("--device", "cpu", "--cache", f"{folder}/{core}", cores={core})
            for core in cores
        ]
        for worker in made:
            stack.callback(worker.kill)
        far = [f"tcp://{stack.enter_context(slow_link(w.address, DELAY_S))}" for w in made]
        near = [worker.device for worker in made]
        for start in ("first", "second"):
            began = perf_counter()
            ours = Ours(path, prefill, devices=near)
            seconds = perf_counter() - began
            print(f"{start} start: {seconds:.1f} s, {sent_bytes(ours.llm):,} bytes sent")
            ours.close()

        def compare(job: Job, title: str, **options: dict[str, object]) -> None:
            runs = {name: Ours(path, job, **each) for name, each in options.items()}
            calls = [lambda i, ours=ours: ours(job, i) for ours in runs.values()]
            results = alternate(calls, args.repetitions)
            for ours in runs.values():
                ours.close()
            speeds = ", ".join(
                f"{name} {median(r):.1f}" for name, r in zip(runs, results, strict=True)
            )
            print(f"{job.title}, {title}: {speeds} tokens/s, ratio {ratio(*results):.2f}")

        local = {"devices": ["cpu:0", "cpu:1"], "threads": "1"}
        compare(prefill, "workers / devices here", workers={"devices": near}, here=local)
        serial = {"devices": near, "n_copies": 1}
        compare(decode, "pipelined / one copy", pipelined={"devices": near}, serial=serial)
        if args.layers:
            chosen = {"devices": near, "n_copies": args.n_copies, "layers": args.layers}
            title = f"--n-copies {args.n_copies} --layers {args.layers} / one copy"
            compare(decode, title, chosen=chosen, serial=serial)
        compare(prefill, "20 ms away / near", away={"devices": far}, near={"devices": near})


if __name__ == "__main__":
    main()
