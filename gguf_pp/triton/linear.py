"""y = x Wᵀ on a device: which way a product goes, and the ways that need no Triton.

| rows of x | quantized W                                      | exact                             |
|-----------|--------------------------------------------------|-----------------------------------|
| 1 to 8    | `gemv_int8`: x rounded to int8 in groups of 32   | `gemv_exact`: float32 throughout  |
| 9 to 64   | `gemm`: both rounded to float16 as they are read | W to float32 scratch, `torch.mm`  |
| more      | W to float16 scratch, `torch.mm`                 | W to float32 scratch, `torch.mm`  |

Weights that are plain numbers take `gemv_plain` where 8 divides their width, then `torch.mm`. Types
without kernels of their own (IQ1 to IQ3, ternary, NVFP4) go through float32 scratch. Where Triton
cannot be used, all take the way of many rows: in float16 on a GPU, in float32 on a CPU.

Within one kernel a row's result is the same bit for bit whatever the other rows and their number.
From one line of the table to the next, and from one number of rows to another in `torch.mm`,
roundings differ.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from gguf_pp.quants.raw import RawTensor
from gguf_pp.triton import multiply_torch, quantize_torch, why_unusable
from gguf_pp.triton.matrix import DeviceMatrix
from gguf_pp.triton.planes import LAYOUTS, Planes
from gguf_pp.triton.quantize_torch import Before, HalfRows, Int8Rows

SCRATCH_BYTES = 32 << 20
"""Room for dequantized rows of W: small enough to stay in the cache of a large device."""

_PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}


class Limits(NamedTuple):
    """The most rows of x for each kind of kernel; above them, or with 0, the next kind is used."""

    gemv: int = 8
    gemm: int = 64


class Rows:
    """x, or what `quantize_torch` makes of it `before` all else, in the forms that kernels read.

    Each is made in one launch when first asked for; matrices that multiply the same x share them.
    x is float32 and contiguous, and must stay as it is as long as this lives.
    """

    def __init__(self, x: Tensor, quantize: ModuleType, before: Before = None) -> None:
        assert x.dtype == torch.float32 and x.is_contiguous(), (x.dtype, x.stride())
        self._x, self._quantize, self._before = x, quantize, before
        self.n_rows: int = x.shape[0]

    def __len__(self) -> int:
        return self.n_rows

    def part(self, first: int, stop: int) -> "Rows":
        """Rows [first, stop)."""
        return Rows(self._x[first:stop], self._quantize, self._before)

    @cached_property
    def values(self) -> Tensor:
        """Float32 [T, K]."""
        if self._before is None:
            return self._x
        values: Tensor = self._quantize.float_rows(self._x, self._before)
        return values

    @cached_property
    def transposed(self) -> Tensor:
        """Float32, the columns of each 16 transposed."""
        values: Tensor = self._quantize.float_rows(self._x, self._before, is_transposed=True)
        return values

    @cached_property
    def int8(self) -> Int8Rows:
        """Codes with scales per 32."""
        rows: Int8Rows = self._quantize.quantize_int8(self._x, self._before)
        return rows

    @cached_property
    def half(self) -> HalfRows:
        """Float16 with a power of two per row."""
        return self._half(is_transposed=False)

    @cached_property
    def half_transposed(self) -> HalfRows:
        """The same, the columns of each 16 transposed."""
        return self._half(is_transposed=True)

    def _half(self, *, is_transposed: bool) -> HalfRows:
        rows: HalfRows = self._quantize.quantize_half(
            self._x, self._before, is_transposed=is_transposed
        )
        return rows


class MatrixOps:
    """Products with quantized matrices on one device; owns the scratch, used from one thread.

    `why_torch` says why Triton's kernels are not used, or is None where they are.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        scratch_bytes: int = SCRATCH_BYTES,
        limits: Limits | None = None,
        is_torch_only: bool = False,
    ) -> None:
        self.device = torch.device(device)
        self.limits = limits or Limits()
        self.why_torch = "asked for" if is_torch_only else why_unusable(self.device)
        self._scratch = torch.empty(scratch_bytes // 4, device=self.device)
        # A GPU multiplies halves many times faster than float32; a CPU does not.
        self._likes_halves = self.why_torch is None or self.device.type == "cuda"
        self._quantize: ModuleType = quantize_torch
        self._kernels: Any = None
        if self.why_torch is None:
            from gguf_pp.triton import multiply, quantize

            self._quantize, self._kernels = quantize, multiply

    def matrix(self, raws: Sequence[RawTensor]) -> DeviceMatrix:
        """Take quantized tensors [n_i, K] to the device, stacked by rows in the given order."""
        return DeviceMatrix(raws, self.device)

    def prepared(self, x: Tensor, before: Before = None) -> Rows:
        """x float32 [T, K], or what is made of it `before` (see `quantize_torch`), for products."""
        return Rows(x, self._quantize, before)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, add: Tensor | None = None) -> Tensor:
        """The RMS norm of x [T, K], plus `add`, as float32 for other things than products."""
        y: Tensor = self._quantize.float_rows(x, (weight, eps), add=add)
        return y

    def linear(
        self,
        x: Tensor | Rows,
        w: DeviceMatrix,
        *,
        exact: bool = False,
        bias: Tensor | None = None,
        add: Tensor | None = None,
    ) -> Tensor:
        """x [T, K] times Wᵀ, plus `bias` [n_rows], plus `add` [T, n_rows]: float32 [T, n_rows].

        All are float32 and contiguous. With `exact`, neither x nor W is rounded, as long as torch
        is not told to multiply float32 as TF32.
        """
        assert add is None or add.is_contiguous(), add.stride()
        rows = x if isinstance(x, Rows) else self.prepared(x)
        out = torch.empty(rows.n_rows, w.n_rows, device=self.device)
        if not rows.n_rows:
            return out
        for first, part in w.parts():
            if part.n_rows == w.n_rows:
                self._multiply(rows, part, out, exact, bias, add)
                continue
            stop = first + part.n_rows
            some_bias = None if bias is None else bias[first:stop]
            some_add = None if add is None else add[:, first:stop]
            self._multiply(rows, part, out[:, first:stop], exact, some_bias, some_add)
        return out

    def rows(self, w: DeviceMatrix, ids: Tensor) -> Tensor:
        """Rows `ids` (int64 [T], on the device) of W, dequantized: float32 [T, K].

        Waits for the device if W has parts of several types.
        """
        out = torch.empty(len(ids), w.n_cols, device=self.device)
        parts = list(w.parts())
        for first, part in parts:
            if len(parts) == 1:
                return self._dequantize(part, out, ids)
            here = ((ids >= first) & (ids < first + part.n_rows)).nonzero().flatten()
            if len(here):
                found = out.new_empty(len(here), w.n_cols)
                out.index_copy_(0, here, self._dequantize(part, found, ids[here] - first))
        return out

    def _multiply(
        self,
        x: Rows,
        w: Planes,
        out: Tensor,
        exact: bool,
        bias: Tensor | None,
        add: Tensor | None,
    ) -> None:
        kernel = self._kernel(x, w, exact)
        if kernel is not None:
            kernel(w, out, bias=bias, add=add)
            return
        if exact or not self._halves(w):
            self._by_scratch(x.values, w, out)
        elif w.type is GGMLQuantizationType.BF16:
            _mm(x.values.bfloat16(), w.planes["q"], out)
        else:
            values, scales = x.half
            self._by_scratch(values, w, out, (scales / self._gain(w)).unsqueeze(-1))
        for addend in (bias, add):
            if addend is not None:
                out += addend

    def _kernel(self, x: Rows, w: Planes, exact: bool) -> Callable[..., Tensor] | None:
        """The kernel for so many rows and such weights, its x bound; None for `torch.mm`."""
        kernels = self._kernels
        if kernels is None or w.type not in LAYOUTS or w.n_cols % 8:
            return None
        if x.n_rows <= self.limits.gemv:
            if w.type in _PLAIN:
                return partial(kernels.gemv_plain, x.values)
            if exact:
                return partial(kernels.gemv_exact, x.transposed)
            return partial(kernels.gemv_int8, x.int8)
        if x.n_rows <= self.limits.gemm and not exact and w.type not in _PLAIN:
            return partial(kernels.gemm, x.half_transposed)
        return None

    def _halves(self, w: Planes) -> bool:
        """Whether a product that need not be exact is one of 16-bit numbers."""
        return self._likes_halves and w.type in LAYOUTS and w.type is not GGMLQuantizationType.F32

    def _gain(self, w: Planes) -> float:
        return 1.0 if w.type in _PLAIN else w.gain

    def _by_scratch(self, x: Tensor, w: Planes, out: Tensor, scales: Tensor | None = None) -> None:
        """x Wᵀ, W dequantized to the type of x (float16 with its gain) chunk by chunk; times
        `scales` [T, 1] where these are given.
        """
        for first, stop, weights in self._chunks(w, x.dtype):
            _mm(x, weights, out[:, first:stop], scales)

    def _chunks(self, w: Planes, dtype: torch.dtype) -> Iterator[tuple[int, int, Tensor]]:
        if _PLAIN.get(w.type) is dtype:
            yield 0, w.n_rows, w.planes["q"]
            return
        room = self._scratch.view(dtype)
        step = len(room) // w.n_cols
        step -= step % 16 if step > 16 else 0  # each chunk begins where its loads are widest
        assert step > 0, f"{len(room)} elements of scratch for rows of {w.n_cols}"
        for first in range(0, w.n_rows, step):
            stop = min(first + step, w.n_rows)
            target = room[: (stop - first) * w.n_cols].view(-1, w.n_cols)
            gain = self._gain(w) if dtype is torch.float16 else 1.0
            yield first, stop, self._dequantize(w.rows(first, stop), target, gain=gain)

    def _dequantize(
        self, w: Planes, out: Tensor, ids: Tensor | None = None, *, gain: float = 1.0
    ) -> Tensor:
        has_kernel = self._kernels is not None and w.type in LAYOUTS and w.type not in _PLAIN
        module = self._kernels if has_kernel else multiply_torch
        target: Tensor = module.dequantize(w, out, ids=ids, gain=gain)
        return target


def _mm(x: Tensor, w: Tensor, out: Tensor, scales: Tensor | None = None) -> None:
    """x Wᵀ with sums in float32, times `scales`, into float32."""
    if x.dtype == torch.float32:
        torch.mm(x, w.t(), out=out)
    elif x.is_cuda:
        out.copy_(torch.mm(x, w.t(), out_dtype=torch.float32))
    else:
        out.copy_(x.float() @ w.float().t())
    if scales is not None:
        out *= scales
