"""Stages that compute in virtual time, for tests of the real executor and ring."""

from collections.abc import Sequence

import torch

from gguf_pp.backend.sim import SimBackend, SimBuffer, World
from gguf_pp.backend.trace import Trace
from gguf_pp.batch import Span, UBatch
from gguf_pp.pipeline.executor import Executor, Take, Ticket
from gguf_pp.pipeline.ring import Copy, Ring

WIDTH = 2


class SimStage:
    """Multiplies by an odd number and adds its index, in `seconds[i_ubatch]`.

    `fails` is the ubatch whose computation raises.
    """

    def __init__(
        self,
        world: World,
        i_stage: int,
        n_stages: int,
        n_copies: int,
        seconds: Sequence[float],
        fails: int | None = None,
    ) -> None:
        self.world = world
        self.backend = SimBackend(world, f"sim:{i_stage}")
        self.ring = Ring(
            self.backend, n_copies, 8, WIDTH, inp=i_stage > 0, out=i_stage < n_stages - 1
        )
        self.compute = self.intake = self.backend.stream("compute", compute=True)
        self.elapsed_s = None
        self.transfer = None if i_stage == n_stages - 1 else self.backend.stream("transfer")
        self._i_stage = i_stage
        self._seconds = seconds
        self._fails = fails
        self._work: torch.Tensor | None = None
        self.seen: list[int] = []

    def load(self, copy: Copy, ubatch: UBatch) -> None:
        if copy.inp is not None:
            assert isinstance(copy.inp, SimBuffer)
            self._work = copy.inp.read()[: ubatch.n_rows].clone()

    def abandon(self, copy: Copy, ubatch: UBatch) -> None:
        self._work = None

    def forward(self, copy: Copy, ubatch: UBatch, take: Take) -> None:
        i_ubatch = ubatch.spans[0].slot
        self.seen.append(i_ubatch)
        self.world.spend(self._seconds[i_ubatch])
        if i_ubatch == self._fails:
            raise RuntimeError(f"stage {self._i_stage} broke")
        x = self._work
        if x is None:
            x = torch.tensor(ubatch.tokens, dtype=torch.float32)[:, None].expand(-1, WIDTH)
        y = x * (2 * self._i_stage + 3) + self._i_stage
        self._work = None
        if copy.out is not None:
            assert isinstance(copy.out, SimBuffer)
            copy.out.write(y)
        else:
            take(y, range(ubatch.n_rows))


def ubatches(n: int) -> list[UBatch]:
    """`n` ubatches of one to three rows, told apart by their slot."""
    made = []
    for i in range(n):
        n_rows = 1 + i % 3
        tokens = tuple(10 * i + r for r in range(n_rows))
        made.append(UBatch(tokens, (Span(i, 0, n_rows),), tuple(range(n_rows))))
    return made


def expected(ubatch: UBatch, n_stages: int) -> list[float]:
    """What the stages make of a ubatch, one after the other."""
    values = [float(t) for t in ubatch.tokens]
    for i in range(n_stages):
        values = [v * (2 * i + 3) + i for v in values]
    return values


class Run:
    """The executor over simulated stages: results, races and the time it took."""

    def __init__(
        self,
        seconds: Sequence[Sequence[float]],
        n_copies: int,
        *,
        seed: int = 0,
        copy_s: float = 0.0,
        pipelined: bool = True,
        fails: tuple[int, int] | None = None,
        executor: type[Executor] = Executor,
        traced: bool = False,
    ) -> None:
        n_stages, n_ubatches = len(seconds), len(seconds[0])
        self.world = World(seed, copy_s)
        self.stages = [
            SimStage(
                self.world,
                i,
                n_stages,
                n_copies,
                seconds[i],
                fails[1] if fails is not None and fails[0] == i else None,
            )
            for i in range(n_stages)
        ]
        self.trace = Trace(self.world.now)
        self.trace.enabled = traced
        self.executor = executor(self.stages, self.trace, pipelined=pipelined)
        self.results: dict[int, list[float]] = {}
        self.errors: dict[int, BaseException] = {}
        tickets: list[Ticket] = []
        for i, ubatch in enumerate(ubatches(n_ubatches)):
            tickets.append(self.executor.submit(ubatch, self._take(i)))
        self.n_waits_while_submitting = self.world.n_host_waits
        for i, ticket in enumerate(tickets):
            try:
                ticket.wait()
            except RuntimeError as exc:
                self.errors[i] = exc

    def _take(self, i: int) -> Take:
        def take(logits: torch.Tensor, rows: range) -> None:
            self.results[i] = logits[:, 0].tolist()

        return take
