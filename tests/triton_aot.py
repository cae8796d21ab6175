"""Compile Triton's kernels for GPUs that are not there, and read what the machine code says.

    python -m tests.triton_aot --arch 90 --types Q4_K Q6_K --kernels gemv_int8 --rows 1 8

prints a line of JSON per launch. Needs Triton, but neither a GPU nor a driver.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace

import torch
from gguf import GGMLQuantizationType

from gguf_pp.triton import multiply, multiply_kernels, quantize, quantize_kernels
from gguf_pp.triton.decode_kernels import DECODERS
from gguf_pp.triton.launching import Launch
from gguf_pp.triton.planes import LAYOUTS
from gguf_pp.triton.quantize_torch import Before
from tests.aot import Case, parser, run

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
ALONE = {"experts": None, "tiles": None, "order": None, "n_share": 1}
"""What products of no mixture leave out."""
BEFORES = {"plain": None, "normed": (torch.empty(0), 0.0)}
BEFORES |= {name: name for name in quantize.ACTIVATIONS}
WIDTHS = (1024, 2048, 14336)
"""Columns of rows that are made ready, one for each size of a block."""


def cases(types: list[str], kernels: list[str], rows: list[int]) -> Iterator[Case]:
    """All launches of the given types, kernels and numbers of rows of x."""
    for name in types:
        type = GGMLQuantizationType[name]
        for kernel in kernels:
            if kernel == "gemv_plain" or type not in DECODERS:
                if kernel == "gemv_plain" and type not in DECODERS:
                    yield from _in_forms(_plain(type, rows))
            elif kernel == "dequantize":
                yield from _dequantize(type)
            elif kernel == "gemm":
                yield from _in_forms(_gemm(type, rows))
            else:
                yield from _in_forms(_gemv(type, kernel, rows))


def _in_forms(cases: Iterator[Case]) -> Iterator[Case]:
    """With a bias and an addend, and without."""
    bare = {"bias": None, "add": None}
    for case in cases:
        yield case
        launch = replace(case.launch, constants=case.launch.constants | bare)
        yield case._replace(name=f"{case.name} bare", launch=launch)


def _dequantize(type: GGMLQuantizationType) -> Iterator[Case]:
    """All rows or some, in halves or in float32."""
    launch = multiply.dequantize_launch(type)
    of_all = replace(launch, constants=launch.constants | {"ids": None})
    for out in ("*fp16", "*fp32"):
        for suffix, each in ((" of ids", launch), ("", of_all)):
            case = _case(type, "dequantize", each, f"{suffix} to {out[1:]}", out=out)
            yield case._replace(least_wide_loads=1)


def _gemm(type: GGMLQuantizationType, rows: list[int]) -> Iterator[Case]:
    for m in sorted({m for m in rows if m > multiply.MAX_GEMV_ROWS}):
        case = _case(type, "gemm", multiply.gemm_launch(type, m), f" M={m}", x="*fp16")
        yield case._replace(least_wide_loads=4)


def _gemv(type: GGMLQuantizationType, kernel: str, rows: list[int]) -> Iterator[Case]:
    for m in (m for m in rows if m <= multiply.MAX_GEMV_ROWS):
        for n_rows in (1, multiply.MANY_ROWS):
            launch = multiply.gemv_launch(type, m, n_rows, exact=kernel == "gemv_exact")
            if m == 1:  # Triton makes a constant of every 1
                launch = replace(launch, constants=launch.constants | {"t_rows": 1})
            block_m, block_n = (launch.constants[f"BLOCK_{axis}"] for axis in "MN")
            case = _case(
                type, kernel, launch, f" M={block_m} N={block_n}",
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
        launch = replace(launch, constants=launch.constants | ALONE)
        yield Case(
            f"gemv_plain {type.name} M={m} N={wide}", kernel, types, launch, wide, "1, 1, 32"
        )


def _case(
    type: GGMLQuantizationType, kernel: str, launch: Launch, suffix: str, **types: str
) -> Case:
    planes = {field.name: POINTERS[field.dtype] for field in LAYOUTS[type]}
    planes = {name: planes.get(name, planes["q"]) for name in ("q", "high", "scales", "d")}
    function = getattr(multiply_kernels, kernel)
    launch = replace(launch, constants=launch.constants | ALONE)
    return Case(f"{kernel} {type.name}{suffix}", function, COMMON | planes | types, launch)


def quantize_cases(befores: list[str], widths: list[int]) -> Iterator[Case]:
    """All launches that make rows ready, by what comes before that and by numbers of columns."""
    found = {
        case.name: case
        for name in befores
        for n_cols in widths
        for case in _quantized(name, BEFORES[name], n_cols)
    }
    yield from found.values()


def _quantized(made: str, before: Before, n_cols: int) -> Iterator[Case]:
    """The forms of rows; an addend comes with a norm, and only in the order of columns."""
    is_normed = isinstance(before, tuple)
    forms = [("quantize_int8", {}, {})]
    for is_transposed in (True, False):
        order = {"TRANSPOSED": is_transposed}
        bare = {} if is_normed and not is_transposed else {"add": None}
        forms += [("quantize_half", order, {}), ("float_rows", order, bare)]
    for name, order, absent in forms:
        how = quantize.sharing(before, n_cols, is_whole=name == "quantize_half", **order)
        absent = absent | ({} if is_normed else {"weight": None})
        launch = replace(how.launch, constants=how.launch.constants | absent)
        types = COMMON | ({"out": "*fp16"} if name == "quantize_half" else {})
        turned = " transposed" if order.get("TRANSPOSED") else ""
        title = f"{name} {made}{turned} B={launch.constants['BLOCK']}"
        kernel = getattr(quantize_kernels, name)
        yield Case(title, kernel, types, launch, least_wide_loads=2)


def main() -> int:
    """Return 1 if a launch has a problem."""
    of_types = ["gemv_int8", "gemv_exact", "gemv_plain", "gemm", "dequantize"]
    kernels = [*of_types, "quantize"]
    options = parser(__doc__)
    options.add_argument("--types", nargs="*", default=[type.name for type in LAYOUTS])
    options.add_argument("--kernels", nargs="+", default=kernels, choices=kernels)
    options.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    options.add_argument("--before", nargs="+", default=list(BEFORES), choices=BEFORES)
    options.add_argument("--columns", type=int, nargs="+", default=WIDTHS)
    arguments = options.parse_args()
    asked = arguments.kernels
    found = [*cases(arguments.types, [k for k in of_types if k in asked], arguments.rows)]
    if "quantize" in asked:
        found += quantize_cases(arguments.before, arguments.columns)
    return run(found, arguments)


if __name__ == "__main__":
    sys.exit(main())
