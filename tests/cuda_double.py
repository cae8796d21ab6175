"""A double of torch for a machine without CUDA: records what is asked, and does it in time.

Streams, events and copies mean what they mean to CUDA and torch (who waits for whom, which stream
a copy is on, what the current stream is in each thread), and are executed in a random legal order
in virtual time, by the simulator, which reports accesses that nothing orders.
"""

import contextlib
import threading
import weakref
from types import SimpleNamespace

import numpy as np
import torch

from gguf_pp.backend.sim import SimEvent, SimStream, World

HOST = "host"


class Stream:
    """torch.cuda.Stream."""

    def __init__(self, double, device, priority=0, name=None):
        self.double, self.device_index, self.priority = double, device, priority
        self.name = name or f"cuda:{device} stream {len(double.world.streams)}"
        self.sim = SimStream(double.world, self.name)
        double.world.streams.append(self.sim)

    def wait_event(self, event):
        self.double.note("wait", self, event)
        with self.double.lock:
            self.sim.wait(event.sim)

    def synchronize(self):
        self.double.note("synchronize", self)
        event = SimEvent(self.double.world)
        with self.double.lock:
            self.sim.record(event)
            event.synchronize()


class Event:
    """torch.cuda.Event: bound to the device of its first record."""

    def __init__(self, double, enable_timing=False, blocking=False):
        self.double, self.sim = double, SimEvent(double.world)
        self.enable_timing, self.blocking, self.device = enable_timing, blocking, None

    def record(self, stream=None):
        stream = stream or self.double.current_stream()
        assert self.device in (None, stream.device_index), "recorded on two devices"
        self.device = stream.device_index
        self.double.note("record", stream, self)
        with self.double.lock:
            stream.sim.record(self.sim)

    def synchronize(self):
        self.double.note("synchronize", None, self)
        with self.double.lock:
            self.sim.synchronize()

    def query(self):
        return self.sim.mark is not None and self.sim.mark.passed

    def elapsed_time(self, later):
        assert self.enable_timing and later.enable_timing
        return 1e3 * (later.sim.mark.time_s - self.sim.mark.time_s)


class Memory:
    """Bytes on a device (its index) or on the host ("host", "pinned"), and who touched them."""

    def __init__(self, double, place, n_bytes):
        self.double, self.place = double, place
        self.bytes = torch.full((n_bytes,), 0xFF, dtype=torch.uint8)  # NaN in any float
        self.writer, self.readers = None, {}

    def touch(self, stream, *, write):
        """An access by a running stream, or by the host (None)."""
        world = self.double.world
        name, tick, clock = HOST, world.host_tick, world.host_clock
        if stream is not None:
            name, tick, clock = stream.name, stream.tick, stream.clock
        else:
            world.host_tick = tick = tick + 1
            clock[HOST] = tick
        others = {**self.readers, **dict([self.writer] if self.writer else [])}
        for other, at in others.items() if write else [self.writer] if self.writer else []:
            if other != name and clock.get(other, 0) < at:
                kind = "write" if write else "read"
                world.races.append(f"{kind} of {self.place} memory: {name} against {other}")
        if write:
            self.writer, self.readers = (name, tick), {}
        else:
            self.readers[name] = tick


class Tensor:
    """torch.Tensor on a device, or in host memory that a device may reach."""

    def __init__(self, memory, data):
        self.memory, self.data = memory, data
        self.double, self.place = memory.double, memory.place
        self.shape, self.dtype, self.nbytes = data.shape, data.dtype, data.nbytes

    def __len__(self):
        return len(self.data)

    def __getitem__(self, rows):
        return Tensor(self.memory, self.data[rows])

    def view(self, *to):
        return Tensor(self.memory, self.data.view(*to))

    def is_contiguous(self):
        return self.data.is_contiguous()

    def copy_(self, src, non_blocking=False):
        self.double.copy(self, src, non_blocking)
        return self

    def add_(self, n):
        self.double.launch("add", [self], [self], lambda: self.data.add_(n))
        return self

    def fill_(self, value):
        self.double.launch("fill", [], [self], lambda: self.data.fill_(value))
        return self

    def read(self):
        """What the host sees of host memory."""
        assert not isinstance(self.place, int), "the host cannot read a device's memory"
        with self.double.lock:
            self.memory.touch(None, write=False)
            return self.data.clone()

    def __rsub__(self, n):
        return n - self.read()

    def __ne__(self, other):
        return self.read() != (other.read() if isinstance(other, Tensor) else other)

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        target, source = args[:2]
        assert func is torch.Tensor.copy_ and isinstance(source, cls)
        return target.copy_(source.read())


