"""Times parts of a real model on real devices, all devices at once."""

import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from gguf_pp import arch
from gguf_pp.arch import Model
from gguf_pp.backend.base import Backend, OutOfMemory
from gguf_pp.backend.cpu import Budget, CpuBackend
from gguf_pp.backend.open import open_devices
from gguf_pp.batch import Span, UBatch
from gguf_pp.config import RuntimeConfig
from gguf_pp.errors import PlacementError
from gguf_pp.gguf import ModelFile
from gguf_pp.ops import make_ops
from gguf_pp.ops.base import LayerKV
from gguf_pp.pipeline.groups import auto_ubatch_size
from gguf_pp.pipeline.load import DeviceLoader
from gguf_pp.pipeline.memory import MIN_CTX_SIZE, Rung
from gguf_pp.pipeline.placement import fits, kv_bytes, measure, need_of, place
from gguf_pp.pipeline.split import Part
from gguf_pp.pipeline.stage import call
from gguf_pp.tune import Job

T = TypeVar("T")

DEPTH = 64
"""Tokens that every sequence has in the cache while layers are timed."""
MIN_SECONDS = 1.0
MIN_PASSES = 3
N_COPIES_TIMED = 20


class _Device:
    """A backend, and the thread and operations that parts are timed with on it."""

    def __init__(self, backend: Backend, config: RuntimeConfig) -> None:
        self.backend = backend
        self.stream = backend.stream("probe", compute=True)
        make = partial(make_ops, config.kernels, backend.n_threads, exact=config.exact)
        self.ops = call(self.stream, make).result()


