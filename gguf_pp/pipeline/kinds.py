"""What stages on a CUDA device have that others have not. CUDA is loaded only where it is named."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from gguf_pp.backend.base import Backend, is_out_of_memory
from gguf_pp.backend.cpu import Budget, CpuBackend
from gguf_pp.backend.host import share_cores
from gguf_pp.backend.trace import DeviceClock
from gguf_pp.batch import Choice, UBatch
from gguf_pp.config import Kernels
from gguf_pp.ops import make_ops
from gguf_pp.ops.base import LayerKV, Ops
from gguf_pp.pipeline.stopwatch import CudaStopwatch, Stopwatch

if TYPE_CHECKING:
    from torch import Tensor

    from gguf_pp.backend.cuda import CudaBackend
    from gguf_pp.pipeline.graphs import StepGraphs
    from gguf_pp.pipeline.outlet import CudaOutlet

Step = Callable[["Tensor", UBatch], "Tensor"]
"""Queues a stage's work: token ids int64 [T] or hidden states [T, E] to hidden states, or to the
logits of all rows if there are outputs for them."""

log = logging.getLogger("gguf_pp")


class Chooser(Protocol):
    """Chooses tokens on the device."""

    def set_ends(self, ids: Sequence[int]) -> None:
        """Name the tokens that end a text, for choices that ban them."""
        ...

    def choose_among(self, logits: Tensor, choices: Sequence[Choice | None]) -> Tensor:
        """Token ids int32 [n] from logits float32 [n, V]; any, where there is no choice."""
        ...


class StepSizes(NamedTuple):
    """Of a stage's steps: `n_slots` sequences and `n_rows` rows at most; `n_inputs` columns of
    hidden states come in, or token ids (0); `n_outputs` go out, which are logits if `heads`."""

    n_slots: int
    n_rows: int
    n_inputs: int
    n_outputs: int
    heads: bool


def make_ops_on(backend: Backend, kernels: Kernels, *, exact: bool) -> Ops:
    """The operations of a stage on `backend`; to be called on its compute stream.

    Raises ConfigError if native kernels are asked for and were not built.
    """
    if (cuda := _as_cuda(backend)) is None:
        return make_ops(kernels, backend.n_threads, exact=exact)
    from gguf_pp.triton.ops import DeviceOps

    return DeviceOps(f"cuda:{cuda.index}", exact=exact, is_torch_only=kernels == "torch")


def make_stopwatch(backend: Backend) -> Stopwatch:
    """What tells how long ubatches take on `backend`."""
    cuda = _as_cuda(backend)
    return Stopwatch() if cuda is None else CudaStopwatch(cuda.api.cuda)


def make_clock(backend: Backend) -> DeviceClock | None:
    """What tells when work on `backend` ran; None where it runs when it is called."""
    if (cuda := _as_cuda(backend)) is None:
        return None
    from gguf_pp.backend.cuda_clock import CudaClock

    return CudaClock(cuda.api.cuda, cuda.raw_stream())


def make_relay(name: str, budget: Budget, devices: Sequence[Backend]) -> CpuBackend:
    """This machine as a place between a worker and `devices`; in pinned memory, which they copy to
    themselves, if CUDA's are among them."""
    for device in devices:
        if (cuda := _as_cuda(device)) is not None:
            from gguf_pp.backend.cuda_relay import Relay

            return Relay(budget, cuda.api, name)
    return CpuBackend(name, share_cores(1)[0], 1, budget)


def make_outlet(backend: Backend, n_slots: int, n_vocab: int) -> CudaOutlet | None:
    """The way of logits to the host, None where they are made there. Raises what torch raises if
    there is no memory for it."""
    if (cuda := _as_cuda(backend)) is None:
        return None
    from gguf_pp.pipeline.outlet import CudaOutlet

    return CudaOutlet(cuda.api, n_slots, n_vocab, waits=cuda.hosted)


def make_steps(
    backend: Backend, ops: Ops, step: Step, kv: LayerKV | None, sizes: StepSizes
) -> StepGraphs | None:
    """Graphs of the steps of a stage; None on other devices, and where they cannot be."""
    if (cuda := _as_cuda(backend)) is None:
        return None
    from gguf_pp.pipeline.graphs import StepGraphs
    from gguf_pp.triton.ops import DeviceOps

    assert isinstance(ops, DeviceOps)
    if not ops.is_graphable:
        return None
    try:
        graphs = StepGraphs(cuda, ops, step, kv, sizes)
    except Exception as exc:
        if not is_out_of_memory(exc):
            raise
        log.warning("%s computes without CUDA graphs: %s", backend.name, exc)
        return None
    cuda.captured.add(graphs)
    return graphs


def chooser_of(backend: Backend, ops: Ops) -> Chooser | None:
    """What chooses tokens where logits are; None where the host can look at them itself."""
    if _as_cuda(backend) is None:
        return None
    from gguf_pp.triton.ops import DeviceOps

    assert isinstance(ops, DeviceOps)
    return ops


def _as_cuda(backend: Backend) -> CudaBackend | None:
    if backend.name.partition(":")[0] != "cuda":
        return None
    from gguf_pp.backend.cuda import CudaBackend

    assert isinstance(backend, CudaBackend)
    return backend
