"""The kernel for norm, rotation and store in Triton's interpreter, against float64."""

import torch

import tests.interpreted  # noqa: F401
from gguf_pp.triton import rope, rope_torch
from tests.test_triton_rope_torch import SHAPES, Case, check, dtypes, shapes


@dtypes
@shapes
def test_heads_are_turned_and_stored(shape, dtype):
    check(rope.rope_store, shape, dtype)


def test_nothing_is_stored_of_padding_alone():
    case = Case(SHAPES["neox"], torch.float16, [(0, -1), (1, -1)])
    _, k, v = case.run(rope.rope_store)
    assert torch.equal(k, case.cached) and torch.equal(v, case.cached)


def test_the_twin_agrees():
    case, twin = (Case(SHAPES["interleaved, a part"], torch.float32) for _ in range(2))
    for a, b in zip(case.run(rope.rope_store), twin.run(rope_torch.rope_store), strict=True):
        assert torch.allclose(a, b, atol=2e-6)


def test_the_bits_of_a_row_do_not_depend_on_the_others():
    shape = SHAPES["wide"]
    whole = Case(shape, torch.float32).run(rope.rope_store)[0]
    for i in (0, 4):
        case = Case(shape, torch.float32)
        for name in ("qkv", "slots", "positions", "q"):
            case.tensors[name] = case.tensors[name][i : i + 1]
        assert torch.equal(case.run(rope.rope_store)[0], whole[i : i + 1])
