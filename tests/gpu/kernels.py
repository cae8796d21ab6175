"""Every kernel on the device itself, against the library, float64, and its twin in torch."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from gguf_pp.ops.base import Attention, Rope, RopeParams
from gguf_pp.ops.check import weight_types
from gguf_pp.ops.rope import make_rope
from gguf_pp.triton import multiply_torch, quantize_torch, rope_torch
from gguf_pp.triton.linear import MatrixOps
from gguf_pp.triton.planes import LAYOUTS, Planes
from gguf_pp.triton.quantize_torch import Before
from tests.gpu.attending import check_attention
from tests.gpu.cases import (
    EVEN,
    LOW,
    RAGGED,
    Framed,
    Shape,
    planes_of,
    raw_of,
    rows_of,
    weights_of,
    worst,
)
from tests.gpu.choosing import check_choosing
from tests.gpu.harness import Report
from tests.gpu.mixing import check_mixing

EXACT, HALVES, INT8 = 2e-6, 3e-4, 1e-2
"""The most that a product may be off as a share of Σ|x||w|, by what is rounded."""
T = GGMLQuantizationType
PLAIN = (T.F32, T.F16, T.BF16)
OPS_ROWS = (1, 12, 100)
LOW_PARTS = ("Q4_K", "Q6_K")
"""Types that are tried with few rows of W: what that changes is the same for all of them."""


def check(
    part: str,
    report: Report,
    device: str = "cuda:0",
    shapes: Sequence[Shape] = (RAGGED, EVEN, LOW),
) -> None:
    """One type by its name; "attention" with a size of heads, "mix" with a type; or "others",
    "quantize", "rope", "choose", and "attention", the other manners of it."""
    if device != "cpu":
        torch.set_num_threads(1)  # there are as many of these processes as cores
    named = {
        "others": check_others,
        "quantize": check_quantize,
        "rope": check_rope,
        "attention": check_attention,
        "choose": check_choosing,
    }
    if part in named:
        return named[part](report, device)
    topic, _, which = part.partition(" ")
    if topic == "attention":
        return check_attention(report, device, int(which))
    if topic == "mix":
        return check_mixing(report, device, T[which])
    for shape in shapes:
        if shape is LOW and part not in LOW_PARTS:
            continue
        _TypeCheck(T[part], shape, report, device).run()
    report.tell(ops=_worst_of_ops(T[part], report, device, shapes[0]))


class _TypeCheck:
    """The kernels of one type on one matrix."""

    def __init__(self, type: T, shape: Shape, report: Report, device: str) -> None:
        self.type, self.shape, self.report, self.device = type, shape, report, device
        self.raw = raw_of(type, shape.n_rows, shape.n_cols)
        self.weights = weights_of(self.raw, device)
        self.w = planes_of(self.raw, device)
        self.where = f"{self.raw.n_rows}x{self.raw.n_cols}"

    def run(self) -> None:
        from gguf_pp.triton import multiply, quantize

        def halves(x: Tensor) -> quantize_torch.HalfRows:
            return quantize.quantize_half(x, is_transposed=True)

        gemv, gemm = self.shape.gemv, self.shape.gemm
        if self.type in PLAIN:
            self.products("plain", multiply.gemv_plain, lambda x: x, gemv, EXACT)
            return
        self.weights_are_right(multiply.dequantize)
        self.products("int8", multiply.gemv_int8, quantize.quantize_int8, gemv, INT8, _of_codes)
        self.products("exact", multiply.gemv_exact, quantize_torch.transposed, gemv[::3], EXACT)
        self.products("gemm", multiply.gemm, halves, gemm, HALVES)

    def weights_are_right(self, dequantize: Callable[..., Tensor]) -> None:
        """All rows, some rows, and halves with their gain: bit for bit."""
        w, n_cols = self.w, self.raw.n_cols
        wanted = self.weights.float()
        out = torch.empty(w.n_rows, n_cols, device=self.device)
        are_all = torch.equal(dequantize(w, out), wanted)
        self.need(are_all, "dequantize: not the library's weights")
        ids = torch.tensor([w.n_rows - 1, 0, w.n_rows - 1], device=self.device)
        some = torch.empty(3, n_cols, device=self.device)
        are_asked = torch.equal(dequantize(w, some, ids=ids), wanted[ids])
        self.need(are_asked, "dequantize: not the rows that are asked for")
        half, twin = (out.new_empty(out.shape, dtype=torch.float16) for _ in range(2))
        dequantize(w, half, gain=w.gain)
        multiply_torch.dequantize(w, twin, gain=w.gain)
        self.need(torch.equal(half, twin), "dequantize: halves differ from the twin's")

    def products(
        self,
        name: str,
        multiply: Callable[[Any, Planes, Tensor], Tensor],
        made: Callable[[Tensor], Any],
        t_rows: Sequence[int],
        limit: float,
        as_read: Callable[[Any], Tensor] | None = None,
    ) -> None:
        """y = x Wᵀ for every number of rows; a row alone is the same bit for bit.

        `as_read` says what x is once it is rounded, if the error to that is to be told as well.
        """
        largest, of_read = 0.0, 0.0
        for n in t_rows:
            x = rows_of(n, self.raw.n_cols, self.device, seed=n)
            rows, framed = made(x), Framed(n, self.w.n_rows, self.device)
            multiply(rows, self.w, framed.inner)
            self.need(framed.is_sound(), f"{name} of {n} rows writes where it should not, or not")
            error = worst(framed.inner, x, self.weights)
            self.need(error <= limit, f"{name} of {n} rows is off by {error:.1e}")
            largest = max(largest, error)
            if as_read is not None:
                read = worst(framed.inner, as_read(rows), self.weights)
                self.need(read <= EXACT, f"{name} of {n} rows is off its codes by {read:.1e}")
                of_read = max(of_read, read)
            alone = torch.empty(1, self.w.n_rows, device=self.device)
            multiply(made(x[-1:].contiguous()), self.w, alone)
            is_same = torch.equal(alone[0], framed.inner[-1])
            self.need(is_same, f"{name}: a row of {n} differs from it alone")
        figures = {"worst": largest, "rows": t_rows}
        self.report.tell(**{
            f"{name} {self.where}": figures | ({"of codes": of_read} if as_read else {})
        })  # fmt: skip

    def need(self, is_right: bool, text: str) -> None:
        self.report.require(is_right, f"{self.where}: {text}")


def _of_codes(rows: quantize_torch.Int8Rows) -> Tensor:
    values = rows.codes.double().view(len(rows.codes), -1, 32)
    return (values * rows.scales.double().unsqueeze(-1)).view(rows.codes.shape)


def _worst_of_ops(type: T, report: Report, device: str, shape: Shape) -> dict[str, float]:
    """Products by way of MatrixOps, with and without Triton, as few and as many rows."""
    raw = raw_of(type, shape.n_rows, shape.n_cols)
    weights = weights_of(raw, device)
    errors: dict[str, float] = {}
    rounded = INT8 if type not in PLAIN or type is T.BF16 else HALVES
    for name, is_torch_only in (("triton", False), ("torch", True)):
        ops = MatrixOps(device, is_torch_only=is_torch_only)
        w = ops.matrix([raw])
        for exact, limit in ((False, rounded), (True, EXACT)):
            key = f"{name} {'exact' if exact else 'default'}"
            for n in OPS_ROWS:
                x = rows_of(n, raw.n_cols, device)
                y = ops.linear(x, w, exact=exact)
                error = worst(y, x, weights)
                report.require(error <= limit, f"{key}, {n} rows: off by {error:.1e}")
                errors[key] = max(errors.get(key, 0.0), error)
                bias, add = y[0] / 3, y * 0.7
                added = ops.linear(x, w, exact=exact, bias=bias, add=add)
                report.require(
                    torch.equal(added, y + bias + add), f"{key}, {n} rows: addends are off"
                )
    return errors


def check_others(report: Report, device: str, shape: Shape = RAGGED) -> None:
    """Types without kernels of their own go through float32 scratch, and are as exact."""
    for type in weight_types():
        if type in LAYOUTS:
            continue
        try:
            report.tell(**{type.name: _worst_of_ops(type, report, device, shape)})
        except NotImplementedError:
            report.missing(f"{type.name} in the package gguf")


def check_quantize(report: Report, device: str) -> None:
    """x in int8 and in halves is the twin's bit for bit; what comes before costs a rounding."""
    from gguf_pp.triton import quantize

    for n_cols in (32, 1056, 2080, 4096):
        x = rows_of(5, n_cols, device)
        x[1, :32] = torch.tensor([0.0, 1e-45, 1e-37, 0.5], device=device).repeat(8)
        made, twin = quantize.quantize_int8(x), quantize_torch.quantize_int8(x.cpu())
        _need_equal(report, f"int8 of {n_cols} columns", made, twin)
        for is_transposed in (False, True):
            half = quantize.quantize_half(x, is_transposed=is_transposed)
            wanted = quantize_torch.quantize_half(x.cpu(), is_transposed=is_transposed)
            _need_equal(report, f"halves of {n_cols} columns", half, wanted)
        weight = rows_of(1, n_cols, device, seed=3)[0]
        _check_made(report, x, (weight, 1e-6))
        both = torch.cat((x, x.flip(0)), dim=1)
        for name in quantize.ACTIVATIONS:
            _check_made(report, both, name)
    report.tell(widths=4)


