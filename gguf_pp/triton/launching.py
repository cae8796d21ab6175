"""Launches of Triton's kernels that cost the host little.

Triton looks at every argument of every launch to find out which compiled form of the kernel is
meant, and hashes all constants: several times what the launch itself takes, while one thread feeds
all devices. A `Launch` remembers what Triton found for arguments of the same kinds.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch import Tensor

from gguf_pp.errors import KernelError

SECONDS = 0.3
"""A first launch that takes longer has compiled its kernel; others find it in Triton's cache."""

log = logging.getLogger("gguf_pp")


@dataclass(frozen=True, eq=False)
class Launch:
    """How a kernel is compiled: its constants, and what the compiler is told besides them.

    Made once for each way to compile, and kept: what it remembers is its own. `constants` name the
    parameters behind those that are given by position.
    """

    constants: dict[str, Any]
    options: dict[str, int | bool]
    _compiled: dict[tuple[object, ...], tuple[Any, tuple[object, ...]]] = field(
        init=False, repr=False, default_factory=dict
    )

    def __call__(self, kernel: Any, grid: tuple[int, ...], *arguments: Any) -> None:
        """Launch `kernel` on the current stream of the device of the first argument, a tensor.

        That device must be the current one. Arguments are tensors, numbers and None. Raises
        KernelError if the kernel does not compile or is too large for the device.
        """
        key = id(kernel), arguments[0].get_device(), *_kinds(arguments)
        found = self._compiled.get(key)
        if found is not None:
            compiled, constants = found
            compiled[(*grid, 1, 1)](*arguments, *constants)
            return
        start = time.perf_counter()
        try:
            compiled = kernel[grid](*arguments, **self.constants, **self.options)
        except Exception as exc:  # a compiler's, of many lines, or what binding arguments raises
            if _is_of_the_device(exc):
                raise
            why = (str(exc).splitlines() or [""])[0]
            raise KernelError(
                f"Triton cannot launch {kernel.__name__}: {type(exc).__name__}: {why}",
                hint="--kernels torch computes without Triton, slower",
            ) from exc
        if hasattr(compiled, "packed_metadata"):  # the interpreter returns None
            if time.perf_counter() - start > SECONDS:
                _say_that_it_compiles()
            rest: Sequence[str] = kernel.arg_names[len(arguments) :]
            self._compiled[key] = compiled, tuple(self.constants[name] for name in rest)


def _is_of_the_device(exc: Exception) -> bool:
    """Whether CUDA says so, that memory is short for one: with a kind of torch's own, or by name.
    Triton's compiler raises RuntimeErrors as well."""
    kind = type(exc)
    return issubclass(kind, RuntimeError) and (kind is not RuntimeError or "CUDA" in str(exc))


@cache
def _say_that_it_compiles() -> None:
    log.warning(
        "compiling kernels for the GPU: the first steps of each size take seconds. "
        "Triton keeps them for later runs"
    )


def _kinds(arguments: Sequence[Any]) -> list[object]:
    """What Triton may compile a kernel for: at least as fine as its own distinctions, which are
    types, whether addresses and numbers are multiples of 16, and whether a number is 1."""
    kinds: list[object] = []
    for argument in arguments:
        kind = type(argument)
        if kind is Tensor:
            kinds += argument.dtype, argument.data_ptr() & 15
        elif kind is int:
            kinds.append(argument % 16 + 16 * (argument >> 31) if argument != 1 else int)
        else:
            assert argument is None or kind is float, kind
            kinds.append(kind)
    return kinds


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The least power of two that is not below `n`, which is positive."""
    return 1 << (n - 1).bit_length()
