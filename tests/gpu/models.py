"""A whole model on the device, by the interface that users have: ids, speed, graphs, a worker."""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gguf_pp
from gguf_pp import fetch
from gguf_pp.api import LLM
from gguf_pp.backend import cuda_trials
from gguf_pp.config import parse_devices
from gguf_pp.errors import ConfigError
from gguf_pp.net import parse_endpoint
from gguf_pp.pipeline.lent import Access, ask
from tests.gpu.cut import cut
from tests.gpu.harness import Missing, Report
from tests.gpu.nursery import write_model

CHECK = Path(__file__).with_name("check.py")
ONE, TWO, MIXED = ["cuda:0"], ["cuda:0", "cuda:0"], ["cuda:0", "cpu"]
CAP = "cuda:0={}"
"""What caps the memory of ONE."""
N_TOKENS = 48
N_STREAMS = 16
PROMPT_UBATCHES = 8
PART_ROWS = 256
"""Of a ubatch that cuBLAS multiplies."""
N_AT_ONCE = 4
REAL, REAL_LAYERS = "smollm2-135m", 8
EXACT_LOGITS, ROUNDED_LOGITS = 2e-3, 0.2
"""The most that logits may be off from the CPU's, in their standard deviations."""


def require_built() -> None:
    """Missing if the product does not know these devices yet."""
    try:
        parse_devices(",".join(TWO))
    except ConfigError as exc:
        raise Missing(f"--device {','.join(TWO)}: {exc}") from exc


@contextmanager
def model_of(report: Report) -> Iterator[Path]:
    """The model that was named, or one that is made."""
    if report.options.get("model"):
        yield Path(report.options["model"])
        return
    with tempfile.TemporaryDirectory() as folder:
        yield write_model(Path(folder) / "made.gguf")


def load(path: Path, devices: Sequence[str], **options: Any) -> LLM:
    """With rows of a ubatch, and so the kernels that compute them, settled."""
    settings: dict[str, Any] = {"ctx_size": 1024, "ubatch_size": 64, "exact": True}
    return gguf_pp.load(path, list(devices), **(settings | options))


def prompt_of(llm: LLM, n: int, seed: int = 0) -> list[int]:
    """`n` random ids."""
    random = np.random.Generator(np.random.PCG64(seed))
    return [int(i) for i in random.integers(0, min(250, llm.tokenizer.n_vocab), n)]


def answer(llm: LLM, seed: int = 0) -> list[int]:
    """What follows a prompt when the best token is always taken."""
    prompt = prompt_of(llm, 128, seed)
    settings: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    return llm.generate(prompt, max_tokens=N_TOKENS, **settings).completion().ids


def check_end_to_end(part: str, report: Report) -> None:
    """Ids and logits of a way to compute against the CPU's; "stages": one against two, by every
    way; "cap": what one on memory does."""
    require_built()
    with model_of(report) as path:
        if part == "stages":
            _against_each_other(report, path)
        elif part == "cap":
            _under_a_cap(report, path)
        else:
            report.tell(**_against_cpu(report, path, part))


def check_real(part: str, report: Report) -> None:
    """The first layers of a real model, if it lies in the cache: ids and logits against the CPU's.
    A part is a way to compute them."""
    require_built()
    real = fetch.default_cache_dir() / fetch.KNOWN[REAL].cached_name
    if not real.is_file():
        raise Missing(f"{REAL}, which gguf-pp pull {REAL} puts into the cache")
    with tempfile.TemporaryDirectory() as folder:
        path = cut(real, REAL_LAYERS, Path(folder) / "cut.gguf")
        report.tell(**_against_cpu(report, path, part))