class Double:
    """Stands for the module torch. `damages(source, target, n_bytes)` says which direct copies
    arrive with a wrong byte; `host_damages` is whether copies from pinned memory do.
    `others_bytes` is what other processes have of each device. The allocator refuses to hold more
    than `refuses_above_bytes`, whatever is said to be free."""

    float32, uint8, int32 = torch.float32, torch.uint8, torch.int32
    __version__ = "2.13.0+double"

    def __init__(self, n_devices=4, seed=0, total_bytes=8 << 30, copy_s=0.0, kernel_s=1.0):
        self.world = World(seed)
        self.world.host_tick = 0
        self.lock = threading.RLock()
        self.log = []
        self.n_devices, self.total_bytes = n_devices, total_bytes
        self.copy_s, self.kernel_s = copy_s, kernel_s
        self.damages = lambda source, target, n_bytes: False
        self.host_damages = False
        self.others_bytes = [0] * n_devices
        self.refuses_above_bytes = total_bytes
        self.allocated, self.cached = [0] * n_devices, [0] * n_devices
        self.contexts = set()
        self.version = SimpleNamespace(cuda="13.0")
        self.defaults = [Stream(self, i, name=f"cuda:{i} default") for i in range(n_devices)]
        self.local = threading.local()
        self.capturing = {}
        self.cuda = _cuda(self)

    def note(self, what, stream, *details):
        self.log.append((what, stream, *details))

    # What is current, per thread.

    def state(self):
        if not hasattr(self.local, "device"):
            self.local.device, self.local.streams = 0, list(self.defaults)
        return self.local

    def current_stream(self, device=None):
        state = self.state()
        return state.streams[state.device if device is None else device]

    def set_stream(self, stream):
        state = self.state()
        if state.device != stream.device_index:
            self.contexts.add(stream.device_index)
        state.device = stream.device_index
        state.streams[stream.device_index] = stream

    @contextlib.contextmanager
    def device(self, index):
        state = self.state()
        before, state.device = state.device, index
        yield
        state.device = before

    # Memory.

    def empty(self, shape, dtype, device=None, pin_memory=False):
        place = "pinned" if pin_memory else HOST
        n_bytes = int(np.prod(shape)) * dtype.itemsize
        if device is not None:
            place = int(device.removeprefix("cuda:"))
            self.contexts.add(place)
            if self.allocated[place] + n_bytes > self.refuses_above_bytes:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate ...")
            self.allocated[place] += n_bytes
            self.cached[place] = max(0, self.cached[place] - n_bytes)
        memory = Memory(self, place, n_bytes)
        if device is not None:
            weakref.finalize(memory, self._freed, place, n_bytes)
        return Tensor(memory, memory.bytes.view(dtype).view(shape))

    def _freed(self, place, n_bytes):
        self.allocated[place] -= n_bytes
        self.cached[place] += n_bytes

    def from_numpy(self, array):
        tensor = self.empty(array.shape, dtype=torch.uint8)
        tensor.data.copy_(torch.from_numpy(array))
        return tensor

    def mem_get_info(self, i):
        taken = self.others_bytes[i] + self.allocated[i] + self.cached[i]
        return self.total_bytes - taken, self.total_bytes

    def empty_cache(self):
        self.note("empty_cache", None)
        self.cached = [0] * self.n_devices

    # Work.

    def launch(self, label, reads, writes, work, seconds=None):
        """A kernel on the current stream: its memory must be on the current device."""
        stream = self.current_stream()
        for tensor in (*reads, *writes):
            assert tensor.place == stream.device_index, f"{label}: memory of another device"
        self.note("kernel", stream, label)
        cost = self.kernel_s if seconds is None else seconds
        self._queue(stream, reads, writes, work, cost)

    def _queue(self, stream, reads, writes, work, seconds):
        def execute():
            self.world.spend(seconds)
            for tensors, write in ((reads, False), (writes, True)):
                for tensor in tensors:
                    if isinstance(tensor, Tensor):
                        tensor.memory.touch(stream.sim, write=write)
            work()

        with self.lock:
            captured = self.capturing.get(stream)
            if captured is not None:
                captured.append((reads, writes, work, seconds))
            else:
                stream.sim.run(execute)

    def copy(self, dst, src, non_blocking):
        places = [getattr(t, "place", HOST) for t in (dst, src)]
        devices = [p for p in places if isinstance(p, int)]
        if not devices:
            with self.lock:
                dst.memory.touch(None, write=True)
                dst.data.copy_(src.read() if isinstance(src, Tensor) else src)
            return
        stream = self.current_stream(devices[-1])  # of the source, if both are devices
        if len(devices) == 2 and places[0] != places[1]:
            other = self.current_stream(places[0])
            self._barrier(stream, other)
        self._queue(stream, [src], [dst], lambda: self._move(dst, src, places), self.copy_s)
        self.note("copy", stream, dst, src)
        if len(devices) == 2 and places[0] != places[1]:
            self._barrier(other, stream)
        elif len(devices) == 1 and not non_blocking:
            stream.synchronize()
        elif len(devices) == 1:
            assert "pinned" in places, "a copy from pageable memory is not asynchronous"

    def _barrier(self, stream, other):
        """Let `stream` wait for all that is queued on `other`."""
        self.note("barrier", stream, other)
        event = SimEvent(self.world)
        with self.lock:
            other.sim.record(event)
            stream.sim.wait(event)

    def _move(self, dst, src, places):
        dst.data.copy_(src.data if isinstance(src, Tensor) else src)
        damaged = all(isinstance(p, int) for p in places) and places[0] != places[1]
        damaged = damaged and self.damages(places[1], places[0], dst.nbytes)
        if damaged or (self.host_damages and places[1] == "pinned"):
            dst.data.view(torch.uint8).view(-1)[-1] ^= 0xFF

    def mm(self, a, b, out):
        self.launch("mm", [a, b], [out], lambda: None)

    @contextlib.contextmanager
    def graph(self, graph, stream, capture_error_mode):
        assert capture_error_mode == "thread_local"
        assert stream.device_index == self.state().device, "captured on another device"
        before = self.current_stream()
        self.set_stream(stream)
        self.capturing[stream] = graph.items
        yield
        del self.capturing[stream]
        self.set_stream(before)

    def replay(self, items):
        for item in items:
            self._queue(self.current_stream(), *item)

    def synchronize(self, device=None):
        del device
        for stream in list(self.world.streams):
            event = SimEvent(self.world)
            with self.lock:
                stream.record(event)
                event.synchronize()


class Graph:
    """torch.cuda.CUDAGraph."""

    def __init__(self, double):
        self.double, self.items = double, []

    def replay(self):
        self.double.replay(self.items)


def _cuda(double):
    """Stands for the module torch.cuda."""
    return SimpleNamespace(
        Stream=lambda device, priority=0: Stream(double, device, priority),
        Event=lambda **kwargs: Event(double, **kwargs),
        CUDAGraph=lambda: Graph(double),
        graph=double.graph,
        device=double.device,
        set_stream=double.set_stream,
        current_stream=double.current_stream,
        synchronize=double.synchronize,
        is_available=lambda: double.n_devices > 0,
        device_count=lambda: double.n_devices,
        mem_get_info=double.mem_get_info,
        memory_allocated=lambda i: double.allocated[i],
        memory_reserved=lambda i: double.allocated[i] + double.cached[i],
        empty_cache=double.empty_cache,
        get_device_name=lambda i: f"Double {i}",
        get_device_capability=lambda i: (9, 0),
        get_device_properties=lambda i: SimpleNamespace(multi_processor_count=100),
        can_device_access_peer=lambda i, j: True,
    )
