"""Steps of a stage as CUDA graphs: what the host would launch kernel by kernel, in one call.

For decode steps there is a graph for every number of rows, rounded up to a power of two, and for
every power of two of cells that attention looks at, beside the way in which tokens are chosen. One
more is for each size of ubatch that a longer prompt goes in, as long as no logits are wanted: one
thread launches for all devices, and of several that compute such a part in a few milliseconds each,
most would wait for it. The last, shorter part of a prompt goes kernel by kernel.

A step that is new runs kernel by kernel, which also compiles them; when it comes again it is
captured, and replayed from then on. What cannot be captured goes on kernel by kernel.
"""

import gc
import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gguf_pp.backend.cuda import CudaBackend
from gguf_pp.batch import UBatch
from gguf_pp.ops.base import LayerKV
from gguf_pp.pipeline.kinds import Step, StepSizes
from gguf_pp.pipeline.placement import logits_rows
from gguf_pp.triton.choose import Kind, kind_of
from gguf_pp.triton.launching import power_of_2
from gguf_pp.triton.ops import DeviceOps
from gguf_pp.triton.standing import StandingRows

MAX_ROWS = 64
"""Of a decode step: up to as many, launching costs more than computing."""
MIN_CELLS = 256

_ONE_AT_A_TIME = threading.Lock()
"""Captures tell a device's generator of random numbers, which torch 2.11 does not guard."""

_FAILED: list[Any] = []
"""Graphs whose capture failed. Torch refers to them for as long as the process lives."""

log = logging.getLogger("gguf_pp")


class Shape(NamedTuple):
    """What a graph was captured for."""

    n_rows: int
    n_cells: int
    kind: Kind | None
    of_prompt: bool


