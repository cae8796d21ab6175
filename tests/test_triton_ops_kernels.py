"""Attention of DeviceOps through Triton's kernels, in their interpreter, against plain torch."""

import pytest
import torch

import tests.interpreted  # noqa: F401
from gguf_pp.ops.torch_ops import TorchOps
from gguf_pp.triton import attention as kernels
from gguf_pp.triton import attention_torch
from gguf_pp.triton.ops import DeviceOps
from tests.test_triton_ops import attention, ubatch


@pytest.fixture(scope="module")
def ops():
    return DeviceOps("cpu", exact=True)


def test_spans_and_single_rows_attend_as_in_the_reference(ops):
    assert ops.name == "triton"
    reference, spec = TorchOps(), attention(window=3)
    caches = [each.layer_kv(2, 20, 2, 8, "f32", "f32") for each in (ops, reference)]
    for cache in caches:
        cache.k.fill_(torch.nan)
        cache.v.fill_(torch.nan)
    for spans in (((1, 0, 4), (0, 0, 1)), ((0, 1, 1), (1, 4, 1))):
        rows = ubatch(*spans)
        qkv = torch.randn(rows.n_rows, 64, generator=torch.Generator().manual_seed(rows.n_rows))
        pairs = zip((ops, reference), caches, strict=True)
        got, wanted = (each.attention(qkv.clone(), cache, rows, spec) for each, cache in pairs)
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_heads_too_wide_for_the_kernels_are_left_to_torch(ops):
    assert ops._attention_for(kernels.MAX_HEAD_SIZE) is kernels
    assert ops._attention_for(kernels.MAX_HEAD_SIZE + 1) is attention_torch
