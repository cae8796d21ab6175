"""What `attention` does, in plain torch: for devices without Triton, and to test it against.

No step waits for the device, and shapes depend on those of the call and on `n_cells` alone, so
that all of it can be captured in a CUDA graph.
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from gguf_pp.ops.base import Attention

SCRATCH_BYTES = 32 << 20
"""What one step may take for float32 keys and values, or for scores; a single kv head may take more
for its own, a KiB for each cell of 128. All that lives at once is three times that, which is within
a device's margin."""


def seen_cells(positions: Tensor, n_cells: int, window: int) -> Tensor:
    """Which of the cells [0, n_cells) rows at `positions` [T] see: bool [T, n_cells]."""
    cells = torch.arange(n_cells, device=positions.device)
    ends = positions[:, None]
    seen = cells <= ends
    return seen & (cells > ends - window) if window else seen


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, slots: Tensor, positions: Tensor, spec: Attention,
    out: Tensor, *, n_cells: int, sinks: Tensor | None = None,
) -> None:  # fmt: skip
    """Attend from rows of any slots at any positions below `n_cells`; fills `out`."""
    n_group = spec.n_heads // spec.n_kv_heads
    sink = None if sinks is None else sinks.view(-1, n_group)  # [K, G]
    queries, outs = (t.view(len(q), -1, n_group, spec.head_size) for t in (q, out))  # [T, K, G, D]
    head_bytes = 2 * n_cells * spec.head_size * q.itemsize
    for heads in _slices(spec.n_kv_heads, head_bytes):
        n_heads = heads.stop - heads.start
        for rows in _slices(len(q), n_heads * head_bytes):
            seen = seen_cells(positions[rows], n_cells, spec.window)[:, None]  # [T, 1, S]
            keys, values = (
                t[:, heads, :n_cells].index_select(0, slots[rows]).float() for t in (k, v)
            )
            values.masked_fill_(~seen[..., None], 0)
            theirs = None if sink is None else sink[heads]
            outs[rows, heads] = _attend(
                queries[rows, heads], keys, values, seen[:, None], spec, theirs
            )
            del keys, values  # before the next are made


def _slices(n: int, n_bytes_each: int) -> Iterator[slice]:
    """Parts of range(n) that take no more than SCRATCH_BYTES each, if one does."""
    n_step = max(1, SCRATCH_BYTES // n_bytes_each)
    return (slice(first, min(first + n_step, n)) for first in range(0, n, n_step))


def prefill_attention(
    q: Tensor, k: Tensor, v: Tensor, slots: Tensor, positions: Tensor, spec: Attention,
    out: Tensor, *, n_cells: int, sinks: Tensor | None = None, exact: bool = False,
) -> None:  # fmt: skip
    """Attend from rows of the slot of row 0 at any positions below `n_cells`; fills `out`.

    Unless `exact`, a float16 cache without softcap and sinks takes torch's fused attention, which
    is at its best when `n_cells` is a multiple of 16.
    """
    is_blank = (torch.arange(n_cells, device=q.device) > positions.max())[:, None]  # [S, 1]
    is_plain = not (exact or spec.softcap) and sinks is None and k.dtype == v.dtype != q.dtype
    n_group = spec.n_heads // spec.n_kv_heads
    queries, outs = (t.view(len(q), -1, n_group, spec.head_size) for t in (q, out))  # [L, K, G, D]
    for heads in _slices(spec.n_kv_heads, 2 * n_cells * spec.head_size * q.itemsize):
        n_heads = heads.stop - heads.start
        keys, values = (t[:, heads, :n_cells].index_select(0, slots[:1])[0] for t in (k, v))
        for slab in (keys, values):  # [K, S, D]
            slab.masked_fill_(is_blank, 0)
        if not is_plain:
            keys, values = keys.float(), values.float()
        for rows in _slices(len(q), 2 * n_heads * n_group * n_cells * q.itemsize):
            # To a kv head, the heads of its group are so many rows more: [K, G, L, D].
            some = queries[rows, heads].permute(1, 2, 0, 3)
            folded = some.flatten(1, 2)  # [K, G L, D]
            seen = seen_cells(positions[rows], n_cells, spec.window)
            mask = seen.repeat(n_group, 1)  # [G L, S]
            if is_plain:
                y = _fused(folded, keys, values, mask, spec.scale)
            else:
                sink = None
                if sinks is not None:
                    sink = sinks.view(-1, n_group)[heads].repeat_interleave(some.shape[2], 1)
                y = _attend(folded, keys, values, mask, spec, sink)
            outs[rows, heads] = y.view(some.shape).permute(2, 0, 1, 3)
        del keys, values


def _attend(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, spec: Attention, sink: Tensor | None
) -> Tensor:
    """Attend from q [..., M, D] to k, v [..., S, D] as far as `seen` [..., M, S]; sink [..., M]."""
    scores = torch.matmul(q, k.transpose(-1, -2)).mul_(spec.scale)
    if spec.softcap:
        scores.div_(spec.softcap).tanh_().mul_(spec.softcap)
    scores.masked_fill_(~seen, -math.inf)
    if sink is not None:
        scores = torch.cat((scores, sink.expand(scores.shape[:-1])[..., None]), dim=-1)
    weights = scores.softmax(dim=-1)[..., : k.shape[-2]]
    return torch.matmul(weights.where(seen, 0), v)  # of a row that sees nothing, softmax is NaN


def _fused(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """The same without softcap and sinks, in the type of k and v: float32 [K, M, D]."""
    # What a row that sees nothing results in differs from kernel to kernel: let it see cell 0.
    is_blind = ~seen.any(-1, keepdim=True)  # [M, 1]
    mask = seen.clone()
    mask[:, :1] |= is_blind
    q, k, v = (t.to(v.dtype)[None] for t in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)[0]
    return y.float().masked_fill_(is_blind, 0)
