"""A model's operations on one device of torch: Triton's kernels where they run, else torch.

Nothing here waits for the device once weights are loaded. What all layers want to know of a ubatch
(where its rows stand) is made on the host once and brought to the device by its compute stream.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from gguf_pp.backend.cuda_host import Uploads
from gguf_pp.batch import Choice, UBatch
from gguf_pp.ops import torch_ops
from gguf_pp.ops.base import Activation, Attention, LayerKV, Matrix, Mixture, Operand, Rope
from gguf_pp.quants.raw import RawTensor
from gguf_pp.quants.reference import dequantize
from gguf_pp.triton import attention_torch, is_interpreted, rope_torch
from gguf_pp.triton.choose import Kind, choose, kind_of, pack
from gguf_pp.triton.experts import ExpertOps
from gguf_pp.triton.linear import MatrixOps, Rows
from gguf_pp.triton.matrix import DeviceExperts, DeviceMatrix
from gguf_pp.triton.planes import CHUNK_BYTES
from gguf_pp.triton.standing import StandingRows, places

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
        self._experts = ExpertOps(self._products)
        why = self._products.why_torch
        self.name = "triton" if why is None else f"torch {self.device.type}"
        self._exact = exact
        self._rope: ModuleType = rope_torch
        self._attention: ModuleType = attention_torch
        self._draw = choose
        self._max_head_size: int | None = None
        if why is None:
            from gguf_pp.triton import attention, draw, rope

            self._rope, self._attention, self._draw = rope, attention, draw.choose
            self._max_head_size = attention.MAX_HEAD_SIZE
        self._ends = torch.empty(0, dtype=torch.int64, device=self.device)
        _announce(self.device, why)
        self._has_experts_by_torch = False
        self._weights: Uploads | None = None
        self._uploads: Uploads | None = None
        self._upload_bytes = 0
        self._specs: dict[int, tuple[Attention, Attention]] = {}
        self._ropes: dict[int, tuple[Rope, Rope]] = {}
        self._places: _Places | None = None

    @property
    def is_graphable(self) -> bool:
        """Whether what is queued here can be captured in a CUDA graph."""
        return self._products.why_torch is not None or not is_interpreted()

    @property
    def launches_by_expert(self) -> bool:
        """Whether a mixture of experts takes launches for each of them, as it does for types
        without kernels: more than a graph should have."""
        return self._has_experts_by_torch

    def looks_everywhere(self, kv: LayerKV) -> bool:
        """Whether what rows of a prompt launch is the same wherever they stand in `kv`, as each
        finds out by itself which cells it sees."""
        assert isinstance(kv, DeviceLayerKV)
        return self._attention_for(kv.k.shape[3]) is not attention_torch

    def matrix(self, parts: Sequence[RawTensor]) -> DeviceMatrix:
        """Copy quantized tensors to planes on the device, stacked by rows."""
        return DeviceMatrix(parts, self.device, self._way_of_weights())

    def experts(self, parts: Sequence[RawTensor]) -> DeviceExperts:
        """Copy quantized tensors to planes on the device, the rows of an expert stacked."""
        self._has_experts_by_torch |= not self._experts.has_kernels(raw.type for raw in parts)
        return DeviceExperts(parts, self.device, self._way_of_weights())

    def _way_of_weights(self) -> Uploads | None:
        """Two pieces of pinned memory: one is filled while the device takes from the other."""
        if self._weights is None and self.device.type != "cpu":
            self._weights = Uploads(torch, 2, CHUNK_BYTES)
        return self._weights

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

    def ids(self, tokens: Sequence[int]) -> Tensor:
        """Token ids int64 [T]."""
        return self._bring(torch.tensor(tokens, dtype=torch.int64))

    def embed(self, table: Matrix, ids: Tensor) -> Tensor:
        """Look up rows: [T, E]."""
        assert isinstance(table, DeviceMatrix)
        return self._products.rows(table, ids)

    def linear(
        self, x: Operand, w: Matrix, *, bias: Tensor | None = None, add: Tensor | None = None
    ) -> Tensor:
        """x Wᵀ + bias + add: [T, n_rows]."""
        assert isinstance(x, Tensor | Rows) and isinstance(w, DeviceMatrix)
        return self._products.linear(x, w, exact=self._exact, bias=bias, add=add)

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, *, add: Tensor | None = None
    ) -> Tensor:
        """x / sqrt(mean(x²) + eps) * weight + add."""
        return self._products.rms_norm(x, weight, eps, add)

    def normed(self, x: Tensor, weight: Tensor, eps: float) -> Rows:
        """The same as it is wanted, rounded in the same launch."""
        return self._products.prepared(x, (weight, eps))

    def gated(self, gate_up: Tensor, activation: Activation) -> Rows:
        """activation(gate) * up: [T, F], as it is wanted."""
        return self._products.prepared(gate_up, activation)

    def mixture(
        self, x: Operand, logits: Tensor, spec: Mixture, *, add: Tensor | None = None
    ) -> Tensor:
        """What the best experts make of x, weighted, plus `add`: [T, E]."""
        assert isinstance(x, Tensor | Rows)
        rows = x if isinstance(x, Rows) else self._products.prepared(x)
        return self._experts.mixture(rows, logits, spec, exact=self._exact, add=add)

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

    def set_ends(self, ids: Sequence[int]) -> None:
        """Name the tokens that end a text, for choices that ban them."""
        self._ends = self.ids(ids)

    def choose(self, logits: Tensor, params: Tensor, kind: Kind) -> Tensor:
        """Tokens int32 [n] from logits [n, V] by packed choices of at most `kind`."""
        way = choose if kind is Kind.ALL else self._draw
        return way(logits, params, self._ends, kind)

    def choose_among(self, logits: Tensor, choices: Sequence[Choice | None]) -> Tensor:
        """Tokens int32 [n] from logits [n, V]; any, where there is no choice."""
        params = self._bring(pack(choices, len(choices)))
        return self.choose(logits, params, kind_of(choices))

    def stand(self, rows: StandingRows, ubatch: UBatch, kv: LayerKV | None) -> None:
        """Bring to `rows` where those of `ubatch` stand; `kv` is any layer's, None in a stage
        without layers. Raises ValueError for a row outside of it."""
        if kv is not None:
            _check_cells(ubatch, kv)
        self._send(rows.packed(ubatch), rows.memory)

    @contextmanager
    def standing(self, rows: StandingRows, n_cells: int) -> Iterator[UBatch]:
        """Inside, the ubatch that this gives stands wherever `rows` say when the work is done,
        at cells below `n_cells`."""
        piece = Piece(0, rows.n_rows, n_cells, decodes=rows.n_choices > 0)
        self._places = _Places(rows.template, rows.slots, rows.positions, (piece,))
        try:
            yield rows.template
        finally:
            self._places = None

    def _attention_for(self, head_size: int) -> ModuleType:
        is_too_wide = self._max_head_size is not None and head_size > self._max_head_size
        return attention_torch if is_too_wide else self._attention

    def _places_of(self, ubatch: UBatch, kv: DeviceLayerKV) -> _Places:
        """Made for the first layer that asks; the layers after it have the same ubatch."""
        if self._places is None or self._places.ubatch is not ubatch:
            _check_cells(ubatch, kv)
            here = self._bring(torch.from_numpy(places(ubatch)))
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
        out = torch.empty_like(values, device=self.device)
        self._send(values, out)
        return out

    def _send(self, values: Tensor, out: Tensor) -> None:
        """Bring contiguous `values` to `out`, which is as large, on the device."""
        if self.device.type == "cpu":
            out.copy_(values)
            return
        if self._uploads is None or values.nbytes > self._upload_bytes:
            self._upload_bytes = max(UPLOAD_BYTES, 2 * values.nbytes)
            self._uploads = Uploads(torch, N_UPLOADS, self._upload_bytes)
        self._uploads.send(values, out)


def _check_cells(ubatch: UBatch, kv: LayerKV) -> None:
    """Raise ValueError for a span outside of `kv`: on the device, an index out of range would end
    the process's use of it."""
    for slot, start, n_rows in ubatch.spans:
        if not (0 <= slot < kv.n_slots and 0 <= start <= kv.n_cells - n_rows):
            raise ValueError(
                f"cells [{start}, {start + n_rows}) of slot {slot}, "
                f"in {kv.n_slots} slots of {kv.n_cells}"
            )


@cache
def _announce(device: torch.device, why_torch: str | None) -> None:
    """Say once per device what computes."""
    if why_torch is None:
        log.info("%s computes with Triton kernels", device)
    elif device.type == "cuda":
        log.warning("%s computes with torch alone: %s", device, why_torch)
