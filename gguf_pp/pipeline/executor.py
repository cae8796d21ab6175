"""Walk the plan: queue every copy and every computation, and wait for nothing but results."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from gguf_pp.backend.base import Backend, Event, Stream
from gguf_pp.backend.trace import Kind, Slice, Trace
from gguf_pp.batch import UBatch
from gguf_pp.pipeline.feedback import Feedback
from gguf_pp.pipeline.plan import Step, plan_steps
from gguf_pp.pipeline.ring import Copy, Ring

Take = Callable[[Tensor, range], Sequence[int] | None]
"""Consumes what was made of the outputs `range` (indexes into UBatch.outputs): logits float32
[n, V]; or, where the device has chosen (UBatch.choices), token ids int32 [n]. It runs where logits
are made, inside the last device's stream; or on the host, from a device that it cannot look into.
It returns the tokens it chose, if it chose any. The tensor is overwritten afterwards."""

Deliver = Callable[[], None]
"""Blocks until logits are on the host and hands them to `take`; raises what that raises. What was
delivered is not delivered again."""


class Stage(Protocol):
    """A contiguous range of layers on one device, or on several of another machine.

    `intake` is where `load` runs: the compute stream itself, or on another machine the stream that
    sends. `elapsed_s` is how long the last `forward` took where it really ran, None if here.
    """

    ring: Ring
    compute: Stream
    transfer: Stream | None

    @property
    def backend(self) -> Backend:
        """The device, or what stands here for one elsewhere: it makes events."""
        ...

    @property
    def intake(self) -> Stream:
        """The stream of `load`."""
        ...

    @property
    def elapsed_s(self) -> float | None:
        """Seconds of the last `forward`, for a stage elsewhere."""
        ...

    def load(self, copy: Copy, ubatch: UBatch) -> None:
        """Move the input out of `copy`, into the stage's own work memory."""
        ...

    def forward(self, copy: Copy, ubatch: UBatch, take: Take) -> Deliver | None:
        """Compute on what was loaded: write `copy.out`, or hand logits to `take`; or return how the
        host is to hand them over once it waits for the ubatch."""
        ...

    def abandon(self, copy: Copy, ubatch: UBatch) -> None:
        """Forget what was loaded, if anything was: `forward` will not be called for it."""
        ...


class Ticket:
    """A ubatch on its way. A failure in one stage skips its later stages and nothing else."""

    def __init__(self, ubatch: UBatch, done: Event) -> None:
        self.ubatch = ubatch
        self.error: BaseException | None = None
        self.deliver: Deliver | None = None
        self.done = done

    def skip(self, reason: BaseException) -> None:
        """Skip what has not begun; `wait` raises `reason`."""
        if self.error is None:
            self.error = reason

    def wait(self) -> None:
        """Block the host until the last stage is through and its logits are taken; raise what went
        wrong anywhere, an interrupt only once."""
        self.done.synchronize()
        error = self.error
        if error is not None:
            if not isinstance(error, Exception):
                self.error = RuntimeError("the ubatch was interrupted")
            raise error
        if self.deliver is not None:
            self.deliver()


