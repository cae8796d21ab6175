"""Random mixtures of experts, and what a reference makes of them."""

import torch

from gguf_pp.ops.base import Mixture
from gguf_pp.ops.torch_ops import gated
from gguf_pp.quants.raw import RawTensor
from tests.quantized import random_raw, weights


def expert_raw(type, n_experts, n_rows, n_cols, seed=0):
    """Quantized [n_experts, n_rows, n_cols] of weights of ordinary size."""
    flat = random_raw(type, n_experts * n_rows, n_cols, seed)
    return RawTensor(f"w{seed}", type, (n_experts, n_rows, n_cols), flat.data)


def weights_of(raw):
    """Float64 [n_experts, n_rows, n_cols]."""
    return weights(raw).view(raw.shape)


def mixture_of(ops, gate, up, down, n_used, activation="silu"):
    """The tensors on the device of `ops`."""
    return Mixture(ops.experts([gate, up]), ops.experts([down]), n_used, activation)


def best(logits, n_used):
    """By row: pairs of an expert and its weight, by expert."""
    for row in logits.double():
        order = sorted(range(len(row)), key=lambda i: (-float(row[i]), i))[:n_used]
        weights = row[order].softmax(0).tolist()
        yield sorted(zip(order, weights, strict=True))


def reference(x, logits, gate, up, down, n_used, activation="silu"):
    """What the mixture makes of x, in float64."""
    gate_up = torch.cat((weights_of(gate), weights_of(up)), dim=1)
    down, rows = weights_of(down), []
    for row, chosen in zip(x.double(), best(logits, n_used), strict=True):
        terms = (w * (down[i] @ gated(gate_up[i] @ row, activation)) for i, w in chosen)
        rows.append(sum(terms))
    return torch.stack(rows)


def relative_error(got, wanted):
    """Of each row, as a share of its largest element."""
    error = (got.double() - wanted).abs().amax(-1) / wanted.abs().amax(-1)
    return float(error.max())
