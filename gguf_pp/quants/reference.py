"""Dequantization in plain torch, equal bit for bit to `gguf.quants.dequantize`.

The kernels of this package are held against it, and it is what runs where there is no kernel.
"""

from collections.abc import Callable, Mapping

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from gguf_pp.errors import UnsupportedError
from gguf_pp.quants import reference_iq, reference_k, reference_legacy

Kernel = Callable[[Tensor, Tensor], None]

PLAIN: Mapping[GGMLQuantizationType, torch.dtype] = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
    GGMLQuantizationType.F64: torch.float64,
    GGMLQuantizationType.I8: torch.int8,
    GGMLQuantizationType.I16: torch.int16,
    GGMLQuantizationType.I32: torch.int32,
    GGMLQuantizationType.I64: torch.int64,
}

_BY_NAME = reference_legacy.KERNELS | reference_k.KERNELS | reference_iq.KERNELS

# Kernels have names for keys because an older gguf package does not know the newest types.
_KERNELS: Mapping[GGMLQuantizationType, Kernel] = {
    type: _BY_NAME[type.name] for type in GGMLQuantizationType if type.name in _BY_NAME
}

SUPPORTED: frozenset[GGMLQuantizationType] = frozenset(PLAIN) | frozenset(_KERNELS)

# Weights per step. On a CPU temporaries stay in the cache; elsewhere launches are what costs.
_CPU_STEP = 1 << 19
_STEP = 1 << 24


def dequantize(data: Tensor, type: GGMLQuantizationType, out: Tensor) -> Tensor:
    """Write the weights of uint8 [n, row_bytes] to `out`, contiguous float32 [n, n_cols].

    Temporaries take about four bytes per weight of a step, however long `data` is. Returns
    `out`; raises UnsupportedError for a type that is not in SUPPORTED.
    """
    check_supported(type)
    block_size, type_size = GGML_QUANT_SIZES[type]
    assert data.dtype == torch.uint8 and out.dtype == torch.float32
    assert data.numel() // type_size * block_size == out.numel(), (data.shape, out.shape)
    flat = data.reshape(-1)
    if flat.storage_offset() % 8:  # reading words in place needs an aligned start
        flat = flat.clone()
    if type in PLAIN:
        out.view(-1).copy_(flat.view(PLAIN[type]))
        return out
    kernel = _KERNELS[type]
    step = (_CPU_STEP if data.device.type == "cpu" else _STEP) // block_size
    blocks = flat.view(-1, type_size)
    target = out.view(-1, block_size)
    for first in range(0, len(blocks), step):
        kernel(blocks[first : first + step], target[first : first + step])
    return out


def check_supported(type: GGMLQuantizationType, name: str = "a tensor") -> None:
    """Raise UnsupportedError if `dequantize` cannot read `type`; `name` says who needs it."""
    if type not in SUPPORTED:
        raise UnsupportedError(
            f"{name} is of type {type.name}, which has no dequantization here",
            hint="use a file quantized to one of: "
            + ", ".join(sorted(supported.name for supported in _KERNELS)),
        )
