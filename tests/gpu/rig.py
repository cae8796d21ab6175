"""The real executor, ring and backend on one device under several names.

Stages do arithmetic whose result tells whether all rows were there, and spin for a while before
and after. Whoever reads a copy poisons it afterwards, so that no stale row is right by chance.
`kernels` is what launches: on a device `DeviceKernels`, in tests that of a double.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from typing import Any, Literal, Protocol

import torch

from gguf_pp.backend.base import Stream
from gguf_pp.backend.cuda import CudaBackend, open_cuda
from gguf_pp.backend.cuda_host import Landing
from gguf_pp.backend.trace import Slice, Trace
from gguf_pp.batch import Span, UBatch
from gguf_pp.config import Device
from gguf_pp.pipeline.executor import Executor, Take
from gguf_pp.pipeline.ring import Copy, Ring

N_ROWS = 64
WIDTH = 2048
EdgeCopy = Literal["auto", "p2p", "host"]


class Kernels(Protocol):
    """Launches on the current stream. `api` is the torch module, or a double of it."""

    api: Any
    width: int

    def begin(self, ubatches: Sequence[UBatch]) -> None:
        """Called before anything else of a run."""

    def spin(self, seconds: float) -> None:
        """Keep the stream busy."""

    def copy(self, dst: Any, src: Any) -> None:
        """dst <- src."""

    def poison(self, dst: Any) -> None:
        """dst <- NaN."""

    def affine(self, dst: Any, src: Any, a: int, b: int) -> None:
        """dst <- a src + b; src may be the values of each row, on the host."""

    def on_host(self, rows: Any) -> torch.Tensor:
        """A copy of rows that have landed."""


class DeviceKernels:
    """On cuda:0."""

    api = torch
    width = WIDTH

    def __init__(self) -> None:
        self._tokens: dict[tuple[float, ...], torch.Tensor] = {}
        cycles = 20_000_000
        for _ in range(2):  # clocks rise first
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            torch.cuda._sleep(cycles)
            end.record()
            end.synchronize()
        self._cycles_per_s = cycles / (1e-3 * start.elapsed_time(end))

    def spin(self, seconds: float) -> None:
        if seconds > 0:
            torch.cuda._sleep(int(seconds * self._cycles_per_s))

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        dst.copy_(src, non_blocking=True)

    def poison(self, dst: torch.Tensor) -> None:
        dst.fill_(torch.nan)

    def affine(self, dst: torch.Tensor, src: Any, a: int, b: int) -> None:
        if not isinstance(src, torch.Tensor):
            src = self._tokens[tuple(src)]
        torch.mul(src, a, out=dst)
        dst.add_(b)

    def begin(self, ubatches: Sequence[UBatch]) -> None:
        # Here, because a copy from memory that is not pinned would block the host.
        for ubatch in ubatches:
            values = torch.tensor(ubatch.tokens, dtype=torch.float32)[:, None].expand(-1, WIDTH)
            self._tokens[ubatch.tokens] = values.contiguous().to("cuda:0")
        torch.cuda.synchronize()

    def on_host(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.clone()


def ubatches(n: int) -> list[UBatch]:
    """`n` ubatches of one to all rows."""
    made = []
    for i in range(n):
        n_rows = (1, N_ROWS, N_ROWS // 3)[i % 3]
        tokens = tuple(N_ROWS * i + r for r in range(n_rows))
        made.append(UBatch(tokens, (Span(i, 0, n_rows),), tuple(range(n_rows))))
    return made


def expected(ubatch: UBatch, n_stages: int, width: int) -> torch.Tensor:
    """What stages in turn make of it: whole numbers, which float32 holds exactly."""
    values = torch.tensor(ubatch.tokens, dtype=torch.float64)
    for i in range(n_stages):
        values = values * (2 * i + 3) + i
    return values.float()[:, None].expand(-1, width)


class DeviceTrace(Trace):
    """Notes the device's time, by events in the streams, of every computation and transfer.

    `delays` are seconds that a piece of work starts late and ends late. A transfer poisons what it
    has sent.
    """

    def __init__(self, kernels: Kernels, delays: Callable[[], tuple[float, float]]) -> None:
        super().__init__()
        self.enabled = True
        self.stages: Sequence[SpinStage] = ()
        self.events: list[tuple[Slice, Any, Any]] = []
        self._kernels, self._delays = kernels, delays
        self._begun: dict[int, tuple[Any, float]] = {}

    def start(self, piece: Slice) -> None:
        if piece.kind == "host":
            return
        early, late = self._delays()
        begun = self._event()
        self._kernels.spin(early)
        self._begun[id(piece)] = begun, late

    def end(self, piece: Slice) -> None:
        if piece.kind == "host":
            return
        begun, late = self._begun.pop(id(piece))
        self._kernels.spin(late)
        if piece.kind == "transfer":
            out = self.stages[piece.i_stage].ring.copies[piece.i_copy].out
            assert out is not None
            self._kernels.poison(out.tensor)
        self.events.append((piece, begun, self._event()))

    def _event(self) -> Any:
        event = self._kernels.api.cuda.Event(enable_timing=True)
        event.record()
        return event

    def times(self, origin: Any) -> dict[tuple[str, int, int], tuple[float, float]]:
        """Seconds from `origin` at which (kind, stage, ubatch) began and ended."""
        return {
            (p.kind, p.i_stage, p.i_ubatch): (
                1e-3 * origin.elapsed_time(begun), 1e-3 * origin.elapsed_time(ended)
            )
            for p, begun, ended in self.events
        }  # fmt: skip


class SpinStage:
    """Multiplies by an odd number and adds its index, in `seconds`."""

    elapsed_s = None

    def __init__(
        self,
        kernels: Kernels,
        backend: CudaBackend,
        i_stage: int,
        n_stages: int,
        n_copies: int,
        n_ubatches: int,
        seconds: Callable[[], float],
    ) -> None:
        first, last = i_stage == 0, i_stage == n_stages - 1
        width = kernels.width
        self.backend, self._kernels = backend, kernels
        self._i_stage, self._seconds = i_stage, seconds
        self.ring = Ring(backend, n_copies, N_ROWS, width, inp=not first, out=not last)
        self.compute: Any = backend.stream(f"stage {i_stage} compute", compute=True)
        self.transfer: Any = None if last else backend.stream(f"stage {i_stage} transfer")
        self._work = backend.buffer(N_ROWS, width, "work").tensor
        self._logits = backend.buffer(N_ROWS, width, "logits").tensor if last else None
        shape, dtype = (N_ROWS, width), kernels.api.float32
        self.landing = Landing(kernels.api, n_ubatches, shape, dtype) if last else None

    @property
    def intake(self) -> Stream:
        return self.compute

    def load(self, copy: Copy, ubatch: UBatch) -> None:
        if copy.inp is not None:
            n = ubatch.n_rows
            self._kernels.copy(self._work[:n], copy.inp.tensor[:n])
            self._kernels.poison(copy.inp.tensor)

    def forward(self, copy: Copy, ubatch: UBatch, take: Take) -> None:
        n = ubatch.n_rows
        out = self._logits if copy.out is None else copy.out.tensor
        x = ubatch.tokens if self._i_stage == 0 else self._work[:n]
        self._kernels.spin(self._seconds())
        self._kernels.affine(out[:n], x, 2 * self._i_stage + 3, self._i_stage)
        if self.landing is not None:
            take.parcel = self.landing.send(out[:n], partial(take, rows=range(n)))

    def abandon(self, copy: Copy, ubatch: UBatch) -> None:
        raise AssertionError("no stage fails here")


class Consumer:
    """Keeps the logits of a ubatch."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self.parcel: Any = None
        self.rows: torch.Tensor | None = None

    def __call__(self, logits: Any, rows: range) -> None:
        self.rows = self._kernels.on_host(logits)


