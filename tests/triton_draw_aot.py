"""Compile the kernels that choose tokens for GPUs that are not there.

    python -m tests.triton_draw_aot --arch 90

prints a line of JSON per launch. Needs Triton, but neither a GPU nor a driver.
"""

import sys
from collections.abc import Iterator

from gguf_pp.triton import draw, draw_kernels
from gguf_pp.triton.choose import Kind
from tests.aot import Case, parser, run

TYPES = {
    "logits": "*fp32", "choices": "*fp64", "ends": "*i64", "keys": "*i64", "out": "*i32",
    "n_vocab": "i32", "n_ends": "i32", "n_keys": "i32",
}  # fmt: skip


def cases() -> Iterator[Case]:
    """All launches."""
    for kind in (Kind.BEST, Kind.TOP):
        kernels = draw_kernels.candidates, draw_kernels.draw
        for kernel, launch in zip(kernels, draw.launches(kind), strict=True):
            yield Case(f"{kernel.__name__} {kind.name}", kernel, TYPES, launch)


if __name__ == "__main__":
    sys.exit(run(cases(), parser(__doc__).parse_args()))
