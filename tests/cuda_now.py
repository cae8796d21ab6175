"""A stand-in for torch with CUDA that does everything at once, in ordinary memory.

It orders nothing, which is the business of `cuda_double`; with real tensors it runs whole models
through the code for CUDA devices.
"""

import contextlib
import itertools
import threading
import time
from types import SimpleNamespace

import torch

from tests.cuda_graph import Graph


class Stream:
    """torch.cuda.Stream, always idle."""

    def __init__(self, now, device, *, is_default=False):
        self.now, self.device_index, self.is_default = now, device, is_default

    def wait_event(self, event):
        self.now.log.append("wait")

    def synchronize(self):
        if self.device_index in self.now.broken:
            raise RuntimeError(self.now.broken[self.device_index])
        self.now.log.append("synchronize")


class Event:
    """torch.cuda.Event, always passed."""

    def __init__(self, now, enable_timing=False, blocking=False):
        self.now, self.enable_timing, self.at_s, self.device = now, enable_timing, None, None

    def record(self, stream=None):
        stream = stream or self.now.current_stream()
        assert self.device in (None, stream.device_index), "recorded on two devices"
        self.device = stream.device_index
        self.at_s = time.perf_counter()

    def query(self):
        return self.at_s is not None

    def synchronize(self):
        self.now.log.append("synchronize")

    def elapsed_time(self, later):
        assert self.enable_timing and later.enable_timing
        return 1e3 * (later.at_s - self.at_s)


class Now:
    """Stands for the module torch, with `n_devices` devices of `total_bytes`."""

    float32, uint8, int32 = torch.float32, torch.uint8, torch.int32
    __version__ = "2.13.0+now"
    from_numpy = staticmethod(torch.from_numpy)

    def __init__(self, n_devices=2, total_bytes=8 << 30):
        self.n_devices, self.total_bytes = n_devices, total_bytes
        self.fails_at, self.failing, self.spoiled, self.broken = None, 0, set(), {}
        pools = itertools.count(1)
        self.log, self.captured_on = [], []
        self.version = SimpleNamespace(cuda="13.0")
        self.local = threading.local()
        self.cuda = SimpleNamespace(
            Stream=lambda device, priority=0: Stream(self, device),
            Event=lambda **kwargs: Event(self, **kwargs),
            CUDAGraph=lambda: Graph(self),
            current_blas_handle=lambda: 1,
            graph_pool_handle=lambda: (0, next(pools)),
            device=self.device,
            set_stream=self.set_stream,
            current_stream=self.current_stream,
            synchronize=lambda device=None: None,
            is_available=lambda: True,
            device_count=lambda: self.n_devices,
            mem_get_info=lambda i: (self.total_bytes, self.total_bytes),
            memory_allocated=lambda i: 0,
            memory_reserved=lambda i: 0,
            empty_cache=lambda: None,
            get_device_properties=lambda i: SimpleNamespace(multi_processor_count=100),
        )

    def state(self):
        if not hasattr(self.local, "device"):
            self.local.device = 0
            self.local.streams = [Stream(self, i, is_default=True) for i in range(self.n_devices)]
        return self.local

    def current_stream(self, device=None):
        state = self.state()
        return state.streams[state.device if device is None else device]

    def set_stream(self, stream):
        state = self.state()
        state.device = stream.device_index
        state.streams[stream.device_index] = stream

    @contextlib.contextmanager
    def device(self, index):
        state = self.state()
        before, state.device = state.device, index
        yield
        state.device = before

    def empty(self, shape, dtype, device=None, pin_memory=False):
        memory = torch.empty(shape, dtype=dtype)
        return memory.fill_(float("nan")) if dtype.is_floating_point else memory.fill_(0xFF)
