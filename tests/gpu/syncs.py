"""Whether decode steps wait for the device where nobody asked them to."""

import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from gguf_pp.api import LLM
from tests.gpu import models
from tests.gpu.harness import Report

CHOOSING: dict[str, dict[str, Any]] = {
    "the best": {"temperature": 0},
    "of the top": {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "seed": 1},
    "of all": {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "seed": 1},
}


def check(part: str, report: Report) -> None:
    """No operation of a decode step waits for the device behind our back."""
    models.require_built()
    ones = torch.ones(1, device="cuda:0")
    report.require(len(syncs_of(lambda: ones.item())) == 1, "torch does not notice a sync")
    with models.model_of(report) as path:
        for devices in (models.ONE, models.TWO):
            with models.load(path, devices, parallel=4, exact=False) as llm:
                models.force_groups(llm, len(devices))  # a new number would be new steps
                found = {name: _syncs_of_steps(llm, how) for name, how in CHOOSING.items()}
            report.tell(**{f"{len(devices)} stages": found})
            for name, sites in found.items():
                n = sum(sites.values())
                report.require(n == 0, f"{name}: {n} syncs in 4 steps of {len(devices)} stages")


def _syncs_of_steps(llm: LLM, how: dict[str, Any]) -> dict[str, int]:
    """Of four decode steps of four sequences, when all kernels are compiled and captured."""
    running = [
        llm.generate(models.prompt_of(llm, 4, i), max_tokens=64, ignore_eos=True, **how)
        for i in range(4)
    ]

    def steps(n: int) -> None:
        for _ in range(n):
            for generation in running:
                next(generation)

    steps(8)
    found = syncs_of(lambda: steps(4))
    for generation in running:
        generation.cancel()
    return found


def syncs_of(work: Any) -> dict[str, int]:
    """How often `work` waits for the device, by the line that did."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    sites = (w for w in caught if "called a synchronizing" in str(w.message))
    return dict(Counter(f"{'/'.join(Path(w.filename).parts[-2:])}:{w.lineno}" for w in sites))
