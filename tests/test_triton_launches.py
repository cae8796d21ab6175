"""How many kernels a layer of a decode step launches: each costs the host or the device its start.

Kernels are only counted, on a device whose values nobody can see: so nothing here waits for one.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES
from torch.utils._python_dispatch import TorchDispatchMode

from tests import interpreted  # noqa: F401

# isort: split
from gguf_pp.decoder import PreNormLayer, SandwichLayer
from gguf_pp.ops.base import Attention, Mixture, Rope
from gguf_pp.parts import Experts, FeedForward, Head, Linear, SelfAttention
from gguf_pp.quants.raw import RawTensor
from gguf_pp.triton import attention, linear, mixture, multiply, quantize, rope
from gguf_pp.triton import ops as device_ops
from gguf_pp.triton.ops import DeviceOps
from tests.quantized import T
from tests.test_triton_ops import Blind, Sent, ubatch

WIDTH, FFN, N_HEADS, N_KV_HEADS, HEAD_SIZE = 512, 1024, 8, 2, 64
FREE = (
    "empty",
    "new_empty",
    "empty_like",
    "empty_strided",
    "view",
    "slice",
    "select",
    "alias",
    "detach",
)


class Kernels:
    """Stands in for a module of kernels: notes what is launched."""

    def __init__(self, launched):
        self._launched = launched

    def __getattr__(self, name):
        return Launcher(self._launched, name)


class Launcher:
    def __init__(self, launched, name):
        self._launched, self._name = launched, name

    def __getitem__(self, grid):
        assert all(n > 0 for n in grid), grid
        return lambda *args, **kwargs: self._launched.append(self._name)


class Noted(TorchDispatchMode):
    """Notes what torch would launch."""

    def __init__(self, launched):
        super().__init__()
        self._launched = launched

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name not in FREE:
            self._launched.append(name)
        return func(*args, **(kwargs or {}))


class Counted(DeviceOps):
    """A device of Triton's whose values nobody can see."""

    matrix, experts = Blind.matrix, Blind.experts

    def __init__(self, exact):
        super().__init__("meta", exact=exact)


@pytest.fixture
def launched(monkeypatch):
    names = []
    for module in (attention, mixture, multiply, quantize, rope):
        monkeypatch.setattr(module, "kernels", Kernels(names))
    monkeypatch.setattr(linear, "why_unusable", lambda device: None)
    monkeypatch.setattr(device_ops, "Uploads", lambda api, n_slots, n_bytes: Sent(n_bytes))
    return names