class Deaf:
    """A stream that does not wait for some events."""

    def __init__(self, stream: Any, events: Sequence[Any]) -> None:
        self._stream, self._events = stream, events

    def wait(self, event: Any) -> None:
        if not any(event is other for other in self._events):
            self._stream.wait(event)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


WAITS = (
    "the output is there",
    "the next input is free",
    "the input is there",
    "the last output was shipped",
)


def forget(wait: str, stages: Sequence[SpinStage]) -> None:
    """Have all stages leave out one kind of wait; see pipeline/ring.py."""
    for stage, following in pairwise(stages):
        mine, others = stage.ring.copies, following.ring.copies
        if wait == "the output is there":
            stage.transfer = Deaf(stage.transfer, [c.done for c in mine])
        elif wait == "the next input is free":
            stage.transfer = Deaf(stage.transfer, [c.free for c in others])
        elif wait == "the input is there":
            following.compute = Deaf(following.compute, [c.filled for c in others])
        else:
            stage.compute = Deaf(stage.compute, [c.filled for c in others])


class Run:
    """Ubatches through stages on one device: what came of them, and when."""

    def __init__(
        self,
        kernels: Kernels,
        n_stages: int,
        n_copies: int,
        n_ubatches: int,
        *,
        seconds: Callable[[], float],
        delays: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0),
        edge_copy: EdgeCopy = "auto",
        pipelined: bool = True,
        forgotten: str | None = None,
    ) -> None:
        made = ubatches(n_ubatches)
        kernels.begin(made)
        api = kernels.api
        with ExitStack() as stack:
            names = [Device("cuda:0", "cuda", 0)] * n_stages
            backends = open_cuda(names, edge_copy=edge_copy, api=api)
            for backend in backends:
                stack.callback(backend.close)
            self.stages = [
                SpinStage(kernels, b, i, n_stages, n_copies, n_ubatches, seconds)
                for i, b in enumerate(backends)
            ]
            if forgotten is not None:
                forget(forgotten, self.stages)
            trace = DeviceTrace(kernels, delays)
            trace.stages = self.stages
            executor = Executor(self.stages, trace, pipelined=pipelined)
            origin = api.cuda.Event(enable_timing=True)
            api.cuda.synchronize(0)
            origin.record()
            takes = [Consumer(kernels) for _ in made]
            tickets = [executor.submit(*pair) for pair in zip(made, takes, strict=True)]
            for ticket, take in zip(tickets, takes, strict=True):
                ticket.wait()
                self.stages[-1].landing.deliver(take.parcel)
            api.cuda.synchronize(0)
        self.rows = [take.rows for take in takes]
        self.times = trace.times(origin)
        wanted = [expected(u, n_stages, kernels.width) for u in made]
        self.n_wrong = sum(not torch.equal(a, b) for a, b in zip(self.rows, wanted, strict=True))

    @property
    def makespan_s(self) -> float:
        """From the first work's start to the last one's end."""
        return max(b for _, b in self.times.values()) - min(a for a, _ in self.times.values())

    def disorder(self, tolerance_s: float) -> list[str]:
        """What began before what it needs had ended."""
        wrong = []
        times = self.times
        for (kind, s, u), (start, _) in times.items():
            needed = [("compute", s, u)] if kind == "transfer" else [("transfer", s - 1, u)]
            if kind == "compute":
                needed.append(("compute", s, u - 1))
            for key in needed:
                if key in times and times[key][1] > start + tolerance_s:
                    wrong.append(f"{kind} {s} of ubatch {u} began before {key} ended")
        return wrong

    @property
    def busy_s(self) -> float:
        """What computations take, one after the other."""
        spans = ((a, b) for (kind, *_), (a, b) in self.times.items() if kind == "compute")
        return sum(end - start for start, end in spans)

    @property
    def at_once(self) -> float:
        """How many stages compute at the same time, on average from first to last."""
        return self.busy_s / self.makespan_s
