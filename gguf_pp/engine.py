"""Sequences, slots and groups: what runs next, and where each token goes.

The engine is driven by its caller: `step` queues what may go, then waits for the oldest ubatch in
flight. Sequences join and leave between steps. Prompts are cut into ubatches that follow each other
down the stages; decoding sequences are dealt into groups, so that every device has a group to work
on while another has the next one.

Where the last stage hands tokens back to the first (pipeline/feedback.py), the host runs ahead: it
queues steps of a sequence whose tokens it does not know yet. What turns out to be surplus, behind
the end of a sequence, is skipped if it has not begun, and ignored otherwise.

All decisions (lengths, positions, slots) are made here, in one thread. On the last device only
sampling happens: it touches nothing but the samplers of the ubatch's own sequences, for one ubatch
after the other.
"""

import itertools
import time
from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median

from gguf_pp.batch import Span, UBatch
from gguf_pp.errors import GgufPpError, RemoteError, RequestError
from gguf_pp.pipeline.build import Pipeline
from gguf_pp.pipeline.executor import Take, Ticket
from gguf_pp.pipeline.flight import Flight
from gguf_pp.pipeline.groups import auto_ubatch_size, choose_groups, fit_stage_time
from gguf_pp.request import FinishReason, Request
from gguf_pp.sampling import NO_TOKEN, Sampler, SamplingParams, not_numbers

REGROUP_STEPS = 16
"""Ubatches between two choices of the number of groups."""
MIN_SAMPLES = 5
"""Ubatches of a size from which on their median says how long it takes."""


class _Cancelled(Exception):
    """Nobody waits for what this ubatch computes."""


