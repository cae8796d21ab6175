"""Mixtures of experts on a device in plain torch: the choice, the sum, and all around them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gguf_pp.errors import FormatError
from gguf_pp.ops.base import Mixture
from gguf_pp.ops.mixture import choose_experts
from gguf_pp.ops.torch_ops import TorchOps
from gguf_pp.triton import experts as device_experts
from gguf_pp.triton.matrix import DeviceExperts
from gguf_pp.triton.mixture_torch import best_experts, tiles_of, weighted_sum
from gguf_pp.triton.ops import DeviceOps
from tests.experts import best, expert_raw, mixture_of, reference, relative_error, weights_of
from tests.quantized import T, name_of


@pytest.mark.parametrize("choose", [choose_experts, best_experts])
def test_of_equal_logits_the_first_are_chosen(choose):
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0], [0.0, -0.0, 0.0, -0.0, 0.0]])
    chosen, weights = choose(logits, 3)
    assert chosen.sort().values.tolist() == [[0, 1, 3], [0, 1, 2]]
    assert torch.allclose(weights.sum(-1), torch.ones(2))


@given(st.lists(st.lists(st.integers(-3, 3), min_size=7, max_size=7), min_size=1, max_size=4))
def test_experts_come_in_ascending_order_with_their_weights(rows):
    logits = torch.tensor(rows, dtype=torch.float32)
    chosen = best_experts(logits, 3)
    for i, wanted in enumerate(best(logits, 3)):
        assert chosen.experts[i].tolist() == [expert for expert, _ in wanted]
        assert chosen.weights[i].tolist() == pytest.approx([weight for _, weight in wanted])


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=300),
    st.integers(10, 12),
)
def test_every_pair_is_in_one_tile_and_that_is_of_its_expert(experts, n_experts):
    tiles = tiles_of(torch.tensor(experts, dtype=torch.int32), n_experts)
    assert tiles.size in (16, 32)
    found = {}
    for expert, first, stop in tiles.table.tolist():
        assert 0 <= expert < n_experts
        pairs = tiles.order[first : min(stop, first + tiles.size)].tolist()
        assert not found.keys() & set(pairs)
        found |= dict.fromkeys(pairs, expert)
    assert [found[i] for i in range(len(experts))] == experts
    assert len(tiles.table) <= -(-len(experts) // tiles.size) + n_experts


def test_tiles_grow_with_the_pairs_of_an_expert():
    sizes = [tiles_of(torch.zeros(n, dtype=torch.int32), 4).size for n in (1, 60, 64, 4096)]
    assert sizes == [16, 16, 32, 32]


def test_a_sum_goes_in_the_order_of_experts():
    y = torch.tensor([[1e8], [1.0], [-1e8]]).repeat(2, 1)
    weights = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 1.0]])
    out = weighted_sum(y, weights, torch.empty(2, 1), add=torch.tensor([[3.0], [-2e8]]))
    assert out.tolist() == [[0.0], [-2e8]]
    assert weighted_sum(y, weights, torch.empty(2, 1), add=None).tolist() == [[0.0], [0.0]]


@pytest.mark.parametrize("types", [(T.Q4_0, T.Q4_0), (T.Q4_0, T.F16)], ids=str)
def test_an_expert_is_the_same_sliced_picked_or_alone(types):
    raws = [expert_raw(type, 3, 5, 64, i) for i, type in enumerate(types)]
    stacked = DeviceExperts(raws, "cpu")
    assert (stacked.n_experts, stacked.n_rows, stacked.n_cols) == (3, 10, 64)
    assert stacked.n_bytes == sum(raw.n_bytes for raw in raws)
    assert len(list(stacked.parts())) == len(set(types))
    for i in range(3):
        wanted = torch.cat([weights_of(raw)[i] for raw in raws]).float()
        for matrix in (stacked.expert(i), stacked.picked(torch.tensor([i], dtype=torch.int32))):
            assert (matrix.n_rows, matrix.n_cols) == (10, 64)
            got = torch.cat([p.dequantize(torch.empty(p.n_rows, 64)) for _, p in matrix.parts()])
            assert torch.equal(got, wanted)


def test_experts_of_other_widths_are_refused():
    with pytest.raises(FormatError, match="w1 has 64 columns, but w0 has 32"):
        DeviceExperts([expert_raw(T.Q4_0, 2, 3, 32), expert_raw(T.Q4_0, 2, 3, 64, 1)], "cpu")


def case(types, n_rows, *, n_experts=5, n_used=2, n_ff=32, width=64):
    gate, up = (expert_raw(type, n_experts, n_ff, width, i) for i, type in enumerate(types[:2]))
    random = torch.Generator().manual_seed(n_rows)
    x = torch.randn(n_rows, width, generator=random)
    logits = torch.randn(n_rows, n_experts, generator=random)
    return x, logits, gate, up, expert_raw(types[2], n_experts, width, n_ff, 2), n_used


@pytest.mark.parametrize("n_rows", [1, 2, 3, 12])
@pytest.mark.parametrize("types", [(T.Q8_0, T.Q4_0, T.F16), (T.F32,) * 3], ids=str)
def test_pairs_and_whole_experts_give_what_the_cpu_does(types, n_rows):
    x, logits, *raws, n_used = case(types, n_rows)
    add = torch.randn(n_rows, 64)
    kept = add.clone()
    for addend in (None, add):
        got, wanted = (
            ops.mixture(x, logits, mixture_of(ops, *raws, n_used), add=addend)
            for ops in (DeviceOps("cpu", exact=True, is_torch_only=True), TorchOps())
        )
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-3)
    assert torch.equal(add, kept)


@pytest.mark.parametrize("n_rows", [0, 2, 9])
@pytest.mark.parametrize("type", [T.Q4_K, T.IQ2_XS, T.MXFP4], ids=name_of)
def test_the_reference_is_met_without_triton(type, n_rows):
    width = 256
    x, logits, *raws, n_used = case((type, type, T.Q8_0), max(n_rows, 1), width=width)
    ops = DeviceOps("cpu", exact=False, is_torch_only=True)
    got = ops.mixture(x[:n_rows], logits[:n_rows], mixture_of(ops, *raws, n_used))
    assert got.shape == (n_rows, width)
    if n_rows:
        assert relative_error(got, reference(x, logits, *raws, n_used)) < 1e-4


def test_what_an_expert_makes_that_was_not_chosen_does_not_matter():
    x, logits, *raws, n_used = case((T.F32,) * 3, 9)
    logits[:, 1] = -100.0
    raws[2].data.view("<f4").reshape(5, -1)[1] = float("nan")
    ops = DeviceOps("cpu", exact=True, is_torch_only=True)
    assert torch.isfinite(ops.mixture(x, logits, mixture_of(ops, *raws, n_used))).all()


def test_rows_are_taken_in_equal_turns(monkeypatch):
    spec = Mixture(DeviceExperts([expert_raw(T.F16, 2, 96, 32)], "cpu"),
                   DeviceExperts([expert_raw(T.F16, 2, 32, 48)], "cpu"), 2, "silu")  # fmt: skip
    monkeypatch.setattr(device_experts, "PAIRS_BYTES", 4 * 4 * 2 * (96 + 48 + 32))
    assert list(device_experts._turns(9, spec)) == [(0, 3), (3, 6), (6, 9)]
    assert list(device_experts._turns(4, spec)) == [(0, 4)]
    assert list(device_experts._turns(0, spec)) == []
