"""Decode steps of a stage as CUDA graphs: what the host would launch kernel by kernel, in one call.

There is a graph for every number of rows, rounded up to a power of two, and for every power of two
of cells that attention looks at, beside the way in which tokens are chosen. A step that is new runs
kernel by kernel, which also compiles them; when it comes again it is captured, and replayed from
then on. What cannot be captured goes on kernel by kernel.
"""

import gc
import logging
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gguf_pp.backend.cuda import CudaBackend
from gguf_pp.batch import UBatch
from gguf_pp.ops.base import LayerKV
from gguf_pp.pipeline.kinds import Step, StepSizes
from gguf_pp.pipeline.placement import logits_rows
from gguf_pp.triton.choose import Kind, kind_of
from gguf_pp.triton.ops import DeviceOps
from gguf_pp.triton.standing import StandingRows

MAX_ROWS = 64
"""Rows up to which launching costs more than computing."""
MIN_CELLS = 256

_ONE_AT_A_TIME = threading.Lock()
"""Captures tell a device's generator of random numbers, which torch 2.11 does not guard."""

log = logging.getLogger("gguf_pp")


class Shape(NamedTuple):
    """What a graph was captured for."""

    n_rows: int
    n_cells: int
    kind: Kind | None


class StepGraphs:
    """The graphs of one stage, used inside its compute stream.

    `x` float32 [max_rows, E] takes hidden states in.
    """

    def __init__(
        self,
        backend: CudaBackend,
        ops: DeviceOps,
        step: Step,
        kv: LayerKV | None,
        sizes: StepSizes,
    ) -> None:
        """`kv` is of any layer. Memory is that of the device's margin; raises what torch raises if
        there is none."""
        self.max_rows = min(MAX_ROWS, _power_of_2(sizes.n_slots))
        if sizes.heads:
            self.max_rows = min(self.max_rows, _power_of_2(logits_rows(sizes.n_outputs) + 1) // 2)
        self.n_captured = 0
        self._name, self._ops, self._step, self._kv = backend.name, ops, step, kv
        self._takes_ids, self._heads = sizes.n_inputs == 0, sizes.heads
        self._cuda = backend.api.cuda
        self._rows: dict[int, StandingRows] = {}
        self._graphs: dict[Shape, Any] = {}
        self._failed: list[Any] = []
        self._has_warned = False
        self._pool = self._cuda.graph_pool_handle()
        self.x = torch.zeros(self.max_rows, sizes.n_inputs, device=ops.device)
        self._out = torch.empty(self.max_rows, sizes.n_outputs, device=ops.device)
        self._chosen = torch.empty(self.max_rows, dtype=torch.int32, device=ops.device)

    def takes(self, ubatch: UBatch) -> bool:
        """Whether `ubatch` is a decode step: rows of their own sequences, which all want logits if
        there are any."""
        n_rows = ubatch.n_rows
        is_step = n_rows <= self.max_rows and len(ubatch.spans) == n_rows
        return is_step and (not self._heads or len(ubatch.outputs) == n_rows)

    def run(
        self, ubatch: UBatch, fill_in: Callable[[Tensor], None]
    ) -> tuple[Tensor, Tensor | None]:
        """Queue the step of `ubatch`, whose hidden states are in `x` if it has any.

        `fill_in` gets its token ids on the device, to put in what the host did not know. Returns
        hidden states or logits [n_rows, n_outputs], and chosen tokens int32 [n_rows] if there are
        choices. The next step overwrites both.
        """
        n_rows = ubatch.n_rows
        shape = self._shape_of(ubatch)
        rows = self._rows.get(shape.n_rows)
        if rows is None:
            rows = self._rows[shape.n_rows] = StandingRows(shape.n_rows, self._ops.device)
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
        return self._out[:n_rows], None if shape.kind is None else self._chosen[:n_rows]

    def _shape_of(self, ubatch: UBatch) -> Shape:
        end = max(span.start for span in ubatch.spans) + 1
        n_cells = 0
        if self._kv is not None:
            n_cells = min(self._kv.n_cells, max(MIN_CELLS, _power_of_2(end)))
        chooses = self._heads and any(ubatch.choices)
        kind = kind_of(ubatch.choices) if chooses else None
        return Shape(_power_of_2(ubatch.n_rows), n_cells, kind)

    def _queue(self, shape: Shape, rows: StandingRows) -> None:
        """Launch the step for all of `rows`, kernel by kernel."""
        out = self._out[: shape.n_rows]
        with self._ops.standing(rows, shape.n_cells) as template:
            x = rows.ids if self._takes_ids else self.x[: shape.n_rows]
            out.copy_(self._step(x, template))
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
            # Torch keeps a reference to a graph whose capture failed, and its pool may be spoiled.
            self._failed.append(graph)
            graph.reset()
            self._pool = self._cuda.graph_pool_handle()
            if not isinstance(exc, RuntimeError):
                raise
            self._tell(shape, exc.__context__ or exc)
            return lambda: self._queue(shape, rows)
        self.n_captured += 1
        replay: Callable[[], None] = graph.replay
        return replay

    def _capture(self, graph: Any, shape: Shape, rows: StandingRows) -> None:
        """Not by torch.cuda.graph, which waits for the device and empties its allocator every time.

        Other threads may go on using CUDA meanwhile; this one frees nothing but what it makes.
        """
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
        what = "%s decodes %d rows without a CUDA graph: %s"
        log.log(level, what, self._name, shape.n_rows, why)


def _power_of_2(n: int) -> int:
    """The least power of two that is not below `n`."""
    return 1 << (n - 1).bit_length()