class Engine:
    """Runs requests on a pipeline, `n_slots` at a time."""

    def __init__(self, pipeline: Pipeline, eog_ids: Iterable[int]) -> None:
        self.pipeline = pipeline
        self.eog_ids = frozenset(i for i in eog_ids if i < pipeline.n_vocab)
        pipeline.set_ends(sorted(self.eog_ids))
        self.n_slots = pipeline.config.n_slots
        self.ctx_size = pipeline.rung.ctx_size
        self.n_groups = 1
        self._waiting: deque[Request] = deque()
        self._active: list[Request] = []
        self._flights: deque[Flight] = deque()
        # Tokens whose keys and values each slot still holds, for prompts that begin alike.
        self._slot_tokens: list[list[int]] = [[] for _ in range(self.n_slots)]
        self._free_slots = set(range(self.n_slots))
        self._free_parcels = pipeline.parcels()
        self.run_ahead = pipeline.config.run_ahead if self._free_parcels else 0
        self._host_s = 0.0
        self._n_decodes = 0
        self._closed = False

    def add(self, prompt: Sequence[int], params: SamplingParams, max_tokens: int) -> Request:
        """Enqueue a sequence; it starts when a slot is free.

        `max_tokens` -1 is until the end of generation or of the context. Raises RequestError
        for a prompt that cannot be served, before anything is computed.
        """
        self._check(prompt)
        request = Request(
            prompt=tuple(prompt),
            sampler=Sampler(params, self.eog_ids, prompt),
            limit=self.ctx_size if max_tokens < 0 else min(self.ctx_size, len(prompt) + max_tokens),
            tokens=list(prompt),
            added_s=time.perf_counter(),
        )
        if max_tokens == 0:
            self._finish(request, "length")
        else:
            self._waiting.append(request)
        return request

    def _check(self, prompt: Sequence[int], room: int = 1) -> None:
        """Refuse a prompt that leaves less than `room` cells, or names unknown tokens."""
        if self._closed:
            raise RequestError("the model is closed")
        n_vocab = self.pipeline.n_vocab
        if not prompt:
            raise RequestError("the prompt is empty", hint="give it at least one token")
        if len(prompt) + room > self.ctx_size:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens, the context {self.ctx_size}",
                hint="raise -c, or shorten the prompt: at least one cell is needed for the answer",
            )
        if bad := [t for t in prompt if not 0 <= t < n_vocab]:
            raise RequestError(f"token id {bad[0]} is outside of the vocabulary of {n_vocab}")

    def cancel(self, request: Request) -> None:
        """End a request now. Its slot is free after the next step: what is computed at this moment
        is finished, what was queued of it is not begun."""
        if request in self._waiting:
            self._waiting.remove(request)
        if request.finish_reason is None:
            self._finish(request, "cancelled")
        self._leave_if_idle(request)

    def step(self) -> bool:
        """Queue what may go, then wait for the oldest ubatch; False when nothing is left to do."""
        if (lost := self.pipeline.failure) is not None:
            self._mend(lost)
        start = time.perf_counter()
        self._admit()
        while (flight := self._next_flight()) is not None:
            self._flights.append(flight)
        if not self._flights:
            return False
        if self.pipeline.executor.pipelined:  # otherwise queueing includes the devices' work
            self._host_s += 0.1 * (time.perf_counter() - start - self._host_s)
        self._land()
        while self._flights and self._flights[0].ticket.error is not None:
            self._land()
        return True

    def _mend(self, lost: RemoteError) -> GgufPpError | None:
        """A worker was lost, and with it the cache of every sequence: those that run have failed.

        Those that wait go on with a new session; if there is none to be had they fail too, with the
        reason that is returned.
        """
        self.drain()
        for request in list(self._active):
            self._fail(request, RemoteError(f"{lost}, and the sequence is lost with it"))
            self._leave_if_idle(request)
        self._slot_tokens = [[] for _ in range(self.n_slots)]
        try:
            self.pipeline.revive()
        except GgufPpError as exc:
            while self._waiting:
                self._fail(self._waiting.popleft(), exc)
            return exc
        return None

    def drain(self) -> None:
        """Wait for everything in flight, whatever comes of it."""
        while self._flights:
            self._land()

    def close(self) -> None:
        """Cancel all requests, wait for what is in flight, and take no more."""
        self._closed = True
        for request in (*self._waiting, *self._active):
            self.cancel(request)
        self.drain()

    def evaluate(self, tokens: Sequence[int], take: Take) -> None:
        """Run one sequence from position 0 and hand the logits of every token to `take`.

        The ranges that `take` gets index `tokens`. Raises RequestError as `add` does; the engine
        must have a free slot. Interrupted, it leaves no work behind in the stages' queues.
        """
        self._check(tokens, room=0)
        self.drain()
        if (lost := self.pipeline.failure) is not None and (failure := self._mend(lost)):
            raise failure
        if not self._free_slots:
            raise RequestError("no slot is free", hint="finish or cancel a request first")
        slot = min(self._free_slots)
        self._slot_tokens[slot] = []
        tickets: list[Ticket] = []
        size = self._ubatch_size(len(tokens))
        try:
            for first in range(0, len(tokens), size):
                part = tokens[first : first + size]
                span, rows = Span(slot, first, len(part)), tuple(range(len(part)))
                ubatch = UBatch(tuple(part), (span,), rows)
                tickets.append(self.pipeline.executor.submit(ubatch, _shifted(take, first)))
            for ticket in tickets:
                ticket.wait()
        except BaseException as exc:
            for ticket in tickets:
                ticket.skip(exc)
            raise

    def _admit(self) -> None:
        """Give free slots to waiting requests, each the slot that holds most of its prompt."""
        while self._waiting and self._free_slots:
            request = self._waiting.popleft()
            # At least the last token is computed again: its logits are what we want.
            limit = len(request.prompt) - 1
            shared = {
                slot: min(limit, _common_prefix(self._slot_tokens[slot], request.prompt))
                for slot in sorted(self._free_slots)
            }
            request.slot = max(shared, key=lambda slot: shared[slot])
            request.n_queued = request.n_cached = shared[request.slot]
            request.started_s = time.perf_counter()
            self._free_slots.remove(request.slot)
            self._active.append(request)

    def _next_flight(self) -> Flight | None:
        """Queue a decode group if one may go, else a part of the prompts, else nothing."""
        decoding = [r for r in self._active if r.decodes]
        ready = [r for r in decoding if r.is_ready(self.run_ahead)]
        n_decodes = sum(f.decodes for f in self._flights)
        if ready and self._may_decode(len(ready), len(decoding), n_decodes):
            size = -(-len(decoding) // self.n_groups)
            limit = min(size, self.pipeline.rung.ubatch_size)
            ready.sort(key=lambda r: r.turn)  # whoever has waited longest
            return self._submit([(r, 1) for r in ready[:limit]], decodes=True)
        most = self.pipeline.depth + self.pipeline.rung.n_copies - min(n_decodes, self.n_groups)
        if len(self._flights) - n_decodes >= max(1, most):
            return None
        parts = self._prompt_parts()
        return self._submit(parts, decodes=False) if parts else None

    def _may_decode(self, n_ready: int, n_decoding: int, n_flying: int) -> bool:
        """One ubatch of each group may be in flight, and more of whole groups only: sequences that
        cannot run ahead would go on one by one, and never meet in a group again."""
        n_groups = self._groups(n_decoding)
        whole = min(n_decoding // n_groups, self.pipeline.rung.ubatch_size)
        limit = n_groups * (1 + self.run_ahead) if n_ready >= whole else n_groups
        return n_flying < limit

    def _groups(self, n_decoding: int) -> int:
        """How many groups may be in flight, chosen anew every few ubatches."""
        n_stages = self.pipeline.depth
        if not self.pipeline.executor.pipelined:
            self.n_groups = 1
        elif self._n_decodes % REGROUP_STEPS == 0 or self.n_groups > n_decoding:
            recents = [recent for stage in self.pipeline.stages for recent in stage.recents]
            fits = [fit for recent in recents if (fit := _fit_decode(recent))]
            if len(fits) == n_stages:
                a, b = max(fits, key=lambda fit: fit[0] + fit[1] * n_decoding)
                host_s = 0.0 if self.run_ahead else self._host_s  # nobody waits for it then
                self.n_groups = choose_groups(n_decoding, n_stages, a, b, host_s)
            else:
                self.n_groups = min(n_decoding, n_stages)
        return self.n_groups

    def _prompt_parts(self) -> list[tuple[Request, int]]:
        """Requests and how many of their prompt tokens make the next ubatch."""
        prompts = [r for r in self._active if r.finish_reason is None and r.in_prompt]
        left = sum(len(r.prompt) - r.n_queued for r in prompts)
        if not left:
            return []
        room = self._ubatch_size(max(left, max(len(r.prompt) for r in prompts)))
        in_flight = sum(f.ubatch.n_rows for f in self._flights)
        if self._flights and in_flight + room > self.pipeline.config.batch_size:
            return []
        parts = []
        for request in prompts:
            n = min(room, len(request.prompt) - request.n_queued)
            if n:
                parts.append((request, n))
            room -= n
        return parts

    def _ubatch_size(self, n_tokens: int) -> int:
        """As asked for, else chosen from the prompt's length."""
        limit = self.pipeline.rung.ubatch_size
        if self.pipeline.config.ubatch_size is not None or not self.pipeline.executor.pipelined:
            return limit
        stages = self.pipeline.stages
        overhead = max(stage.overhead_rows for stage in stages)
        return auto_ubatch_size(n_tokens, self.pipeline.depth, overhead, limit)

    def _submit(self, parts: Sequence[tuple[Request, int]], *, decodes: bool) -> Flight:
        executor = self.pipeline.executor
        for request, _ in parts:
            request.turn = executor.n_submitted
        flight = Flight(parts, self._free_parcels, chooses=self.pipeline.chooses, decodes=decodes)
        flight.ticket = executor.submit(flight.ubatch, flight.take)
        self._n_decodes += decodes
        return flight

    def _land(self) -> None:
        """Wait for the oldest ubatch and give its tokens to their requests.

        What fails fails the requests of this ubatch only. If the host is interrupted while it
        waits, nothing has changed.
        """
        flight, failure = self._flights[0], None
        ubatch = flight.ubatch
        try:
            flight.ticket.wait()
        except Exception as exc:  # noqa: BLE001 - kept, and raised where the request is read
            failure = exc
        self._flights.popleft()
        if ubatch.parcel is not None:
            self._free_parcels.append(ubatch.parcel)
        if failure is None:
            for request, token in zip(flight.emitting, flight.tokens, strict=True):
                self._receive(request, token)
        for request, span in zip(flight.requests, ubatch.spans, strict=True):
            request.n_in_flight -= 1
            if failure is not None:
                self._fail(request, failure)
                request.n_queued = min(request.n_queued, span.start)
            self._leave_if_idle(request)

    def _receive(self, request: Request, token: int) -> None:
        if request.finish_reason is not None:
            return
        if token == NO_TOKEN:
            self._fail(request, not_numbers())
            request.n_queued = 0  # no cell of it is believed
            return
        if not request.generated:
            request.first_token_s = time.perf_counter()
        request.tokens.append(token)
        if token in self.eog_ids:
            self._finish(request, "stop")
        elif len(request.tokens) >= request.limit:
            self._finish(request, "length")

    def _fail(self, request: Request, error: Exception) -> None:
        if request.finish_reason is None:
            request.error = error
            self._finish(request, "error")

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        request.finished_s = time.perf_counter()
        self._skip_surplus()

    def _skip_surplus(self) -> None:
        """Do not begin what is only for requests that have ended. Rows that go on with others are
        computed, and so are all before them: no stage gets to see a cache with a hole."""
        going: set[Request] = set()
        for flight in reversed(self._flights):
            if flight.is_surplus and going.isdisjoint(flight.requests):
                flight.ticket.skip(_Cancelled())
            else:
                going.update(flight.requests)

    def _leave_if_idle(self, request: Request) -> None:
        """Give the slot back once nothing of a finished request is in flight."""
        if request.finish_reason is None or request.n_in_flight or request not in self._active:
            return
        self._active.remove(request)
        self._slot_tokens[request.slot] = request.tokens[: request.n_queued]
        self._free_slots.add(request.slot)


def _fit_decode(recent: Iterable[tuple[int, int, float]]) -> tuple[float, float] | None:
    """Seconds = a + b rows of a stage's recent ubatches in which every row decoded.

    Of those with equal rows the median counts, if there are enough: steps that compiled kernels or
    were captured as graphs, the first and the second of a size, took very long.
    """
    times: dict[int, list[float]] = {}
    for n, n_out, seconds in tuple(recent):  # at once: the stage's own thread appends
        if n == n_out:
            times.setdefault(n, []).append(seconds)
    sizes = ((n, seconds) for n, seconds in times.items() if len(seconds) >= MIN_SAMPLES)
    return fit_stage_time((n, median(seconds)) for n, seconds in sizes)


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
    return sum(1 for _ in pairs)


def _shifted(take: Take, first: int) -> Take:
    return lambda logits, rows: take(logits, range(rows.start + first, rows.stop + first))
