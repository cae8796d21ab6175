"""Norm, rotation and the store of keys and values with Triton; `rope_torch` has it without."""

from torch import Tensor

from gguf_pp.ops.base import Attention
from gguf_pp.triton import rope_kernels as kernels

OPTIONS = {"num_warps": 1, "enable_fp_fusion": True}


def rope_store(
    qkv: Tensor, k: Tensor, v: Tensor, slots: Tensor, positions: Tensor, spec: Attention, q: Tensor
) -> None:
    """Norm and rotate the queries and keys of `qkv`; queries fill `q`, the rest goes to the cache.

    qkv [T, (H + 2K) D] and q [T, H, D] are float32, k and v [n_slots, K, n_cells, D] float16 or
    float32, slots and positions [T] int32, all contiguous. A row at position -1 is padding: it
    stores nothing, and its queries are finite and of no use.
    """
    n_rows, n_heads = len(qkv), spec.n_heads + 2 * spec.n_kv_heads
    cos, sin = spec.rope.cos, spec.rope.sin
    kernels.rope_store[n_heads, n_rows](
        qkv, q, k, v, slots, positions, cos, sin, spec.q_norm, spec.k_norm, spec.eps, k.shape[2],
        **rope_constants(spec), **OPTIONS,
    )  # fmt: skip


def rope_constants(spec: Attention) -> dict[str, int | bool]:
    """What the kernel is compiled for."""
    return {
        "N_HEADS": spec.n_heads,
        "N_KV_HEADS": spec.n_kv_heads,
        "HEAD_SIZE": spec.head_size,
        "N_ROT": 2 * spec.rope.cos.shape[1],
        "NEOX": spec.rope.neox,
        "BLOCK_D": 1 << (spec.head_size - 1).bit_length(),
    }
