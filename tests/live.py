"""How much memory tensors take."""

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class Live(TorchDispatchMode):
    """Watches what operations make: `peak` is the most bytes that lived at any time."""

    def __init__(self):
        super().__init__()
        self._made, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {id_of(x) for x in (*args, *(kwargs or {}).values()) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, Tensor) and id_of(x) not in given | self._made.keys():
                storage = x.untyped_storage()
                self._made[id_of(x)] = StorageWeakRef(storage), storage.nbytes()
        self._made = {i: made for i, made in self._made.items() if not made[0].expired()}
        self.peak = max(self.peak, sum(n_bytes for _, n_bytes in self._made.values()))
        return out


def id_of(x):
    """Of its storage."""
    return x.untyped_storage()._cdata


def peak_bytes(call, *args, **kwargs):
    """The most that tensors which `call` made took at any time, those that views are of whole."""
    with Live() as live:
        call(*args, **kwargs)
    return live.peak
