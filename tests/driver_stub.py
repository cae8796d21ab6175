"""Triton's own way from a call to a launch, on a machine without a GPU: all but the device is real.

`install` gives this process a driver of CUDA that computes nothing (driver_stub.c). After that
Triton compiles, loads and launches kernels on tensors of the CPU as it would on those of a GPU, and
what is launched can be looked at. Results are whatever memory holds. Needs a C compiler with the
headers of Python, as Triton itself does; affects the whole process.
"""

import ctypes
import gc
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton.backends.nvidia.driver import CudaDriver
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from gguf_pp.triton import linear
from gguf_pp.triton.launching import Launch
from tests.aot import SHARED_LIMITS

SOURCE = Path(__file__).with_suffix(".c")
HEADERS = Path(triton.__file__).parent / "backends" / "nvidia" / "include"


class Launched(NamedTuple):
    """A launch as the driver saw it; `function` tells loaded kernels apart."""

    kernel: str
    function: int
    grid: tuple[int, int, int]
    threads: int
    shared: int


class _Launch(ctypes.Structure):
    _fields_ = [
        ("kernel", ctypes.c_char * 64),
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("threads", ctypes.c_uint),
        ("shared", ctypes.c_uint),
    ]


class Stub:
    """The driver of one device of compute capability `arch`."""

    def __init__(self, library: ctypes.CDLL, arch: int) -> None:
        self._library, self._shared = library, SHARED_LIMITS[arch] << 10
        self.n_compiled = 0
        self.forget()

    def forget(self) -> None:
        """Start a new list of launches."""
        self._library.stub_reset(self._shared)

    def launched(self) -> list[Launched]:
        """What was launched since the list was started."""
        first = ctypes.POINTER(_Launch)()
        n = self._library.stub_launches(ctypes.byref(first))
        return [
            Launched(each.kernel.decode(), each.function, (*each.grid,), each.threads, each.shared)
            for each in first[:n]
        ]


def install(folder: Path, arch: int) -> Stub:
    """Build the driver in `folder` and have Triton use it."""
    assert os.environ.get("TRITON_INTERPRET") != "1", "the interpreter launches nothing"
    path = folder / "libcuda.so.1"
    flags = ["-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1", f"-I{HEADERS}"]
    subprocess.run(["cc", *flags, "-o", str(path), str(SOURCE)], check=True)
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    # Loaded under its name, it is what Triton finds when it asks for the driver by that name.
    stub = Stub(ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL), arch)
    torch.cuda.current_device = lambda: 0
    torch.cuda.set_device = lambda device: None
    torch.cuda.get_device_capability = lambda device=None: divmod(arch, 10)
    torch._C._cuda_getCurrentRawStream = lambda device: 0  # type: ignore[attr-defined]
    driver.set_active(CudaDriver())
    linear.why_unusable = lambda device: None  # type: ignore[assignment]

    def heard(**what: object) -> None:
        stub.n_compiled += 1

    triton.knobs.compilation.listener = heard
    return stub


def compiled(*modules: object) -> Iterator[tuple[str, object]]:
    """The kernels of these modules that were compiled, by name."""
    for module in modules:
        for name, function in vars(module).items():
            if isinstance(function, JITFunction):
                for caches in list(function.device_caches.values()):
                    yield from ((name, kernel) for kernel in caches[0].values())


def forget_launches() -> None:
    """Have every Launch ask Triton again."""
    for each in gc.get_objects():
        if type(each) is Launch:
            each._compiled.clear()
