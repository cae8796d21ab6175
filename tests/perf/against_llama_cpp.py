"""gguf-pp against llama.cpp on the same cores, in the same run: a table of ratios.

    python tests/perf/against_llama_cpp.py [--repetitions 5] [--only SUBSTRING]

llama.cpp is xllamacpp's build. Its server spends time on sampling, so for decode of one stream the
table also gives our ratio to figures of a native llama-bench on the machine named in REFERENCE,
scaled by how fast xllamacpp's prefill (which equals the native one) runs here and now. So are two
RPC servers of one core each, which xllamacpp cannot start. Leave the machine alone meanwhile.
"""

import argparse
import os
from dataclasses import dataclass
from statistics import median
from typing import Any

from peers import Job, LlamaCpp, Ours, alternate, quiet, ratio

from gguf_pp import fetch

# Tokens/s of native llama.cpp (October 2026) on 2 cores, and of its prefill of 512 there, by which
# the figure is scaled.
REFERENCE_PREFILL = {"smollm2-135m": 134.0, "gemma3-270m": 159.0}


@dataclass(frozen=True)
class Row:
    """A job, our options, and native llama.cpp's figure for it where xllamacpp's is not fair."""

    job: Job
    wanted: float
    options: dict[str, Any]
    reference: float | None = None


TWO = {"devices": ["cpu:0", "cpu:1"]}
ROWS = [
    Row(Job("smollm2-135m", 512, 1), 1.6, {}),
    Row(Job("gemma3-270m", 512, 1), 1.3, {}),
    Row(Job("smollm2-135m", 32, 64), 1.1, {}, 89.0),
    Row(Job("gemma3-270m", 32, 64), 1.0, {}, 43.0),
    Row(Job("smollm2-135m", 32, 64, 16), 1.4, {}, 104.0),
    Row(Job("smollm2-135m", 1024, 1), 1.8, TWO, 116.0),
    Row(Job("smollm2-135m", 32, 64, 16), 2.5, TWO, 52.0),
]


def measure(row: Row, repetitions: int) -> None:
    """Measure one row and print it."""
    job, n_threads = row.job, len(os.sched_getaffinity(0))
    path = str(fetch.resolve(job.model))
    ours, theirs = Ours(path, job, **row.options), LlamaCpp(path, job, n_threads)
    theirs.n_vocab = ours.llm.tokenizer.n_vocab
    try:
        a, b = alternate([lambda i: ours(job, i), lambda i: theirs(job, i)], repetitions)
        where = "+".join(row.options.get("devices", ["cpu"]))
        text = f"{job.title:34} {where:12} {median(a):8.1f} {median(b):8.1f} {ratio(a, b):6.2f}"
        if row.reference is not None:
            probe = Job(job.model, 512, 1)
            scale = prefill(path, probe, n_threads, ours.llm.tokenizer.n_vocab)
            native = row.reference * scale / REFERENCE_PREFILL[job.model]
            text += f" {native:8.1f} {median(a) / native:6.2f}"
        else:
            text += f" {'':8} {'':6}"
        print(f"{text} {row.wanted:6.1f}", flush=True)
    finally:
        ours.close()
        theirs.close()


def prefill(path: str, job: Job, n_threads: int, n_vocab: int) -> float:
    """xllamacpp's prefill of 512 tokens, here and now."""
    peer = LlamaCpp(path, job, n_threads)
    peer.n_vocab = n_vocab
    try:
        return median(peer(job, i) for i in range(3))
    finally:
        peer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    print(
        f"{'tokens/s':34} {'devices':12} {'ours':>8} {'xllama':>8} {'ratio':>6} "
        f"{'native':>8} {'ratio':>6} {'wanted':>6}"
    )
    with quiet():
        for row in ROWS:
            if args.only in row.job.title:
                measure(row, args.repetitions)


if __name__ == "__main__":
    main()
