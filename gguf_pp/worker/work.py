"""The stages that one client has here, run by the executor that runs those at home."""

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from gguf_pp import arch
from gguf_pp.arch import Model
from gguf_pp.backend.base import Backend, Stream
from gguf_pp.backend.cpu import CpuBackend
from gguf_pp.backend.cuda_relay import Broke
from gguf_pp.backend.trace import Trace
from gguf_pp.batch import UBatch
from gguf_pp.errors import RemoteError
from gguf_pp.pipeline.executor import Executor, Stage, Ticket
from gguf_pp.pipeline.kinds import make_ops_on
from gguf_pp.pipeline.load import DeviceLoader
from gguf_pp.pipeline.memory import Rung
from gguf_pp.pipeline.peer import bytes_of
from gguf_pp.pipeline.placement import visit
from gguf_pp.pipeline.ring import Copy
from gguf_pp.pipeline.sizing import SizeLoader
from gguf_pp.pipeline.split import Part
from gguf_pp.pipeline.stage import call
from gguf_pp.wire import ProtocolError, check_ubatch
from gguf_pp.worker.declared import Declared
from gguf_pp.worker.lender import Loan
from gguf_pp.worker.refusal import shown
from gguf_pp.worker.stages import Inlet, Outlet, Send, WorkedStage
from gguf_pp.worker.store import StoredModel

B = TypeVar("B", bound=Backend)

_LOGITS_AHEAD = 2
"""Parts of logits that may wait to be sent while the next is computed."""


@dataclass(frozen=True, slots=True)
class Ways:
    """Where results go: hidden states, logits of some outputs, the end of a ubatch (seconds per
    stage, or what went wrong), the news that an input copy is free, and why nothing will come any
    more."""

    send: Send
    send_logits: Callable[[UBatch, range, memoryview], None]
    report: Callable[[UBatch, list[float], BaseException | None], None]
    consumed: Callable[[], None]
    broke: Callable[[str], None]


@runtime_checkable
class _Fragile(Protocol):
    """A device that may break for good, and tells when a stream does."""

    broke: Broke


