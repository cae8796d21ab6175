"""Compile Triton's kernels for GPUs that are not there, and read what the machine code says.

    python -m tests.triton_aot --arch 90 --types Q4_K Q6_K --kernels gemv_int8 --rows 1 8

prints a line of JSON per launch. Needs Triton, but neither a GPU nor a driver.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from gguf import GGMLQuantizationType
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gguf_pp.triton import multiply, multiply_kernels, quantize, quantize_kernels
from gguf_pp.triton.decode_kernels import DECODERS
from gguf_pp.triton.planes import LAYOUTS

SHARED_LIMITS = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""KiB of shared memory that a program may have, by compute capability."""

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
POINTERS = {
    torch.int32: "*i32", torch.uint8: "*u8", torch.int8: "*i8",
    torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32",
}  # fmt: skip
COMMON = {
    **dict.fromkeys(("out", "bias", "add", "x", "x_scales", "x_sums", "weight"), "*fp32"),
    **dict.fromkeys(("scales", "sums"), "*fp32"),
    **dict.fromkeys(
        ("t_rows", "n_rows", "n_blocks", "n_chunks", "n_cols", "stride", "n_split_chunks"), "i32"
    ),
    **dict.fromkeys(("gain", "eps"), "fp32"),
    "ids": "*i64",
    "codes": "*i8",
}
MULTIPLES_OF_16 = ("n_rows", "n_chunks", "n_cols", "stride")


class Case(NamedTuple):
    """One launch: a kernel with the types of its parameters, its constants and options.

    `lanes` is how the 32 threads of a warp must stand to each other in the sum at its end.
    """

    name: str
    kernel: Any
    types: dict[str, str]
    launch: multiply.Launch
    least_wide_loads: int = 0
    lanes: str = ""


def cases(types: list[str], kernels: list[str], rows: list[int]) -> Iterator[Case]:
    """All launches of the given types, kernels and numbers of rows of x."""
    for name in types:
        type = GGMLQuantizationType[name]
        for kernel in kernels:
            if kernel == "quantize":
                continue
            elif kernel == "gemv_plain" or type not in DECODERS:
                if kernel == "gemv_plain" and type not in DECODERS:
                    yield from _plain(type, rows)
            elif kernel == "dequantize":
                launch = multiply.dequantize_launch(type)
                yield _case(type, kernel, launch, "", out="*fp16")
            elif kernel == "gemm":
                for m in sorted({m for m in rows if m > multiply.MAX_GEMV_ROWS}):
                    yield _case(type, kernel, multiply.gemm_launch(type, m), f" M={m}", x="*fp16")
            else:
                yield from _gemv(type, kernel, rows)
    if "quantize" in kernels:
        yield from _quantize()


def _gemv(type: GGMLQuantizationType, kernel: str, rows: list[int]) -> Iterator[Case]:
    for m in (m for m in rows if m <= multiply.MAX_GEMV_ROWS):
        for n_rows in (1, multiply.MANY_ROWS):
            launch = multiply.gemv_launch(type, m, n_rows)
            if m == 1:  # Triton makes a constant of every 1
                launch = launch._replace(constants=launch.constants | {"t_rows": 1})
            block_n = launch.constants["BLOCK_N"]
            case = _case(
                type, kernel, launch, f" M={m} N={block_n}",
                x="*i32" if kernel == "gemv_int8" else "*fp32",
            )  # fmt: skip
            yield case._replace(least_wide_loads=block_n, lanes="1, 1, 32")


def _plain(type: GGMLQuantizationType, rows: list[int]) -> Iterator[Case]:
    q = POINTERS[LAYOUTS[type][0].dtype]
    for m in (m for m in rows if m <= multiply.MAX_GEMV_ROWS):
        launch = multiply.plain_launch(m, multiply.MANY_ROWS)
        kernel = multiply_kernels.gemv_plain
        types = COMMON | {"q": q}
        wide = launch.constants["BLOCK_N"]
        yield Case(
            f"gemv_plain {type.name} M={m} N={wide}", kernel, types, launch, wide, "1, 1, 32"
        )


