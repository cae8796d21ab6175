"""Rows made ready for products by Triton's kernels, interpreted, against twins and float64."""

import math
from functools import partial

import pytest
import torch

from tests import interpreted  # noqa: F401

# isort: split
from gguf_pp.ops import torch_ops
from gguf_pp.triton import quantize, quantize_torch
from tests.quantized import random_x

MODULES = (quantize, quantize_torch)
ACTIVATIONS = ("silu", "gelu_tanh", "gelu_erf")
WIDTHS = (32, 1056, 4128)  # within a block, several blocks to a row, more than a program reads
FORMS = {
    "floats": lambda x, before: (quantize.float_rows(x, before),),
    "int8": quantize.quantize_int8,
    "halves": partial(quantize.quantize_half, is_transposed=True),
}
EXTREMES = [0.0, -0.0, 1e-45, -1e-37, 1e-30, 9.9999, -9.9999, 10.0, -10.0, 88.0, -88.0, -104.0]
EXTREMES += [1e4, -1e4, 7e4, -7e4, 1e30, -1e30, 3e38, -3e38]


def x_for(before, n_rows, n_cols, seed=0):
    """x of ordinary size, with gates between -12 and 12 where there is an activation."""
    generator = torch.Generator().manual_seed(seed)
    if not isinstance(before, str):
        return random_x(n_rows, n_cols, seed)
    gate, up = torch.randn(2, n_rows, n_cols, generator=generator)
    return torch.cat(((gate * 4).clamp(-12, 12), up), dim=1)


def befores(n_cols):
    weight = torch.randn(n_cols, generator=torch.Generator().manual_seed(5))
    return {"plain": None, "norm": (weight, 1e-6)} | {name: name for name in ACTIVATIONS}


def meant(x, before):
    """What comes before rounding, in float64 but for GELU's own halves."""
    if before is None:
        return x.double()
    if before == "gelu_tanh":
        return torch_ops.gated(x, before).double()
    if isinstance(before, str):
        return torch_ops.gated(x.double(), before)
    return torch_ops.rms_norm(x.double(), before[0].double(), before[1])


def read(rows):
    """What int8 or half rows stand for."""
    if isinstance(rows, quantize_torch.Int8Rows):
        values = rows.codes.double().view(len(rows.codes), -1, 32)
        return (values * rows.scales.double().unsqueeze(-1)).view(rows.codes.shape)
    return rows.values.double() * rows.scales.double().unsqueeze(-1)


@pytest.mark.parametrize("n_cols", [32, 1056, 2080])
def test_rows_are_rounded_as_in_torch_bit_for_bit(n_cols):
    x = random_x(3, n_cols)
    x[1, :32] = torch.tensor([0.0, 1e-45, 1e-37, 0.5]).repeat(8)
    made = [(quantize.quantize_int8(x), quantize_torch.quantize_int8(x))]
    for is_transposed in (False, True):
        halves, floats = (
            [getattr(module, name)(x, is_transposed=is_transposed) for module in MODULES]
            for name in ("quantize_half", "float_rows")
        )
        made += [halves, ([floats[0]], [floats[1]])]
    for got, wanted in made:
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("name", ["norm", *ACTIVATIONS])
@pytest.mark.parametrize("n_cols", WIDTHS)
def test_what_comes_before_is_right_in_every_form(n_cols, name):
    before = befores(n_cols)[name]
    x = x_for(before, 2, n_cols)
    wanted = meant(x, before)
    size = wanted.abs().amax(1, keepdim=True)
    # One last bit of GELU's halves is allowed to differ.
    slack = wanted.abs() * 2.0**-10 + 1e-6 * size if name == "gelu_tanh" else 2e-6 * size
    for module in MODULES:
        assert ((module.float_rows(x, before) - wanted).abs() <= slack).all()
        rows = module.quantize_int8(x, before)
        step = rows.scales.double().repeat_interleave(32, dim=1)
        assert ((read(rows) - wanted).abs() <= 0.501 * step + slack).all()
        halves = module.quantize_half(x, before, is_transposed=False)
        assert ((read(halves) - wanted).abs() <= wanted.abs() * 2.0**-11 + slack).all()
        turned = module.quantize_half(x, before, is_transposed=True)
        assert torch.equal(turned.values, quantize_torch.transposed(halves.values))
        assert torch.equal(turned.scales, halves.scales)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_right_everywhere(name):
    gate = torch.cat((torch.linspace(-90, 90, 8001), torch.linspace(-12, 12, 8001)))
    gate = torch.cat((gate, torch.tensor(EXTREMES)))[None]
    x = torch.cat((gate, torch.ones_like(gate)), dim=1)
    got, twin = quantize.float_rows(x, name), torch_ops.gated(x, name)
    if name == "gelu_tanh":
        inside = gate.abs() < 10
        assert torch.equal(got[~inside], gate.clamp(min=0)[~inside])
        assert torch.equal(got.half()[inside].float(), got[inside])
        torch.testing.assert_close(got, twin, rtol=2.0**-10, atol=1e-6)
        assert (got != twin).float().mean() < 0.03
        return
    wanted, g = meant(x, name), gate.double()
    # Left of 0, 1 + erf cancels, in torch as well.
    slack = 2e-7 * g.abs() if name == "gelu_erf" else 4e-7 * wanted.abs()
    assert ((got - wanted).abs() <= slack + 1e-29).all()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_what_is_no_number_stays_none(name):
    gate = torch.full((1, 32), math.nan)
    assert quantize.float_rows(torch.cat((gate, gate * 0 + 1), dim=1), name).isnan().all()


