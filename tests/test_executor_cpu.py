"""The real executor over real threads: whatever the pace, results are those of one in turn."""

import contextlib
import random
import threading

import pytest
import torch

from gguf_pp.backend.cpu import Budget, CpuBackend
from gguf_pp.backend.host import share_cores
from gguf_pp.backend.trace import Trace
from gguf_pp.pipeline.executor import Executor
from gguf_pp.pipeline.ring import Ring
from tests.simulated import WIDTH, expected, ubatches

PATIENCE_S = 30
"""What a test that hangs may take; no test that passes waits for a clock."""


class ToyStage:
    """A stage on a real device: its arithmetic is that of `simulated`, its pace is random."""

    elapsed_s = None

    def __init__(self, backend, i_stage, n_stages, n_copies, seed, meet=None):
        last = i_stage == n_stages - 1
        self.backend = backend
        self.ring = Ring(backend, n_copies, 8, WIDTH, inp=i_stage > 0, out=not last)
        self.compute = self.intake = backend.stream(f"stage {i_stage} compute", compute=True)
        self.transfer = (
            None if last else Dawdling(backend.stream(f"stage {i_stage} transfer"), seed)
        )
        self._random = random.Random(f"{seed} {i_stage}")
        self._i_stage = i_stage
        self._meet = meet or (lambda i_stage, i_ubatch: None)
        self._work = None

    def load(self, copy, ubatch):
        dawdle(self._random)
        if copy.inp is not None:
            self._work = copy.inp.tensor[: ubatch.n_rows].clone()
            copy.inp.tensor.fill_(float("nan"))

    def abandon(self, copy, ubatch):
        self._work = None

    def forward(self, copy, ubatch, take):
        self._meet(self._i_stage, ubatch.spans[0].slot)
        x = self._work
        if x is None:
            x = torch.tensor(ubatch.tokens, dtype=torch.float32)[:, None].expand(-1, WIDTH)
        self._work = None
        if copy.out is not None:
            copy.out.tensor.fill_(float("nan"))
        dawdle(self._random)
        y = x * (2 * self._i_stage + 3) + self._i_stage
        if copy.out is not None:
            copy.out.tensor[: ubatch.n_rows] = y
        else:
            take(y, range(ubatch.n_rows))


class Dawdling:
    """A stream whose copies take a random while."""

    def __init__(self, stream, seed):
        self._stream, self._random = stream, random.Random(seed)
        self.wait, self.record = stream.wait, stream.record

    def copy(self, dst, src, n_rows):
        n = self._random.choice((0, 0, 20, 60))
        self._stream.run(lambda: spin(n))
        self._stream.copy(dst, src, n_rows)


def dawdle(rng):
    """Now and then a little work, so that streams meet in ever new orders."""
    spin(rng.choice((0, 0, 10, 50)))


def spin(n):
    x = torch.eye(16)
    for _ in range(n):
        x = x @ x
    assert float(x[0, 0]) == 1


@contextlib.contextmanager
def executor(n_stages, n_copies, *, seed=0, pipelined=True, meet=None):
    budget, shares = Budget(1 << 20), share_cores(n_stages)
    with contextlib.ExitStack() as stack:
        stages = []
        for i, cores in enumerate(shares):
            backend = CpuBackend(f"cpu:{i}", cores, 1, budget)
            stack.callback(backend.close)
            stages.append(ToyStage(backend, i, n_stages, n_copies, seed, meet))
        yield Executor(stages, Trace(), pipelined=pipelined)


def run_all(executor, n_ubatches):
    """Results and errors by ubatch."""
    results, errors, tickets = {}, {}, []
    for i, ubatch in enumerate(ubatches(n_ubatches)):
        take = lambda y, rows, i=i: results.update({i: y[:, 0].tolist()})  # noqa: E731
        tickets.append(executor.submit(ubatch, take))
    for i, ticket in enumerate(tickets):
        try:
            ticket.wait()
        except ArithmeticError as exc:
            errors[i] = exc
    return results, errors


@pytest.mark.parametrize("pipelined", [True, False])
@pytest.mark.parametrize("n_copies", [1, 2, 3, 4])
@pytest.mark.parametrize("n_stages", [1, 2, 3, 4])
def test_on_real_threads_any_number_of_stages_and_copies_gives_the_same(
    n_stages, n_copies, pipelined
):
    n = 40
    with executor(n_stages, n_copies, seed=10 * n_stages + n_copies, pipelined=pipelined) as walk:
        results, errors = run_all(walk, n)
        again, _ = run_all(walk, 7)  # copies go on where the first batch ended
    assert errors == {}
    assert results == {i: expected(u, n_stages) for i, u in enumerate(ubatches(n))}
    assert again == {i: expected(u, n_stages) for i, u in enumerate(ubatches(7))}


def test_on_real_threads_a_failing_ubatch_fails_alone():
    def meet(i_stage, i_ubatch):
        if (i_stage, i_ubatch) in {(1, 3), (0, 5), (2, 11)}:
            raise ZeroDivisionError(f"stage {i_stage}")

    with executor(3, 2, meet=meet) as walk:
        results, errors = run_all(walk, 12)
    assert {i: str(exc) for i, exc in errors.items()} == {3: "stage 1", 5: "stage 0", 11: "stage 2"}
    assert results == {i: expected(u, 3) for i, u in enumerate(ubatches(12)) if i not in errors}


@pytest.mark.parametrize("n_copies", [1, 2])
def test_pipelined_stages_work_at_the_same_time(n_copies):
    """Every stage meets its neighbour, one ubatch apart: nobody passes alone."""
    n_stages, n = 3, 8
    meetings = {
        (s, u): threading.Barrier(2) for s in range(n_stages - 1) for u in range(1, n)
    }  # stage s with ubatch u, and stage s + 1 with ubatch u - 1

    def meet(i_stage, i_ubatch):
        for key in ((i_stage - 1, i_ubatch + 1), (i_stage, i_ubatch)):
            if key in meetings:
                meetings[key].wait(PATIENCE_S)

    with executor(n_stages, n_copies, meet=meet) as walk:
        results, errors = run_all(walk, n)
    assert errors == {}
    assert results == {i: expected(u, n_stages) for i, u in enumerate(ubatches(n))}


def test_not_pipelined_devices_take_turns():
    turns = []
    with executor(3, 1, pipelined=False, meet=lambda s, u: turns.append((u, s))) as walk:
        run_all(walk, 6)
    assert turns == [(u, s) for u in range(6) for s in range(3)]


def test_submitting_does_not_wait_for_a_stage_that_is_held():
    opened = threading.Event()

    def meet(i_stage, i_ubatch):
        if (i_stage, i_ubatch) == (2, 0):
            assert opened.wait(PATIENCE_S)

    with executor(3, 2, meet=meet) as walk:
        tickets = [walk.submit(u, lambda y, rows: None) for u in ubatches(20)]
        opened.set()
        for ticket in tickets:
            ticket.wait()