class Executor:
    """Runs ubatches through stages, over the rotating copies of their rings.

    Not pipelined, the host waits after every stage and devices take turns; a single one has nobody
    to take turns with. `feedback` is needed for ubatches with `late` rows or a `parcel`.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        trace: Trace,
        *,
        pipelined: bool,
        feedback: Feedback | None = None,
    ) -> None:
        self.stages = stages
        self.trace = trace
        self.pipelined = pipelined
        self._takes_turns = not pipelined and len(stages) > 1
        self._feedback = feedback
        self.n_copies = len(stages[0].ring.copies)
        self.n_submitted = 0

    def submit(self, ubatch: UBatch, take: Take) -> Ticket:
        """Queue `ubatch` on all stages; returns at once unless devices take turns."""
        last = self.stages[-1]
        # An event of its own: `done` of the copy is recorded again by later ubatches.
        ticket = Ticket(ubatch, last.backend.event())
        host = self.trace.open("host", -1, self.n_submitted, 0, ubatch.n_rows)
        if host is not None:
            self.trace.start(host)
        if self._feedback is not None:
            self._feedback.expect(ubatch)
        for step in plan_steps(len(self.stages), 1, self.n_copies, first=self.n_submitted):
            if step.i_stage > 0:
                self._ship(step, ubatch.n_rows)
            self._run(step, ticket, take)
            if self._takes_turns:
                self.stages[step.i_stage].ring.copies[step.i_copy].done.synchronize()
        if self._feedback is not None:
            self._feedback.ship(ubatch)
        last.compute.record(ticket.done)
        self.n_submitted += 1
        if host is not None:
            self.trace.end(host)
        return ticket

    def _ship(self, step: Step, n_rows: int) -> None:
        """Queue the way of the stage before's output to this step's input; waits as in ring.py."""
        i_from = step.i_stage - 1
        stage, source = self.stages[i_from], self.stages[i_from].ring.copies[step.i_copy]
        target = self.stages[step.i_stage].ring.copies[step.i_copy]
        assert stage.transfer is not None
        if source.out is None or target.inp is None:
            # Linked workers: nothing passes through here, but the first one announces the ubatch.
            self.stages[step.i_stage].intake.wait(source.free)
            return
        stage.transfer.wait(source.done)
        stage.transfer.wait(target.free)
        with self._recorded(stage.transfer, "transfer", step._replace(i_stage=i_from), n_rows):
            stage.transfer.copy(target.inp, source.out, n_rows)
        stage.transfer.record(target.filled)

    def _run(self, step: Step, ticket: Ticket, take: Take) -> None:
        """Queue the computation of one stage; waits as in ring.py."""
        stage = self.stages[step.i_stage]
        copy = stage.ring.copies[step.i_copy]
        stage.intake.wait(copy.filled)
        if step.i_stage + 1 < len(self.stages):
            stage.compute.wait(self.stages[step.i_stage + 1].ring.copies[step.i_copy].filled)
        away = stage.intake is not stage.compute
        piece = self._open("compute", step, ticket.ubatch.n_rows)
        if piece is not None:
            stage.intake.run(functools.partial(self.trace.start, piece))
        stage.intake.run(functools.partial(_guarded, ticket, stage.load, copy))
        stage.intake.record(copy.free)
        if away:
            stage.compute.wait(copy.free)
        forward = functools.partial(stage.forward, take=take)
        stage.compute.run(functools.partial(_guarded, ticket, forward, copy, stage.abandon))
        if piece is not None:
            stage.compute.run(functools.partial(self._end, piece, stage))
        stage.compute.record(copy.done)

    def _open(self, kind: Kind, step: Step, n_rows: int) -> Slice | None:
        return self.trace.open(kind, step.i_stage, step.i_ubatch, step.i_copy, n_rows)

    def _end(self, piece: Slice, stage: Stage) -> None:
        """End a slice. One that ran elsewhere began as long ago as it took there, not when its
        input was sent."""
        self.trace.end(piece)
        if stage.elapsed_s is not None:
            piece.start_s = piece.end_s - stage.elapsed_s

    @contextmanager
    def _recorded(self, stream: Stream, kind: Kind, step: Step, n_rows: int) -> Iterator[None]:
        """Let the trace know when what is queued inside the block begins and ends."""
        piece = self._open(kind, step, n_rows)
        if piece is not None:
            stream.run(functools.partial(self.trace.start, piece))
        yield
        if piece is not None:
            stream.run(functools.partial(self.trace.end, piece))


def _guarded(
    ticket: Ticket,
    work: Callable[[Copy, UBatch], Deliver | None],
    copy: Copy,
    instead: Callable[[Copy, UBatch], None] | None = None,
) -> None:
    """Do `work` for the ticket's ubatch and keep what it raises; if an earlier stage failed, do
    `instead`."""
    if ticket.error is not None:
        if instead is not None:
            instead(copy, ticket.ubatch)
        return
    try:
        deliver = work(copy, ticket.ubatch)
        if deliver is not None:
            ticket.deliver = deliver
    except BaseException as exc:  # noqa: BLE001 - raised again where the host waits
        ticket.error = exc
