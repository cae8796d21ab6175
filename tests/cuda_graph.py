"""A stand-in for CUDA graphs: operations of torch are written down, and done again in place.

What a graph cannot have raises: waiting for a result, shapes that depend on values, tensors made
from Python's numbers, which would travel while the device is not running. As on a GPU, what is
computed past torch (numpy, or the host's own choices) is frozen in the graph.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

REFUSED = {
    "aten._local_scalar_dense",
    "aten.nonzero",
    "aten.masked_select",
    "aten.lift_fresh",
    "aten.equal",
    "aten.unique_consecutive",
    "aten._unique2",
}


class Capture(TorchDispatchMode):
    """Does operations and keeps them: (function, arguments, results)."""

    def __init__(self, fails_at=None):
        super().__init__()
        self.done, self.fails_at = [], fails_at

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = f"{func.namespace}.{func._opname}"
        if name in REFUSED:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        if self.fails_at is not None and len(self.done) == self.fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate ...")
        out = func(*args, **(kwargs or {}))
        self.done.append((func, args, kwargs or {}, out))
        return out


class Graph:
    """torch.cuda.CUDAGraph. `now.fails_at` is the operation at which capturing fails, as long as
    `now.failing` is above 0. A pool is of no use after a capture in it failed."""

    def __init__(self, now):
        self.now, self.capture, self.n_replays = now, None, 0

    def capture_begin(self, pool=None, capture_error_mode="global"):
        assert pool is not None
        if pool in self.now.spoiled:
            raise RuntimeError("already recording to mempool_id")
        self.pool = pool
        assert capture_error_mode == "thread_local", "other threads use CUDA as well"
        self.stream = self.now.current_stream()
        assert not self.stream.is_default, "captured on the default stream"
        self.now.captured_on.append(self.stream)
        fails = self.now.failing > 0
        self.capture = Capture(self.now.fails_at if fails else None)
        if fails:
            self.now.failing -= 1
            self.now.spoiled.add(pool)
        self.capture.__enter__()
        self.now.log.append("capture")

    def capture_end(self):
        self.capture.__exit__(None, None, None)

    def replay(self):
        assert self.now.current_stream() is self.stream
        self.n_replays += 1
        self.now.log.append("replay")
        for func, args, kwargs, out in self.capture.done:
            again = func(*args, **kwargs)
            for old, new in zip(_tensors(out), _tensors(again), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    def reset(self):
        self.now.log.append("reset")
        self.capture = None


def _tensors(out):
    values = out if isinstance(out, tuple | list) else [out]
    return [value for value in values if isinstance(value, torch.Tensor)]
