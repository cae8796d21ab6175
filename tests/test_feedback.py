"""Chosen tokens go back: what is filled in, what it takes of memory, and what waits for what."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gguf_pp.backend import cuda_edges
from gguf_pp.backend.base import OutOfMemory
from gguf_pp.backend.cpu import Budget, CpuBackend
from gguf_pp.backend.host import share_cores
from gguf_pp.backend.sim import SimBackend, World
from gguf_pp.batch import Late, Span, UBatch
from gguf_pp.pipeline.executor import Executor
from gguf_pp.pipeline.feedback import Feedback
from gguf_pp.wire import check_ubatch, pack_ubatch, unpack_ubatch
from tests import cuda_run
from tests.cuda_double import Double
from tests.cuda_run import Run, ToyStage
from tests.simulated import expected, ubatches

N_VOCAB = 100


class OneEnd:
    def __init__(self, backend):
        self.backend = backend
        self.compute = backend.stream("compute", compute=True)


@pytest.fixture
def end():
    backend = CpuBackend("cpu", share_cores(1)[0], 1, Budget(1 << 16))
    yield OneEnd(backend)
    backend.close()


@given(st.data())
def test_each_late_row_gets_the_token_of_its_output(data):
    backend = CpuBackend("cpu", share_cores(1)[0], 1, Budget(1 << 16))
    feedback = Feedback(OneEnd(backend), OneEnd(backend), OneEnd(backend).compute, N_VOCAB)
    feedback.allocate(3, 8)
    left = torch.arange(24, dtype=torch.int32).view(3, 8)
    for i, parcel in enumerate(feedback.parcels):
        feedback.leave(i, range(0, 3), left[i, :3])
        feedback.leave(i, range(3, 8), left[i, 3:])
        parcel.inp.tensor.copy_(parcel.out.tensor)
    n_rows = data.draw(st.integers(1, 12))
    rows = sorted(data.draw(st.sets(st.integers(0, n_rows - 1))))
    late = [Late(row, data.draw(st.integers(0, 2)), data.draw(st.integers(0, 7))) for row in rows]
    ids = torch.arange(50, 50 + n_rows)
    wanted = ids.tolist()
    for row, i_parcel, i_output in late:
        wanted[row] = int(left[i_parcel, i_output])
    feedback.fill_in(ids, late)
    backend.close()
    assert ids.tolist() == wanted


def test_rows_that_follow_each_other_are_one_copy(end, monkeypatch):
    feedback = Feedback(end, end, end.compute, N_VOCAB)
    feedback.allocate(2, 8)
    copies = []
    copy = torch.Tensor.copy_
    ids = torch.zeros(8, dtype=torch.int64)
    monkeypatch.setattr(
        torch.Tensor, "copy_", lambda self, src: copies.append(len(src)) or copy(self, src)
    )
    late = [Late(i, 0, 2 + i) for i in range(4)] + [Late(5, 0, 6), Late(6, 1, 7), Late(7, 1, 0)]
    feedback.fill_in(ids, late)
    assert copies == [4, 1, 1, 1]


@pytest.mark.parametrize("left", [-(1 << 31), -1, N_VOCAB, (1 << 31) - 1])
def test_what_is_no_token_becomes_one(end, left):
    feedback = Feedback(end, end, end.compute, N_VOCAB)
    feedback.allocate(1, 1)
    feedback.leave(0, range(1), torch.tensor([left], dtype=torch.int32))
    ids = torch.zeros(1, dtype=torch.int64)
    feedback.fill_in(ids, [Late(0, 0, 0)])
    assert 0 <= int(ids) < N_VOCAB


@pytest.mark.parametrize("room", [0, 8, 32, 72, 127])
def test_what_was_allocated_is_given_back_whole_or_half_done(room):
    world = World()
    first, last = SimBackend(world, "first"), SimBackend(world, "last", limit_bytes=room)
    feedback = Feedback(OneEnd(first), OneEnd(last), last.stream("feedback"), N_VOCAB)
    with pytest.raises(OutOfMemory):
        feedback.allocate(4, 8)
    feedback.release()
    assert (first.used_bytes, last.used_bytes, feedback.parcels) == (0, 0, [])
    last.limit_bytes = 128
    feedback.allocate(4, 8)
    assert first.used_bytes == last.used_bytes == feedback.n_bytes == 128


def test_one_stage_has_one_buffer_and_waits_for_nothing(end):
    feedback = Feedback(end, end, end.compute, N_VOCAB)
    feedback.allocate(1, 1)
    [parcel] = feedback.parcels
    assert parcel.inp is parcel.out
    asked = []
    end.compute.wait = end.compute.record = end.compute.copy = asked.append
    ubatch = UBatch((0,), (Span(0, 0, 1),), (0,), (Late(0, 0, 0),), (), 0)
    feedback.expect(ubatch)
    feedback.ship(ubatch)
    assert asked == []


def test_to_workers_a_ubatch_goes_without_what_is_for_the_ends():
    plain = UBatch((0, 7), (Span(0, 3, 1), Span(1, 0, 1)), (0, 1))
    late = replace(plain, late=(Late(0, 2, 1),), choices=(None, None), parcel=3)
    for tokens in (True, False):
        packed = pack_ubatch(late, tokens=tokens)
        assert packed == pack_ubatch(plain, tokens=tokens)
        check_ubatch(
            unpack_ubatch(packed, tokens=tokens), max_rows=2, n_slots=2, n_cells=9, n_vocab=8
        )


# On CUDA devices.

N_PARCELS = 2


class FedStage(ToyStage):
    """Leaves the first column of what it made as tokens, and reads that of the ubatch before."""

    def forward(self, copy, ubatch, take):
        if self.i_stage == 0 and ubatch.late:
            source = self.feedback.parcels[ubatch.late[0].parcel].inp.tensor

            def fill_in():
                tokens = self.data(source)[: len(ubatch.late), 0].tolist()
                self.feedback.seen[ubatch.spans[0].slot] = tokens

            self.launch("fill in", [source], [], ubatch, fill_in)
        super().forward(copy, ubatch, take)
        if self.last:
            out, n = self.feedback.parcels[ubatch.parcel].out.tensor, ubatch.n_rows
            y = self.logits if self.on_cuda else self.work

            def leave():
                self.data(out)[:n, 0] = self.data(y)[:n, 0]

            self.launch("leave", [y], [out], ubatch, leave)


class FedExecutor(Executor):
    """Every ubatch reads what the one before has left."""

    def __init__(self, stages, trace, *, pipelined):
        first, last = stages[0], stages[-1]
        stream = last.backend.stream("feedback") if last.on_cuda else last.compute
        self.feedback = first.feedback = last.feedback = Feedback(first, last, stream, N_VOCAB)
        self.feedback.stream, self.feedback.seen = stream, {}
        self.feedback.allocate(N_PARCELS, 8)
        super().__init__(stages, trace, pipelined=pipelined, feedback=self.feedback)

    def submit(self, ubatch, take):
        i = ubatch.spans[0].slot
        late = tuple(Late(0, (i - 1) % N_PARCELS, r) for r in range(1 + (i - 1) % 3)) if i else ()
        return super().submit(replace(ubatch, late=late, parcel=i % N_PARCELS), take)


class Deaf(FedExecutor):
    """Forgets the waits for events `kind` of parcels on the stream that `stream_of` names."""

    kind, stream_of = "", None

    def __init__(self, stages, trace, *, pipelined):
        super().__init__(stages, trace, pipelined=pipelined)
        events = [getattr(parcel, self.kind) for parcel in self.feedback.parcels]
        stream = type(self).stream_of(self)
        wait = stream.wait
        stream.wait = lambda event: event in events or wait(event)


class NoTokenYet(Deaf):
    kind, stream_of = "filled", lambda self: self.stages[0].compute


class NothingChosen(Deaf):
    kind, stream_of = "chosen", lambda self: self.feedback.stream


@pytest.fixture(autouse=True)
def fed(monkeypatch):
    monkeypatch.setattr(cuda_run, "ToyStage", FedStage)
    monkeypatch.setattr(cuda_edges, "TEST_BYTES", (256,))


def is_fed(run):
    left = [expected(ubatch, len(run.stages)) for ubatch in ubatches(7)]
    return run.executor.feedback.seen == {i: left[i - 1] for i in range(1, 7)}


def parcels_in(run):
    """The lines of the script that are about parcels."""
    names, feedback = run.names(), run.executor.feedback
    names[feedback.stream.raw] = "F"
    for p, parcel in enumerate(feedback.parcels):
        names[parcel.chosen.mark.raw] = f"chosen({p})"
        names[parcel.filled.mark.raw] = f"filled({p})"
    lines = []
    for what, stream, *details in run.log:
        words = [names.get(stream, "?")]
        if what != "copy":
            words += [names.get(d, d if isinstance(d, str) else "?") for d in details]
        if any(word in ("F", "fill in", "leave") or "(" in word for word in words):
            lines.append(" ".join([what, *words]))
    return lines


def protocol(last, n_ubatches):
    """As in ring.py, written down anew."""
    for u in range(n_ubatches):
        p, before = u % N_PARCELS, (u - 1) % N_PARCELS
        if u > 0:
            yield f"wait S0 filled({before})"
        if u >= N_PARCELS:
            yield f"wait S{last} filled({p})"
        if u > 0:
            yield "kernel S0 fill in"
        yield f"kernel S{last} leave"
        yield f"record S{last} chosen({p})"
        yield f"wait F chosen({p})"
        yield "barrier F D0"
        yield "copy F"
        yield "barrier D0 F"
        yield f"record F filled({p})"


@pytest.mark.parametrize("n_stages", [2, 3, 4])
def test_exactly_the_waits_records_and_copies_of_the_protocol_are_issued(n_stages):
    run = Run([str(i) for i in range(n_stages)], executor=FedExecutor)
    assert parcels_in(run) == list(protocol(n_stages - 1, 7))
    assert run.is_right()
    assert is_fed(run)


@pytest.mark.parametrize("edge_copy", ["auto", "host"])
@pytest.mark.parametrize("pipelined", [True, False])
@pytest.mark.parametrize("names", ["012", "010", "00", "0"])
@pytest.mark.parametrize("n_copies", [1, 3])
def test_tokens_go_round_between_any_devices(names, n_copies, pipelined, edge_copy):
    run = Run(
        names,
        n_copies,
        double=Double(seed=n_copies, copy_s=0.7),
        pipelined=pipelined,
        edge_copy=edge_copy,
        executor=FedExecutor,
    )
    assert run.is_right()
    assert is_fed(run)


@pytest.mark.parametrize(
    "names", [("cpu", "0"), ("0", "cpu"), ("0", "cpu", "1"), ("cpu", "0", "1"), ("1", "0", "cpu")]
)
def test_tokens_go_round_between_cpu_and_cuda_devices(names):
    run = Run(names, executor=FedExecutor)
    assert run.is_right()
    assert is_fed(run)


@pytest.mark.parametrize("edge_copy", ["auto", "host"])
@pytest.mark.parametrize("mutant", [NoTokenYet, NothingChosen])
def test_a_wait_that_is_left_out_is_noticed(mutant, edge_copy):
    def races(executor):
        runs = [
            Run("012", double=Double(seed=i, copy_s=0.5), edge_copy=edge_copy, executor=executor)
            for i in range(4)
        ]
        return any(run.races for run in runs)

    assert races(mutant)
    assert not races(FedExecutor)