@pytest.mark.parametrize("name", ["plain", "norm", *ACTIVATIONS])
@pytest.mark.parametrize("form", FORMS)
def test_a_row_depends_on_itself_alone(form, name):
    before = befores(1056)[name]
    x = x_for(before, 3, 1056)
    together, alone = FORMS[form](x, before), FORMS[form](x[1:2].contiguous(), before)
    assert all(torch.equal(a[1:2], b) for a, b in zip(together, alone, strict=True))


def among_nan(tensor):
    """The same values in the middle of memory that is otherwise NaN."""
    whole = tensor.new_full((tensor.numel() + 128,), math.nan)
    inner = whole[64:-64].view(tensor.shape)
    return inner.copy_(tensor)


@pytest.mark.parametrize("name", ["plain", "norm", *ACTIVATIONS])
@pytest.mark.parametrize("n_cols", [32, 1056])
@pytest.mark.parametrize("form", FORMS)
def test_nothing_beyond_the_rows_is_read(form, n_cols, name):
    before = befores(n_cols)[name]
    x = x_for(before, 2, n_cols)
    guarded = (among_nan(before[0]), before[1]) if name == "norm" else before
    wanted, got = FORMS[form](x, before), FORMS[form](among_nan(x), guarded)
    assert all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True))


@pytest.fixture
def among_canaries(monkeypatch):
    """Let new tensors lie in the middle of memory that is otherwise 77; a list of that memory."""
    made, real = [], torch.Tensor.new_empty

    def new_empty(tensor, *shape, dtype=torch.float32, **more):
        if more:  # the interpreter's own
            return real(tensor, *shape, dtype=tensor.dtype, **more)
        made.append(torch.full((math.prod(shape) + 128,), 77, dtype=dtype))
        return made[-1][64:-64].view(shape)

    def begin():
        monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
        return made

    yield begin
    monkeypatch.undo()


@pytest.mark.parametrize("name", ["plain", "norm", *ACTIVATIONS])
@pytest.mark.parametrize("n_cols", [32, 1056])
@pytest.mark.parametrize("form", FORMS)
def test_nothing_beyond_the_rows_is_written_and_all_of_them_is(form, n_cols, name, among_canaries):
    before = befores(n_cols)[name]
    x = x_for(before, 2, n_cols)
    wanted, memory = FORMS[form](x, before), among_canaries()
    got = FORMS[form](x, before)
    assert all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True))
    assert len(memory) == len(got)
    assert all((m[:64] == 77).all() and (m[-64:] == 77).all() for m in memory)


def test_an_addend_is_added_to_the_norm():
    x, add = random_x(2, 1056), torch.randn(2, 1056)
    before = befores(1056)["norm"]
    normed = quantize.float_rows(x, before)
    assert torch.equal(quantize.float_rows(x, before, add=add), normed + add)
    assert torch.equal(
        quantize_torch.float_rows(x, before, add=add), torch_ops.rms_norm(x, *before) + add
    )


def test_a_norm_of_zeros_is_zero_and_of_large_values_finite():
    x = torch.stack((torch.zeros(64), torch.full((64,), 1e18)))
    before = (torch.ones(64), 1e-6)
    for y in (quantize.float_rows(x, before), read(quantize.quantize_int8(x, before))):
        torch.testing.assert_close(y.float(), torch.stack((torch.zeros(64), torch.ones(64))))


@pytest.mark.parametrize(
    ("before", "n_cols", "is_whole", "n_programs", "block"),
    [
        (None, 32, False, 1, 1024),
        (None, 4096, False, 4, 1024),
        ("silu", 14336, False, 14, 1024),
        ("silu", 14336, True, 1, 4096),
        ("silu", 1536, True, 1, 2048),
        (None, 1025, True, 1, 2048),
        ((torch.ones(5120), 0.0), 5120, False, 1, 4096),
        ((torch.ones(576), 0.0), 576, False, 1, 1024),
    ],
)
def test_a_row_is_shared_among_programs_where_columns_are_independent(
    before, n_cols, is_whole, n_programs, block
):
    how = quantize.sharing(before, n_cols, is_whole=is_whole)
    assert (how.n_programs, how.launch.constants["BLOCK"]) == (n_programs, block)
    n_warps = {1024: 4, 2048: 8, 4096: 16}[block]
    assert how.launch.options["num_warps"] == min(16, n_warps * (1 + (before == "silu")))