def _case(
    type: GGMLQuantizationType, kernel: str, launch: multiply.Launch, suffix: str, **types: str
) -> Case:
    planes = {field.name: POINTERS[field.dtype] for field in LAYOUTS[type]}
    planes = {name: planes.get(name, planes["q"]) for name in ("q", "high", "scales", "d")}
    function = getattr(multiply_kernels, kernel)
    return Case(f"{kernel} {type.name}{suffix}", function, COMMON | planes | types, launch)


def _quantize() -> Iterator[Case]:
    constants = {"BLOCK": quantize.BLOCK}
    options = quantize.OPTIONS
    for kernel in (quantize_kernels.quantize_int8, quantize_kernels.norm_quantize_int8):
        yield Case(kernel.__name__, kernel, COMMON, multiply.Launch(constants, options))
    for weight in ("*fp32", None):
        launch = multiply.Launch(
            constants | {"TRANSPOSED": True} | ({} if weight else {"weight": None}), options
        )
        types = COMMON | {"out": "*fp16"}
        name = "quantize_half" + (" normed" if weight else "")
        yield Case(name, quantize_kernels.quantize_half, types, launch)


def compiled(case: Case, arch: int) -> Any:
    """The kernel as Triton compiles it for compute capability `arch`."""
    signature, constants, attributes = {}, {}, {}
    for i, name in enumerate(case.kernel.arg_names):
        if name in case.launch.constants:
            signature[name], constants[(i,)] = "constexpr", case.launch.constants[name]
            continue
        signature[name] = case.types[name]
        if signature[name].startswith("*") or name in MULTIPLES_OF_16:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(case.kernel, signature, constants, attributes)
    target = GPUTarget("cuda", arch, 32)
    return triton.compile(source, target=target, options=case.launch.options)


def report(case: Case, arch: int) -> dict[str, Any]:
    """What one launch takes, and what is wrong with it."""
    result = compiled(case, arch)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(result.asm["cubin"])
        file.flush()
        usage = _tool("cuobjdump", "--dump-resource-usage", file.name)
        code = _tool("nvdisasm", "-c", file.name)
    found = {key: int(re.search(rf"{key}:(\d+)", usage)[1]) for key in ("REG", "STACK", "LOCAL")}
    wide = len(re.findall(r"\bLDG\.E\.128", code))
    problems = []
    if found["STACK"] or found["LOCAL"] or re.search(r"\b(STL|LDL)\b", code):
        problems.append("spills")
    if result.metadata.shared > SHARED_LIMITS[arch] * 1024:
        problems.append("shared memory")
    if wide < case.least_wide_loads:
        problems.append(f"{wide} loads of 128 bits, wanted {case.least_wide_loads}")
    if case.lanes and set(_lanes(result.asm["ttgir"])) != {case.lanes}:
        problems.append("lanes do not stand in one row")
    return {
        "case": case.name, "arch": arch, "registers": found["REG"],
        "shared": result.metadata.shared, "wide_loads": wide, "problems": problems,
    }  # fmt: skip


def _lanes(ttgir: str) -> list[str]:
    """How lanes lie in the operand of each sum; "" where a thread holds several of its terms."""
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.blocked<.*>)$", ttgir, re.MULTILINE))
    found = []
    for name in re.findall(r"\}\) : \(tensor<[\dx]+xf32, (#\w+)>\) ->", ttgir):
        per_thread, lanes = (
            re.search(rf"{key} = \[([\d, ]+)\]", layouts[name])[1]
            for key in ("sizePerThread", "threadsPerWarp")
        )
        found.append(lanes if per_thread.endswith("1") else "")
    return found


def _tool(name: str, *arguments: str) -> str:
    done = subprocess.run([TOOLS / name, *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def main() -> int:
    """Return 1 if a launch has a problem."""
    kernels = ["gemv_int8", "gemv_exact", "gemv_plain", "gemm", "dequantize", "quantize"]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", type=int, nargs="+", default=list(SHARED_LIMITS))
    parser.add_argument("--types", nargs="*", default=[type.name for type in LAYOUTS])
    parser.add_argument("--kernels", nargs="+", default=kernels, choices=kernels)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    arguments = parser.parse_args()
    n_bad = 0
    for case in cases(arguments.types, arguments.kernels, arguments.rows):
        for arch in arguments.arch:
            line = report(case, arch)
            n_bad += bool(line["problems"])
            print(json.dumps(line), flush=True)
    return int(n_bad > 0)


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") != "1", "the interpreter compiles nothing"
    sys.exit(main())
