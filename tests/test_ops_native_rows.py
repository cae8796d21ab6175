import math

import pytest
import torch

from gguf_pp.native import kernels, start_team
from gguf_pp.ops.native import NativeOps
from gguf_pp.ops.torch_ops import TorchOps

pytestmark = pytest.mark.skipif(kernels() is None, reason="the native kernels were not built")

NAN = float("nan")


@pytest.fixture(scope="module")
def ops():
    return NativeOps(1, exact=True)


@pytest.fixture(autouse=True, scope="module")
def one_torch_thread():
    """The references are small: sharing them costs more than computing them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def worst(y, expected):
    return ((y.double() - expected).abs().max() / expected.abs().max()).item()


def inside_nan(shape):
    """A tensor with NaN in it and 64 times before and after it, and a view of it all."""
    around = torch.full((math.prod(shape) + 128,), NAN)
    return around[64:-64].view(shape), around


def test_rows_that_are_not_laid_out_as_kernels_read_them_are_refused(ops):
    x, w = torch.zeros(4, 8), torch.ones(8)
    for call in (
        lambda: ops.rms_norm(torch.zeros(8, 4).T, w, 1e-6),
        lambda: ops.rms_norm(x.double(), w, 1e-6),
        lambda: ops.rms_norm(x, w[:7], 1e-6),
        lambda: ops.rms_norm(x, w, 1e-6, add=x[:3]),
        lambda: ops.rms_norm(x.to("meta"), w, 1e-6),
        lambda: ops.rms_norm(x[:0], w, 1e-6),
        lambda: ops.gated(x[:, :7], "silu"),
        lambda: ops.gated(x[:, :6], "silu"),
    ):
        with pytest.raises(ValueError, match=r"wanted|rms_norm of"):
            call()


@pytest.mark.parametrize("n_cols", [1, 7, 8, 9, 576, 1000])
@pytest.mark.parametrize("n_rows", [1, 3, 200])
def test_rms_norm_is_that_of_float64(ops, n_rows, n_cols):
    x, add = torch.randn(2, n_rows, n_cols) * 30
    weight = torch.randn(n_cols)
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    assert worst(ops.rms_norm(x, weight, 1e-5), expected) < 2e-7
    sums = ops.rms_norm(x, weight, 1e-5, add=add).double()
    # What is added may all but cancel: then the sum is as exact as its terms.
    largest = max(expected.abs().max(), add.abs().max())
    assert (sums - (expected + add)).abs().max() < 4e-7 * largest


def test_rms_norm_of_zeros_is_zero_and_of_large_values_finite(ops):
    x = torch.stack((torch.zeros(16), torch.full((16,), 1e30)))
    expected = torch.stack((torch.zeros(16), torch.ones(16)))
    torch.testing.assert_close(ops.rms_norm(x, torch.ones(16), 1e-6), expected)


@pytest.mark.parametrize("n_cols", [1, 7, 8, 29, 1536])
def test_silu_and_gelu_erf_are_those_of_float64(ops, n_cols):
    gate, up = torch.randn(2, 5, n_cols) * 4
    x, g = torch.cat((gate, up), dim=1), gate.double()
    silu = g * torch.sigmoid(g) * up
    gelu = g * 0.5 * (1 + torch.special.erf(g / math.sqrt(2))) * up
    assert worst(ops.gated(x, "silu"), silu) < 3e-7
    assert worst(ops.gated(x, "gelu_erf"), gelu) < 3e-7


def test_silu_is_right_to_a_few_units_of_the_last_place_everywhere(ops):
    gate = torch.cat((torch.linspace(-80, 90, 100_001), torch.tensor([-200.0, 0.0, 3e38])))
    expected = gate.double() * torch.sigmoid(gate.double())
    y = ops.gated(torch.cat((gate, torch.ones_like(gate)))[None], "silu")[0]
    assert ((y - expected) / expected.abs().clamp(min=1e-29)).abs().max() < 4e-7
    assert ops.gated(torch.tensor([[NAN, 1.0]]), "silu").isnan().all()


def test_gelu_tanh_is_what_ggml_has_in_its_table(ops):
    gate = torch.cat((torch.linspace(-12, 12, 40_001), torch.tensor([-1e30, 0.0, 1e30])))
    x = torch.cat((gate, torch.ones_like(gate)))[None]
    y, expected = ops.gated(x, "gelu_tanh")[0], TorchOps().gated(x, "gelu_tanh")[0]
    ends = gate.abs() >= 10
    assert torch.equal(y[ends], expected[ends])
    torch.testing.assert_close(y, expected, rtol=2.0**-10, atol=1e-6)
    assert (y != expected).float().mean() < 0.03
    assert torch.equal(y[~ends].half().float(), y[~ends])


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu_erf"])
def test_rows_by_themselves_do_not_depend_on_their_call(ops, activation):
    x, weight = torch.randn(300, 2 * 83), torch.randn(2 * 83)
    two = NativeOps(2, exact=True)
    for call in (
        lambda ops, rows: ops.gated(rows, activation),
        lambda ops, rows: ops.rms_norm(rows, weight, 1e-6, add=rows),
    ):
        whole = call(two, x)
        assert torch.equal(whole, torch.cat([call(ops, x[i : i + 1]) for i in range(300)]))


@pytest.mark.parametrize("n_cols", [1, 7, 8, 13])
def test_row_kernels_write_their_result_and_nothing_else(n_cols):
    x, team = torch.randn(3, 2 * n_cols), start_team(1)
    a = x.data_ptr()
    for run in (
        lambda out: kernels().gated(team, a, out, 3, n_cols, 0),
        lambda out: kernels().rms_norm(team, a, a, 0, out, 3, n_cols, 1e-6),
    ):
        out, around = inside_nan((3, n_cols))
        run(out.data_ptr())
        assert out.isfinite().all()
        assert around[:64].isnan().all() and around[-64:].isnan().all()


def test_results_stay_as_they_are_while_someone_holds_them(ops):
    x, weight = torch.randn(2, 64), torch.ones(64)
    held = [ops.rms_norm(x * i, weight, 1e-6) for i in range(1, 20)]
    assert len({y.data_ptr() for y in held}) == len(held)
