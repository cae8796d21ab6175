"""The same jobs on gguf-pp and on llama.cpp (xllamacpp), timed in the same way.

Prompts are random token ids, so that nothing depends on tokenizers; a job's prompts differ from
one repetition to the next, so that nothing is answered from a cache.
"""

import json
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any, Protocol

import gguf_pp
from gguf_pp.sampling import SamplingParams


@dataclass(frozen=True)
class Job:
    """`n_streams` prompts of `n_prompt` tokens, then `n_gen` tokens each. Prefill if n_gen is 1."""

    model: str
    n_prompt: int
    n_gen: int
    n_streams: int = 1

    @property
    def title(self) -> str:
        what = f"prefill {self.n_prompt}" if self.n_gen == 1 else f"decode {self.n_gen}"
        return f"{self.model} {what}" + (f" @ {self.n_streams}" if self.n_streams > 1 else "")

    def prompts(self, n_vocab: int, seed: int) -> list[list[int]]:
        draw = random.Random(seed)
        return [
            [draw.randrange(1000, n_vocab - 1000) for _ in range(self.n_prompt)]
            for _ in range(self.n_streams)
        ]


class Runner(Protocol):
    """Runs a job and returns tokens per second: of prompts, or of generated tokens."""

    def __call__(self, job: Job, seed: int) -> float: ...


class Ours:
    """gguf-pp with the given options."""

    def __init__(self, path: str, job: Job, **options: Any) -> None:
        self.llm = gguf_pp.load(
            path, ctx_size=job.n_prompt + job.n_gen + 8, parallel=job.n_streams, **options
        )

    def __call__(self, job: Job, seed: int) -> float:
        engine = self.llm._engine  # the engine's own clock, without detokenization
        params = SamplingParams(temperature=0, ignore_eos=True)
        prompts = job.prompts(self.llm.tokenizer.n_vocab, seed)
        start = perf_counter()
        requests = [engine.add(prompt, params, job.n_gen) for prompt in prompts]
        while any(not r.generated for r in requests) and engine.step():
            pass
        prefilled = perf_counter()
        n_before = sum(len(r.generated) for r in requests)
        while engine.step():
            pass
        end = perf_counter()
        if job.n_gen == 1:
            return job.n_streams * job.n_prompt / (prefilled - start)
        return (sum(len(r.generated) for r in requests) - n_before) / (end - prefilled)

    def close(self) -> None:
        self.llm.close()


class LlamaCpp:
    """llama.cpp's server in this process, `n_threads` threads."""

    def __init__(self, path: str, job: Job, n_threads: int) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = path
        params.n_parallel = job.n_streams
        params.n_ctx = job.n_streams * (job.n_prompt + job.n_gen + 64)
        params.cpuparams.n_threads = n_threads
        params.cpuparams_batch.n_threads = n_threads
        self.n_vocab = 0
        self.server = xllamacpp.Server(params)

    def __call__(self, job: Job, seed: int) -> float:
        prompts = job.prompts(self.n_vocab, seed)
        with ThreadPoolExecutor(job.n_streams) as pool:
            start = perf_counter()
            timings = list(pool.map(lambda p: self._complete(p, job.n_gen), prompts))
            seconds = perf_counter() - start
        if job.n_gen == 1:
            return job.n_streams * job.n_prompt / seconds
        if job.n_streams == 1:
            return float(timings[0]["predicted_per_second"])
        prompt_s = max(t["prompt_ms"] for t in timings) / 1000
        return job.n_streams * (job.n_gen - 1) / (seconds - prompt_s)

    def _complete(self, prompt: Sequence[int], n_gen: int) -> dict[str, Any]:
        answer = self.server.handle_completions(
            {
                "prompt": list(prompt),
                "max_tokens": n_gen,
                "temperature": 0,
                "cache_prompt": False,
                "ignore_eos": True,
            }
        )
        parsed = json.loads(answer) if isinstance(answer, str) else answer
        timings: dict[str, Any] = parsed["timings"]
        return timings

    def close(self) -> None:
        del self.server


@contextmanager
def quiet() -> Iterator[None]:
    """llama.cpp logs to the file descriptor, from threads of its own; keep it off the terminal."""
    sys.stderr.flush()
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


def alternate(runners: Sequence[Callable[[int], float]], repetitions: int) -> list[list[float]]:
    """Results per runner: one warm-up each, then A B A B ..."""
    for runner in runners:
        runner(-1)
    rounds = [[runner(i) for runner in runners] for i in range(repetitions)]
    return [list(column) for column in zip(*rounds, strict=True)]


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median of the ratios, pair by pair: the machine's drift cancels."""
    return median(a / b for a, b in zip(ours, theirs, strict=True))
