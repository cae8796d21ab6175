"""How rows get from one CUDA device to the next, and whether they arrive.

Streams and events here are those of torch.cuda; the scheduler knows them by backend/cuda.py. `api`
is the torch module, or a double of it.
"""

import logging
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Literal

import numpy as np
from torch import Tensor

from gguf_pp.backend import cuda_streams
from gguf_pp.errors import PlacementError

EdgeCopy = Literal["auto", "p2p", "host"]
Mode = Literal["p2p", "host"]

TEST_BYTES = (4 << 10, 1 << 20, 16 << 20)
"""Sizes of the self-test: drivers move small, middling and large copies in different ways."""

log = logging.getLogger("gguf_pp")


class Current:
    """Makes each stream the current one of its device, and the last one's device current.

    On exit all is as it was. `torch.cuda.device` goes around it, because `set_stream` alone would
    make a context on whatever device was current before, used or not.
    """

    def __init__(self, cuda: Any, *streams: Any) -> None:
        self._cuda = cuda
        self._streams = streams
        self._before: list[Any] = []
        self._device = cuda.device(streams[-1].device_index)

    def __enter__(self) -> None:
        self._device.__enter__()
        self._before = [self._cuda.current_stream(s.device_index) for s in self._streams]
        for stream in self._streams:
            self._cuda.set_stream(stream)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for stream in reversed(self._before):
            self._cuda.set_stream(stream)
        self._device.__exit__(exc_type, exc, traceback)


class Pinned:
    """Host memory [n_rows, n_cols] that a device copies to and from without the host.

    It needs no guard of its own: a stream that has let it `leave` and `arrive`, or whose host has
    waited in between, comes to the next copy only after both.
    """

    def __init__(self, api: Any, shape: tuple[int, ...], dtype: Any) -> None:
        self._cuda = api.cuda
        self._tensor: Tensor = api.empty(shape, dtype=dtype, pin_memory=True)
        self._landed = api.cuda.Event(blocking=True)
        self._arrived = api.cuda.Event()

    def leave(self, x: Any, src: Tensor) -> None:
        """Queue `src` into the first rows, on its device's stream `x`."""
        with Current(self._cuda, x):
            self._tensor[: len(src)].copy_(src, non_blocking=True)
        self._landed.record(x)

    def arrive(self, x: Any, d: Any, dst: Tensor) -> None:
        """Queue what left on `x` into `dst`, on its device's stream `d`; `x` ends after that."""
        d.wait_event(self._landed)
        with Current(self._cuda, d):
            dst.copy_(self._tensor[: len(dst)], non_blocking=True)
        self._arrived.record(d)
        x.wait_event(self._arrived)

    def take(self, n_rows: int) -> Tensor:
        """Block until what left is here, and return it."""
        self._landed.synchronize()
        return self._tensor[:n_rows]


def copy_between(
    cuda: Any, x: Any, d: Any, dst: Tensor, src: Tensor, pinned: Pinned | None
) -> None:
    """Queue `dst` <- `src` on stream `x` of the source's device, through `pinned` if there is one.

    Between two devices torch's copy lets `x` wait for whatever stream is current on the other
    device, and that one for the copy. So `d`, which does nothing else, is current there: with a
    compute stream neighbours would go in lock-step. Source: ATen/native/cuda/Copy.cu.
    """
    assert dst.shape == src.shape and dst.dtype == src.dtype
    assert dst.is_contiguous() and src.is_contiguous()  # otherwise torch makes a temporary
    if pinned is not None:
        pinned.leave(x, src)
        pinned.arrive(x, d, dst)
        return
    with Current(cuda, d, x):
        dst.copy_(src, non_blocking=True)


def find_damage(
    api: Any, source: int, target: int, mode: Mode, sizes: Iterable[int] | None = None
) -> str:
    """Send random bytes from device to device and compare: what went wrong, or ""."""
    x, d = (cuda_streams.take(api, i, compute=False) for i in (source, target))
    damage = _damage(api, x, d, mode, sizes or TEST_BYTES)
    for stream in (x, d):  # not if that raised: what a broken device had is used no more
        cuda_streams.give_back(api, stream.device_index, stream, compute=False)
    return damage


def _damage(api: Any, x: Any, d: Any, mode: Mode, sizes: Iterable[int]) -> str:
    """The same on streams of the two devices, idle before and after."""
    cuda, source, target = api.cuda, x.device_index, d.device_index
    random = np.random.Generator(np.random.PCG64(source << 16 | target))
    for n_bytes in sizes:
        sent = api.from_numpy(random.integers(0, 256, n_bytes, dtype=np.uint8))
        src = api.empty((n_bytes,), dtype=api.uint8, device=f"cuda:{source}")
        dst = api.empty((n_bytes,), dtype=api.uint8, device=f"cuda:{target}")
        pinned = Pinned(api, (n_bytes,), api.uint8) if mode == "host" else None
        with Current(cuda, x):
            src.copy_(sent)
        with Current(cuda, d):
            dst.copy_(255 - sent)  # every byte wrong, so that none is right by chance
        copy_between(cuda, x, d, dst, src, pinned)
        arrived = cuda.Event()
        arrived.record(x)
        arrived.synchronize()
        back = api.empty((n_bytes,), dtype=api.uint8)
        with Current(cuda, d):
            back.copy_(dst)
        if n_wrong := int((back != sent).sum()):
            return f"{n_wrong} of {n_bytes} bytes differ"
    return ""


def choose_modes(
    api: Any, edges: Iterable[tuple[int, int]], asked: EdgeCopy
) -> dict[tuple[int, int], Mode]:
    """How to copy along `edges` (device indexes) and back; raises PlacementError if nothing works.

    Peer access that claims to work may damage data, on some boards and behind some IOMMUs, and
    torch uses it unasked. So every direction is tried with data; within a device nothing is.
    """
    both = sorted({pair for a, b in edges for pair in ((a, b), (b, a))})
    modes: dict[tuple[int, int], Mode] = {}
    damaged: list[str] = []
    for source, target in both:
        mode: Mode = "host" if asked == "host" else "p2p"
        damage = "" if source == target else find_damage(api, source, target, mode)
        if damage and asked == "auto":
            damaged.append(f"cuda:{source} to cuda:{target} ({damage})")
            mode, damage = "host", find_damage(api, source, target, "host")
        if damage:
            raise PlacementError(
                f"copies from cuda:{source} to cuda:{target} arrive damaged ({mode}: {damage})",
                hint="try --edge-copy host" if mode == "p2p" else "name one of the two devices",
            )
        modes[source, target] = mode
    if damaged:
        log.warning(
            "direct copies arrive damaged: %s; going through host memory, which is slower",
            ", ".join(damaged),
        )
    return modes
