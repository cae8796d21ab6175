"""A part of the model on one device, with its weights, its KV cache and its ring."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from gguf_pp.arch import Model
from gguf_pp.backend.base import Backend, Stream
from gguf_pp.batch import Choice, UBatch
from gguf_pp.ops.base import LayerKV, Ops
from gguf_pp.pipeline.executor import Deliver, Take
from gguf_pp.pipeline.feedback import Feedback
from gguf_pp.pipeline.kinds import StepSizes, chooser_of, make_outlet, make_steps, make_stopwatch
from gguf_pp.pipeline.load import DeviceLoader
from gguf_pp.pipeline.memory import Rung
from gguf_pp.pipeline.placement import kv_bytes, logits_rows, scratch_bytes
from gguf_pp.pipeline.ring import Copy, Ring
from gguf_pp.pipeline.split import Part

if TYPE_CHECKING:
    from gguf_pp.backend.cuda_host import Parcel
    from gguf_pp.pipeline.graphs import StepGraphs
    from gguf_pp.pipeline.outlet import CudaOutlet

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """What a device holds. `layers` is half open; buffers are the rotating copies and scratch."""

    name: str
    layers: tuple[int, int]
    weight_bytes: int
    kv_bytes: int
    buffer_bytes: int
    free_bytes: int
    kernels: str

    def __add__(self, other: DeviceUse) -> DeviceUse:
        """Two stages of one device, of which at most one has layers."""
        return DeviceUse(
            self.name,
            self.layers if self.layers[0] < self.layers[1] else other.layers,
            self.weight_bytes + other.weight_bytes,
            self.kv_bytes + other.kv_bytes,
            self.buffer_bytes + other.buffer_bytes,
            min(self.free_bytes, other.free_bytes),
            self.kernels,
        )


class LayerStage:
    """The layers of `part`, and the ends of the model if they are in it.

    `recent` are (rows, outputs, seconds) of the ubatches computed last. `uses_graphs`, until
    weights are loaded, is whether CUDA devices may launch steps as graphs.
    """

    elapsed_s = None

    def __init__(
        self,
        i_stage: int,
        backend: Backend,
        make_ops: Callable[[], Ops],
        model: Model,
        part: Part,
    ) -> None:
        self.backend = backend
        self.part = part
        self.compute: Stream = backend.stream(f"stage {i_stage} compute", compute=True)
        self.transfer: Stream | None = (
            None if part.heads else backend.stream(f"stage {i_stage} transfer")
        )
        # On the device's own thread, so that the threads of its kernels start on its cores.
        self.ops: Ops = call(self.compute, make_ops).result()
        self.ring: Ring
        self.weight_bytes = 0
        self.kv_bytes = 0
        self.scratch_bytes = 0
        self._stopwatch = make_stopwatch(backend)
        self._i_stage = i_stage
        self._model = model
        self._embedding: Any = None
        self._weights: list[Any] = []
        self._head: Any = None
        self._kv: list[LayerKV] = []
        self._input: Tensor | None = None
        self._n_slots = self._n_rows = 0
        self._outlet: CudaOutlet | None = None
        self._steps: StepGraphs | None = None
        self._chooser = chooser_of(backend, self.ops)
        self.uses_graphs = True
        self.feedback: Feedback | None = None

    @property
    def intake(self) -> Stream:
        """The compute stream: it moves its own input."""
        return self.compute

    @property
    def name(self) -> str:
        """The device."""
        return self.backend.name

    @property
    def layers(self) -> range:
        """Layers held here; none in a stage that is only an end of the model."""
        return self.part.layers

    @property
    def kernels(self) -> str:
        """What computes."""
        return self.ops.name

    @property
    def overhead_rows(self) -> int:
        """As in Ops."""
        return self.ops.overhead_rows

    @property
    def chooses(self) -> bool:
        """Whether tokens are chosen on the device, where there are choices for them."""
        return self.part.heads and self._chooser is not None

    def set_ends(self, ids: Sequence[int]) -> None:
        """Name the tokens that end a text, for choices that ban them."""
        if self._chooser is not None:
            call(self.compute, partial(self._chooser.set_ends, ids)).result()
            call(self.compute, self._make_steps).result()  # graphs read them where they were

    @property
    def n_threads(self) -> int:
        """Threads of this host that compute."""
        return self.backend.n_threads

    @property
    def recent(self) -> deque[tuple[int, int, float]]:
        """As above, the oldest first."""
        return self._stopwatch.recent

    @property
    def recents(self) -> list[deque[tuple[int, int, float]]]:
        """`recent` of every device in the stage that has layers."""
        return [self.recent] if self.layers else []

    def uses(self) -> list[DeviceUse]:
        """What each device of the stage holds."""
        return [
            DeviceUse(
                name=self.name,
                layers=(self.layers.start, self.layers.stop),
                weight_bytes=self.weight_bytes,
                kv_bytes=self.kv_bytes,
                buffer_bytes=self.ring.n_bytes + self.scratch_bytes + self._parcel_bytes,
                free_bytes=self.backend.memory().free_bytes,
                kernels=self.kernels,
            )
        ]

    @property
    def _parcel_bytes(self) -> int:
        return 0 if self.feedback is None else self.feedback.n_bytes

    def reserve_weights(self, n_bytes: int) -> None:
        """Take `n_bytes` for this stage's weights; raises OutOfMemory if the device has less."""
        self.backend.reserve(n_bytes, "weights")
        self.weight_bytes = n_bytes

    def load_weights(self, loader: DeviceLoader) -> None:
        """Read this stage's weights. Runs on the compute stream of the stage whose ops `loader`
        has: this one, or another of the same device. Once `allocate` has succeeded."""
        if self.part.embeds:
            self._embedding = self._model.load_embedding(loader)
        self._weights = [self._model.load_layer(loader, i) for i in self.layers]
        if self.part.heads:
            self._head = self._model.load_head(loader)
            n_vocab = self._head.output.n_rows
            self._outlet = make_outlet(self.backend, self._n_slots, n_vocab)
        self._make_steps()

    def _make_steps(self) -> None:
        """Once the weights are here: what graphs of steps need besides them."""
        if not self.uses_graphs:
            return
        self._drop_steps()
        n_embd, heads = self._model.hp.n_embd, self.part.heads
        sizes = StepSizes(
            n_slots=self._n_slots,
            n_rows=self._n_rows,
            n_inputs=0 if self.part.embeds else n_embd,
            n_outputs=self._head.output.n_rows if heads else n_embd,
            heads=heads,
        )
        kv = self._kv[0] if self._kv else None
        self._steps = make_steps(self.backend, self.ops, self._step, kv, sizes)

    def settle(self) -> None:
        """Wait until the compute stream is through with what was queued. What one stream wrote may
        then be read by any other."""
        done = self.backend.event()
        self.compute.record(done)
        done.synchronize()

    def allocate(self, rung: Rung, n_slots: int, kv_types: tuple[str, str]) -> None:
        """Reserve KV cache, ring and scratch; raises OutOfMemory. `release` undoes it, whole or
        half done."""
        hp = self._model.hp
        cell = kv_bytes(hp.n_kv_heads, hp.head_size, kv_types)
        size = cell * rung.ctx_size * n_slots * len(self.layers)
        self.backend.reserve(size, "KV cache")
        self.kv_bytes = size
        shape = n_slots, rung.ctx_size, hp.n_kv_heads, hp.head_size
        call(self.compute, lambda: self._allocate_kv(*shape, *kv_types)).result()
        self.ring = Ring(
            self.backend,
            rung.n_copies,
            rung.ubatch_size,
            hp.n_embd,
            inp=not self.part.embeds,
            out=not self.part.heads,
        )
        scratch = scratch_bytes(self._model, self.part, rung, self.name)
        self.backend.reserve(scratch, "scratch")
        self.scratch_bytes = scratch
        self._n_slots, self._n_rows = n_slots, rung.ubatch_size

    def _allocate_kv(
        self, n_slots: int, n_cells: int, n_kv_heads: int, head_size: int, k_type: str, v_type: str
    ) -> None:
        """On the compute stream, whose memory it is."""
        for _ in self.layers:
            self._kv.append(
                self.ops.layer_kv(n_slots, n_cells, n_kv_heads, head_size, k_type, v_type)
            )

    def _drop_steps(self) -> None:
        if self._steps is not None:
            self._steps.close()
        self._steps = None

    def close(self) -> None:
        """Drop weights and what was made of them, without waiting for the garbage collector: they
        refer to this stage. Streams are closed already."""
        self._drop_steps()
        self._weights, self._embedding, self._head = [], None, None
        self._kv.clear()
        self._outlet = self.feedback = None

    def release(self) -> None:
        """Give back everything but the weights."""
        self._drop_steps()
        self._kv.clear()
        if hasattr(self, "ring"):
            self.ring.release()
        self.backend.release(self.kv_bytes + self.scratch_bytes)
        self.kv_bytes = self.scratch_bytes = 0

    def load(self, copy: Copy, ubatch: UBatch) -> None:
        """Move the input out of `copy`, which is free for the next ubatch right after."""
        if copy.inp is None:
            return
        rows = copy.inp.tensor[: ubatch.n_rows]
        if self._steps is not None and self._steps.takes(ubatch):
            self._steps.x[: ubatch.n_rows].copy_(rows)
        else:
            self._input = rows.clone()

    def abandon(self, copy: Copy, ubatch: UBatch) -> None:
        """Drop what was loaded."""
        self._input = None

    def forward(self, copy: Copy, ubatch: UBatch, take: Take) -> Deliver | None:
        """Run the layers on what was loaded."""
        start = self._stopwatch.start()
        deliver = None
        if self._steps is not None and self._steps.takes(ubatch):
            made, chosen = self._steps.run(ubatch, partial(self._fill_in, ubatch))
            if self.part.heads and ubatch.outputs:
                deliver = self._deliver(self._send(made, chosen, range(len(made)), ubatch, take))
        else:
            made = self._walk(self._taken_in(ubatch), ubatch)
            if self.part.heads and ubatch.outputs:
                deliver = self._emit(made, ubatch, take)
        if copy.out is not None:
            copy.out.tensor[: ubatch.n_rows].copy_(made)
        self._stopwatch.stop(start, ubatch)
        return deliver

    def _taken_in(self, ubatch: UBatch) -> Tensor:
        """Token ids int64 [T], those that were chosen meanwhile among them; or the input."""
        if self.part.embeds:
            ids = self.ops.ids(ubatch.tokens)
            self._fill_in(ubatch, ids)
            return ids
        assert self._input is not None
        x, self._input = self._input, None
        return x

    def _fill_in(self, ubatch: UBatch, ids: Tensor) -> None:
        if ubatch.late:
            assert self.feedback is not None
            self.feedback.fill_in(ids, ubatch.late)

    def _walk(self, x: Tensor, ubatch: UBatch) -> Tensor:
        """Token ids, or hidden states [T, E], through the layers."""
        if self.part.embeds:
            x = self._model.embed(self.ops, self._embedding, x)
        for weights, kv in zip(self._weights, self._kv, strict=True):
            x = self._model.layer(self.ops, weights, x, kv, ubatch)
        return x

    def _step(self, x: Tensor, ubatch: UBatch) -> Tensor:
        """The same and on, in the last stage, to the logits of all rows if any are wanted."""
        x = self._walk(x, ubatch)
        has_logits = self.part.heads and ubatch.outputs
        return self._model.logits(self.ops, self._head, x) if has_logits else x

    def _emit(self, x: Tensor, ubatch: UBatch, take: Take) -> Deliver | None:
        """Logits of the rows that want them, a few at a time, to `take`."""
        outputs = ubatch.outputs
        if len(outputs) < ubatch.n_rows:
            x = _pick(x, outputs)
        n_rows = logits_rows(self._head.output.n_rows)
        parcels: list[Parcel] = []
        for start in range(0, len(outputs), n_rows):
            rows = range(start, min(start + n_rows, len(outputs)))
            logits = self._model.logits(self.ops, self._head, x[rows.start : rows.stop])
            chosen = self._chosen(logits, ubatch.choices[rows.start : rows.stop])
            parcels += self._send(logits, chosen, rows, ubatch, take)
        return self._deliver(parcels)

    def _send(
        self, logits: Tensor, chosen: Tensor | None, rows: range, ubatch: UBatch, take: Take
    ) -> list[Parcel]:
        """Hand over what was made of the outputs `rows`: here and now, or on its way."""
        if self._outlet is None:
            tokens = take(logits, rows)
            chosen = None if tokens is None else torch.tensor(tokens, dtype=torch.int32)
            parcels = []
        else:
            choices = ubatch.choices[rows.start : rows.stop]
            parcels = self._outlet.send(logits, rows, take, chosen, choices)
        if ubatch.parcel is not None and chosen is not None:
            assert self.feedback is not None
            self.feedback.leave(ubatch.parcel, rows, chosen)
        return parcels

    def _chosen(self, logits: Tensor, choices: Sequence[Choice | None]) -> Tensor | None:
        """Tokens int32 [n] where there are choices, on the device."""
        if not any(choices):
            return None
        assert self._chooser is not None
        return self._chooser.choose_among(logits, choices)

    def _deliver(self, parcels: Sequence[Parcel]) -> Deliver | None:
        return None if self._outlet is None else self._outlet.deliver(parcels)


def _pick(x: Tensor, rows: Sequence[int]) -> Tensor:
    """Those rows of x, ascending. Slices need no indexes, which a device would be waited for."""
    pairs = groupby(enumerate(rows), key=lambda pair: pair[1] - pair[0])
    runs = [[row for _, row in run] for _, run in pairs]
    return torch.cat([x[run[0] : run[-1] + 1] for run in runs])


def call(stream: Stream, work: Callable[[], T]) -> Future[T]:
    """Run `work` on `stream`; the future has what it returned or raised."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as exc:  # noqa: BLE001 - raised again by future.result()
            future.set_exception(exc)

    stream.run(run)
    return future
