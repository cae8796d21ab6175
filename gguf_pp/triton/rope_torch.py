"""What `rope` does, in plain torch: for devices without Triton, and to test it against."""

import torch
import torch.nn.functional as F
from torch import Tensor

from gguf_pp.ops.base import Attention, Rope


def rope_store(
    qkv: Tensor, k: Tensor, v: Tensor, slots: Tensor, positions: Tensor, spec: Attention, q: Tensor
) -> None:
    """Norm and rotate the queries and keys of `qkv`; queries fill `q`, the rest goes to the cache.

    Shapes and types are those of `rope.rope_store`. No step waits for the device.
    """
    n_heads, n_kv_heads = spec.n_heads, spec.n_kv_heads
    heads = qkv.view(len(qkv), -1, spec.head_size)
    queries, keys, values = torch.split(heads, [n_heads, n_kv_heads, n_kv_heads], dim=1)
    if spec.q_norm is not None:
        queries = F.rms_norm(queries, spec.q_norm.shape, spec.q_norm, spec.eps)
    if spec.k_norm is not None:
        keys = F.rms_norm(keys, spec.k_norm.shape, spec.k_norm, spec.eps)
    cells = positions.clamp(min=0).long()
    q.copy_(_turn(queries, spec.rope, cells))
    _store(k, _turn(keys, spec.rope, cells), slots, positions)
    _store(v, values, slots, positions)


def _turn(x: Tensor, rope: Rope, positions: Tensor) -> Tensor:
    """Rotate heads x [T, H, D] that stand at `positions` [T]."""
    cos, sin = (table[positions, None] for table in (rope.cos, rope.sin))  # [T, 1, n_rot/2]
    n_rot = 2 * cos.shape[-1]
    turned, rest = x[..., :n_rot], x[..., n_rot:]
    a, b = turned.chunk(2, dim=-1) if rope.neox else (turned[..., ::2], turned[..., 1::2])
    a, b = a * cos - b * sin, a * sin + b * cos
    pairs = (a, b) if rope.neox else (torch.stack((a, b), dim=-1).flatten(-2),)
    return torch.cat((*pairs, rest), dim=-1)


def _store(slab: Tensor, rows: Tensor, slots: Tensor, positions: Tensor) -> None:
    """Write rows [T, K, D] to their cells.

    The number of writes may not depend on the data, so a padding row repeats a real one; where
    there is none it writes back what it finds.
    """
    is_real = positions >= 0
    own = torch.arange(len(rows), device=rows.device)
    source = torch.where(is_real, own, is_real.int().argmax())
    slot, cell = slots[source].long(), positions[source].clamp(min=0).long()
    new = rows[source].to(slab.dtype)
    slab[slot, :, cell] = torch.where(is_real[source, None, None], new, slab[slot, :, cell])