def raw(type, n_rows, n_cols):
    block_size, type_size = GGML_QUANT_SIZES[type]
    data = np.zeros((n_rows, n_cols // block_size * type_size), dtype=np.uint8)
    return RawTensor("w", type, (n_rows, n_cols), data)


def llama_like(ops, type):
    def matrix(n_rows, n_cols):
        return Linear(ops.matrix([raw(type, n_rows, n_cols)]))

    norm, table = torch.empty(WIDTH, device="meta"), torch.empty(64, HEAD_SIZE // 2, device="meta")
    spec = Attention(N_HEADS, N_KV_HEADS, HEAD_SIZE, HEAD_SIZE**-0.5, Rope(table, table, neox=True))
    n_q, n_kv = N_HEADS * HEAD_SIZE, N_KV_HEADS * HEAD_SIZE
    return PreNormLayer(
        attn_norm=norm,
        attention=SelfAttention(matrix(n_q + 2 * n_kv, WIDTH), matrix(WIDTH, n_q), spec),
        ffn_norm=norm,
        ffn=FeedForward(matrix(2 * FFN, WIDTH), matrix(WIDTH, FFN), "silu"),
        eps=1e-6,
    )


def gemma_like(ops, type):
    plain = llama_like(ops, type)
    norm = torch.empty(HEAD_SIZE, device="meta")
    spec = replace(plain.attention.spec, q_norm=norm, k_norm=norm, window=32)
    return SandwichLayer(
        attn_norm=plain.attn_norm,
        attention=replace(plain.attention, spec=spec),
        post_attention_norm=plain.attn_norm,
        ffn_norm=plain.attn_norm,
        ffn=replace(plain.ffn, activation="gelu_tanh"),
        post_ffw_norm=plain.attn_norm,
        eps=1e-6,
    )


def mixtral_like(ops, type):
    plain, router = llama_like(ops, type), ops.matrix([raw(T.F32, 4, WIDTH)])
    gate, up, down = (
        replace(raw(type, 4 * n_rows, n_cols), shape=(4, n_rows, n_cols))
        for n_rows, n_cols in ((FFN, WIDTH), (FFN, WIDTH), (WIDTH, FFN))
    )
    spec = Mixture(ops.experts([gate, up]), ops.experts([down]), 2, "silu")
    return replace(plain, ffn=Experts(Linear(router), spec))


def launches_of(launched, make, n_rows, *, type=T.Q4_K, exact=False):
    """What the second of two layers launches, the first having brought where rows stand."""
    ops = Counted(exact)
    layer, rows = make(ops, type), ubatch(*((i, 3, 1) for i in range(n_rows)))
    kv = ops.layer_kv(n_rows, 64, N_KV_HEADS, HEAD_SIZE, "f16", "f16")
    x = layer(ops, torch.empty(n_rows, WIDTH, device="meta"), kv, rows)
    launched.clear()
    with Noted(launched):
        assert layer(ops, x, kv, rows).shape == (n_rows, WIDTH)
    return launched


ATTENTION = ["rope_store", "decode_chunks", "decode_merge"]


def steps(made, product, post=()):
    """A layer by what makes rows ready, what multiplies, and what follows before a sum."""
    ffn = [made, product, made, product, *post]
    return [made, product, *ATTENTION, made, product, *post, *ffn]


@pytest.mark.parametrize("n_rows", [1, 8])
def test_a_layer_of_a_few_sequences_is_11_launches(launched, n_rows):
    wanted = steps("quantize_int8", "gemv_int8")
    assert len(wanted) == 11
    assert launches_of(launched, llama_like, n_rows) == wanted


def test_a_layer_with_norms_before_and_after_is_13_launches(launched):
    wanted = steps("quantize_int8", "gemv_int8", post=["float_rows"])
    assert len(wanted) == 13
    assert launches_of(launched, gemma_like, 1) == wanted


@pytest.mark.parametrize(("make", "post"), [(llama_like, []), (gemma_like, ["float_rows"])])
def test_exact_products_cost_no_more_launches(launched, make, post):
    wanted = steps("float_rows", "gemv_exact", post)
    assert launches_of(launched, make, 2, exact=True) == wanted


def test_plain_weights_multiply_heads_as_they_are(launched):
    wanted = steps("float_rows", "gemv_plain")
    del wanted[5]
    assert launches_of(launched, llama_like, 1, type=T.F16) == wanted


def test_more_sequences_make_rows_ready_in_one_launch_as_well(launched):
    names = launches_of(launched, llama_like, 16)
    assert [name for name in names if name in ("quantize_half", "gemm", *ATTENTION)] == steps(
        "quantize_half", "gemm"
    )


@pytest.mark.parametrize(
    ("exact", "made", "product"),
    [(False, "quantize_int8", "gemv_int8"), (True, "float_rows", "gemv_exact")],
)
@pytest.mark.parametrize("n_rows", [1, 8])
def test_a_layer_of_experts_is_15_launches(launched, n_rows, exact, made, product):
    wanted = steps(made, product)[:7]
    wanted += ["float_rows", "gemv_plain", "best_experts", *[made, product] * 2, "weighted_sum"]
    assert len(wanted) == 15
    assert launches_of(launched, mixtral_like, n_rows, exact=exact) == wanted


def test_experts_of_many_rows_are_found_without_a_wait_in_16_launches_more(launched):
    names = launches_of(launched, mixtral_like, 64)
    first, last = names.index("best_experts"), names.index("weighted_sum")
    assert [name for name in names[first:last] if name in ("quantize_half", "gemm")] == [
        *["quantize_half", "gemm"] * 2
    ]
    assert last - first == 1 + 16 + 4


def test_the_head_is_one_launch_more_than_its_product(launched):
    ops = Counted(exact=False)
    matrix = ops.matrix([raw(T.Q6_K, 64, WIDTH)])
    head = Head(torch.empty(WIDTH, device="meta"), matrix, 1e-6)
    with Noted(launched):
        head(ops, torch.empty(2, WIDTH, device="meta"))
    assert launched == ["quantize_int8", "gemv_int8"]


def test_parts_of_several_types_share_what_is_made_of_their_rows(launched):
    ops = Counted(exact=False)
    matrix = ops.matrix([raw(T.Q4_K, 64, WIDTH), raw(T.Q6_K, 32, WIDTH)])
    rows = ops.normed(torch.empty(2, WIDTH, device="meta"), torch.empty(WIDTH, device="meta"), 1e-6)
    with Noted(launched):
        for _ in range(2):
            ops.linear(rows, matrix)
    assert launched == ["quantize_int8"] + ["gemv_int8"] * 4
