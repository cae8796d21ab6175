"""Kernels of CUDA devices, written in Triton, and whether they can be used here.

Per topic three modules: `x_kernels` has the kernels and loads Triton, `x` launches them, `x_torch`
has the same functions in plain torch. What loads without Triton: this module, `planes`, `matrix`,
`linear`, `choose`, `standing`, `launching` and all that end in `_torch`.
"""

import os
from contextlib import nullcontext
from functools import cache

import torch


@cache
def why_unusable(device: torch.device) -> str | None:
    """Why Triton kernels cannot run on `device`, or None where they can.

    Found out once, by running one on a CUDA device: that takes Triton, a C compiler with the
    headers of Python, and a device of a kind that Triton compiles for. Kernels run on the CPU
    only in Triton's interpreter (TRITON_INTERPRET=1), for tests.
    """
    try:
        from gguf_pp.triton import probe_kernels
    except ImportError as exc:
        return f"Triton does not load: {exc}"
    if device.type == "cpu" and not is_interpreted():
        return "Triton has no compiler for CPUs"
    guard = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    try:
        with guard:
            out = torch.zeros(1, dtype=torch.int32, device=device)
            probe_kernels.count[(1,)](out)
            computes = out.item() == 1
    except probe_kernels.FAILURES as exc:
        return f"Triton cannot run a kernel on {device}: {exc}"
    return None if computes else f"Triton's kernels do not compute on {device}"


def is_interpreted() -> bool:
    """Whether kernels run step by step on the CPU, as TRITON_INTERPRET=1 asks for."""
    return os.environ.get("TRITON_INTERPRET") == "1"
