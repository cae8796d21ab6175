"""Whether kernels that are wrong are noticed, and those that are right are not."""

import pytest
import torch

from gguf_pp.ops import make_ops
from gguf_pp.ops.check import check_kernels, random_matrix, weight_types
from gguf_pp.quants.reference import dequantize

TYPES = [t.name for t in weight_types()]


def test_the_kernels_of_the_cpu_are_right_for_every_type_of_weights():
    checks = check_kernels(lambda exact: make_ops("auto", 1, exact=exact), n_rows=9)
    assert [check.type for check in checks] == TYPES
    assert {"Q4_K", "IQ4_XS", "MXFP4", "BF16", "F32"} <= set(TYPES)
    assert not {"I8", "F64"} & set(TYPES)
    assert [check for check in checks if check.fault] == []
    assert all(0 < check.error < 0.01 for check in checks)


def ops_that(spoil):
    """Torch's operations with results spoilt by a function."""

    def make(exact):
        ops = make_ops("torch", 1, exact=exact)
        linear, embed = ops.linear, ops.embed
        ops.linear = lambda x, w: spoil("linear", linear(x, w))
        ops.embed = lambda table, tokens: spoil("embed", embed(table, tokens))
        return ops

    return make


@pytest.mark.parametrize("where", ["linear", "embed"])
@pytest.mark.parametrize(
    ("spoil", "fault", "has_error"),
    [
        (lambda y: y * (1 + 1e-4), "off by ", True),
        (lambda y: y.index_fill(1, torch.tensor([3]), float("nan")), "off by nan", False),
        (lambda y: y.roll(1, 1), "off by ", True),
    ],
)
def test_wrong_results_are_faults(where, spoil, fault, has_error, monkeypatch):
    monkeypatch.setattr("gguf_pp.ops.check.weight_types", lambda: weight_types()[-5:-3])
    make = ops_that(lambda which, y: spoil(y) if which == where else y)
    checks = check_kernels(make, n_rows=4)
    assert len(checks) == 2
    for check in checks:
        assert check.fault.startswith(fault)
        assert (check.error is not None) is has_error


@pytest.mark.parametrize("kind", [RuntimeError, AssertionError, Exception])
def test_kernels_that_raise_are_a_fault_and_the_others_are_still_tried(kind, monkeypatch):
    monkeypatch.setattr("gguf_pp.ops.check.weight_types", lambda: weight_types()[-5:-3])
    calls = []

    def spoil(which, y):
        calls.append(which)
        if len(calls) == 1:
            raise kind("CUDA error: no kernel image\nmore")
        return y

    one, two = check_kernels(ops_that(spoil), n_rows=4)
    assert (one.error, one.fault) == (None, "CUDA error: no kernel image")
    assert two.fault == ""


@pytest.mark.parametrize("type", weight_types(), ids=lambda t: t.name)
def test_random_matrices_have_weights_of_ordinary_size(type):
    raw, weights = random_matrix(type, 4, 512)
    again = dequantize(torch.from_numpy(raw.data), type, torch.empty(4, 512))
    assert torch.equal(again, weights)
    assert 0 < weights.abs().max() < 1000
    assert len(weights.unique()) > 8
