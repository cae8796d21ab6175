"""Hidden states in and out of a worker's CUDA devices: who waits for whom, on a double of torch."""

import threading

import pytest
import torch

from gguf_pp.backend import cuda_edges
from gguf_pp.backend.cpu import Budget
from gguf_pp.backend.cuda import CudaSet
from gguf_pp.backend.cuda_relay import Relay
from gguf_pp.backend.trace import Trace
from gguf_pp.pipeline.executor import Executor
from gguf_pp.pipeline.memory import Rung
from gguf_pp.worker import stages as worked
from gguf_pp.worker.stages import Inlet, Outlet
from tests.cuda_double import Double
from tests.cuda_run import N_ROWS, ToyStage
from tests.simulated import WIDTH, ubatches
from tests.watchdog import watchdog

N_UBATCHES = 7


@pytest.fixture(autouse=True)
def no_hang(monkeypatch):
    monkeypatch.setattr(cuda_edges, "TEST_BYTES", (256,))
    monkeypatch.setattr(worked, "bytes_of", lambda rows: rows)
    with watchdog(60):
        yield


class Deaf:
    """A stream that does not wait for some events."""

    def __init__(self, stream, events):
        self.stream, self.events = stream, events

    def wait(self, event):
        if not any(event is other for other in self.events):
            self.stream.wait(event)

    def __getattr__(self, name):
        return getattr(self.stream, name)


class Session:
    """What a session does with ubatches that come in for stages on `indices`: a reader that writes
    where there is room, the stages, and a way out. `forget` is called with it before all that."""

    def __init__(self, indices, n_copies, *, seed=0, forget=lambda session: None):
        self.double = Double(seed=seed, copy_s=0.3)
        self.results = {}
        edges = [(a, b) for a in indices for b in indices]
        here = CudaSet(indices, edges, api=self.double)
        devices = [here.open(f"cuda:{i}", i, hosted=True) for i in indices]
        relay = Relay(Budget(1 << 20), self.double)
        self.upload = devices[0].stream("upload")
        self.inlet = Inlet(relay, self.upload, WIDTH)
        self.outlet = Outlet(relay, WIDTH, self.send, half=False)
        for end in (self.inlet, self.outlet):
            end.allocate(Rung(n_copies, N_ROWS, 1))
        n, seconds = len(devices), [1.0] * N_UBATCHES
        self.layers = [
            ToyStage(self.double, device, i + 1, n + 2, n_copies, seconds, lambda *_: None)
            for i, device in enumerate(devices)
        ]
        self.room = threading.Semaphore(n_copies)
        forget(self)
        self.double.log.clear()
        try:
            self.run(n_copies)
        finally:
            for backend in (*devices, relay):
                backend.close()

    def run(self, n_copies):
        executor = Executor([self.inlet, *self.layers, self.outlet], Trace(), pipelined=True)
        tickets = []
        for u, ubatch in enumerate(ubatches(N_UBATCHES)):
            self.room.acquire()
            rows = torch.tensor(ubatch.tokens, dtype=torch.float32)[:, None].expand(-1, WIDTH)
            self.inlet.ring.copies[u % n_copies].out.tensor[: ubatch.n_rows].copy_(rows)
            tickets.append(executor.submit(ubatch, None))
            filled = self.layers[0].ring.copies[u % n_copies].filled
            self.inlet.lend(filled, self.room.release)
        for ticket in tickets:
            ticket.wait()

    def send(self, ubatch, rows):
        self.results[ubatch.spans[0].slot] = rows.read()[:, 0].tolist()

    @property
    def races(self):
        return self.double.world.races

    def is_right(self):
        return self.races == [] and self.results == {
            u: expected(ubatch, len(self.layers)) for u, ubatch in enumerate(ubatches(N_UBATCHES))
        }

    def script(self, stream):
        """What was asked of a stream of a device, in a word each."""
        words = {"kernel": lambda details: details[0]}
        return [
            words.get(what, lambda _, what=what: what)(details)
            for what, on, *details in self.double.log
            if on is stream.raw and what != "synchronize"  # the host's, at the end
        ]


def expected(ubatch, n_layers):
    values = [float(token) for token in ubatch.tokens]
    for i in range(1, n_layers + 1):
        values = [v * (2 * i + 3) + i for v in values]
    return values


@pytest.mark.parametrize("n_copies", [1, 2, 4])
@pytest.mark.parametrize("indices", [[0], [0, 1], [2, 2], [1, 0, 1]])
def test_rows_come_in_and_go_out_whole_and_without_races(indices, n_copies):
    for seed in range(3):
        session = Session(indices, n_copies, seed=seed)
        assert session.is_right(), session.races


@pytest.mark.parametrize("n_copies", [1, 2])
def test_devices_wait_only_for_what_they_need(n_copies):
    session = Session([0], n_copies)
    (stage,) = session.layers
    for stream, wanted in (
        (session.upload, lambda again: ["wait"] * again + ["copy", "record"]),
        (stage.transfer, lambda again: ["wait", "copy", "record"]),
        (
            stage.compute,
            lambda again: ["wait"] * (1 + again) + ["load", "record", "forward", "record"],
        ),
    ):
        lines = [word for u in range(N_UBATCHES) for word in wanted(u >= n_copies)]
        assert session.script(stream) == lines


def lend_at_once(session):
    copies = session.layers[0].ring.copies
    session.inlet.compute = Deaf(session.inlet.compute, [c.filled for c in copies])


def ignore_readers(session):
    copies = session.layers[0].ring.copies
    session.inlet.transfer = Deaf(session.upload, [c.free for c in copies])


def start_early(session):
    stage = session.layers[0]
    stage.compute = stage.intake = Deaf(stage.compute, [c.filled for c in stage.ring.copies])


def ship_early(session):
    stage = session.layers[-1]
    stage.transfer = Deaf(stage.transfer, [c.done for c in stage.ring.copies])


def ship_into_what_is_sent(session):
    stage = session.layers[-1]
    stage.transfer = Deaf(stage.transfer, [c.free for c in session.outlet.ring.copies])


def send_early(session):
    copies = session.outlet.ring.copies
    session.outlet.compute = Deaf(session.outlet.compute, [c.filled for c in copies])


def compute_into_what_is_shipped(session):
    stage = session.layers[-1]
    events = [c.filled for c in session.outlet.ring.copies]
    stage.compute = stage.intake = Deaf(stage.compute, events)


MUTANTS = [
    lend_at_once,
    ignore_readers,
    start_early,
    ship_early,
    ship_into_what_is_sent,
    send_early,
    compute_into_what_is_shipped,
]


@pytest.mark.parametrize("n_copies", [1, 2])
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_without_any_one_of_the_waits_there_is_a_race(mutant, n_copies):
    runs = (Session([0], n_copies, seed=seed, forget=mutant) for seed in range(60))
    assert any(run.races for run in runs)
