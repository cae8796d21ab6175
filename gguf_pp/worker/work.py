"""The stages that one client has here, run by the executor that runs those at home."""

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gguf_pp import arch
from gguf_pp.arch import Model
from gguf_pp.backend.base import Stream
from gguf_pp.backend.cpu import CpuBackend
from gguf_pp.backend.trace import Trace
from gguf_pp.batch import UBatch
from gguf_pp.errors import RemoteError
from gguf_pp.ops import make_ops
from gguf_pp.pipeline.executor import Executor, Stage, Ticket
from gguf_pp.pipeline.load import DeviceLoader
from gguf_pp.pipeline.memory import Rung
from gguf_pp.pipeline.peer import bytes_of
from gguf_pp.pipeline.placement import visit
from gguf_pp.pipeline.sizing import SizeLoader
from gguf_pp.pipeline.split import Part
from gguf_pp.pipeline.stage import call
from gguf_pp.wire import ProtocolError, check_ubatch
from gguf_pp.worker.declared import Declared
from gguf_pp.worker.lender import Lease, Lender
from gguf_pp.worker.stages import Outlet, Send, WorkedStage
from gguf_pp.worker.store import StoredModel

_LOGITS_AHEAD = 2
"""Parts of logits that may wait to be sent while the next is computed."""


@dataclass(frozen=True, slots=True)
class Ways:
    """Where results go: hidden states, logits of some outputs, the end of a ubatch (seconds per
    stage, or what went wrong), and the news that an input copy is free."""

    send: Send
    send_logits: Callable[[UBatch, range, memoryview], None]
    report: Callable[[UBatch, list[float], BaseException | None], None]
    consumed: Callable[[], None]


class Work:
    """Stages on devices of this worker. `take_in` is called from one thread, all else from one
    other."""

    def __init__(
        self, declared: Declared, stored: StoredModel, lender: Lender, lease: Lease, ways: Ways
    ) -> None:
        """Reserve the weights; raises OutOfMemory, FormatError, UnsupportedError, ProtocolError."""
        self.declared = declared
        self.rung: Rung | None = None
        self.n_rows = 0
        self._stored = stored
        self._ways = ways
        self._model = arch.build(stored.metadata)
        self._check_ends()
        self._executor: Executor | None = None
        self._in_flight: dict[int, Ticket] = {}
        self._room = threading.Semaphore(_LOGITS_AHEAD)
        self._n_cached = [0] * declared.n_slots
        self._backends: list[CpuBackend] = []
        self._stages: list[WorkedStage] = []
        self._outlet: Outlet | None = None
        try:
            self._build(lender, lease)
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

    def _build(self, lender: Lender, lease: Lease) -> None:
        declared, model = self.declared, self._model
        sizes = [_weight_bytes(self._stored, model, part) for _, part in declared.stages]
        for i, (name, part) in enumerate(declared.stages):
            backend = lender.lend(name, lease)
            self._backends.append(backend)
            make = partial(make_ops, declared.kernels, backend.n_threads, exact=declared.exact)
            consumed = None if i else self._ways.consumed
            stage = WorkedStage(i, backend, make, model, part, consumed)
            self._stages.append(stage)
            stage.reserve_weights(sizes[i])
        half = declared.wire == "f16"
        last = self._backends[-1]
        if declared.heads:
            self._out: Stream = last.stream("outlet")
        else:
            self._outlet = Outlet(last, model.hp.n_embd, self._ways.send, half=half)
            self._out = self._outlet.compute

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
            if self._outlet is not None:
                self._outlet.allocate(rung)
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
        if self._outlet is not None:
            self._outlet.release()

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
        self._stored.close()
        stages: list[Stage] = [*self._stages]
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
        assert self._executor is not None
        ring = self._stages[0].ring
        copy = ring.copies[self._executor.n_submitted % len(ring.copies)]
        assert copy.inp is not None
        return copy.inp.tensor[: ubatch.n_rows]

    def take_in(self, ubatch: UBatch) -> None:
        """Run a ubatch, whose hidden states are in place; what comes of it goes the ways."""
        assert self._executor is not None
        if self._half is not None:
            self._input(ubatch).copy_(self._half[: ubatch.n_rows])
        for span in ubatch.spans:
            self._n_cached[span.slot] = span.start + span.n_rows
        self.n_rows += ubatch.n_rows
        ticket = self._executor.submit(ubatch, partial(self._take, ubatch))
        self._in_flight[id(ubatch)] = ticket
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
        key = id(ticket.ubatch)
        seconds = [stage.seconds_of.pop(key, 0.0) for stage in self._stages]
        self._in_flight.pop(key, None)
        with suppress(RemoteError):
            self._ways.report(ticket.ubatch, seconds, ticket.error)

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
        self.release()
        self._stages, self._backends, self._outlet = [], [], None
        self._stored.close()


def _weight_bytes(stored: StoredModel, model: Model, part: Part) -> int:
    """What the tensors of a part take; each is checked on the way. Raises FormatError."""
    loader = SizeLoader(stored, 1)
    visit(loader, model, part)
    return loader.n_bytes
