"""A model's operations on one device of torch: Triton's kernels where they run, else torch.

Nothing here waits for the device once weights are loaded. What all layers want to know of a ubatch
(where its rows stand) is made on the host once and brought to the device by its compute stream.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gguf_pp.backend.cuda_host import Uploads
from gguf_pp.batch import UBatch
from gguf_pp.ops import torch_ops
from gguf_pp.ops.base import Activation, Attention, LayerKV, Matrix, Rope
from gguf_pp.quants.raw import RawTensor
from gguf_pp.quants.reference import dequantize
from gguf_pp.triton import attention_torch, rope_torch
from gguf_pp.triton.linear import MatrixOps
from gguf_pp.triton.matrix import DeviceMatrix

N_UPLOADS = 16
UPLOAD_BYTES = 64 << 10
"""Pinned memory for what is brought to the device; made larger for larger ubatches."""

CELL_STEP = 16
"""Cells that rows may see are rounded up to a multiple of it, as torch's fused attention likes."""

log = logging.getLogger("gguf_pp")


class DeviceLayerKV:
    """Keys and values [n_slots, n_kv_heads, n_cells, D] on a device. What was not written is
    undefined, NaN included, and is never seen."""

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self.k, self.v = k, v
        self.n_slots, self.n_cells = k.shape[0], k.shape[2]
        self.n_bytes = k.nbytes + v.nbytes


class Piece(NamedTuple):
    """Rows [first, stop) of a ubatch that attend in one launch, to cells below `n_cells`.

    They are single rows of any slots (`decodes`), or a span of several rows.
    """

    first: int
    stop: int
    n_cells: int
    decodes: bool


