"""What a model is written in: one protocol, one implementation per kind of device."""

from gguf_pp.config import Kernels
from gguf_pp.native import kernels
from gguf_pp.ops.base import Ops


def make_ops(choice: Kernels, n_threads: int, *, exact: bool) -> Ops:
    """The operations of one CPU stage: our kernels where they were built, else torch.

    Raises ConfigError if native kernels are asked for and were not built. Torch is always exact.
    """
    # Here, because what imports only the protocol, to plan, must not wait for torch.
    if kernels(choice) is None:
        from gguf_pp.ops.torch_ops import TorchOps

        return TorchOps()
    from gguf_pp.ops.native import NativeOps

    return NativeOps(n_threads, exact=exact)
