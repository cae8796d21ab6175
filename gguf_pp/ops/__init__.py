"""What a model is written in: one protocol, one implementation per kind of device."""

from gguf_pp.backend.base import Backend
from gguf_pp.config import Kernels
from gguf_pp.ops.base import Ops


def make_ops(backend: Backend, kernels: Kernels, *, exact: bool) -> Ops:
    """The operations for one stage on `backend`.

    Raises ConfigError if native kernels are asked for and were not built.
    """
    from gguf_pp.ops.torch_ops import TorchOps

    return TorchOps()
