"""A part of the model on one device, with its weights, its KV cache and its ring."""

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from gguf_pp.arch import Model
from gguf_pp.backend.base import Backend, Stream
from gguf_pp.batch import UBatch
from gguf_pp.ops.base import LayerKV, Ops
from gguf_pp.pipeline.executor import Take
from gguf_pp.pipeline.load import DeviceLoader
from gguf_pp.pipeline.memory import Rung
from gguf_pp.pipeline.placement import kv_bytes, logits_rows, scratch_bytes
from gguf_pp.pipeline.ring import Copy, Ring
from gguf_pp.pipeline.split import Part

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

    def __add__(self, other: "DeviceUse") -> "DeviceUse":
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

    `recent` are (rows, outputs, seconds) of the ubatches computed last.
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
        self.recent: deque[tuple[int, int, float]] = deque(maxlen=64)
        self._i_stage = i_stage
        self._model = model
        self._embedding: Any = None
        self._weights: list[Any] = []
        self._head: Any = None
        self._kv: list[LayerKV] = []
        self._input: Tensor | None = None

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
    def n_threads(self) -> int:
        """Threads of this host that compute."""
        return self.backend.n_threads

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
                buffer_bytes=self.ring.n_bytes + self.scratch_bytes,
                free_bytes=self.backend.memory().free_bytes,
                kernels=self.kernels,
            )
        ]

    def reserve_weights(self, n_bytes: int) -> None:
        """Take `n_bytes` for this stage's weights; raises OutOfMemory if the device has less."""
        self.backend.reserve(n_bytes, "weights")
        self.weight_bytes = n_bytes

    def load_weights(self, loader: DeviceLoader) -> None:
        """Read this stage's weights. Runs on the compute stream of the stage whose ops `loader`
        has: this one, or another of the same device."""
        if self.part.embeds:
            self._embedding = self._model.load_embedding(loader)
        self._weights = [self._model.load_layer(loader, i) for i in self.layers]
        if self.part.heads:
            self._head = self._model.load_head(loader)

    def allocate(self, rung: Rung, n_slots: int, kv_types: tuple[str, str]) -> None:
        """Reserve KV cache, ring and scratch; raises OutOfMemory. `release` undoes it, whole or
        half done."""
        hp = self._model.hp
        cell = kv_bytes(hp.n_kv_heads, hp.head_size, kv_types)
        size = cell * rung.ctx_size * n_slots * len(self.layers)
        self.backend.reserve(size, "KV cache")
        self.kv_bytes = size
        for _ in self.layers:
            self._kv.append(
                self.ops.layer_kv(n_slots, rung.ctx_size, hp.n_kv_heads, hp.head_size, *kv_types)
            )
        self.ring = Ring(
            self.backend,
            rung.n_copies,
            rung.ubatch_size,
            hp.n_embd,
            inp=not self.part.embeds,
            out=not self.part.heads,
        )
        scratch = scratch_bytes(self._model, rung.ubatch_size, last=self.part.heads)
        self.backend.reserve(scratch, "scratch")
        self.scratch_bytes = scratch

    def release(self) -> None:
        """Give back everything but the weights."""
        self._kv.clear()
        if hasattr(self, "ring"):
            self.ring.release()
        self.backend.release(self.kv_bytes + self.scratch_bytes)
        self.kv_bytes = self.scratch_bytes = 0

    def load(self, copy: Copy, ubatch: UBatch) -> None:
        """Move the input out of `copy`, which is free for the next ubatch right after."""
        if copy.inp is not None:
            self._input = copy.inp.tensor[: ubatch.n_rows].clone()

    def abandon(self, copy: Copy, ubatch: UBatch) -> None:
        """Drop what was loaded."""
        self._input = None

    def forward(self, copy: Copy, ubatch: UBatch, take: Take) -> None:
        """Run the layers on what was loaded."""
        start = time.perf_counter()
        model, ops = self._model, self.ops
        if self.part.embeds:
            x = model.embed(ops, self._embedding, ubatch.tokens)
        else:
            assert self._input is not None
            x, self._input = self._input, None
        for weights, kv in zip(self._weights, self._kv, strict=True):
            x = model.layer(ops, weights, x, kv, ubatch)
        if copy.out is not None:
            copy.out.tensor[: ubatch.n_rows].copy_(x)
        elif ubatch.outputs:
            self._emit(x, ubatch, take)
        end = time.perf_counter()
        self.recent.append((ubatch.n_rows, len(ubatch.outputs), end - start))

    def _emit(self, x: Tensor, ubatch: UBatch, take: Take) -> None:
        """Logits of the rows that want them, a few at a time, to `take`."""
        outputs = ubatch.outputs
        if len(outputs) < ubatch.n_rows:
            x = x[torch.tensor(outputs)]
        n_rows = logits_rows(self._head.output.n_rows)
        for start in range(0, len(outputs), n_rows):
            rows = range(start, min(start + n_rows, len(outputs)))
            take(self._model.logits(self.ops, self._head, x[rows.start : rows.stop]), rows)


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
