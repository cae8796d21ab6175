"""Overlap and order of stages by the device's own clock, and results under random durations."""

import random
from typing import Any

import torch

from tests.gpu.harness import Report
from tests.gpu.rig import WAITS, DeviceKernels, Kernels, Run

TOLERANCE_S = 20e-6


def check_overlap(
    part: str, report: Report, kernels: Kernels | None = None, seconds: float = 4e-3
) -> None:
    """Stages of one device run side by side, in order, and give what they give in turn."""
    kernels = kernels or DeviceKernels()
    n_ubatches = 12
    Run(kernels, 2, 1, 3, seconds=lambda: 0.0)  # loads what is loaded at first use
    for n_stages in (2, 3, 4):
        for edge_copy in ("auto", "host"):
            settings: dict[str, Any] = {"seconds": lambda: seconds, "edge_copy": edge_copy}
            serial = Run(kernels, n_stages, 1, n_ubatches, pipelined=False, **settings)
            run = Run(kernels, n_stages, 2, n_ubatches, **settings)
            name = f"{n_stages} stages, {edge_copy}"
            equal = all(torch.equal(a, b) for a, b in zip(run.rows, serial.rows, strict=True))
            report.require(not run.n_wrong and not serial.n_wrong, f"{name}: wrong results")
            report.require(equal, f"{name}: not what stages in turn give")
            for text in (run.disorder(TOLERANCE_S) + serial.disorder(TOLERANCE_S))[:3]:
                report.fault(f"{name}: {text}")
            ideal_s = (n_ubatches + n_stages - 1) * serial.busy_s / (n_ubatches * n_stages)
            report.tell(**{name: {
                "serial_ms": 1e3 * serial.makespan_s,
                "pipelined_ms": 1e3 * run.makespan_s,
                "of_ideal": run.makespan_s / ideal_s,
                "at_once": run.at_once,
            }})  # fmt: skip
            fast = run.makespan_s < 1.25 * ideal_s
            report.require(fast, f"{name}: {run.makespan_s / ideal_s:.2f} times the ideal")
            slow = serial.at_once < 1.01
            report.require(slow, f"{name}: stages in turn overlap, so that the clock is wrong")


def check_races(
    part: str,
    report: Report,
    kernels: Kernels | None = None,
    unit_s: float = 3e-3,
    n_sound: int = 24,
    n_mutant: int = 24,
) -> None:
    """Random durations never change a result; without any one of the waits they do."""
    kernels = kernels or DeviceKernels()
    n_wrong = 0
    for seed in range(n_sound):
        n_wrong += _tortured(kernels, seed, unit_s).n_wrong > 0
    report.tell(runs=n_sound, wrong=n_wrong)
    report.require(n_wrong == 0, f"{n_wrong} of {n_sound} runs gave wrong results")
    noticed = {}
    for wait in WAITS:
        seeds = (s for s in range(n_mutant) if _tortured(kernels, s, unit_s, wait).n_wrong)
        noticed[wait] = next(seeds, None)
        report.tell(mutants=noticed)
        found = noticed[wait] is not None
        report.require(found, f"without the wait {wait!r} nothing was wrong in {n_mutant} runs")


def _tortured(kernels: Kernels, seed: int, unit_s: float, forgotten: str | None = None) -> Run:
    """With durations by `seed`: most are short, some long. Mutants copy directly: through the host
    there are more waits than the ring's."""
    chance = random.Random(seed)

    def some() -> float:
        return unit_s * chance.choice([0, 0, 0.05, 0.3, 1])

    return Run(
        kernels,
        chance.randint(2, 4),
        chance.choice([1, 2, 2, 3]),
        9,
        seconds=some,
        delays=lambda: (some(), some()),
        edge_copy=chance.choice(["auto", "host"]) if forgotten is None else "auto",
        forgotten=forgotten,
    )
