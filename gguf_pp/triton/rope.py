"""Norm, rotation and the store of keys and values with Triton; `rope_torch` has it without."""

from functools import cache

from torch import Tensor

from gguf_pp.ops.base import Attention
from gguf_pp.triton import rope_kernels as kernels
from gguf_pp.triton.launching import Launch, power_of_2


def rope_store(
    qkv: Tensor, k: Tensor, v: Tensor, slots: Tensor, positions: Tensor, spec: Attention, q: Tensor
) -> None:
    """Norm and rotate the queries and keys of `qkv`; queries fill `q`, the rest goes to the cache.

    qkv [T, (H + 2K) D] and q [T, H, D] are float32, k and v [n_slots, K, n_cells, D] float16 or
    float32, slots and positions [T] int32, all contiguous. A row at position -1 is padding: it
    stores nothing, and its queries are finite and of no use.
    """
    n_rows, n_heads = qkv.shape[0], spec.n_heads + 2 * spec.n_kv_heads
    cos, sin = spec.rope.cos, spec.rope.sin
    rope_launch(spec)(
        kernels.rope_store, (n_heads, n_rows),
        qkv, q, k, v, slots, positions, cos, sin, spec.q_norm, spec.k_norm, spec.eps, k.shape[2],
    )  # fmt: skip


def rope_launch(spec: Attention) -> Launch:
    """How the kernel is compiled."""
    n_rot, neox = 2 * spec.rope.cos.shape[1], spec.rope.neox
    return _launch(spec.n_heads, spec.n_kv_heads, spec.head_size, n_rot, neox)


@cache
def _launch(n_heads: int, n_kv_heads: int, head_size: int, n_rot: int, neox: bool) -> Launch:
    constants = {
        "N_HEADS": n_heads,
        "N_KV_HEADS": n_kv_heads,
        "HEAD_SIZE": head_size,
        "N_ROT": n_rot,
        "NEOX": neox,
        "BLOCK_D": power_of_2(head_size),
    }
    return Launch(constants, {"num_warps": 1, "enable_fp_fusion": True})
