"""A mixture of experts on a device: which way its products go, and the way that needs no kernels.

| rows of x                      | quantized W                  | exact                      |
|--------------------------------|------------------------------|----------------------------|
| to 8, or to 2 pairs per expert | `gemv_int8`, pair by pair    | `gemv_exact`, pair by pair |
| more                           | `gemm_tiles`                 | `gemv_exact`, pair by pair |

A pair is a row and one of the experts that serve it. Weights that are plain numbers take
`gemv_plain`, pair by pair. Where one of the matrices has a type without kernels, or Triton cannot
be used, products go the ways of `linear`: of the experts of each pair, or of all experts and rows.

Which experts are chosen, the device alone knows. Nothing waits for it: what is launched follows
from the number of rows, so that a CUDA graph can be made of it.
"""

from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from gguf_pp.ops.base import Mixture
from gguf_pp.quants.reference import PLAIN
from gguf_pp.triton import mixture_torch
from gguf_pp.triton.linear import MatrixOps, Rows
from gguf_pp.triton.matrix import DeviceExperts, DeviceMatrix
from gguf_pp.triton.mixture_torch import Chosen, tiles_of
from gguf_pp.triton.multiply_torch import Pairs, Tiles
from gguf_pp.triton.planes import has_kernels

MAX_GEMV_PAIRS = 2
"""Pairs per expert, on average, above which it pays to find those of the same expert, so that its
weights are decoded once for several of them."""

PAIRS_BYTES = 128 << 20
"""What is kept of pairs at a time; with more rows than this allows, they go in several turns."""


class ExpertOps:
    """Mixtures of experts through the products of one device; used from one thread."""

    def __init__(self, products: MatrixOps) -> None:
        self._products = products
        self._module: ModuleType = mixture_torch
        self._kernels: Any = None
        if products.why_torch is None:
            from gguf_pp.triton import mixture, multiply

            self._module, self._kernels = mixture, multiply

    def mixture(
        self, x: Rows, logits: Tensor, spec: Mixture, *, exact: bool, add: Tensor | None
    ) -> Tensor:
        """As Ops.mixture."""
        gate_up, down = spec.gate_up, spec.down
        assert isinstance(gate_up, DeviceExperts) and isinstance(down, DeviceExperts)
        chosen: Chosen = self._module.best_experts(logits, spec.n_used)
        if not (self._has_kernels(gate_up) and self._has_kernels(down)):
            return self._without_kernels(x.values, chosen, spec, exact, add)
        out = torch.empty(len(x), down.n_rows, device=self._products.device)
        by_tiles = not exact and self._is_many(len(x), spec)
        for first, stop in _turns(len(x), spec):
            some = x if stop - first == len(x) else x.part(first, stop)
            pairs = Pairs(chosen.experts[first:stop].flatten(), spec.n_used)
            tiles = tiles_of(pairs.experts, gate_up.n_experts) if by_tiles else None
            hidden = self._product(some, gate_up, pairs, tiles, exact)
            gated = self._products.prepared(hidden, spec.activation)
            y = self._product(gated, down, pairs._replace(n_share=1), tiles, exact)
            addend = None if add is None else add[first:stop]
            self._module.weighted_sum(y, chosen.weights[first:stop], out[first:stop], add=addend)
        return out

    def has_kernels(self, types: Iterable[GGMLQuantizationType]) -> bool:
        """Whether experts of these types are multiplied by kernels for pairs."""
        return self._kernels is not None and all(map(has_kernels, types))

    def _has_kernels(self, w: DeviceExperts) -> bool:
        return self.has_kernels(part.type for _, _, part in w.parts()) and w.n_cols % 8 == 0

    def _is_many(self, n_rows: int, spec: Mixture) -> bool:
        most = max(
            self._products.limits.gemv * spec.n_used, MAX_GEMV_PAIRS * spec.gate_up.n_experts
        )
        return n_rows * spec.n_used > most

    def _product(
        self, x: Rows, w: DeviceExperts, pairs: Pairs, tiles: Tiles | None, exact: bool
    ) -> Tensor:
        """Of each pair: [P, n_rows]."""
        kernels = self._kernels
        out = torch.empty(len(pairs.experts), w.n_rows, device=self._products.device)
        for first, stop, part in w.parts():
            target = out[:, first:stop]
            if part.type in PLAIN:
                kernels.gemv_plain(x.values, part, target, pairs=pairs)
            elif exact:
                kernels.gemv_exact(x.transposed, part, target, pairs=pairs)
            elif tiles is None:
                kernels.gemv_int8(x.int8, part, target, pairs=pairs)
            else:
                kernels.gemm_tiles(x.half_transposed, part, target, tiles, pairs.n_share)
        return out

    def _without_kernels(
        self, x: Tensor, chosen: Chosen, spec: Mixture, exact: bool, add: Tensor | None
    ) -> Tensor:
        """By products of DeviceMatrix: of picked experts, or of all of them if that is less."""
        gate_up, down = spec.gate_up, spec.down
        assert isinstance(gate_up, DeviceExperts) and isinstance(down, DeviceExperts)
        out = x.new_zeros(len(x), down.n_rows) if add is None else add.clone()
        if chosen.experts.numel() <= down.n_experts:
            for row in range(len(x)):
                for rank in range(spec.n_used):
                    i = chosen.experts[row, rank : rank + 1]
                    matrices = gate_up.picked(i), down.picked(i)
                    y = self._feed_forward(x[row : row + 1], *matrices, spec, exact)
                    out[row] += y[0] * chosen.weights[row, rank]
            return out
        for i_expert in range(down.n_experts):
            matrices = gate_up.expert(i_expert), down.expert(i_expert)
            y = self._feed_forward(x, *matrices, spec, exact)
            serves = chosen.experts == i_expert
            weight = (chosen.weights * serves).sum(dim=-1, keepdim=True)
            out = torch.where(serves.any(dim=-1, keepdim=True), out + y * weight, out)
        return out

    def _feed_forward(
        self, x: Tensor, gate_up: DeviceMatrix, down: DeviceMatrix, spec: Mixture, exact: bool
    ) -> Tensor:
        hidden = self._products.linear(x, gate_up, exact=exact)
        gated = self._products.prepared(hidden, spec.activation)
        return self._products.linear(gated, down, exact=exact)


def _turns(n_rows: int, spec: Mixture) -> Iterator[tuple[int, int]]:
    """Ranges of rows that are computed one after the other, equally long up to the last."""
    n_floats = spec.n_used * (spec.gate_up.n_rows + spec.down.n_cols + spec.down.n_rows)
    most = max(1, PAIRS_BYTES // (4 * n_floats))
    step = -(-n_rows // -(-n_rows // most)) if n_rows else 1
    for first in range(0, n_rows, step):
        yield first, min(first + step, n_rows)