def _check_made(report: Report, x: Tensor, before: Before) -> None:
    """Rows under a norm or an activation are right within a rounding, whatever the other rows."""
    from gguf_pp.triton import quantize

    made = before if isinstance(before, str) else "norm"
    what = f"{made} of {x.shape[1]} columns"
    exactly = before if isinstance(before, str) else (before[0].double().cpu(), before[1])
    wanted = quantize_torch.float_rows(x.double().cpu(), exactly).to(x.device)
    slack = 1e-5 * wanted.abs().amax(1, keepdim=True)
    if before == "gelu_tanh":  # one last bit of its halves
        slack = slack + wanted.abs() * 2**-10
    rows = quantize.quantize_int8(x, before)
    off = (_of_codes(rows) - wanted).abs() - 0.501 * rows.scales.double().repeat_interleave(32, 1)
    report.require(bool((off <= slack).all()), f"{what} in int8 is off")
    floats = quantize.float_rows(x, before)
    report.require(bool(((floats - wanted).abs() <= slack).all()), f"{what} is off")
    half = quantize.quantize_half(x, before, is_transposed=False)
    off = (half.values.double() * half.scales.double().unsqueeze(-1) - wanted).abs()
    report.require(bool((off <= slack + wanted.abs() * 2**-11).all()), f"{what} in halves is off")
    alone = quantize.quantize_int8(x[2:3].contiguous(), before)
    report.require(
        all(torch.equal(a[2:3], b) for a, b in zip(rows, alone, strict=True)),
        f"{what} depends on other rows",
    )


