"""Tokens chosen from the 64 largest logits or fewer, in two launches; `choose` has it in torch."""

import torch
import triton
from torch import Tensor

from gguf_pp.sampling import NO_TOKEN
from gguf_pp.triton import draw_kernels as kernels
from gguf_pp.triton.choose import N_PARAMS, Kind

BLOCK_BITS = 11
"""A program reads 1 << BLOCK_BITS logits, then candidates, at once."""

OPTIONS = {"num_warps": 8, "num_stages": 1, "enable_fp_fusion": False}


def choose(logits: Tensor, params: Tensor, ends: Tensor, kind: Kind) -> Tensor:
    """As `choose.choose`, for Kind.BEST and Kind.TOP; all are contiguous."""
    assert kind is not Kind.ALL and logits.is_contiguous(), (kind, logits.stride())
    n_rows, n_vocab = logits.shape
    n_blocks = triton.cdiv(n_vocab, 1 << BLOCK_BITS)
    keys = logits.new_empty(n_rows, n_blocks * kind, dtype=torch.int64)
    out = logits.new_empty(n_rows, dtype=torch.int32)
    constants = constants_of(kind)
    kernels.candidates[n_rows, n_blocks](
        logits, params, ends, keys, n_vocab, len(ends), N_PARAMS=N_PARAMS, **constants, **OPTIONS
    )
    kernels.draw[n_rows,](
        keys, params, out, n_blocks * kind, n_vocab,
        N_PARAMS=N_PARAMS, NO_TOKEN=NO_TOKEN, **constants, **OPTIONS,
    )  # fmt: skip
    return out


def constants_of(kind: Kind) -> dict[str, int]:
    """What the kernels are compiled for."""
    return {"K_BITS": kind.bit_length() - 1, "N_BITS": BLOCK_BITS}
