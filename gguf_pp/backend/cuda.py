"""CUDA devices: torch's streams and events behind the scheduler's.

Work is launched by the host as it is queued and runs on the device when its turn has come; the
streams order it, and nothing here waits for it. That one thread launches for all devices is the
fastest way as long as no stream has to wait for anything but a CUDA device. In a pipeline with
devices of other kinds, streams are `hosted`: each has a thread that launches its work, and that
may block until a CPU or another machine is through.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from gguf_pp.backend import cuda_streams
from gguf_pp.backend.base import Buffer, Event, Memory
from gguf_pp.backend.cpu import CpuEvent, CpuStream, Mark
from gguf_pp.backend.cuda_budget import CudaBudget
from gguf_pp.backend.cuda_edges import Current, EdgeCopy, Mode, Pinned, choose_modes, copy_between
from gguf_pp.backend.cuda_relay import Broke, PinnedBuffer, ignore, telling
from gguf_pp.backend.host import share_cores
from gguf_pp.config import Device
from gguf_pp.errors import ConfigError, in_short

CORE_BYTES_PER_S = 8e9
"""What a core of a CPU reads, about: the unit of `relative_speed`."""


class CudaBuffer:
    """Float32 [n_rows, n_cols] on a CUDA device. `pinned` is its twin on the host, if it needs one
    to be copied from.

    It must live until all streams are idle: torch's allocator knows of none but the one that was
    current when it was made.
    """

    def __init__(self, backend: "CudaBackend", tensor: Tensor, pinned: Pinned | None) -> None:
        self.backend = backend
        self.tensor = tensor
        self.pinned = pinned
        self.n_bytes = tensor.nbytes


class CudaMark(Mark):
    """A record on a CUDA stream. `issued` passes when the thread that launches has come to it, and
    is None if that was at once."""

    def __init__(self, raw: Any, issued: CpuEvent | None = None) -> None:
        self.raw = raw
        self._issued = issued

    def reach(self) -> None:
        """Block until streams may wait for `raw`: what is not yet recorded is no wait to CUDA."""
        if self._issued is not None:
            self._issued.synchronize()

    def wait(self) -> None:
        """Block until the device is through; raises if work on it failed."""
        self.reach()
        self.raw.synchronize()


class CudaStream:
    """A queue of one CUDA device; `thread` launches what is queued, or the caller if there is none.

    Work may only launch: what it computes with must be on the device and stay there. Without a
    thread, waiting for anything but a CUDA device blocks the host.
    """

    def __init__(
        self, name: str, backend: "CudaBackend", raw: Any, thread: CpuStream | None
    ) -> None:
        self.name = name
        self.raw = raw
        self._backend = backend
        self._cuda = backend.api.cuda
        self._thread = thread

    def wait(self, event: Event) -> None:
        """Hold later work on this stream until `event` has passed."""
        assert isinstance(event, CpuEvent)
        if event.mark is not None:
            self._issue(partial(self._join, event.mark))

    def record(self, event: Event) -> None:
        """Let `event` pass once all work queued so far is done."""
        assert isinstance(event, CpuEvent)
        if self._thread is not None:
            # A thread may come to a wait for this record after the next one was queued: each has
            # its own event, or the two would wait for each other.
            raw, issued = self._cuda.Event(blocking=True), CpuEvent()
            self._issue(partial(raw.record, self.raw))
            self._thread.record(issued)
            event.mark = CudaMark(raw, issued)
            return
        mark = event.mark
        if not isinstance(mark, CudaMark):
            event.mark = mark = CudaMark(self._cuda.Event())
        mark.raw.record(self.raw)

    def copy(self, dst: Buffer, src: Buffer, n_rows: int) -> None:
        """Queue a copy of the first `n_rows` rows of `src`, on this device, into `dst`, on any; or
        from pinned memory to this device."""
        if isinstance(src, PinnedBuffer) or isinstance(dst, PinnedBuffer):
            self._issue(partial(self._copy_pinned, dst, src, n_rows))
        else:
            assert isinstance(src, CudaBuffer)
            self._issue(partial(self._copy, dst, src, n_rows))

    def run(self, work: Callable[[], None]) -> None:
        """Launch `work` with this stream current, and its device."""
        self._issue(partial(self._launch, work))

    def close(self) -> None:
        """Launch what is queued, then end the thread."""
        if self._thread is not None:
            self._thread.close()

    def _issue(self, work: Callable[[], None]) -> None:
        if self._thread is None:
            work()
        else:
            self._thread.run(partial(telling, self._backend.tell, work))

    def _join(self, mark: Mark) -> None:
        if isinstance(mark, CudaMark):
            mark.reach()
            self.raw.wait_event(mark.raw)
        else:
            mark.wait()

    def _launch(self, work: Callable[[], None]) -> None:
        with Current(self._cuda, self.raw), torch.inference_mode():
            work()

    def _copy_pinned(self, dst: Buffer, src: Buffer, n_rows: int) -> None:
        with Current(self._cuda, self.raw):
            dst.tensor[:n_rows].copy_(src.tensor[:n_rows], non_blocking=True)

    def _copy(self, dst: Buffer, src: CudaBuffer, n_rows: int) -> None:
        rows = src.tensor[:n_rows]
        if isinstance(dst, CudaBuffer):
            other = dst.backend
            pinned = src.pinned if self._backend.mode_to(other.index) == "host" else None
            copy_between(self._cuda, self.raw, other.idle, dst.tensor[:n_rows], rows, pinned)
            return
        assert src.pinned is not None, "a buffer without a twin is copied to the host"
        src.pinned.leave(self.raw, rows)
        dst.tensor[:n_rows].copy_(src.pinned.take(n_rows))


class Captured(Protocol):
    """Graphs that were captured on a stream."""

    def close(self) -> None:
        """Drop them."""
        ...


class CudaBackend:
    """One CUDA device, or one of several virtual ones on it. `idle` is a stream that does nothing
    but bring rows in. `hosted` is whether streams have a thread; `broke` hears of those that break.
    `captured` is dropped before others get the streams: with a graph torch drops what cuBLAS works
    in on its stream, whoever's that is by then.
    """

    local = True
    n_threads = 1

    def __init__(
        self,
        name: str,
        index: int,
        budget: CudaBudget,
        *,
        modes: Mapping[tuple[int, int], Mode],
        hosted: bool,
        api: Any,
    ) -> None:
        self.name = name
        self.index = index
        self.hosted = hosted
        self.api = api
        self.relative_speed = _relative_speed(api.cuda.get_device_properties(index))
        self.captured: WeakSet[Captured] = WeakSet()
        self._raws: list[tuple[Any, bool]] = []
        self.idle = self.raw_stream()
        self.broke: Broke = ignore
        self._budget = budget
        self._modes = modes
        self._staged = hosted or "host" in modes.values()
        self._streams: list[CudaStream] = []

    def mode_to(self, index: int) -> Mode:
        """How this device copies to another one."""
        return self._modes[self.index, index]

    def buffer(self, n_rows: int, n_cols: int, what: str) -> CudaBuffer:
        """Reserve a buffer; raises OutOfMemory, or what torch raises in its place."""
        n_bytes = 4 * n_rows * n_cols
        self.reserve(n_bytes, what)
        try:
            shape, dtype = (n_rows, n_cols), self.api.float32
            tensor = self.api.empty(shape, dtype=dtype, device=f"cuda:{self.index}")
            pinned = Pinned(self.api, shape, dtype) if self._staged else None
            return CudaBuffer(self, tensor, pinned)
        except BaseException:
            self.release(n_bytes)
            raise

    def event(self) -> CpuEvent:
        """Make an event that was never recorded. Streams of any kind may record it."""
        return CpuEvent()

    def stream(self, name: str, *, compute: bool = False) -> CudaStream:
        """Make a stream."""
        full_name = f"{self.name} {name}"
        thread = CpuStream(full_name, share_cores(1)[0], 1) if self.hosted else None
        stream = CudaStream(full_name, self, self.raw_stream(compute=compute), thread)
        self._streams.append(stream)
        return stream

    def raw_stream(self, *, compute: bool = False) -> Any:
        """A stream as torch has them, of nobody else until this device is closed."""
        raw = cuda_streams.take(self.api, self.index, compute=compute)
        self._raws.append((raw, compute))
        return raw

    def reserve(self, n_bytes: int, what: str) -> None:
        """Count `n_bytes` as taken; raises OutOfMemory if the device has less."""
        self._budget.take(self.name, n_bytes, what)

    def release(self, n_bytes: int) -> None:
        """Give back what `reserve` took."""
        self._budget.give(n_bytes)

    def memory(self) -> Memory:
        """Total and free bytes; virtual devices on one device share them."""
        return self._budget.memory()

    def tell(self, exc: BaseException) -> None:
        """A stream broke."""
        self.broke(exc)

    def close(self) -> None:
        """Wait for this device's streams, not for the whole device, which would spoil a graph that
        somebody else captures there; give them back, and end threads."""
        for stream in self._streams:
            stream.close()
        with contextlib.suppress(RuntimeError):  # told before, where their work was waited for
            for raw, _ in self._raws:
                raw.synchronize()
            for graphs in self.captured:
                graphs.close()
            for raw, compute in self._raws:
                cuda_streams.give_back(self.api, self.index, raw, compute=compute)
        self._streams.clear()
        self._raws.clear()


def _relative_speed(properties: Any) -> float:
    """From the bandwidth of the memory, which older torch does not know; then from the size."""
    clock_khz = getattr(properties, "memory_clock_rate", 0)
    bus_bits = getattr(properties, "memory_bus_width", 0)
    bytes_per_s = 2 * 1000 * clock_khz * bus_bits / 8 or 1e10 * properties.multi_processor_count
    return float(bytes_per_s) / CORE_BYTES_PER_S


class CudaSet:
    """CUDA devices that this process uses, by index: how much memory each has, and how rows get
    from one to another. They may be opened again and again."""

    def __init__(
        self,
        indices: Iterable[int],
        edges: Iterable[tuple[int, int]],
        *,
        edge_copy: EdgeCopy = "auto",
        limit_bytes: Mapping[int, int] | None = None,
        api: Any = torch,
    ) -> None:
        """`limit_bytes` caps what is taken of a device; `edges` are tried, both ways.

        Raises ConfigError for a device that is not there, PlacementError if copies arrive damaged.
        """
        self.api = api
        wanted, limits = set(indices), limit_bytes or {}
        _require(api, wanted)
        self.budgets = {i: CudaBudget(api, i, limits.get(i)) for i in sorted(wanted)}
        self._modes = choose_modes(api, edges, edge_copy)
        self._probes: dict[int, Any] = {}

    def open(
        self, name: str, index: int, *, hosted: bool, budget: CudaBudget | None = None
    ) -> CudaBackend:
        """The device as one of a pipeline; `budget` instead of its own is what counts its bytes."""
        own = budget or self.budgets[index]
        return CudaBackend(name, index, own, modes=self._modes, hosted=hosted, api=self.api)

    def relative_speed(self, index: int) -> float:
        """As in Backend."""
        return _relative_speed(self.api.cuda.get_device_properties(index))

    def failure(self, index: int) -> str:
        """Why this process can use a device no more, or "".

        What goes wrong inside of a kernel is told by every later call, until the process ends: also
        by a wait for a stream that is always idle, which spoils no capture, as one for the device
        would.
        """
        try:
            if index not in self._probes:
                self._probes[index] = cuda_streams.take(self.api, index, compute=False)
            self._probes[index].synchronize()
        except RuntimeError as exc:
            return in_short(exc)
        return ""


def open_cuda(
    devices: Sequence[Device],
    *,
    edge_copy: EdgeCopy = "auto",
    limit_bytes: Mapping[int, int] | None = None,
    api: Any = torch,
) -> list[CudaBackend]:
    """Open those of a pipeline's `devices` whose kind is "cuda", in order; a device may be named
    more than once. `limit_bytes` caps what is taken of a device, by index.

    Raises ConfigError for a device that is not there, PlacementError if copies arrive damaged.
    """
    order = [device.index or 0 if device.kind == "cuda" else None for device in devices]
    cuda = [index for index in order if index is not None]
    indices = set(cuda)
    edges = {(a, b) for a, b in pairwise(order) if a is not None and b is not None}
    edges |= set(zip(cuda[-1:], cuda[:1], strict=True))  # chosen tokens go back
    here = CudaSet(indices, edges, edge_copy=edge_copy, limit_bytes=limit_bytes, api=api)
    return [
        here.open(device.name, index, hosted=None in order)
        for device, index in zip(devices, order, strict=True)
        if index is not None
    ]


def _require(api: Any, indices: set[int]) -> None:
    n_devices = api.cuda.device_count() if api.cuda.is_available() else 0
    missing = sorted(index for index in indices if index >= n_devices)
    if not missing:
        return
    if api.version.cuda is None:
        raise ConfigError(
            f"device 'cuda:{missing[0]}' needs a torch with CUDA, this is {api.__version__}",
            hint="install torch for CUDA, or name cpu",
        )
    raise ConfigError(
        f"no device 'cuda:{missing[0]}': there are {n_devices} CUDA devices here",
        hint="gguf-pp devices lists them, gguf-pp doctor says what is wrong with them",
    )
