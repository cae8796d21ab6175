"""From a file and settings to stages that are ready to run."""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from gguf_pp import arch
from gguf_pp.arch import Model
from gguf_pp.backend.base import Backend, OutOfMemory
from gguf_pp.backend.open import open_devices
from gguf_pp.backend.trace import Trace
from gguf_pp.config import RuntimeConfig
from gguf_pp.errors import PlacementError
from gguf_pp.gguf import ModelFile
from gguf_pp.ops import make_ops
from gguf_pp.ops.base import Ops
from gguf_pp.pipeline import split
from gguf_pp.pipeline.executor import Executor
from gguf_pp.pipeline.load import SizeLoader
from gguf_pp.pipeline.memory import MIN_CTX_SIZE, Rung, climb_down, rungs
from gguf_pp.pipeline.stage import LayerStage, kv_bytes, scratch_bytes

log = logging.getLogger("gguf_pp")

MARGIN = 0.05
"""Share of the free memory that a context chosen by us leaves alone."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of a model's weights, as they lie in the file."""

    embedding: int
    layers: tuple[int, ...]
    head: int
    tied: bool
    names: frozenset[str]

    def of(self, layers: range) -> int:
        """Bytes of one stage. A stage with both ends holds a tied table once."""
        first, last = layers.start == 0, layers.stop == len(self.layers)
        total = sum(self.layers[i] for i in layers)
        total += self.embedding * first + self.head * last
        return total - self.embedding * (first and last and self.tied)


def measure(file: ModelFile, model: Model, n_ctx: int) -> Sizes:
    """Add up sizes; on the way every tensor is checked. Raises FormatError."""

    def size(load: Callable[[SizeLoader], object]) -> SizeLoader:
        loader = SizeLoader(file, n_ctx)
        load(loader)
        return loader

    embedding = size(model.load_embedding)
    head = size(model.load_head)
    # Tables shared by all layers are small and are counted with each.
    layers = [
        size(lambda load, i=i: model.load_layer(load, i))  # type: ignore[misc]
        for i in range(model.hp.n_layers)
    ]
    names = embedding.names.union(head.names, *(layer.names for layer in layers))
    return Sizes(
        embedding=embedding.n_bytes,
        layers=tuple(layer.n_bytes for layer in layers),
        head=head.n_bytes,
        tied="token_embd.weight" in head.names,
        names=frozenset(names),
    )


def place(
    config: RuntimeConfig, sizes: Sizes, cell_bytes: int, backends: Sequence[Backend]
) -> list[range]:
    """Layers per device: as `--layers` or `-ts` say, else equal time, else equal memory.

    Equal time counts a layer by its bytes and a device by its relative speed; it is dropped if
    some device cannot hold its part. `cell_bytes` is the KV of one layer at the least context.
    """
    n_layers = len(sizes.layers)
    if config.layers is not None:
        return split.split_exact(n_layers, config.layers, len(config.devices))
    if config.shares is not None:
        return split.split_by_shares(n_layers, config.shares)
    speeds = [backend.relative_speed for backend in backends]
    by_time = split.split_evenly(sizes.layers, speeds)
    need: dict[str, int] = {}
    free: dict[str, int] = {}
    for backend, mine in zip(backends, by_time, strict=True):
        memory = backend.memory()
        free[memory.pool] = memory.free_bytes
        need[memory.pool] = need.get(memory.pool, 0) + sizes.of(mine) + cell_bytes * len(mine)
    if all(need[pool] <= free[pool] for pool in need):
        return by_time
    layer_bytes = [size + cell_bytes for size in sizes.layers]
    room = [backend.memory().free_bytes for backend in backends]
    return split.split_evenly(layer_bytes, room, sizes.embedding, sizes.head)


