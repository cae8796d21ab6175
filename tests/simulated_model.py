"""A model in virtual time, small enough for arithmetic: the real engine and executor run on it."""

from collections import deque
from types import SimpleNamespace

import torch

from gguf_pp.backend.sim import SimBackend, World
from gguf_pp.backend.trace import Trace
from gguf_pp.engine import Engine
from gguf_pp.pipeline.executor import Executor
from gguf_pp.pipeline.feedback import Feedback
from gguf_pp.pipeline.memory import Rung
from gguf_pp.pipeline.ring import Ring
from gguf_pp.sampling import Sampler

N_VOCAB = 17
CTX_SIZE = 32
UBATCH_SIZE = 4
PRIME = 251


def layer(i_stage, x, cells):
    """What stage `i_stage` makes of a row: `cells` are its inputs so far, this one included."""
    weights = torch.arange(1, 1 + len(cells), dtype=torch.float32)
    return ((2 * i_stage + 3) * x + i_stage + float((weights * cells).sum())) % PRIME


def cells_of(tokens, n_stages):
    """What every stage keeps of a sequence, float32 [n_stages, T]."""
    kept = torch.empty(n_stages, len(tokens))
    x = [float(token) for token in tokens]
    for i in range(n_stages):
        kept[i] = torch.tensor(x)
        x = [layer(i, x[t], kept[i, : t + 1]) for t in range(len(tokens))]
    return kept


def text_of(n_stages, prompt, params, max_tokens, eog_ids):
    """What the model says after `prompt`, one token after the other, and why it ends."""
    sampler = Sampler(params, eog_ids, prompt)
    limit = CTX_SIZE if max_tokens < 0 else min(CTX_SIZE, len(prompt) + max_tokens)
    tokens, kept, text = list(prompt), torch.empty(n_stages, CTX_SIZE), []
    for t in range(limit - 1):
        x = float(tokens[t])
        for i in range(n_stages):
            kept[i, t] = x
            x = layer(i, x, kept[i, : t + 1])
        if t < len(prompt) - 1:
            continue
        text.append(sampler(logits_of(torch.tensor([x]))[0].numpy()))
        tokens.append(text[-1])
        if text[-1] in eog_ids:
            return text, "stop"
    return text, "length"


def logits_of(y):
    """Float32 [n, N_VOCAB] that fall from the token a number stands for, round the vocabulary."""
    return -0.5 * ((torch.arange(N_VOCAB) - y[:, None]) % N_VOCAB)


class ModelStage:
    """A stage whose cache is of numbers, NaN where none was written. `spend` says for how long it
    computes; `fails` is told the stage and the ubatch, and may raise. `holes` are spans that came
    before those in front of them, for which a worker would end the session."""

    elapsed_s = None
    overhead_rows = 1

    def __init__(self, world, i_stage, n_stages, rung, n_slots, spend, fails):
        self.backend = SimBackend(world, f"sim:{i_stage}")
        first, last = i_stage == 0, i_stage == n_stages - 1
        self.ring = Ring(
            self.backend, rung.n_copies, rung.ubatch_size, 1, inp=not first, out=not last
        )
        self.compute = self.intake = self.backend.stream("compute", compute=True)
        self.transfer = None if last else self.backend.stream("transfer")
        self.kv = torch.full((n_slots, rung.ctx_size), float("nan"))
        self.holes = []
        self.recents = [deque()]
        self._n_cached = [0] * n_slots
        self.feedback = None
        self._i_stage, self._spend, self._fails = i_stage, spend, fails
        self._work = None
        self._world = world

    def load(self, copy, ubatch):
        if copy.inp is not None:
            self._work = copy.inp.read()[: ubatch.n_rows, 0].clone()

    def abandon(self, copy, ubatch):
        self._work = None

    def forward(self, copy, ubatch, take):
        self._world.spend(self._spend())
        self._fails(self._i_stage, ubatch)
        x, self._work = self._work, None
        if x is None:
            ids = torch.tensor(ubatch.tokens)
            if ubatch.late:
                self.feedback.fill_in(ids, ubatch.late)
            x = ids.float()
        y = torch.tensor(list(self._rows(x, ubatch)))
        if copy.out is not None:
            copy.out.write(y[:, None])
        elif ubatch.outputs:
            self._choose(y[list(ubatch.outputs)], ubatch, take)

    def _rows(self, x, ubatch):
        values = iter(x.tolist())
        for span in ubatch.spans:
            cells = self.kv[span.slot]
            self.holes += [span] if span.start > self._n_cached[span.slot] else []
            self._n_cached[span.slot] = span.start + span.n_rows
            for at in range(span.start, span.start + span.n_rows):
                cells[at] = value = next(values)
                yield layer(self._i_stage, value, cells[: at + 1])

    def _choose(self, y, ubatch, take):
        tokens = take(logits_of(y), range(len(y)))
        if ubatch.parcel is not None:
            out = self.feedback.parcels[ubatch.parcel].out
            out.write(torch.tensor(tokens, dtype=torch.int32).view(torch.float32)[:, None])


class SimPipeline:
    """What the engine asks of a Pipeline."""

    failure = None
    chooses = False
    n_vocab = N_VOCAB

    def __init__(
        self,
        n_stages=2,
        *,
        n_copies=2,
        n_slots=1,
        run_ahead=0,
        seed=0,
        copy_s=0.0,
        spend=lambda: 1.0,
        fails=lambda i_stage, ubatch: None,
        pipelined=True,
        own_stream=True,
        n_parcels=32,
    ):
        self.world = World(seed, copy_s)
        self.rung = Rung(n_copies, UBATCH_SIZE, CTX_SIZE)
        self.depth = n_stages
        self.config = SimpleNamespace(
            n_slots=n_slots, run_ahead=run_ahead, ubatch_size=UBATCH_SIZE, batch_size=16
        )
        self.stages = [
            ModelStage(self.world, i, n_stages, self.rung, n_slots, spend, fails)
            for i in range(n_stages)
        ]
        first, last = self.stages[0], self.stages[-1]
        stream = last.backend.stream("feedback") if own_stream else last.compute
        self.feedback = first.feedback = last.feedback = Feedback(first, last, stream, N_VOCAB)
        self.feedback.allocate(n_parcels if run_ahead else 0, n_slots)
        self.feedback_stream = stream
        self.executor = Executor(
            self.stages, Trace(self.world.now), pipelined=pipelined, feedback=self.feedback
        )

    def set_ends(self, ids):
        """Nothing is chosen on a device here."""

    def parcels(self):
        return list(range(len(self.feedback.parcels)))


def simulated_engine(*args, eog_ids=(), **kwargs):
    """The engine on a SimPipeline of these."""
    return Engine(SimPipeline(*args, **kwargs), eog_ids)


def run(engine):
    while engine.step():
        pass


def assert_cache_is_as_told(engine):
    """Every stage has computed what the engine says the slots hold."""
    stages = engine.pipeline.stages
    for slot, tokens in enumerate(engine._slot_tokens):
        wanted = cells_of(tokens, len(stages))
        for stage, cells in zip(stages, wanted, strict=True):
            assert stage.kv[slot, : len(tokens)].tolist() == cells.tolist()
