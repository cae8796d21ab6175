"""The least that shows that Triton compiles and runs here."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import subprocess

import triton
import triton.language as tl
from triton.errors import TritonError

FAILURES: tuple[type[Exception], ...] = (
    TritonError,
    AssertionError,
    ImportError,
    OSError,
    RuntimeError,
    subprocess.SubprocessError,
)
"""What a first launch raises: no compiler, no headers, no driver, a device that is too old."""


@triton.jit
def count(out):
    """Add 1 to the int32 at `out`."""
    tl.store(out, tl.load(out) + 1)