class ModelProbe:
    """A `tune.Probe` for the devices of a configuration; a context manager.

    Weights are loaded for one measurement and dropped after it, so that a model which fits no
    single device can be timed.
    """

    def __init__(self, file: ModelFile, config: RuntimeConfig, n_ctx: int) -> None:
        """Raises FormatError, UnsupportedError, ConfigError."""
        file.require_model()
        self._file, self._config, self._n_ctx = file, config, n_ctx
        self._model: Model = arch.build(file.metadata)
        self._sizes = measure(file, self._model, n_ctx)
        self._backends = open_devices(config.devices, Budget(config.memory_bytes))
        self._devices = [_Device(backend, config) for backend in self._backends]

    @property
    def kinds(self) -> list[Hashable]:
        """What each layer is like: the names, types and shapes of its tensors."""
        kinds: list[set[tuple[str, ...]]] = [set() for _ in self._sizes.layers]
        for name, info in self._file.tensors.items():
            prefix, _, rest = name.removeprefix("blk.").partition(".")
            if name.startswith("blk.") and prefix.isdecimal() and int(prefix) < len(kinds):
                kinds[int(prefix)].add((rest, info.type.name, str(info.shape)))
        return [frozenset(kind) for kind in kinds]

    def default_split(self) -> list[range]:
        """What a run without -ts and --layers does. Raises PlacementError."""
        hp = self._model.hp
        cell = kv_bytes(hp.n_kv_heads, hp.head_size, self._config.kv_types)
        cells = MIN_CTX_SIZE * self._config.n_slots
        return place(self._config, self._sizes, cell * cells, self._backends)

    def ubatch_size(self, n_tokens: int) -> int:
        """Rows of the ubatches that a run cuts a prompt of `n_tokens` into."""
        limit = min(n_tokens, self._config.max_ubatch_size)
        if self._config.ubatch_size is not None:
            return limit
        overhead = max(device.ops.overhead_rows for device in self._devices)
        return auto_ubatch_size(n_tokens, len(self._devices), overhead, limit)

    def fits(self, i_device: int, layers: range) -> bool:
        """Whether a device has the memory for layers, their KV cache and buffers."""
        rung = Rung(self._config.n_copies, self._config.max_ubatch_size, self._n_ctx)
        n_layers = self._model.hp.n_layers
        part = Part(layers, embeds=layers.start == 0, heads=layers.stop == n_layers)
        need = need_of(self._config, self._model, self._sizes, part, rung)
        return fits([self._backends[i_device]], [need.total])

    def layers_s(self, layers: Sequence[int], job: Job) -> list[float]:
        """Seconds of one of `layers`, per device."""

        def load(device: _Device) -> list[Any]:
            loader = self._loader(device)
            return [self._model.load_layer(loader, i) for i in layers]

        def timed(device: _Device, weights: list[Any]) -> float:
            return self._pass_s(device, weights, job) / len(layers)

        return self._at_once(load, timed, sum(self._sizes.layers[i] for i in layers))

    def _pass_s(self, device: _Device, weights: Sequence[Any], job: Job) -> float:
        """Seconds of one ubatch through all `weights`."""
        hp, config = self._model.hp, self._config
        n_slots = job.n_rows if job.workload == "decode" else 1
        n_cells = DEPTH + job.n_rows
        size = (n_slots, n_cells, hp.n_kv_heads, hp.head_size)
        caches = [device.ops.layer_kv(*size, *config.kv_types) for _ in weights]
        for slot in range(n_slots):
            self._walk(device, weights, caches, _ubatch([Span(slot, 0, DEPTH)]))
        spans = [Span(slot, DEPTH, job.n_rows // n_slots) for slot in range(n_slots)]
        return timed_s(partial(self._walk, device, weights, caches, _ubatch(spans)))

    def _walk(
        self, device: _Device, weights: Sequence[Any], caches: Sequence[LayerKV], ubatch: UBatch
    ) -> None:
        x = self._hidden(ubatch.n_rows)
        for w, kv in zip(weights, caches, strict=True):
            x = self._model.layer(device.ops, w, x, kv, ubatch)

    def _hidden(self, n_rows: int) -> Tensor:
        """Hidden states [n_rows, E] of ordinary size."""
        width = self._model.hp.n_embd
        return torch.linspace(-1, 1, n_rows * width).reshape(n_rows, width)

    def head_s(self, job: Job) -> list[float]:
        """Seconds of the head per ubatch: of a prompt only one row, in the last, has logits."""
        n_rows, per = (job.n_rows, 1) if job.workload == "decode" else (1, job.n_ubatches)

        def load(device: _Device) -> Any:
            return self._model.load_head(self._loader(device))

        def timed(device: _Device, head: Any) -> float:
            x = self._hidden(n_rows)
            return timed_s(lambda: self._model.logits(device.ops, head, x)) / per

        return self._at_once(load, timed, self._sizes.head)

    def edges_s(self, job: Job) -> list[float]:
        """Seconds from a device's queue to the next one's buffer."""
        width, times = self._model.hp.n_embd, []
        for source, target in zip(self._backends, self._backends[1:], strict=False):
            src = source.buffer(job.n_rows, width, "output to time")
            dst = target.buffer(job.n_rows, width, "input to time")
            stream, passed = source.stream("probe transfer"), source.event()

            def copy() -> None:
                stream.copy(dst, src, job.n_rows)  # noqa: B023 - called before the next edge
                stream.record(passed)  # noqa: B023
                passed.synchronize()  # noqa: B023

            times.append(timed_s(copy, 0.0, N_COPIES_TIMED))
            source.release(src.n_bytes)
            target.release(dst.n_bytes)
        return times

    def _loader(self, device: _Device) -> DeviceLoader:
        return DeviceLoader(self._file, self._n_ctx, device.ops, lambda n_bytes: None)

    def _at_once(
        self, load: Callable[[_Device], T], timed: Callable[[_Device, T], float], n_bytes: int
    ) -> list[float]:
        """Load `n_bytes` of weights on every device, then time them on all at the same time."""
        taken: list[CpuBackend] = []
        try:
            for backend in self._backends:
                backend.reserve(n_bytes, "weights to time")
                taken.append(backend)
            loaded = [call(d.stream, partial(load, d)) for d in self._devices]
            weights = [future.result() for future in loaded]
            pairs = zip(self._devices, weights, strict=True)
            futures = [call(d.stream, partial(timed, d, w)) for d, w in pairs]
            return [future.result() for future in futures]
        except OutOfMemory as exc:
            raise PlacementError(
                f"{exc.device} has {exc.free_bytes >> 20} MiB free for "
                f"{exc.asked_bytes >> 20} MiB of weights to time"
            ) from exc
        finally:
            for backend in taken:
                backend.release(n_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for backend in self._backends:
            backend.close()


def _ubatch(spans: Sequence[Span]) -> UBatch:
    n_rows = sum(span.n_rows for span in spans)
    return UBatch((0,) * n_rows, tuple(spans), ())


def timed_s(
    work: Callable[[], object], min_seconds: float = MIN_SECONDS, min_passes: int = MIN_PASSES
) -> float:
    """Median seconds of `work`, called for a while after a call that is not counted."""
    work()
    times: list[float] = []
    while len(times) < min_passes or sum(times) < min_seconds:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