def _against_cpu(report: Report, path: Path, way: str) -> dict[str, Any]:
    """How many ids are those of the CPU, and how far logits are off, computed in one of WAYS."""
    exact = way != "default"
    # Other ways are computed at the same time, each with a CPU's answer of its own.
    threads = str(max(1, (os.cpu_count() or 1) // N_AT_ONCE))
    with load(path, ["cpu"], threads=threads) as llm:
        wanted, wanted_logits = outcome(llm)
    devices = MIXED if way == "with the CPU" else ONE
    with load(path, devices, exact=exact, threads=threads) as llm:
        ids, logits = outcome(llm)
    differ = (i for i, (a, b) in enumerate(zip(ids, wanted, strict=True)) if a != b)
    n_equal = next(differ, len(ids))
    off = float(np.abs(logits - wanted_logits).max() / wanted_logits.std())
    is_near = off <= (EXACT_LOGITS if exact else ROUNDED_LOGITS)
    report.require(is_near, f"logits are off by {off:.2g} standard deviations")
    is_same = n_equal == len(ids) or not exact
    report.require(is_same, f"ids differ from token {n_equal} on")
    return {"ids_equal": n_equal, "of": len(ids), "logits_off": off}


def _against_each_other(report: Report, path: Path) -> None:
    results = {}
    for name, devices, options in (
        ("one stage", ONE, {}),
        ("in turn", TWO, {"n_copies": 1}),
        ("pipelined", TWO, {"n_copies": 2}),
        ("4 copies", TWO, {"n_copies": 4}),
        ("through the host", TWO, {"n_copies": 2, "edge_copy": "host"}),
    ):
        with load(path, devices, exact=False, **options) as llm:
            results[name] = llm.logits(prompt_of(llm, 192))
    for name, logits in results.items():
        equal = np.array_equal(logits, results["one stage"])
        report.require(equal, f"{name}: logits are not those of one stage, bit for bit")


def _under_a_cap(report: Report, path: Path) -> None:
    """With less memory than it would take, a run has a shorter context, and the same answer."""
    with load(path, ONE, ctx_size=None) as llm:
        wanted, n_full = answer(llm), llm.ctx_size
        (use,) = llm.devices()
    n_bytes = use.weight_bytes + use.kv_bytes // 2 + use.buffer_bytes
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats(0)
    before = _allocated()
    with load(path, ONE, ctx_size=None, memory=CAP.format(n_bytes)) as llm:
        got, n_cells = answer(llm), llm.ctx_size
    report.tell(
        context=n_full,
        context_capped=n_cells,
        cap_mib=n_bytes >> 20,
        peak_mib=(_allocated(peak=True) - before) >> 20,
    )
    report.require(n_cells < n_full, f"under a cap the context is {n_cells} of {n_full}")
    report.require(got == wanted, "under a cap the ids are others")


def _allocated(*, peak: bool = False) -> int:
    """Bytes that torch has of the device."""
    if not torch.cuda.is_available():
        return 0
    return torch.cuda.max_memory_allocated(0) if peak else torch.cuda.memory_allocated(0)


def check_rates(part: str, report: Report) -> None:
    """Tokens per second of all sequences, by the number of stages and of groups."""
    require_built()
    with model_of(report) as path:
        _rates(report, path)


def _rates(report: Report, path: Path) -> None:
    rates = {}
    for name, devices, n_streams, n_groups in (
        ("1 stage, 1 sequence", ONE, 1, None),
        (f"1 stage, {N_STREAMS} sequences", ONE, N_STREAMS, None),
        (f"2 stages, {N_STREAMS} sequences, 1 group", TWO, N_STREAMS, 1),
        (f"2 stages, {N_STREAMS} sequences, 2 groups", TWO, N_STREAMS, 2),
        (f"2 stages, {N_STREAMS} sequences, as chosen", TWO, N_STREAMS, None),
    ):
        with load(path, devices, parallel=n_streams, exact=False) as llm:
            if n_groups is not None:
                force_groups(llm, n_groups)
            _decode(llm, n_streams, 4)
            start = time.perf_counter()
            n_made = _decode(llm, n_streams, N_TOKENS)
            rates[name] = n_made / (time.perf_counter() - start)
        report.tell(tokens_per_s=rates)


def _decode(llm: LLM, n_streams: int, n_tokens: int) -> int:
    return sum(map(len, _decoded(llm, n_streams, n_tokens)))


def _decoded(llm: LLM, n_streams: int, n_tokens: int) -> list[list[int]]:
    prompts = [prompt_of(llm, 4, seed) for seed in range(n_streams)]
    settings: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    made = llm.generate_batch(prompts, max_tokens=n_tokens, **settings)
    return [completion.ids for completion in made]


def force_groups(llm: LLM, n: int) -> None:
    """Have as many groups in flight, if there are sequences for them, whatever steps take."""
    engine = llm._engine

    def groups(n_decoding: int) -> int:
        engine.n_groups = min(n, n_decoding)
        return engine.n_groups

    engine._groups = groups  # type: ignore[method-assign]


def check_remote(part: str, report: Report) -> None:
    """A worker on this machine, a process of its own, lends the device: ids and logits are those of
    a run without it, wherever its stages are."""
    require_built()
    with model_of(report) as path, tempfile.TemporaryDirectory() as cache:
        with load(path, TWO) as llm:
            wanted = outcome(llm)
        with worker(cache, ",".join(TWO)) as address:
            for name, devices in _with_worker(address).items():
                start = time.perf_counter()
                with load(path, devices) as llm:
                    loaded = time.perf_counter()
                    if len(kinds := set(kernels_of(llm))) > 1:
                        raise Missing(
                            f"a worker that lends {ONE[0]}: {' and '.join(sorted(kinds))}"
                        )
                    got = outcome(llm)
                answered = time.perf_counter()
                report.tell(**{name: {"load_s": loaded - start, "answer_s": answered - loaded}})
                report.require(got[0] == wanted[0], f"{name}: ids are not those without a worker")
                equal = np.array_equal(got[1], wanted[1])
                report.require(equal, f"{name}: logits are not those without a worker")
            lent = ask(parse_endpoint(f"tcp://{address}"), Access(None, None, 15.0))
        for device in lent:
            report.require(not device.unusable, f"{device.name_there}: {device.unusable}")
        report.tell(free_mib=[device.free_bytes >> 20 for device in lent])


def _with_worker(address: str) -> dict[str, list[str]]:
    """Devices by what those of the worker are in the pipeline: hidden states come in, come in and
    go out, or never leave it."""
    lent = f"tcp://{address}"
    return {
        "behind": [*ONE, f"{lent}/{ONE[0]}"],
        "in the middle": [TWO[0], lent, TWO[1]],
        "all of it": [f"{lent}/{ONE[0]}"],
    }


def outcome(llm: LLM) -> tuple[list[int], np.ndarray]:
    """Ids, and logits of a prompt."""
    return answer(llm), llm.logits(prompt_of(llm, 192))


def kernels_of(llm: LLM) -> list[str]:
    """What computes on each device, in order."""
    return [use.kernels for use in llm.devices()]


@contextmanager
def worker(cache: str, device: str) -> Iterator[str]:
    """The address of one that lends `device`; Missing, with what it said, if it ends."""
    words = ["gguf-pp", "worker", "-p", "0", "--device", device, "--cache", cache]
    process = subprocess.Popen(
        [sys.executable, str(CHECK), *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    try:
        said = ""
        for line in process.stdout:
            if found := re.match(r"listening on (\S+),", line):
                yield found[1]
                return
            said = line.strip() or said
        raise Missing(f"gguf-pp worker --device {device}: {said}")
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()
        process.stdout.close()


def check_graphs(part: str, report: Report) -> None:
    """Steps as graphs against kernel by kernel: ids, and tokens/s of decoding and of a prompt."""
    require_built()
    report.tell(replays=cuda_trials.graph_replays(torch, 0))
    with model_of(report) as path:
        for devices, n_streams, n_rows in (
            (ONE, 1, 64), (ONE, N_STREAMS, 64), (TWO, N_STREAMS, 64), (ONE, 1, PART_ROWS)
        ):  # fmt: skip
            figures, ids = {}, {}
            for name, graphs in (("eager", False), ("graphs", True)):
                options = {"parallel": n_streams, "exact": False, "cuda_graphs": graphs}
                options |= {"ubatch_size": n_rows, "ctx_size": max(1024, 9 * n_rows)}
                with load(path, devices, **options) as llm:
                    # Groups of other sizes may be rounded otherwise, and their number is chosen by
                    # what steps take, which graphs change.
                    force_groups(llm, len(devices))
                    rate, first = _prompt_rate(llm)
                    _decode(llm, n_streams, 8)
                    start = time.perf_counter()
                    ids[name] = [first, *_decoded(llm, n_streams, N_TOKENS)]
                    seconds = time.perf_counter() - start
                    figures[name] = {
                        "tokens_per_s": sum(map(len, ids[name][1:])) / seconds,
                        "prompt_tokens_per_s": rate,
                        "captured": [_n_captured(stage) for stage in llm._pipeline.stages],
                        "failed": [_n_failed(stage) for stage in llm._pipeline.stages],
                        "free_mib": _free_mib(),
                    }
            name = f"{len(devices)} stages, {n_streams} sequences, ubatch {n_rows}"
            report.tell(**{name: figures})
            report.require(all(figures["graphs"]["captured"]), f"{name}: nothing was captured")
            report.require(not any(figures["graphs"]["failed"]), f"{name}: a capture failed")
            report.require(ids["eager"] == ids["graphs"], f"{name}: ids differ with graphs")


def _prompt_rate(llm: LLM) -> tuple[float, list[int]]:
    """Tokens/s of a prompt of several full ubatches after two more of them, which compile and
    capture; and its first token."""
    for seed in range(3):
        prompt = prompt_of(llm, PROMPT_UBATCHES * llm._pipeline.rung.ubatch_size + 1, seed)
        start = time.perf_counter()
        found = llm.generate(prompt, max_tokens=1, temperature=0, ignore_eos=True).completion().ids
        seconds = time.perf_counter() - start
    return len(prompt) / seconds, found


def _free_mib() -> int:
    """Of the device, its allocator's aside: what graphs take of the driver shows here."""
    return int(torch.cuda.mem_get_info()[0]) >> 20 if torch.cuda.is_available() else 0


def _n_failed(stage: Any) -> int:
    return 0 if stage._steps is None else stage._steps.n_failed


def _n_captured(stage: Any) -> int:
    return 0 if stage._steps is None else stage._steps.n_captured