def pieces_of(ubatch: UBatch) -> Iterator[Piece]:
    """All rows in order: consecutive spans of one row together, longer spans one by one."""
    first = 0
    for decodes, group in groupby(ubatch.spans, key=lambda span: span.n_rows == 1):
        spans = list(group)
        for part in [spans] if decodes else [[span] for span in spans]:
            stop = first + sum(span.n_rows for span in part)
            yield Piece(first, stop, max(span.start + span.n_rows for span in part), decodes)
            first = stop


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the rows of `ubatch` stand: int32 [T] on the device."""

    ubatch: UBatch
    slots: Tensor
    positions: Tensor
    pieces: tuple[Piece, ...]


class DeviceOps:
    """Ops on `device`, whose compute stream is current where it is called.

    With `exact`, products are of float32 throughout. `is_torch_only` leaves Triton out; so does a
    machine on which it does not run, which is logged.
    """

    maps_weights = False
    overhead_rows = 256

    def __init__(
        self, device: torch.device | str, *, exact: bool, is_torch_only: bool = False
    ) -> None:
        self.device = torch.device(device)
        self._products = MatrixOps(self.device, is_torch_only=is_torch_only)
        why = self._products.why_torch
        self.name = "triton" if why is None else f"torch {self.device.type}"
        self._exact = exact
        self._rope: ModuleType = rope_torch
        self._attention: ModuleType = attention_torch
        self._max_head_size: int | None = None
        if why is None:
            from gguf_pp.triton import attention, rope

            self._rope, self._attention = rope, attention
            self._max_head_size = attention.MAX_HEAD_SIZE
        _announce(self.device, why)
        self._uploads: Uploads | None = None
        self._upload_bytes = 0
        self._specs: dict[int, tuple[Attention, Attention]] = {}
        self._ropes: dict[int, tuple[Rope, Rope]] = {}
        self._places: _Places | None = None

    def matrix(self, parts: Sequence[RawTensor]) -> DeviceMatrix:
        """Copy quantized tensors to planes on the device, stacked by rows."""
        return self._products.matrix(parts)

    def vector(self, raw: RawTensor) -> Tensor:
        """A small tensor as float32, its shape kept."""
        out = torch.empty(raw.n_rows, raw.n_cols)
        values = dequantize(torch.from_numpy(raw.data.copy()), raw.type, out)
        return values.view(raw.shape).to(self.device)

    def layer_kv(
        self, n_slots: int, n_cells: int, n_kv_heads: int, head_size: int, k_type: str, v_type: str
    ) -> DeviceLayerKV:
        """Reserve keys and values of one layer."""
        shape = (n_slots, n_kv_heads, n_cells, head_size)
        k, v = (
            torch.empty(shape, dtype=torch_ops.KV_TYPES[kind], device=self.device)
            for kind in (k_type, v_type)
        )
        return DeviceLayerKV(k, v)

    def embed(self, table: Matrix, tokens: Sequence[int]) -> Tensor:
        """Look up rows: [T, E]."""
        assert isinstance(table, DeviceMatrix)
        return self._products.rows(table, self._bring(torch.tensor(tokens, dtype=torch.int64)))

    def linear(
        self, x: Tensor, w: Matrix, *, bias: Tensor | None = None, add: Tensor | None = None
    ) -> Tensor:
        """x Wᵀ + bias + add: [T, n_rows]."""
        assert isinstance(w, DeviceMatrix)
        return self._products.linear(x, w, exact=self._exact, bias=bias, add=add)

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, *, add: Tensor | None = None
    ) -> Tensor:
        """x / sqrt(mean(x²) + eps) * weight + add."""
        return torch_ops.rms_norm(x, weight, eps, add)

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """activation(gate) * up: [T, F]."""
        return torch_ops.gated(gate_up, activation)

    def attention(self, qkv: Tensor, kv: LayerKV, ubatch: UBatch, spec: Attention) -> Tensor:
        """Norm, rotate, store, attend: [T, H D]. Raises ValueError for a span outside of `kv`."""
        assert isinstance(kv, DeviceLayerKV)
        places, spec = self._places_of(ubatch, kv), self._spec_here(spec)
        n_rows = ubatch.n_rows
        q = qkv.new_empty(n_rows, spec.n_heads, spec.head_size)
        self._rope.rope_store(qkv, kv.k, kv.v, places.slots, places.positions, spec, q)
        out = qkv.new_empty(n_rows, spec.n_heads * spec.head_size)
        module = self._attention_for(spec.head_size)
        for piece in places.pieces:
            rows = slice(piece.first, piece.stop)
            n_cells = min(kv.n_cells, -(-piece.n_cells // CELL_STEP) * CELL_STEP)
            where = (kv.k, kv.v, places.slots[rows], places.positions[rows], spec, out[rows])
            if piece.decodes:
                module.decode_attention(q[rows], *where, n_cells=n_cells)
            else:
                module.prefill_attention(q[rows], *where, n_cells=n_cells, exact=self._exact)
        return out

    def _attention_for(self, head_size: int) -> ModuleType:
        is_too_wide = self._max_head_size is not None and head_size > self._max_head_size
        return attention_torch if is_too_wide else self._attention

    def _places_of(self, ubatch: UBatch, kv: DeviceLayerKV) -> _Places:
        """Made for the first layer that asks; the layers after it have the same ubatch."""
        if self._places is None or self._places.ubatch is not ubatch:
            spans = ubatch.spans
            for slot, start, n_rows in spans:
                # On the device an index out of range ends the process's use of it.
                if not (0 <= slot < kv.n_slots and 0 <= start <= kv.n_cells - n_rows):
                    raise ValueError(
                        f"cells [{start}, {start + n_rows}) of slot {slot}, "
                        f"in {kv.n_slots} slots of {kv.n_cells}"
                    )
            slots = np.repeat([span.slot for span in spans], [span.n_rows for span in spans])
            positions = np.concatenate([np.arange(s.start, s.start + s.n_rows) for s in spans])
            both = torch.from_numpy(np.stack((slots, positions)).astype(np.int32))
            here = self._bring(both)
            self._places = _Places(ubatch, here[0], here[1], tuple(pieces_of(ubatch)))
        return self._places

    def _spec_here(self, spec: Attention) -> Attention:
        """`spec` with its tables on the device."""
        # Keeping what came beside what was made of it keeps its id from another use.
        if id(spec) not in self._specs:
            rope = spec.rope
            if id(rope) not in self._ropes:
                cos, sin = (table.to(self.device) for table in (rope.cos, rope.sin))
                self._ropes[id(rope)] = rope, Rope(cos, sin, rope.neox)
            self._specs[id(spec)] = spec, replace(spec, rope=self._ropes[id(rope)][1])
        return self._specs[id(spec)][1]

    def _bring(self, values: Tensor) -> Tensor:
        """Contiguous `values` to the device, which the host does not wait for."""
        if self.device.type == "cpu":
            return values
        if self._uploads is None or values.nbytes > self._upload_bytes:
            self._upload_bytes = max(UPLOAD_BYTES, 2 * values.nbytes)
            self._uploads = Uploads(torch, N_UPLOADS, self._upload_bytes)
        out = torch.empty_like(values, device=self.device)
        self._uploads.send(values, out)
        return out


@cache
def _announce(device: torch.device, why_torch: str | None) -> None:
    """Say once per device what computes."""
    if why_torch is None:
        log.info("%s computes with Triton kernels", device)
    elif device.type == "cuda":
        log.warning("%s computes with torch alone: %s", device, why_torch)
