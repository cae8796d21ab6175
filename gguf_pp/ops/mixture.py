"""A mixture of experts where the host sees which ones are chosen: one expert after the other."""

from collections.abc import Callable, Sequence

from torch import Tensor

from gguf_pp.ops.base import Matrix, Mixture, Operand, Ops
from gguf_pp.quants.planes import split_experts
from gguf_pp.quants.raw import RawTensor


class ExpertList:
    """A matrix of its own per expert."""

    def __init__(
        self, parts: Sequence[RawTensor], make: Callable[[Sequence[RawTensor]], Matrix]
    ) -> None:
        """Cut tensors [n_experts, n_i, K], and `make` the matrix of each expert."""
        self.matrices = [make(rows) for rows in zip(*map(split_experts, parts), strict=True)]
        self.n_experts = len(self.matrices)
        self.n_rows, self.n_cols = self.matrices[0].n_rows, self.matrices[0].n_cols
        self.n_bytes = sum(matrix.n_bytes for matrix in self.matrices)


def choose_experts(logits: Tensor, n_used: int) -> tuple[Tensor, Tensor]:
    """The `n_used` greatest of each row, of equal ones the first, from the greatest down.

    Returns their indexes, int64, and their softmax: [T, n_used] each.
    """
    best, chosen = logits.sort(dim=-1, descending=True, stable=True)
    return chosen[:, :n_used], best[:, :n_used].softmax(dim=-1)


def mixture_in_turn(
    ops: Ops, x: Operand, logits: Tensor, spec: Mixture, add: Tensor | None
) -> Tensor:
    """As Ops.mixture, of an ExpertList."""
    gate_up, down = spec.gate_up, spec.down
    assert isinstance(x, Tensor)
    assert isinstance(gate_up, ExpertList) and isinstance(down, ExpertList)
    chosen, weights = choose_experts(logits, spec.n_used)
    y = x.new_zeros(x.shape) if add is None else add.clone()
    for i_expert in sorted(set(chosen.flatten().tolist())):
        rows, ranks = (chosen == i_expert).nonzero(as_tuple=True)
        hidden = ops.gated(ops.linear(x[rows], gate_up.matrices[i_expert]), spec.activation)
        y[rows] += ops.linear(hidden, down.matrices[i_expert]) * weights[rows, ranks, None]
    return y
