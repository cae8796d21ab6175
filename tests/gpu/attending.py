"""Attention on the device against its twin in torch on the CPU."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gguf_pp.ops.base import Attention, Rope
from gguf_pp.triton import attention_torch
from tests.gpu.harness import Report

N_SLOTS, N_CELLS = 3, 300
NO_ROPE = Rope(torch.empty(0, 0), torch.empty(0, 0), neox=True)
MANNERS: tuple[dict[str, Any], ...] = (
    {},
    {"window": 1},
    {"window": 50},
    {"window": 130, "softcap": 30.0},
    {"softcap": 2.0},
    {"n_kv_heads": 1},
    {"n_kv_heads": 4},
)


def check_attention(report: Report, device: str, head_size: int | None = None) -> None:
    """Decode and prefill against the twin on the CPU: a size of heads with every type of cache, or
    heads of 64 in every manner, and whether rows depend on each other."""
    cases: list[tuple[int, torch.dtype, dict[str, Any]]]
    if head_size is None:
        cases = [(64, torch.float16, manner) for manner in MANNERS]
        _check_attention_rows(report, device)
    else:
        cases = [(head_size, dtype, {}) for dtype in (torch.float16, torch.float32)]
    largest = {"decode": 0.0, "prefill": 0.0, "prefill exact": 0.0}
    for head_size, dtype, manner in cases:
        for name, rows, settings, limit in _calls(dtype):
            error = _attention_error(name, head_size, dtype, manner, rows, settings, device)
            key = "prefill exact" if settings.get("exact") else name
            largest[key] = max(largest[key], error)
            report.require(
                error <= limit, f"{key} of {head_size} {dtype} {manner}: off by {error:.1e}"
            )
    report.tell(cases=len(cases), **largest)


def _calls(dtype: torch.dtype) -> list[tuple[str, list[tuple[int, int]], dict[str, Any], float]]:
    positions = [0, 63, 64, 127, -1, 128, N_CELLS - 1]
    decode = [(2, p) for p in positions] + [(0, 30)]
    prefill = [(1, 33 + i) for i in range(70)] + [(1, -1)]
    rounded = 3e-6 if dtype == torch.float32 else 3e-3
    return [
        ("decode", decode, {}, 5e-6),
        ("prefill", prefill, {"exact": False}, max(rounded, 5e-6)),
        ("prefill", prefill, {"exact": True}, 5e-6),
    ]


def _attention_inputs(
    spec: Attention, rows: Sequence[tuple[int, int]], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Only cells that some row may see hold numbers."""
    generator = torch.Generator().manual_seed(5)
    slots, positions = (torch.tensor(x, dtype=torch.int32) for x in zip(*rows, strict=True))
    shape = (N_SLOTS, spec.n_kv_heads, N_CELLS, spec.head_size)
    slabs = [torch.full(shape, torch.nan, dtype=dtype) for _ in range(2)]
    for slot in set(slots.tolist()):
        n_filled = int(positions[slots == slot].max()) + 1
        for slab in slabs:
            cells = torch.randn(slab[slot, :, :n_filled].shape, generator=generator)
            slab[slot, :, :n_filled] = cells.to(dtype)
    q = torch.randn(len(rows), spec.n_heads, spec.head_size, generator=generator)
    sinks = torch.randn(spec.n_heads, generator=generator)
    return {
        "q": q, "k": slabs[0], "v": slabs[1], "slots": slots, "positions": positions, "sinks": sinks
    }  # fmt: skip


def _attend(
    attend: Callable[..., None], inputs: dict[str, Tensor], spec: Attention, device: str, **how: Any
) -> Tensor:
    there = {name: tensor.to(device) for name, tensor in inputs.items()}
    whole = torch.full((len(inputs["q"]) + 2, spec.n_heads * spec.head_size), 7.0, device=device)
    attend(**there, spec=spec, out=whole[1:-1], n_cells=N_CELLS, **how)
    assert bool((whole[:: len(whole) - 1] == 7).all()), "written beyond the result"
    return whole[1:-1].cpu()


def _attention_error(
    name: str,
    head_size: int,
    dtype: torch.dtype,
    manner: dict[str, Any],
    rows: Sequence[tuple[int, int]],
    how: dict[str, Any],
    device: str,
) -> float:
    from gguf_pp.triton import attention

    settings = {"n_kv_heads": 2, **manner}
    spec = Attention(4, head_size=head_size, scale=head_size**-0.5, rope=NO_ROPE, **settings)
    inputs = _attention_inputs(spec, rows, dtype)
    kernel, twin = (getattr(m, f"{name}_attention") for m in (attention, attention_torch))
    exact = {"exact": True} if name == "prefill" else {}
    got = _attend(kernel, inputs, spec, device, **how)
    wanted = _attend(twin, inputs, spec, "cpu", **exact)
    return float((got.double() - wanted.double()).abs().max())


def _check_attention_rows(report: Report, device: str) -> None:
    """A row's bits depend on no other row."""
    from gguf_pp.triton import attention

    spec = Attention(4, 2, 64, 0.125, NO_ROPE, window=140)
    rows = [(2, N_CELLS - 1), (1, 40), (2, 190)]
    inputs = _attention_inputs(spec, rows, torch.float16)
    together = _attend(attention.decode_attention, inputs, spec, device)
    for i in range(3):
        alone = inputs | {n: inputs[n][i : i + 1] for n in ("q", "slots", "positions")}
        one = _attend(attention.decode_attention, alone, spec, device)
        report.require(
            torch.equal(one, together[i : i + 1]), f"decode: row {i} depends on the others"
        )
