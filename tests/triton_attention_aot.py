"""Compile the kernels of attention and rotation for GPUs that are not there.

    python -m tests.triton_attention_aot --arch 90 --head-sizes 128

prints a line of JSON per launch; see `aot`.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from gguf_pp.ops.base import Attention, Rope
from gguf_pp.triton import attention, attention_kernels, rope, rope_kernels
from tests.aot import Case, parser, run

N_CELLS = 8192
HEAD_SIZES = (64, 80, 96, 128, 256)
TYPES = {
    **dict.fromkeys(("q", "qkv", "out", "tops", "masses", "totals", "sinks"), "*fp32"),
    **dict.fromkeys(("cos", "sin", "q_weight", "k_weight"), "*fp32"),
    **dict.fromkeys(("slots", "positions"), "*i32"),
    **dict.fromkeys(("scale", "softcap", "eps"), "fp32"),
    **dict.fromkeys(("n_rows", "n_cells", "n_chunks", "window"), "i32"),
}


class Cache(NamedTuple):
    """What keys and values are."""

    n_bytes: int
    pointer: str

    def case(
        self, name: str, kernel: Any, launch: Any, absent: tuple[str, ...], wide: bool
    ) -> Case:
        """A launch without the parameters `absent`."""
        types = TYPES | {"k": self.pointer, "v": self.pointer}
        launch = replace(launch, constants=launch.constants | dict.fromkeys(absent))
        return Case(name, kernel, types, launch, copies_wide=wide)


def cases(head_sizes: list[int]) -> Iterator[Case]:
    """All launches for heads of the given sizes."""
    for head_size in head_sizes:
        for cache in (Cache(2, "*fp16"), Cache(4, "*fp32")):
            name = f"{head_size} {cache.pointer[1:]}"
            tables = torch.empty(1, head_size // 2)
            spec = Attention(32, 8, head_size, 0.1, Rope(tables, tables, neox=head_size != 96))
            yield from _rope(name, cache, spec)
            for is_plain in (False, True):
                yield from _attention(name, cache, spec, is_plain)


def _rope(name: str, cache: Cache, spec: Attention) -> Iterator[Case]:
    launch = rope.rope_launch(spec)
    for title, absent in (("", ()), (" without norms", ("q_weight", "k_weight"))):
        yield cache.case(f"rope {name}{title}", rope_kernels.rope_store, launch, absent, False)


def _attention(name: str, cache: Cache, spec: Attention, is_plain: bool) -> Iterator[Case]:
    name += " plain" if is_plain else " with softcap and sinks"
    softcap, sinks = (("softcap",), ("sinks",)) if is_plain else ((), ())
    kernels = attention_kernels
    launch = attention.decode_launch(spec, cache.n_bytes, N_CELLS)
    yield cache.case(f"chunks {name}", kernels.decode_chunks, launch, softcap, True)
    if cache.n_bytes == 2:
        launch = attention.merge_launch(spec, N_CELLS)
        yield cache.case(f"merge {name}", kernels.decode_merge, launch, sinks, False)
    for is_exact in (False, True) if cache.n_bytes == 2 else (True,):
        launch = attention.prefill_launch(spec, cache.n_bytes, exact=is_exact)
        title = f"prefill {name}{' exact' if is_exact else ''}"
        yield cache.case(title, kernels.prefill_tiles, launch, softcap + sinks, True)


def main() -> int:
    """Return 1 if a launch has a problem."""
    options = parser(__doc__)
    options.add_argument("--head-sizes", type=int, nargs="+", default=HEAD_SIZES)
    arguments = options.parse_args()
    return run(cases(arguments.head_sizes), arguments)


if __name__ == "__main__":
    sys.exit(main())
