"""Tokens chosen from the 64 largest logits or fewer, in two launches; `choose` has it in torch."""

from functools import cache

import torch
from torch import Tensor

from gguf_pp.sampling import NO_TOKEN
from gguf_pp.triton import draw_kernels as kernels
from gguf_pp.triton.choose import N_PARAMS, Kind
from gguf_pp.triton.launching import Launch, cdiv

BLOCK_BITS = 11
"""A program reads 1 << BLOCK_BITS logits, then candidates, at once."""


def choose(logits: Tensor, params: Tensor, ends: Tensor, kind: Kind) -> Tensor:
    """As `choose.choose`, for Kind.BEST and Kind.TOP; all are contiguous."""
    assert kind is not Kind.ALL and logits.is_contiguous(), (kind, logits.stride())
    n_rows, n_vocab = logits.shape
    n_blocks = cdiv(n_vocab, 1 << BLOCK_BITS)
    keys = logits.new_empty(n_rows, n_blocks * kind, dtype=torch.int64)
    out = logits.new_empty(n_rows, dtype=torch.int32)
    candidates, draw = launches(kind, BLOCK_BITS)
    grid = n_rows, n_blocks
    candidates(kernels.candidates, grid, logits, params, ends, keys, n_vocab, len(ends))
    draw(kernels.draw, (n_rows,), keys, params, out, n_blocks * kind, n_vocab)
    return out


@cache
def launches(kind: Kind, n_bits: int = BLOCK_BITS) -> tuple[Launch, Launch]:
    """How `candidates` and `draw` are compiled."""
    constants = {"N_PARAMS": N_PARAMS, "K_BITS": kind.bit_length() - 1, "N_BITS": n_bits}
    options: dict[str, int | bool] = {"num_warps": 8, "num_stages": 1, "enable_fp_fusion": False}
    return Launch(constants, options), Launch(constants | {"NO_TOKEN": NO_TOKEN}, options)
