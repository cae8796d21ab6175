"""The real executor and ring over CUDA and CPU devices, on the double of torch."""

import contextlib
from functools import partial

import torch

from gguf_pp.backend.cpu import Budget, CpuBackend
from gguf_pp.backend.cuda import CudaBackend, open_cuda
from gguf_pp.backend.cuda_host import Landing
from gguf_pp.backend.host import share_cores
from gguf_pp.backend.trace import Trace
from gguf_pp.config import Device
from gguf_pp.pipeline.executor import Executor
from gguf_pp.pipeline.ring import Ring
from tests.cuda_double import Double
from tests.simulated import WIDTH, expected, ubatches

N_ROWS = 8


def named(*names):
    """Devices as parsed: "0" is cuda:0, "cpu" is a CPU."""
    return [
        Device("cpu", "cpu", None) if name == "cpu" else Device(f"cuda:{name}", "cuda", int(name))
        for name in names
    ]


class ToyStage:
    """A stage with the arithmetic of `simulated`, as kernels of the double or, on a CPU, at once.

    `seconds` are those of its kernels, by ubatch; `meet` is called before it computes.
    """

    def __init__(self, double, backend, i_stage, n_stages, n_copies, seconds, meet):
        first, last = i_stage == 0, i_stage == n_stages - 1
        self.double, self.backend, self.last = double, backend, last
        self.ring = Ring(backend, n_copies, N_ROWS, WIDTH, inp=not first, out=not last)
        self.compute = self.intake = backend.stream(f"stage {i_stage} compute", compute=True)
        self.transfer = None if last else backend.stream(f"stage {i_stage} transfer")
        self.elapsed_s = None
        self.i_stage, self.seconds, self.meet = i_stage, seconds, meet
        self.on_cuda = isinstance(backend, CudaBackend)
        self.work = backend.buffer(N_ROWS, WIDTH, "work").tensor
        if last and self.on_cuda:
            self.logits = backend.buffer(N_ROWS, WIDTH, "logits").tensor
            self.landing = Landing(double, n_stages + n_copies, (N_ROWS, WIDTH), double.float32)

    def launch(self, label, reads, writes, ubatch, work):
        if self.on_cuda:
            seconds = self.seconds[ubatch.spans[0].slot] if label == "forward" else 0
            self.double.launch(label, reads, writes, work, seconds)
        else:
            work()

    def data(self, tensor):
        return tensor.data if self.on_cuda else tensor

    def load(self, copy, ubatch):
        n = ubatch.n_rows
        if copy.inp is not None:
            source, work = copy.inp.tensor, self.work

            def move():
                self.data(work)[:n] = self.data(source)[:n]

            self.launch("load", [source], [work], ubatch, move)

    def abandon(self, *what):
        pass

    def forward(self, copy, ubatch, take):
        self.meet(self.i_stage, ubatch.spans[0].slot)
        n, work = ubatch.n_rows, self.work
        y = copy.out.tensor if copy.out is not None else self.logits if self.on_cuda else work
        tokens = torch.tensor(ubatch.tokens, dtype=torch.float32)[:, None].expand(-1, WIDTH)

        def compute():
            x = tokens if self.i_stage == 0 else self.data(work)[:n]
            self.data(y)[:n] = x * (2 * self.i_stage + 3) + self.i_stage

        reads = [] if self.i_stage == 0 else [work]
        self.launch("forward", reads, [y], ubatch, compute)
        if self.last and not self.on_cuda:
            take(y[:n], None)
        elif self.last:
            parcel = self.landing.send(y[:n], lambda rows: take(rows.read(), None))
            if self.backend.hosted:
                self.landing.deliver(parcel)
            else:
                take.parcel = parcel


class Run:
    """What came of `n_ubatches` through stages on `names`, and what was asked of torch for it."""

    def __init__(
        self,
        names,
        n_copies=2,
        *,
        n_ubatches=7,
        double=None,
        seed=0,
        edge_copy="auto",
        pipelined=True,
        executor=Executor,
        meet=lambda i_stage, i_ubatch: None,
        seconds=None,
    ):
        self.double = double or Double(seed=seed)
        self.results, self.errors = {}, {}
        with contextlib.ExitStack() as stack:
            devices = named(*names)
            opened = iter(open_cuda(devices, edge_copy=edge_copy, api=self.double))
            self.backends = [self.open(device, opened) for device in devices]
            for backend in self.backends:
                stack.callback(backend.close)
            n = len(names)
            self.stages = [
                ToyStage(
                    self.double,
                    backend,
                    i,
                    n,
                    n_copies,
                    seconds[i] if seconds else [1.0] * n_ubatches,
                    meet,
                )
                for i, backend in enumerate(self.backends)
            ]
            self.executor = executor(self.stages, Trace(), pipelined=pipelined)
            self.double.log.clear()
            self.started_s = self.double.world.makespan_s
            self.tickets, takes = [], []
            for i, ubatch in enumerate(ubatches(n_ubatches)):
                takes.append(partial(self.take, i))
                takes[i].parcel = None
                self.tickets.append(self.executor.submit(ubatch, takes[i]))
            self.log = list(self.double.log)
            self.submitted()
            for i, (ticket, take) in enumerate(zip(self.tickets, takes, strict=True)):
                self.land(i, ticket, take)

    def open(self, device, opened):
        if device.kind == "cuda":
            return next(opened)
        return CpuBackend(device.name, share_cores(1)[0], 1, Budget(1 << 20))

    def submitted(self):
        """Called when all is queued, and nothing waited for."""

    def take(self, i, logits, rows):
        self.results[i] = logits[:, 0].tolist()

    def land(self, i, ticket, take):
        try:
            ticket.wait()
            if take.parcel is not None:
                self.stages[-1].landing.deliver(take.parcel)
        except ArithmeticError as exc:
            self.errors[i] = exc

    @property
    def races(self):
        return self.double.world.races

    @property
    def makespan_s(self):
        return self.double.world.makespan_s - self.started_s

    def is_right(self):
        wanted = {i: expected(u, len(self.stages)) for i, u in enumerate(ubatches(7))}
        return self.races == [] and self.results == wanted

    def names(self):
        """Of streams and events, as in scheduler's protocol: S0, X0, D1, done[0][1]."""
        names = {}
        for s, stage in enumerate(self.stages):
            names[stage.compute.raw] = f"S{s}"
            names[stage.backend.idle] = f"D{s}"
            if stage.transfer is not None:
                names[stage.transfer.raw] = f"X{s}"
            for c, copy in enumerate(stage.ring.copies):
                for kind in ("filled", "free", "done"):
                    mark = getattr(copy, kind).mark
                    if mark is not None:
                        names[mark.raw] = f"{kind}[{s}][{c}]"
        for u, ticket in enumerate(self.tickets):
            names[ticket.done.mark.raw] = f"ticket[{u}]"
        return names

    def script(self):
        """What was asked of torch until all was queued, one line each."""
        names = self.names()
        lines = []
        for what, stream, *details in self.log:
            if what == "copy":
                details = []
            words = [names.get(d, d if isinstance(d, str) else "landed") for d in details]
            lines.append(" ".join([what, names.get(stream, "?"), *words]))
        return lines
