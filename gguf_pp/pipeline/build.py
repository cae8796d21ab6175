"""From a file and settings to stages that are ready to run."""

import logging
import threading
from collections.abc import Callable
from functools import partial

from gguf_pp import arch
from gguf_pp.backend.base import Backend, OutOfMemory
from gguf_pp.backend.open import open_devices
from gguf_pp.backend.trace import Trace
from gguf_pp.config import RuntimeConfig
from gguf_pp.errors import PlacementError
from gguf_pp.gguf import ModelFile
from gguf_pp.ops import make_ops
from gguf_pp.ops.base import Ops
from gguf_pp.pipeline.executor import Executor
from gguf_pp.pipeline.memory import MIN_CTX_SIZE, Rung, climb_down, rungs
from gguf_pp.pipeline.placement import (
    fitting_context,
    kv_bytes,
    measure,
    place,
    why_not_pipelined,
)
from gguf_pp.pipeline.stage import LayerStage

log = logging.getLogger("gguf_pp")


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
        for stage in self.stages:
            _reserve_weights(stage, sizes.of(stage.layers))
        asked = Rung(config.n_copies, config.max_ubatch_size, n_ctx)
        self.rung, _ = climb_down(
            rungs(asked, ctx_fixed=config.ctx_size is not None), self._allocate, self._release
        )
        # Last: it takes longest, and rotation tables have the size of the context that was had.
        self._load_weights(file, progress)
        self.reason = why_not_pipelined(config, len(self.stages), self.rung.n_copies)
        self.executor = Executor(self.stages, self.trace, pipelined=not self.reason)
        if self.reason:
            log.info("pipeline parallelism off: %s", self.reason)
        else:
            log.info("pipeline parallelism enabled (n_copies=%d)", self.rung.n_copies)

    def _ops(self, backend: Backend) -> Ops:
        return make_ops(self.config.kernels, backend.n_threads, exact=self.config.exact)

    def _load_weights(self, file: ModelFile, progress: Callable[[int, int], None]) -> None:
        """All devices read their part at the same time."""
        total = sum(stage.weight_bytes for stage in self.stages)
        done = 0
        lock = threading.Lock()

        def step(n_bytes: int) -> None:
            nonlocal done
            with lock:
                done += n_bytes
                progress(min(done, total), total)

        n_ctx = self.rung.ctx_size
        futures = [stage.load_weights(file, n_ctx, step) for stage in self.stages]
        for future in futures:
            future.result()

    def _allocate(self, rung: Rung) -> bool:
        for stage in self.stages:
            stage.allocate(rung, self.config.n_slots, self.config.kv_types)
        return True

    def _release(self) -> None:
        for stage in self.stages:
            stage.release()

    def close(self) -> None:
        """Stop the devices' threads and drop weights and buffers."""
        for backend in self._backends:
            backend.close()
        self.stages = []


def _reserve_weights(stage: LayerStage, n_bytes: int) -> None:
    try:
        stage.reserve_weights(n_bytes)
    except OutOfMemory as exc:
        raise PlacementError(
            f"{stage.backend.name} has {exc.free_bytes >> 20} MiB free for "
            f"{exc.asked_bytes >> 20} MiB of weights "
            f"(layers {stage.layers.start} to {stage.layers.stop - 1})",
            hint="use a smaller quantization, or more devices",
        ) from exc
