"""Compile the kernels of mixtures of experts for GPUs that are not there.

    python -m tests.triton_mixture_aot --arch 90 --types Q4_K --only gemm

prints a line of JSON per launch; see `aot`.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace

from gguf import GGMLQuantizationType

from gguf_pp.triton import mixture, mixture_kernels, mixture_torch, multiply, multiply_kernels
from gguf_pp.triton.decode_kernels import DECODERS
from gguf_pp.triton.launching import Launch
from gguf_pp.triton.planes import LAYOUTS
from tests.aot import Case, parser, run
from tests.triton_aot import COMMON, POINTERS

TYPES = COMMON | {
    **dict.fromkeys(("experts", "tiles"), "*i32"),
    "order": "*i64",
    **dict.fromkeys(("n_share", "n_used", "n_experts"), "i32"),
    **dict.fromkeys(("logits", "weights", "y"), "*fp32"),
}
N_EXPERTS = (4, 128, 512, 4096)
N_SHARE = {"gate and up": {}, "down": {"n_share": 1}}
"""Triton makes a constant of every 1."""


def cases(types: list[str]) -> Iterator[Case]:
    """All launches of the given types, and those that depend on none."""
    for n_experts in N_EXPERTS:
        launch = mixture.best_launch(n_experts)
        yield Case(f"best_experts E={n_experts}", mixture_kernels.best_experts, TYPES, launch)
    for add in (True, False):
        launch = mixture.sum_launch()
        launch = replace(launch, constants=launch.constants | ({} if add else {"add": None}))
        title = "weighted_sum" + (" added" if add else "")
        yield Case(title, mixture_kernels.weighted_sum, TYPES, launch, least_wide_loads=1)
    for name in types:
        yield from _products(GGMLQuantizationType[name])


def _products(type: GGMLQuantizationType) -> Iterator[Case]:
    for title, constants in N_SHARE.items():
        if type not in DECODERS:
            launch = multiply.plain_launch(8, multiply.MANY_ROWS, of_pairs=True)
            yield _gemv("gemv_plain", type, launch, title, constants)
            continue
        for kernel in ("gemv_int8", "gemv_exact"):
            for n_rows in (1, multiply.MANY_ROWS):
                exact = kernel == "gemv_exact"
                launch = multiply.gemv_launch(type, 1, n_rows, exact=exact, of_pairs=True)
                yield _gemv(kernel, type, launch, title, constants)
        size, most = mixture_torch.TILE_SIZES
        while size <= most:
            launch = multiply.gemm_launch(type, size)
            case = _case("gemm", type, launch, f"M={size} {title}", constants, x="*fp16")
            yield case._replace(least_wide_loads=4)
            size *= 2


def _gemv(
    kernel: str,
    type: GGMLQuantizationType,
    launch: Launch,
    title: str,
    constants: dict[str, int],
) -> Case:
    block_n = launch.constants["BLOCK_N"]
    x = "*i32" if kernel == "gemv_int8" else "*fp32"
    case = _case(kernel, type, launch, f"N={block_n} {title}", constants, x=x)
    return case._replace(least_wide_loads=block_n, lanes="1, 1, 32")


def _case(
    kernel: str,
    type: GGMLQuantizationType,
    launch: Launch,
    title: str,
    constants: dict[str, int],
    **types: str,
) -> Case:
    planes = {field.name: POINTERS[field.dtype] for field in LAYOUTS[type]}
    planes = {name: planes.get(name, planes["q"]) for name in ("q", "high", "scales", "d")}
    absent = {"bias": None, "add": None}
    launch = replace(launch, constants=launch.constants | constants | absent)
    function = getattr(multiply_kernels, kernel)
    return Case(f"{kernel} {type.name} {title}", function, TYPES | planes | types, launch)


def main() -> int:
    """Return 1 if a launch has a problem."""
    options = parser(__doc__)
    options.add_argument("--types", nargs="*", default=[type.name for type in LAYOUTS])
    arguments = options.parse_args()
    return run(cases(arguments.types), arguments)


if __name__ == "__main__":
    sys.exit(main())
