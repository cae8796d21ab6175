"""From a file and settings to stages that are ready to run."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import partial
from itertools import pairwise

from gguf_pp import arch
from gguf_pp.backend.base import Backend, OutOfMemory, is_out_of_memory
from gguf_pp.backend.cpu import CpuBackend
from gguf_pp.backend.trace import Trace
from gguf_pp.config import RuntimeConfig
from gguf_pp.errors import PlacementError, RemoteError
from gguf_pp.gguf import ModelFile
from gguf_pp.gguf.identity import identity_of
from gguf_pp.ops.base import Ops
from gguf_pp.pipeline.devices import open_all
from gguf_pp.pipeline.executor import Executor
from gguf_pp.pipeline.feedback import Feedback
from gguf_pp.pipeline.kinds import make_clock, make_ops_on, make_relay
from gguf_pp.pipeline.load import DeviceLoader, Reading
from gguf_pp.pipeline.memory import MIN_CTX_SIZE, Rung, climb_down, rungs
from gguf_pp.pipeline.offload import offloaded
from gguf_pp.pipeline.peer import RemoteDevice
from gguf_pp.pipeline.placement import (
    Sizes,
    fitting_context,
    kv_bytes,
    measure,
    n_parcels,
    place,
    why_not_pipelined,
)
from gguf_pp.pipeline.planned import cuda_here
from gguf_pp.pipeline.remote import RemoteStage
from gguf_pp.pipeline.split import Part, parts_of
from gguf_pp.pipeline.stage import DeviceUse, LayerStage, call

log = logging.getLogger("gguf_pp")


class Pipeline:
    """Stages with weights and buffers, and the executor that runs them. `reason` says why
    pipelining is off, or is empty."""

    def __init__(
        self, file: ModelFile, config: RuntimeConfig, progress: Callable[[int, int], None]
    ) -> None:
        """Load everything; raises FormatError, UnsupportedError, ConfigError, PlacementError,
        RemoteError. `file` stays open as long as this.

        `progress` is told bytes read so far and in all.
        """
        self.trace = Trace()
        file.require_model()
        self.model = arch.build(file.metadata)
        self.stages: list[LayerStage | RemoteStage] = []
        self.feedback: Feedback | None = None
        self._file = file
        self._warn_of_long_context(config)
        sizes = measure(file, self.model, config.ctx_size or self.model.hp.n_ctx_train)
        settled = offloaded(config, self.model, sizes, partial(cuda_here, config))
        for note in settled.notes[len(config.notes) :]:
            log.warning("%s", note)
        self._devices = open_all(settled)
        self.config = self._devices.config
        try:
            self._load(sizes, progress)
        except BaseException:
            self.close()
            raise

    def _warn_of_long_context(self, config: RuntimeConfig) -> None:
        asked, train = config.ctx_size, self.model.hp.n_ctx_train
        if asked is not None and asked > train:
            log.warning("the context of %d exceeds the %d the model was trained for", asked, train)

    def _load(self, sizes: Sizes, progress: Callable[[int, int], None]) -> None:
        config, model, file, devices = self.config, self.model, self._file, self._devices.all
        hp = model.hp
        self.n_vocab = file.tensors["token_embd.weight"].shape[0]
        if unused := sorted(set(file.tensors) - sizes.names):
            log.warning("%d tensors are not used, such as %s", len(unused), unused[0])
        cell = kv_bytes(hp.n_kv_heads, hp.head_size, config.kv_types)
        layers = place(config, sizes, cell * MIN_CTX_SIZE * config.n_slots, devices)
        parts = parts_of(layers, [device.local for device in devices])
        n_ctx = config.ctx_size or fitting_context(config, model, sizes, parts, devices)
        self.stages = self._make_stages(parts)
        self.depth = len(layers)
        self._make_feedback()
        self._reserve_weights(sizes)
        asked = Rung(config.n_copies, config.max_ubatch_size, n_ctx)
        self.rung, _ = climb_down(
            rungs(asked, ctx_fixed=config.ctx_size is not None), self._allocate, self._release
        )
        # Last: it takes longest, and rotation tables have the size of the context that was had.
        self._load_weights(self.stages, progress)
        for i, stage in enumerate(self.stages):
            if (clock := make_clock(stage.backend)) is not None:
                self.trace.clocks[i] = clock
        self.reason = why_not_pipelined(config, self.depth, self.rung.n_copies)
        self.executor = self._make_executor()
        if self.reason:
            log.info("pipeline parallelism off: %s", self.reason)
        else:
            log.info("pipeline parallelism enabled (n_copies=%d)", self.rung.n_copies)

    def _make_stages(self, parts: Sequence[tuple[int, Part]]) -> list[LayerStage | RemoteStage]:
        """One for each part here, and one for consecutive parts of the same worker."""
        stages: list[LayerStage | RemoteStage] = []
        away: list[tuple[RemoteDevice, Part]] = []
        for i_device, part in [*parts, (None, None)]:
            device = None if i_device is None else self._devices.all[i_device]
            if away and not (isinstance(device, RemoteDevice) and device.peer is away[0][0].peer):
                stages.append(self._remote_stage(len(stages), away))
                away = []
            if isinstance(device, RemoteDevice):
                assert part is not None
                away.append((device, part))
            elif device is not None:
                assert part is not None
                make = partial(self._ops, device)
                stage = LayerStage(len(stages), device, make, self.model, part)
                stage.uses_graphs = self.config.cuda_graphs
                stages.append(stage)
        return stages

    def _remote_stage(
        self, i_stage: int, places: Sequence[tuple[RemoteDevice, Part]]
    ) -> RemoteStage:
        peer = places[0][0].peer
        here = make_relay(f"tcp://{peer.endpoint.peer}", self._devices.budget, self._devices.here)
        self._devices.relays.append(here)
        return RemoteStage(i_stage, peer, places, self.model, self.config, here)

    def _make_feedback(self) -> None:
        """The way of tokens from the last stage to the first, if the host is to run ahead."""
        first, last = self.stages[0], self.stages[-1]
        if not self.config.run_ahead or (self.depth == 1 and len(self.stages) > 1):
            return
        if not (isinstance(first, LayerStage) and isinstance(last, LayerStage)):
            return
        stream = last.compute
        if not isinstance(last.backend, CpuBackend):  # whose streams are threads, slow to meet
            stream = last.backend.stream("feedback")
        self.feedback = Feedback(first, last, stream, self.n_vocab)
        first.feedback = last.feedback = self.feedback

    @property
    def chooses(self) -> bool:
        """Whether the last device chooses tokens, where UBatch.choices say how."""
        last = self.stages[-1]
        return isinstance(last, LayerStage) and last.chooses

    def set_ends(self, ids: Sequence[int]) -> None:
        """Name the tokens that end a text, for choices that ban them."""
        last = self.stages[-1]
        if isinstance(last, LayerStage):
            last.set_ends(ids)

    def parcels(self) -> list[int]:
        """Numbers of the parcels there are for UBatch.parcel; none if the host cannot run ahead."""
        return [] if self.feedback is None else [*range(len(self.feedback.parcels))]

    @property
    def remote_stages(self) -> list[RemoteStage]:
        """Those on other machines."""
        return [stage for stage in self.stages if isinstance(stage, RemoteStage)]

    def uses(self) -> list[DeviceUse]:
        """What each device with layers holds, in order; ends of the model that are stages of their
        own count with their device."""
        uses = [use for stage in self.stages for use in stage.uses()]
        ends = [use for use in uses if use.layers[0] == use.layers[1]]
        owners = [use for use in uses if use.layers[0] < use.layers[1]]
        first = {use.name: i for i, use in reversed(list(enumerate(owners)))}
        for end in ends:
            owners[first[end.name]] += end
        return owners

    def _ops(self, backend: Backend) -> Ops:
        return make_ops_on(backend, self.config.kernels, exact=self.config.exact)

    def _reserve_weights(self, sizes: Sizes) -> None:
        for stage in self.stages:
            try:
                if isinstance(stage, LayerStage):
                    stage.reserve_weights(sizes.of(stage.part))
            except OutOfMemory as exc:
                raise _too_large(exc, stage.layers) from exc
        self._open_remote()

    def _open_remote(self) -> None:
        """Declare the stages of workers, and link those that follow each other."""
        remote = self.remote_stages
        identity = identity_of(self._file) if remote else None
        for stage in remote:
            assert identity is not None
            try:
                stage.open(self._file, identity, self.n_vocab)
            except OutOfMemory as exc:
                raise _too_large(exc, stage.layers) from exc
        for before, after in pairwise(self.stages):
            if isinstance(before, RemoteStage) and isinstance(after, RemoteStage):
                way = "straight" if before.link(after) else "through this machine"
                log.info("%s sends to %s %s", before.name, after.name, way)

    def _load_weights(
        self, stages: Sequence[LayerStage | RemoteStage], progress: Callable[[int, int], None]
    ) -> None:
        """All devices read their part at the same time."""
        file, n_ctx = self._file, self.rung.ctx_size
        reading = Reading(sum(stage.weight_bytes for stage in stages), progress)
        by_device: dict[str, list[LayerStage]] = {}
        for stage in stages:
            if isinstance(stage, LayerStage):
                by_device.setdefault(stage.name, []).append(stage)
        try:
            # Threads of their own: a CUDA stream without one computes in that of its caller.
            with ThreadPoolExecutor(len(by_device) or 1) as pool, reading:
                futures = [
                    call(s.compute, partial(s.load_weights, file, n_ctx, reading.count))
                    for s in stages
                    if isinstance(s, RemoteStage)
                ]
                for mine in by_device.values():
                    # Both ends of the model on one device may be the same matrix.
                    loader = DeviceLoader(file, n_ctx, mine[0].ops, reading.step)
                    futures.append(pool.submit(_load_on_one_device, mine, loader))
                for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                    future.result()
        except Exception as exc:
            if not is_out_of_memory(exc):
                raise
            raise PlacementError(
                f"there was no memory for weights that should have fitted: {exc}",
                hint="use a smaller context (-c), or leave more free with --memory",
            ) from exc
        for mine in by_device.values():
            mine[0].settle()

    def _allocate(self, rung: Rung) -> bool:
        for stage in self.stages:
            stage.allocate(rung, self.config.n_slots, self.config.kv_types)
        if self.feedback is not None:
            n = n_parcels(self.config, self.depth, rung.n_copies)
            self.feedback.allocate(n, self.config.n_slots)
        return True

    def _release(self) -> None:
        if self.feedback is not None:
            self.feedback.release()
        for stage in self.stages:
            stage.release()

    @property
    def failure(self) -> RemoteError | None:
        """How a worker was lost, and what it held with it; None if all is well."""
        failures = [stage.peer.failure for stage in self.remote_stages]
        return next((failure for failure in failures if failure is not None), None)

    def revive(self) -> None:
        """Make all workers ready again, with the same stages and sizes; their caches are empty.

        Raises RemoteError if one cannot be reached, PlacementError if it has less memory now.
        What was in flight must have failed.
        """
        for stage in self.remote_stages:
            stage.settle()
        try:
            self._reopen()
        except BaseException:
            for stage in self.remote_stages:  # half made it is still lost
                stage.peer.close()
            raise
        self.executor = self._make_executor()

    def _make_executor(self) -> Executor:
        return Executor(self.stages, self.trace, pipelined=not self.reason, feedback=self.feedback)

    def _reopen(self) -> None:
        for stage in self.remote_stages:
            stage.peer.reconnect()
            stage.reset()
        self._open_remote()
        for stage in self.remote_stages:
            try:
                stage.allocate(self.rung, self.config.n_slots, self.config.kv_types)
            except OutOfMemory as exc:
                raise _too_large(exc, stage.layers) from exc
        self._load_weights(self.remote_stages, lambda done, total: None)

    def close(self) -> None:
        """Stop the devices' threads, leave the workers, and drop weights and buffers. Times of
        slices that are not known by then never are: clocks have streams of the devices."""
        self.trace.clocks.clear()
        self._devices.close()
        for stage in self.stages:
            if isinstance(stage, LayerStage):
                stage.close()
        self.stages = []


def _load_on_one_device(stages: Sequence[LayerStage], loader: DeviceLoader) -> None:
    for stage in stages:
        call(stages[0].compute, partial(stage.load_weights, loader)).result()


def _too_large(exc: OutOfMemory, layers: range) -> PlacementError:
    return PlacementError(
        f"{exc.device} has {exc.free_bytes >> 20} MiB free for {exc.asked_bytes >> 20} MiB of "
        f"{exc.what} (layers {layers.start} to {layers.stop - 1})",
        hint="use a smaller quantization, or more devices",
    )