class Work:
    """Stages on devices of this worker. `take_in` is called from one thread, all else from one
    other. If a device breaks nothing comes out any more, but for the news of it."""

    def __init__(self, declared: Declared, stored: StoredModel, loan: Loan, ways: Ways) -> None:
        """Reserve the weights; raises OutOfMemory, FormatError, UnsupportedError, ProtocolError,
        and PlacementError for a device that is broken."""
        self.declared = declared
        self.rung: Rung | None = None
        self.n_rows = 0
        self._stored = stored
        self._loan = loan
        self._ways = ways
        self._model = arch.build(stored.metadata)
        self._check_ends()
        self._executor: Executor | None = None
        self._in_flight: dict[int, Ticket] = {}
        self._room = threading.Semaphore(_LOGITS_AHEAD)
        self._n_cached = [0] * declared.n_slots
        self._backends: list[Backend] = []
        self._stages: list[WorkedStage] = []
        self._inlet: Inlet | None = None
        self._outlet: Outlet | None = None
        self._told = threading.Lock()
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def _check_ends(self) -> None:
        """The declared layers are some of the model's, and its ends are where they belong."""
        declared, n_layers = self.declared, self._model.hp.n_layers
        last = declared.stages[-1][1].layers.stop
        if last > n_layers or (declared.heads and last != n_layers):
            raise ProtocolError(f"layers up to {last}, of a model that has {n_layers}")
        tensors = self._stored.tensors
        head = "output.weight" if "output.weight" in tensors else "token_embd.weight"
        tables = ["token_embd.weight"] * declared.embeds + [head] * declared.heads
        for name in tables:
            if name not in tensors or tensors[name].shape[0] != declared.n_vocab:
                raise ProtocolError(f"a vocabulary of another size than {name}")

    def _build(self) -> None:
        declared, model, loan = self.declared, self._model, self._loan
        sizes = [_weight_bytes(self._stored, model, part) for _, part in declared.stages]
        for i, (name, part) in enumerate(declared.stages):
            backend = self._opened(loan.open(name))
            if i == 0 and not declared.embeds and not isinstance(backend, CpuBackend):
                host = self._opened(loan.beside(backend))
                self._inlet = Inlet(host, backend.stream("upload"), model.hp.n_embd)
            make = partial(make_ops_on, backend, declared.kernels, exact=declared.exact)
            # Of what an inlet takes in, it is the inlet that knows when it has left.
            consumed = None if i or self._inlet is not None else self._ways.consumed
            stage = WorkedStage(i, backend, make, model, part, consumed)
            self._stages.append(stage)
            stage.reserve_weights(sizes[i])
        half = declared.wire == "f16"
        host = self._opened(loan.beside(self._stages[-1].backend))
        if declared.heads:
            self._out: Stream = host.stream("outlet")
        else:
            self._outlet = Outlet(host, model.hp.n_embd, self._ways.send, half=half)
            self._out = self._outlet.compute

    def _opened(self, backend: B) -> B:
        """The same, to be closed at the end; news of broken streams come here."""
        if backend not in self._backends:
            self._backends.append(backend)
            if isinstance(backend, _Fragile):
                backend.broke = self._broke
        return backend

    @property
    def _ends(self) -> list[Inlet | Outlet]:
        return [end for end in (self._inlet, self._outlet) if end is not None]

    @property
    def stages(self) -> list[WorkedStage]:
        """Those with layers, in order."""
        return self._stages

    def allocate(self, rung: Rung) -> None:
        """Reserve KV cache and buffers; raises OutOfMemory, keeping nothing."""
        self.release()
        try:
            for stage in self._stages:
                stage.allocate(rung, self.declared.n_slots, self.declared.kv_types)
            for end in self._ends:
                end.allocate(rung)
        except BaseException:
            self.release()
            raise
        self.rung = rung
        shape = (rung.ubatch_size, self._model.hp.n_embd)
        wants_half = self.declared.wire == "f16" and not self.declared.embeds
        self._half = torch.empty(shape, dtype=torch.float16) if wants_half else None

    def release(self) -> None:
        """Give back everything but the weights."""
        self._executor = self.rung = None
        for stage in self._stages:
            stage.release()
        for end in self._ends:
            end.release()

    def load(self, n_ctx: int, progress: Callable[[int], None]) -> None:
        """Read the weights and begin to take ubatches. Raises RemoteError, ProtocolError."""
        if self.rung is None or n_ctx != self.rung.ctx_size:
            raise ProtocolError("to load, the same context must be allocated first")
        self._stored.finish()
        futures = []
        for stage in self._stages:
            loader = DeviceLoader(self._stored, n_ctx, stage.ops, progress)
            futures.append(call(stage.compute, partial(stage.load_weights, loader)))
        for future in futures:
            future.result()
        for stage in self._stages:
            stage.settle()
        self._stored.close()
        stages: list[Stage] = [*self._stages]
        if self._inlet is not None:
            stages.insert(0, self._inlet)
        if self._outlet is not None:
            stages.append(self._outlet)
        self._executor = Executor(stages, Trace(), pipelined=True)

    def payload_bytes(self, ubatch: UBatch) -> int:
        """Bytes of the hidden states that come with `ubatch`, after checking it. Raises
        ProtocolError."""
        if self._executor is None or self.rung is None:
            raise ProtocolError("a ubatch before the stage is loaded")
        rung, declared = self.rung, self.declared
        check_ubatch(
            ubatch,
            max_rows=rung.ubatch_size,
            n_slots=declared.n_slots,
            n_cells=rung.ctx_size,
            n_vocab=declared.n_vocab,
        )
        for span in ubatch.spans:
            # Cells that were never written may hold what another session left in memory.
            if span.start > self._n_cached[span.slot]:
                raise ProtocolError(f"rows from cell {span.start}, of which not all are computed")
        if declared.embeds:
            return 0
        return ubatch.n_rows * self._model.hp.n_embd * (2 if self._half is not None else 4)

    def target(self, ubatch: UBatch) -> memoryview:
        """Where the hidden states of the next ubatch belong; there must be a free copy."""
        if self._half is not None:
            return bytes_of(self._half[: ubatch.n_rows])
        return bytes_of(self._input(ubatch))

    def _input(self, ubatch: UBatch) -> Tensor:
        buffer = self._copy_of(self._stages[0]).inp
        if self._inlet is not None:
            buffer = self._copy_of(self._inlet).out
        assert buffer is not None
        return buffer.tensor[: ubatch.n_rows]

    def _copy_of(self, stage: Stage) -> Copy:
        """Of the ubatch that is submitted next."""
        assert self._executor is not None
        copies = stage.ring.copies
        return copies[self._executor.n_submitted % len(copies)]

    def take_in(self, ubatch: UBatch) -> None:
        """Run a ubatch, whose hidden states are in place; what comes of it goes the ways."""
        assert self._executor is not None
        if self._half is not None:
            self._input(ubatch).copy_(self._half[: ubatch.n_rows])
        for span in ubatch.spans:
            self._n_cached[span.slot] = span.start + span.n_rows
        self.n_rows += ubatch.n_rows
        first = self._copy_of(self._stages[0])
        ticket = self._executor.submit(ubatch, partial(self._take, ubatch))
        self._in_flight[id(ubatch)] = ticket
        if self._inlet is not None:
            self._inlet.lend(first.filled, self._ways.consumed)
        report = partial(self._out.run, partial(self._report, ticket))
        if self._outlet is not None:
            report()
        else:  # logits are queued on the way out while they are made; the report comes after them
            self._stages[-1].compute.run(report)

    def _take(self, ubatch: UBatch, logits: Tensor, rows: range) -> None:
        """Send logits while the next ones are computed."""
        self._room.acquire()
        kept = logits.clone()
        self._out.run(partial(self._send_logits, ubatch, rows, kept))

    def _send_logits(self, ubatch: UBatch, rows: range, logits: Tensor) -> None:
        try:
            with suppress(RemoteError):  # a client that is gone is noticed elsewhere
                self._ways.send_logits(ubatch, rows, bytes_of(logits))
        finally:
            self._room.release()

    def _report(self, ticket: Ticket) -> None:
        ubatch, error = ticket.ubatch, _outcome(ticket)
        if error is not None and self._loan.inspect():
            self._broke(error)
            return
        seconds = [stage.seconds_of(ubatch, is_through=error is None) for stage in self._stages]
        self._in_flight.pop(id(ubatch), None)
        with suppress(RemoteError):
            self._ways.report(ubatch, seconds, error)

    def _broke(self, exc: BaseException) -> None:
        """A stream has ended, with all those that wait for it: say so, once."""
        if self._told.acquire(blocking=False):
            self._ways.broke(self._loan.inspect() or f"a stage broke: {shown(exc)}")

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in flight."""
        return not self._in_flight

    def close(self) -> None:
        """Skip what has not begun, wait for the rest, and drop everything."""
        gone = RemoteError("the client is gone")
        for ticket in list(self._in_flight.values()):
            ticket.skip(gone)
        for backend in self._backends:
            backend.close()
        self._stored.close()
        if not self._loan.inspect():
            self.release()
        self._loan.end(keep=[self._stages, self._ends, self._backends])
        self._stages, self._backends, self._inlet, self._outlet = [], [], None, None


def _outcome(ticket: Ticket) -> BaseException | None:
    """What went wrong with a ubatch, once all devices are through with it."""
    try:
        ticket.wait()
    except BaseException as exc:  # noqa: BLE001 - the client is told of it
        return exc
    return None


def _weight_bytes(stored: StoredModel, model: Model, part: Part) -> int:
    """What the tensors of a part take; each is checked on the way. Raises FormatError."""
    loader = SizeLoader(stored, 1)
    visit(loader, model, part)
    return loader.n_bytes
