"""Attention of DeviceOps through Triton's kernels, in their interpreter, against plain torch."""

import pytest
import torch

import tests.interpreted  # noqa: F401
from gguf_pp.ops.torch_ops import TorchOps
from gguf_pp.triton import attention as kernels
from gguf_pp.triton import attention_torch
from gguf_pp.triton.ops import DeviceOps
from gguf_pp.triton.standing import StandingRows
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


def test_rows_of_a_prompt_attend_the_same_wherever_they_stand_in_a_graph(ops):
    cache, spec = ops.layer_kv(2, 64, 2, 8, "f16", "f16"), attention()
    assert ops.looks_everywhere(cache)
    assert not DeviceOps("cpu", exact=True, is_torch_only=True).looks_everywhere(cache)
    random = torch.Generator().manual_seed(1)
    for each in (cache.k, cache.v):
        each.copy_(torch.randn(each.shape, generator=random))
    standing = StandingRows(6, torch.device("cpu"), of_prompt=True)
    for slot, start in ((0, 0), (1, 13), (0, 58)):
        rows = ubatch((slot, start, 6))
        qkv = torch.randn(6, 64, generator=random)
        wanted = ops.attention(qkv.clone(), cache, rows, spec)
        ops.stand(standing, rows, cache)
        with ops.standing(standing, cache.n_cells) as template:
            got = ops.attention(qkv.clone(), cache, template, spec)
        assert torch.equal(got, wanted)