class StepGraphs:
    """The graphs of one stage, used inside its compute stream.

    `x` float32 [n, E] takes hidden states in. Decode steps have `max_rows` rows at most.
    """

    def __init__(
        self,
        backend: CudaBackend,
        ops: DeviceOps,
        step: Step,
        kv: LayerKV | None,
        sizes: StepSizes,
    ) -> None:
        """`kv` is of any layer. Raises what torch raises if there is no memory."""
        self.max_rows = min(MAX_ROWS, power_of_2(sizes.n_slots))
        if sizes.heads:
            self.max_rows = min(self.max_rows, power_of_2(logits_rows(sizes.n_outputs) + 1) // 2)
        self.n_captured = 0
        self._name, self._ops, self._step, self._kv = backend.name, ops, step, kv
        self._takes_ids, self._heads = sizes.n_inputs == 0, sizes.heads
        self._cuda = backend.api.cuda
        has_parts = kv is not None and sizes.n_rows > 1 and not ops.launches_by_expert
        self._part_rows = sizes.n_rows if has_parts else 0
        self._rows: dict[tuple[int, bool], StandingRows] = {}
        self._graphs: dict[Shape, Any] = {}
        self.n_failed = 0
        self._has_warned = False
        self._pool = self._cuda.graph_pool_handle()
        most = max(self.max_rows, self._part_rows)
        self.x = torch.zeros(most, sizes.n_inputs, device=ops.device)
        n_out = self.max_rows if sizes.heads else most
        self._out = torch.empty(n_out, sizes.n_outputs, device=ops.device)
        self._chosen = torch.empty(self.max_rows, dtype=torch.int32, device=ops.device)

    def close(self) -> None:
        """Drop all graphs: before others of the same stage are captured."""
        self._graphs.clear()

    def takes(self, ubatch: UBatch) -> bool:
        """Whether `ubatch` is a decode step, rows of their own sequences which all want logits if
        there are any; or a part of a prompt as large as ubatches are, of which none are wanted."""
        n_rows = ubatch.n_rows
        is_step = n_rows <= self.max_rows and len(ubatch.spans) == n_rows
        is_step = is_step and (not self._heads or len(ubatch.outputs) == n_rows)
        return is_step or self._is_part(ubatch)

    def _is_part(self, ubatch: UBatch) -> bool:
        n_rows = ubatch.n_rows
        is_full = n_rows == self._part_rows or 1 < n_rows == power_of_2(n_rows) < self._part_rows
        return is_full and len(ubatch.spans) == 1 and not (self._heads and ubatch.outputs)

    def run(
        self, ubatch: UBatch, fill_in: Callable[[Tensor], None]
    ) -> tuple[Tensor, Tensor | None]:
        """Queue the step of `ubatch`, whose hidden states are in `x` if it has any.

        `fill_in` gets its token ids on the device, to put in what the host did not know. Returns
        hidden states or logits [n_rows, n_outputs], nothing of a prompt where logits are made, and
        chosen tokens int32 [n_rows] if there are choices. The next step overwrites both.
        """
        n_rows = ubatch.n_rows
        shape = self._shape_of(ubatch)
        rows = self._rows.get((shape.n_rows, shape.of_prompt))
        if rows is None:
            rows = StandingRows(shape.n_rows, self._ops.device, of_prompt=shape.of_prompt)
            self._rows[shape.n_rows, shape.of_prompt] = rows
        self._ops.stand(rows, ubatch, self._kv)
        if self._takes_ids:
            fill_in(rows.ids[:n_rows])
        if shape in self._graphs and self._graphs[shape] is None:
            self._graphs[shape] = self._captured(shape, rows)
        graph = self._graphs.get(shape)
        if graph is None:
            self._queue(shape, rows)
            self._graphs[shape] = None
        else:
            graph()
        n_out = 0 if self._heads and shape.of_prompt else n_rows
        return self._out[:n_out], None if shape.kind is None else self._chosen[:n_rows]

    def _shape_of(self, ubatch: UBatch) -> Shape:
        if self._is_part(ubatch):
            return Shape(ubatch.n_rows, self._cells_of(ubatch), None, of_prompt=True)
        chooses = self._heads and any(ubatch.choices)
        kind = kind_of(ubatch.choices) if chooses else None
        n_rows = power_of_2(ubatch.n_rows)
        return Shape(n_rows, self._cells_of(ubatch), kind, of_prompt=False)

    def _cells_of(self, ubatch: UBatch) -> int:
        """Cells that a graph for `ubatch` looks at."""
        if self._kv is None:
            return 0
        if self._is_part(ubatch) and self._ops.looks_everywhere(self._kv):
            return self._kv.n_cells
        end = max(span.start + span.n_rows for span in ubatch.spans)
        return min(self._kv.n_cells, max(MIN_CELLS, power_of_2(end)))

    def _queue(self, shape: Shape, rows: StandingRows) -> None:
        """Launch the step for all of `rows`, kernel by kernel."""
        with self._ops.standing(rows, shape.n_cells) as template:
            x = rows.ids if self._takes_ids else self.x[: shape.n_rows]
            made = self._step(x, template)
        if self._heads and shape.of_prompt:
            return
        out = self._out[: shape.n_rows]
        out.copy_(made)
        if shape.kind is not None:
            chosen = self._ops.choose(out, rows.choices, shape.kind)
            self._chosen[: shape.n_rows].copy_(chosen)

    def _captured(self, shape: Shape, rows: StandingRows) -> Callable[[], None]:
        """How to launch the step: by its graph, or kernel by kernel if that cannot be had."""
        graph = self._cuda.CUDAGraph()
        try:
            with _ONE_AT_A_TIME:
                self._capture(graph, shape, rows)
        except BaseException as exc:
            _FAILED.append(graph)
            self.n_failed += 1
            if not self.n_captured:  # resetting one graph takes from others what cuBLAS works in
                graph.reset()
            self._pool = self._cuda.graph_pool_handle()  # the other may be spoiled
            self._graphs[shape] = one_by_one = partial(self._queue, shape, rows)
            if not isinstance(exc, RuntimeError):
                raise
            self._tell(shape, exc.__context__ or exc)
            return one_by_one
        self.n_captured += 1
        replay: Callable[[], None] = graph.replay
        return replay

    def _capture(self, graph: Any, shape: Shape, rows: StandingRows) -> None:
        """Not by torch.cuda.graph, which waits for the device and empties its allocator every time.

        Other threads may go on using CUDA meanwhile; this one frees nothing but what it makes.
        """
        self._cuda.current_blas_handle()  # this thread's is made, if it has none, outside of graphs
        collects = gc.isenabled()
        gc.disable()
        try:
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                self._queue(shape, rows)
            finally:
                graph.capture_end()
        finally:
            if collects:
                gc.enable()

    def _tell(self, shape: Shape, why: BaseException) -> None:
        level = logging.DEBUG if self._has_warned else logging.WARNING
        self._has_warned = True
        what = "%s computes %d rows at a time without a CUDA graph: %s"
        log.log(level, what, self._name, shape.n_rows, why)
