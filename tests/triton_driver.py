"""Run a model's steps through Triton's own launches, on a driver that computes nothing.

    python -m tests.triton_driver model.gguf --arch 90

prints a line of JSON per step, with the number of launches and of kernels that were compiled for
it, and a line per kernel. Says what `aot` says, of what really is launched: the forms of kernels
that follow from the shapes of a model and from the addresses of its tensors.
"""

import argparse
import json
import logging
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from gguf_pp import arch as architectures
from gguf_pp.batch import Span, UBatch
from gguf_pp.gguf import ModelFile
from gguf_pp.pipeline.load import DeviceLoader
from gguf_pp.triton import (
    attention_kernels,
    draw_kernels,
    mixture_kernels,
    multiply_kernels,
    quantize_kernels,
    rope_kernels,
)
from gguf_pp.triton.choose import N_PARAMS, Kind
from gguf_pp.triton.ops import DeviceOps
from tests.aot import SHARED_LIMITS, usage_of
from tests.driver_stub import Stub, compiled, forget_launches, install

N_SLOTS, N_CELLS = 8, 1024
MODULES = (
    attention_kernels, draw_kernels, mixture_kernels, multiply_kernels, quantize_kernels,
    rope_kernels,
)  # fmt: skip
POSITIONS = (0, 1, 15, 16, 255, 256, 1000)


def prompt(slot: int, start: int, n_rows: int) -> UBatch:
    """`n_rows` tokens of one sequence, the last of which wants logits."""
    return UBatch((5,) * n_rows, (Span(slot, start, n_rows),), (n_rows - 1,))


def decode(position: int, n_rows: int) -> UBatch:
    """A token each of `n_rows` sequences, at `position` and those behind it."""
    spans = tuple(Span(i, position + i, 1) for i in range(n_rows))
    return UBatch((5,) * n_rows, spans, tuple(range(n_rows)))


PROMPTS = {f"prompt of {n} at {start}": prompt(0, start, n) for n, start in
           ((128, 0), (100, 128), (33, 0), (17, 40), (7, 16))}  # fmt: skip
MIXED = UBatch((5,) * 11, (Span(2, 0, 9), Span(0, 20, 1), Span(1, 33, 1)), (8, 9, 10))


def stepper(path: Path, n_layers: int, *, exact: bool) -> Callable[[UBatch], Tensor]:
    """What runs a ubatch through the embedding of a model, its first layers and its head, and
    chooses tokens in two ways."""
    ops = DeviceOps("cpu", exact=exact)
    with ModelFile.open(path) as file:
        model = architectures.build(file.metadata)
        loader = DeviceLoader(file, N_CELLS, ops, lambda n_bytes: None)
        table, head = model.load_embedding(loader), model.load_head(loader)
        layers = [model.load_layer(loader, i) for i in range(min(n_layers, model.hp.n_layers))]
    n_heads, size = model.hp.n_kv_heads, model.hp.head_size
    caches = [ops.layer_kv(N_SLOTS, N_CELLS, n_heads, size, "f16", "f16") for _ in layers]

    def step(ubatch: UBatch) -> Tensor:
        x = model.embed(ops, table, ops.ids(ubatch.tokens))
        for layer, cache in zip(layers, caches, strict=True):
            x = model.layer(ops, layer, x, cache, ubatch)
        logits = model.logits(ops, head, x)
        for kind in (Kind.BEST, Kind.TOP):
            ops.choose(logits, torch.zeros(len(logits), N_PARAMS, dtype=torch.float64), kind)
        return logits

    return step


def report_step(stub: Stub, step: Callable[[UBatch], Tensor], title: str, ubatch: UBatch) -> None:
    """Run it twice: as it comes, and with every launch as Triton itself does it."""
    before = stub.n_compiled
    stub.forget()
    step(ubatch)
    launched, n_compiled = stub.launched(), stub.n_compiled - before
    forget_launches()
    stub.forget()
    step(ubatch)
    told = {"step": title, "launches": len(launched), "compiled": n_compiled}
    print(json.dumps(told | {"as_triton": stub.launched() == launched}), flush=True)


def main() -> int:
    """Return 1 if a kernel spills."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--arch", type=int, choices=SHARED_LIMITS, default=90)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--exact", action="store_true")
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[1, 2, 4, 8], help="of a decode step"
    )
    options = parser.parse_args()
    logging.getLogger("gguf_pp").setLevel(logging.ERROR)  # that it compiles is no news here
    with tempfile.TemporaryDirectory() as folder:
        stub = install(Path(folder), options.arch)
        step = stepper(options.model, options.layers, exact=options.exact)
        for title, ubatch in (*PROMPTS.items(), ("prompt among others", MIXED)):
            report_step(stub, step, title, ubatch)
        for n_rows in options.rows:
            for at in POSITIONS:
                report_step(stub, step, f"{n_rows} rows at {at}", decode(at, n_rows))
    n_bad = 0
    for name, kernel in compiled(*MODULES):
        usage = usage_of(kernel.asm["cubin"])
        spills = usage["STACK"] + usage["LOCAL"]
        n_bad += spills > 0
        print(json.dumps({"kernel": name, "registers": usage["REG"], "spilled_bytes": spills}))
    return int(n_bad > 0)


if __name__ == "__main__":
    sys.exit(main())