def fitting_context(
    config: RuntimeConfig,
    model: Model,
    sizes: Sizes,
    layers: Sequence[range],
    backends: Sequence[Backend],
) -> int:
    """The largest context, up to the model's own, whose KV cache fits beside everything else."""
    hp = model.hp
    need: dict[str, int] = {}
    per_cell: dict[str, int] = {}
    free: dict[str, int] = {}
    cell = kv_bytes(hp.n_kv_heads, hp.head_size, config.kv_types) * config.n_slots
    for backend, mine in zip(backends, layers, strict=True):
        memory = backend.memory()
        last = mine.stop == hp.n_layers
        fixed = sizes.of(mine) + scratch_bytes(model, config.max_ubatch_size, last=last)
        fixed += 2 * config.n_copies * config.max_ubatch_size * hp.n_embd * 4
        free[memory.pool] = int(memory.free_bytes * (1 - MARGIN))
        need[memory.pool] = need.get(memory.pool, 0) + fixed
        per_cell[memory.pool] = per_cell.get(memory.pool, 0) + cell * len(mine)
    fits = min((free[pool] - need[pool]) // per_cell[pool] for pool in free)
    if fits >= hp.n_ctx_train:
        return hp.n_ctx_train
    return max(MIN_CTX_SIZE, fits // 256 * 256)


class Pipeline:
    """Stages with weights and buffers, and the executor that runs them. `reason` says why
    pipelining is off, or is empty."""

    def __init__(
        self, file: ModelFile, config: RuntimeConfig, progress: Callable[[int, int], None]
    ) -> None:
        """Load everything; raises FormatError, UnsupportedError, ConfigError, PlacementError.

        `progress` is told bytes read so far and in all.
        """
        self.config = config
        self.trace = Trace()
        file.require_model()
        self.model = arch.build(file.metadata)
        self.n_vocab = 0
        self._refuse_long_context()
        self._backends = open_devices(config.devices, config.memory_bytes)
        try:
            self._load(file, progress)
        except BaseException:
            self.close()
            raise

    def _refuse_long_context(self) -> None:
        asked, train = self.config.ctx_size, self.model.hp.n_ctx_train
        if asked is not None and asked > train:
            log.warning("the context of %d exceeds the %d the model was trained for", asked, train)

    def _load(self, file: ModelFile, progress: Callable[[int, int], None]) -> None:
        config, model = self.config, self.model
        hp = model.hp
        n_ctx = config.ctx_size or hp.n_ctx_train
        sizes = measure(file, model, n_ctx)
        self.n_vocab = file.tensors["token_embd.weight"].shape[0]
        if unused := sorted(set(file.tensors) - sizes.names):
            log.warning("%d tensors are not used, such as %s", len(unused), unused[0])
        cell = kv_bytes(hp.n_kv_heads, hp.head_size, config.kv_types)
        layers = place(config, sizes, cell * MIN_CTX_SIZE * config.n_slots, self._backends)
        n_ctx = config.ctx_size or fitting_context(config, model, sizes, layers, self._backends)
        self.stages = [
            LayerStage(i, backend, partial(self._ops, backend), model, mine)
            for i, (backend, mine) in enumerate(zip(self._backends, layers, strict=True))
        ]
        self._load_weights(file, sizes, n_ctx, progress)
        asked = Rung(config.n_copies, config.max_ubatch_size, n_ctx)
        self.rung, _ = climb_down(
            rungs(asked, ctx_fixed=config.ctx_size is not None), self._allocate, self._release
        )
        self.reason = self._why_not_pipelined()
        self.executor = Executor(self.stages, self.trace, pipelined=not self.reason)
        if self.reason:
            log.info("pipeline parallelism off: %s", self.reason)
        else:
            log.info("pipeline parallelism enabled (n_copies=%d)", self.rung.n_copies)

    def _ops(self, backend: Backend) -> Ops:
        return make_ops(self.config.kernels, backend.n_threads, exact=self.config.exact)

    def _load_weights(
        self,
        file: ModelFile,
        sizes: Sizes,
        n_ctx: int,
        progress: Callable[[int, int], None],
    ) -> None:
        """All devices read their part at the same time."""
        total = sum(sizes.of(stage.layers) for stage in self.stages)
        done = 0
        lock = threading.Lock()

        def step(n_bytes: int) -> None:
            nonlocal done
            with lock:
                done += n_bytes
                progress(min(done, total), total)

        futures = [self._start_loading(stage, file, sizes, n_ctx, step) for stage in self.stages]
        for future in futures:
            future.result()

    def _start_loading(
        self,
        stage: LayerStage,
        file: ModelFile,
        sizes: Sizes,
        n_ctx: int,
        step: Callable[[int], None],
    ) -> Future[None]:
        try:
            return stage.load_weights(file, n_ctx, sizes.of(stage.layers), step)
        except OutOfMemory as exc:
            raise PlacementError(
                f"{stage.backend.name} has {exc.free_bytes >> 20} MiB free for "
                f"{exc.asked_bytes >> 20} MiB of weights "
                f"(layers {stage.layers.start} to {stage.layers.stop - 1})",
                hint="use a smaller quantization, or more devices",
            ) from exc

    def _allocate(self, rung: Rung) -> bool:
        for stage in self.stages:
            stage.allocate(rung, self.config.n_slots, self.config.kv_types)
        return True

    def _release(self) -> None:
        for stage in self.stages:
            stage.release()

    def _why_not_pipelined(self) -> str:
        if len(self.stages) == 1:
            return "there is one device"
        if self.rung.n_copies > 1:
            return ""
        if self.config.n_copies > 1:
            return "its buffers could not be allocated"
        return "--n-copies 1"

    def close(self) -> None:
        """Stop the devices' threads and drop weights and buffers."""
        for backend in self._backends:
            backend.close()
        self.stages = []
