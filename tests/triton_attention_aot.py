"""Compile the kernels of attention and rotation for GPUs that are not there.

    python -m tests.triton_attention_aot --arch 90 --head-sizes 128

prints a line of JSON per launch. Needs Triton, but neither a GPU nor a driver.
"""

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gguf_pp.ops.base import Attention, Rope
from gguf_pp.triton import attention, attention_kernels, rope, rope_kernels
from tests.triton_aot import SHARED_LIMITS, _tool

TENSOR_MEMORY = 512
"""Columns that a program may have on capability 100; Triton compiles what needs more."""

N_CELLS = 8192
UNALIGNED = ("slots", "positions")
FLOATS = ("scale", "softcap", "eps")
INTS = ("n_rows", "n_cells", "n_chunks", "window")


class Case(NamedTuple):
    """One launch. `is_wide`: keys and values come in loads of 128 bits."""

    name: str
    kernel: Any
    cache_type: str
    constants: dict[str, Any]
    options: dict[str, Any]
    is_wide: bool = False


def cases(head_sizes: list[int]) -> Iterator[Case]:
    """All launches for heads of the given sizes."""
    for head_size in head_sizes:
        for n_bytes, cache_type in ((2, "*fp16"), (4, "*fp32")):
            name = f"{head_size} {cache_type[1:]}"
            tables = torch.empty(1, head_size // 2)
            spec = Attention(32, 8, head_size, 0.1, Rope(tables, tables, neox=head_size != 96))
            for absent in ((), ("sinks", "softcap"), ("q_weight", "k_weight")):
                yield from _rope(name, cache_type, spec, absent)
                yield from _attention(name, cache_type, spec, n_bytes, absent)


def _rope(name: str, cache_type: str, spec: Attention, absent: tuple[str, ...]) -> Iterator[Case]:
    if "sinks" not in absent:
        constants = {**rope.rope_constants(spec), **dict.fromkeys(absent)}
        title = f"rope {name}{' without norms' if absent else ''}"
        yield Case(title, rope_kernels.rope_store, cache_type, constants, rope.OPTIONS)


def _attention(
    name: str, cache_type: str, spec: Attention, n_bytes: int, absent: tuple[str, ...]
) -> Iterator[Case]:
    if "q_weight" in absent:
        return
    name += " plain" if absent else " with softcap and sinks"
    kernels = attention_kernels
    launch = attention.decode_launch(spec, n_bytes, N_CELLS)
    constants = launch.constants | ({"softcap": None} if absent else {})
    yield Case(f"chunks {name}", kernels.decode_chunks, cache_type, constants, launch.options, True)
    if n_bytes == 2:
        launch = attention.merge_launch(spec, N_CELLS)
        constants = launch.constants | ({"sinks": None} if absent else {})
        yield Case(f"merge {name}", kernels.decode_merge, cache_type, constants, launch.options)
    for is_exact in (False, True) if n_bytes == 2 else (True,):
        launch = attention.prefill_launch(spec, n_bytes, exact=is_exact)
        constants = launch.constants | dict.fromkeys(absent)
        title = f"prefill {name}{' exact' if is_exact else ''}"
        yield Case(title, kernels.prefill_tiles, cache_type, constants, launch.options, True)


def compiled(case: Case, arch: int) -> Any:
    """The kernel as Triton compiles it for compute capability `arch`."""
    signature, constants, attributes = {}, {}, {}
    for i, name in enumerate(case.kernel.arg_names):
        if name in case.constants:
            signature[name], constants[(i,)] = "constexpr", case.constants[name]
        elif name in FLOATS or name in INTS:
            signature[name] = "fp32" if name in FLOATS else "i32"
        elif name in UNALIGNED:
            signature[name] = "*i32"
        else:
            signature[name] = case.cache_type if name in ("k", "v") else "*fp32"
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(case.kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=case.options)


def report(case: Case, arch: int) -> dict[str, Any]:
    """What one launch takes, and what is wrong with it."""
    result = compiled(case, arch)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(result.asm["cubin"])
        file.flush()
        usage = _tool("cuobjdump", "--dump-resource-usage", file.name)
        code = _tool("nvdisasm", "-c", file.name)
    found = {key: int(re.search(rf"{key}:(\d+)", usage)[1]) for key in ("REG", "STACK", "LOCAL")}
    wide = len(re.findall(r"\bLDGSTS\.E\.BYPASS\.(?:LTC128B\.)?128", code))
    problems = []
    if found["STACK"] or found["LOCAL"] or re.search(r"\b(STL|LDL)\b", code):
        problems.append("spills")
    if result.metadata.shared > SHARED_LIMITS[arch] * 1024:
        problems.append("shared memory")
    if (getattr(result.metadata, "tmem_size", 0) or 0) > TENSOR_MEMORY:
        problems.append("tensor memory")
    if case.is_wide and (not wide or len(re.findall(r"\bLDGSTS\b", code)) > wide):
        problems.append("narrow loads")
    if not re.search(r"\bSTG\b", code):
        problems.append("nothing is stored")
    return {
        "case": case.name, "arch": arch, "registers": found["REG"],
        "shared": result.metadata.shared, "wide_loads": wide, "problems": problems,
    }  # fmt: skip


def main() -> int:
    """Return 1 if a launch has a problem."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", type=int, nargs="+", default=list(SHARED_LIMITS))
    parser.add_argument("--head-sizes", type=int, nargs="+", default=[64, 80, 96, 128, 256])
    parser.add_argument("--only", default="", help="what a case's name begins with")
    arguments = parser.parse_args()
    n_bad = 0
    for case in cases(arguments.head_sizes):
        for arch in arguments.arch if case.name.startswith(arguments.only) else ():
            line = report(case, arch)
            n_bad += bool(line["problems"])
            print(json.dumps(line), flush=True)
    return int(n_bad > 0)


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") != "1", "the interpreter compiles nothing"
    sys.exit(main())