def _need_equal(report: Report, what: str, got: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
        n = int((a.cpu() != b).sum())
        report.require(n == 0, f"{what}: {n} of {b.numel()} differ from the twin, part {i}")


N_SLOTS = 3
ROTATED = 5e-6
"""The most that elements up to 7 may be off: quotients and roots are two last bits off there."""


def check_rope(report: Report, device: str) -> None:
    """Norm, rotation and store against the twin on the CPU."""
    from gguf_pp.triton import rope

    shapes = (
        # heads, kv heads, head size, turned, neox, norms
        (4, 2, 64, 64, True, False),
        (4, 2, 64, 64, False, False),
        (2, 1, 80, 32, True, True),
        (2, 1, 96, 20, False, True),
        (32, 8, 128, 128, True, True),
        (4, 1, 256, 256, True, True),
    )
    for shape in shapes:
        for dtype in (torch.float16, torch.float32):
            got = _roped(rope.rope_store, shape, dtype, device)
            wanted = _roped(rope_torch.rope_store, shape, dtype, "cpu")
            limit = ROTATED if dtype == torch.float32 else 4e-3
            for name, a, b, most in zip("qkv", got, wanted, (ROTATED, limit, limit), strict=True):
                error = float((a.cpu().double() - b.double()).abs().max())
                report.require(error <= most, f"{shape} {dtype}: {name} is off by {error:.1e}")
    report.tell(shapes=len(shapes))


def _roped(
    store: Callable[..., None], shape: tuple[Any, ...], dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor]:
    n_heads, n_kv_heads, head_size, n_rot, neox, has_norms = shape
    generator = torch.Generator().manual_seed(3)
    norms = [(torch.rand(head_size, generator=generator) + 0.5).to(device) for _ in range(2)]
    table = make_rope(RopeParams(n_rot, 1e4, neox, magnitude=1.25), 12)
    spec = Attention(
        n_heads, n_kv_heads, head_size, 1.0,
        Rope(table.cos.to(device), table.sin.to(device), neox),
        q_norm=norms[0] if has_norms else None, k_norm=norms[1] if has_norms else None, eps=0.01,
    )  # fmt: skip
    rows = [(2, 5), (2, 6), (0, 0), (0, -1), (1, 11)]
    places = torch.tensor(rows, dtype=torch.int32, device=device)
    slots, positions = places.t().contiguous()
    qkv = torch.randn(len(rows), (n_heads + 2 * n_kv_heads) * head_size, generator=generator)
    cached = torch.full((N_SLOTS, n_kv_heads, 12, head_size), 7.0, dtype=dtype)
    k, v = (cached.clone().to(device) for _ in range(2))
    q = torch.zeros(len(rows), n_heads, head_size, device=device)
    store(qkv.to(device), k, v, slots, positions, spec, q)
    q[3] = 0  # what a padding row gets is of no use
    return q, k, v
