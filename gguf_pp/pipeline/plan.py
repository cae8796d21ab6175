"""The schedule as a value: made, checked and printed without touching a device."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Step(NamedTuple):
    """Stage `i_stage` runs ubatch `i_ubatch` on copy `i_copy` of its input."""

    i_stage: int
    i_ubatch: int
    i_copy: int

    @property
    def tick(self) -> int:
        """When this step runs if every step takes one unit of time."""
        return self.i_stage + self.i_ubatch


def plan_steps(n_stages: int, n_ubatches: int, n_copies: int, first: int = 0) -> Iterator[Step]:
    """Yield the steps of ubatches [first, first + n_ubatches) in the order the host issues them.

    The host walks one ubatch down all stages before the next; streams turn that into overlap.
    `first` counts on from the batches before, so that a copy is never reused out of turn.
    """
    for i_ubatch in range(first, first + n_ubatches):
        for i_stage in range(n_stages):
            yield Step(i_stage, i_ubatch, i_ubatch % n_copies)


def format_plan(steps: Sequence[Step]) -> str:
    """Draw the plan as a table: a row per tick, a column per stage."""
    cells = {(s.tick, s.i_stage): f"u{s.i_ubatch}·c{s.i_copy}" for s in steps}
    n_stages = 1 + max(s.i_stage for s in steps)
    lines = ["tick  " + "".join(f"stage {i:<5}" for i in range(n_stages))]
    for tick in range(1 + max(s.tick for s in steps)):
        row = "".join(f"{cells.get((tick, i), '·'):<11}" for i in range(n_stages))
        lines.append(f"{tick:>4}  {row}")
    return "\n".join(line.rstrip() for line in lines)


def bubble(n_stages: int, n_ubatches: int) -> float:
    """Share of device time spent idle while a pipeline fills and drains: (P-1)/(M+P-1)."""
    return (n_stages - 1) / (n_ubatches + n_stages - 1)
