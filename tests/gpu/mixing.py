"""Mixtures of experts on the device against float64, and from a graph."""

import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from gguf_pp.ops.base import Mixture
from gguf_pp.ops.check import random_matrix
from gguf_pp.ops.torch_ops import gated
from gguf_pp.quants.raw import RawTensor
from gguf_pp.triton.ops import DeviceOps
from tests.gpu.cases import from_graph, weights_of
from tests.gpu.harness import Report

T = GGMLQuantizationType
N_EXPERTS, N_USED, WIDTH, N_FF = 8, 2, 512, 768
N_ROWS = (1, 5, 40, 200)
EXACT, ROUNDED = 1e-4, 8e-2
"""The most that a row may be off, as a share of its largest element."""


def check_mixing(report: Report, device: str, type: T) -> None:
    """Every way that pairs of a row and an expert go, by the number of rows."""
    tensors = [_raw(type, n, k) for n, k in ((N_FF, WIDTH), (N_FF, WIDTH), (WIDTH, N_FF))]
    for exact, limit in ((True, EXACT), (False, ROUNDED)):
        ops = DeviceOps(device, exact=exact)
        gate, up, down = tensors
        spec = Mixture(ops.experts([gate, up]), ops.experts([down]), N_USED, "silu")
        worst = 0.0
        for n_rows in N_ROWS:
            generator = torch.Generator().manual_seed(n_rows)
            x = torch.randn(n_rows, WIDTH, generator=generator).to(device)
            logits = torch.randn(n_rows, N_EXPERTS, generator=generator).to(device)
            wanted = _reference(x, logits, tensors)

            def mix(ops=ops, x=x, logits=logits, spec=spec) -> Tensor:
                return ops.mixture(x, logits, spec)

            results = [mix()] if device == "cpu" else [mix(), from_graph(mix)]
            errors = [(y - wanted).abs().amax(-1) / wanted.abs().amax(-1) for y in results]
            worst = max(worst, *(float(error.max()) for error in errors))
        name = "exact" if exact else "default"
        report.tell(**{name: worst})
        report.require(worst <= limit, f"{name}: off by {worst:.2g} of a row's largest")


def _raw(type: T, n_rows: int, n_cols: int) -> RawTensor:
    """Random weights of a sensible size: [N_EXPERTS, n_rows, n_cols]."""
    flat = random_matrix(type, N_EXPERTS * n_rows, n_cols)[0]
    return RawTensor("experts", type, (N_EXPERTS, n_rows, n_cols), flat.data)


def _reference(x: Tensor, logits: Tensor, tensors: list[RawTensor]) -> Tensor:
    """In float64, row by row."""
    gate, up, down = (weights_of(raw, str(x.device)).view(raw.shape) for raw in tensors)
    best, chosen = logits.double().topk(N_USED)
    terms = []
    for row, weights, experts in zip(x.double(), best.softmax(-1), chosen.tolist(), strict=True):
        parts = (
            weight * (down[i] @ gated(torch.cat((gate[i] @ row, up[i] @ row)), "silu"))
            for weight, i in zip(weights, experts, strict=True)
        )
        terms.append(sum(parts))
    return torch.stack(terms)
