"""What stages on a CUDA device have that others have not. CUDA is loaded only where it is named."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gguf_pp.backend.base import Backend
from gguf_pp.config import Kernels
from gguf_pp.ops import make_ops
from gguf_pp.ops.base import Ops
from gguf_pp.pipeline.stopwatch import CudaStopwatch, Stopwatch

if TYPE_CHECKING:
    from gguf_pp.backend.cuda import CudaBackend
    from gguf_pp.pipeline.outlet import CudaOutlet


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


def make_outlet(backend: Backend, n_slots: int, n_vocab: int) -> CudaOutlet | None:
    """The way of logits to the host, None where they are made there. Raises what torch raises if
    there is no memory for it."""
    if (cuda := _as_cuda(backend)) is None:
        return None
    from gguf_pp.pipeline.outlet import CudaOutlet

    return CudaOutlet(cuda.api, n_slots, n_vocab, waits=cuda.hosted)


def _as_cuda(backend: Backend) -> CudaBackend | None:
    if backend.name.partition(":")[0] != "cuda":
        return None
    from gguf_pp.backend.cuda import CudaBackend

    assert isinstance(backend, CudaBackend)
    return backend
