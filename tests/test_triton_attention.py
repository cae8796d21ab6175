"""Attention kernels in Triton's interpreter: against float64, and bit for bit among themselves."""

import numpy as np
import pytest
import torch

import tests.interpreted  # noqa: F401
from gguf_pp.triton import attention, attention_torch
from tests.test_triton_attention_torch import (
    HEAD_SIZES,
    N_CELLS,
    Case,
    check_decode,
    check_prefill,
    fenced,
    fences_stand,
    manners,
    spec_of,
)

DECODE, PREFILL = attention.decode_attention, attention.prefill_attention


@pytest.mark.parametrize(
    ("head_size", "dtype"),
    [(d, torch.float16) for d in HEAD_SIZES] + [(80, torch.float32), (256, torch.float32)],
)
def test_a_decode_step_is_what_float64_makes_of_it(head_size, dtype):
    check_decode(DECODE, spec=spec_of(head_size, 2, 1), dtype=dtype)


@manners
def test_decode_manners(manner):
    check_decode(DECODE, spec=spec_of(32, **manner), sinks=manner.get("window") != 50)


def test_a_group_may_be_wider_than_a_tile():
    case = Case(spec_of(16, 40, 2), [(1, 20), (0, 3)])
    assert (case.run(DECODE, n_cells=21).double() - case.expected()).abs().max() < 3e-6


def test_a_padding_row_results_in_0():
    case = Case(spec_of(), [(0, -1), (1, 5), (0, -1)], sinks=True)
    assert (case.run(DECODE)[[0, 2]] == 0).all()
    assert (case.run(DECODE, slice(0, 1)) == 0).all()
    assert (case.run(PREFILL, slice(1, 3))[1:] == 0).all()
    assert (case.run(PREFILL, slice(2, 3)) == 0).all()


def test_parts_stay_in_their_place_and_only_written_ones_are_read(monkeypatch):
    case = Case(spec_of(16, 6, 2, window=140), [(1, N_CELLS - 1), (0, 5)], sinks=True)
    original, buffers = torch.Tensor.new_empty, []

    def new_empty(like, shape, **settings):
        if settings:  # the interpreter's own
            return original(like, shape, **settings)
        inner, buffer = fenced(torch.full(shape, torch.nan, dtype=like.dtype))
        buffers.append(buffer)
        return inner

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    got = case.run(DECODE)
    assert len(buffers) == 3 and all(map(fences_stand, buffers))
    assert (got.double() - case.expected()).abs().max() < 3e-6


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_one_huge_score_takes_all(softcap):
    settings = {"spec": spec_of(32, 2, 1, softcap=softcap), "magnitude": 3000.0, "tolerance": 1e-5}
    check_decode(DECODE, **settings)
    check_prefill(PREFILL, n_rows=20, **settings)


def test_the_bits_of_a_row_depend_on_no_other_row_and_no_bound():
    spec = spec_of(32, 2, 1, window=140)
    case = Case(spec, [(2, N_CELLS - 1), (1, 40), (2, 190)], sinks=True)
    together = case.run(DECODE)
    for i in range(3):
        row = slice(i, i + 1)
        position = int(case.tensors["positions"][i])
        for n_cells in (position + 1, N_CELLS):
            assert torch.equal(case.run(DECODE, row, n_cells), together[row])


@pytest.mark.parametrize("window", [0, 20])
def test_the_bits_of_a_row_do_not_depend_on_how_a_chunk_is_cut(window, monkeypatch):
    # BLAS, to which the interpreter gives products, sums a row according to its place in the tile.
    monkeypatch.setattr(np, "matmul", lambda a, b, dtype: np.einsum("mk,kn->mn", a, b, dtype=dtype))
    case = Case(spec_of(32, 2, 1, window=window), [(1, 20 + i) for i in range(90)])
    whole = case.run(PREFILL)
    for rows in (slice(0, 1), slice(1, 70), slice(70, 90)):
        assert torch.equal(case.run(PREFILL, rows), whole[rows])


@pytest.mark.parametrize(
    ("head_size", "dtype", "exact"),
    [
        (64, torch.float16, False),
        (80, torch.float16, True),
        (96, torch.float16, False),
        (128, torch.float16, False),
        (128, torch.float32, False),
        (256, torch.float16, True),
        (256, torch.float32, True),
    ],
)
def test_a_chunk_is_what_float64_makes_of_it(head_size, dtype, exact):
    tolerance = 3e-6 if exact or dtype == torch.float32 else 3e-3
    spec = spec_of(head_size, 2, 1)
    check_prefill(PREFILL, tolerance, 63, exact=exact, spec=spec, dtype=dtype)


@manners
def test_prefill_manners(manner):
    settings = {"spec": spec_of(32, **manner), "sinks": manner.get("window") != 50}
    check_prefill(PREFILL, 3e-6, 100, 66, 3, **settings)


@pytest.mark.parametrize("start", [0, 1, 63, 64, 65])
def test_a_chunk_begins_and_ends_anywhere(start):
    for n_rows in (1, 64, 65):
        check_prefill(PREFILL, 3e-6, start, n_rows, spec=spec_of(16, 2, 1))


def test_keys_and_values_may_differ_in_type():
    case = Case(spec_of(), [(0, 30), (0, 150)], dtype=torch.float32)
    case.tensors["k"] = case.tensors["k"].half()
    for attend in (DECODE, PREFILL):
        error = (case.run(attend).double() - case.expected()).abs().max()
        assert error < (3e-6 if attend is DECODE else 3e-3)


def test_the_twin_agrees():
    case = Case(spec_of(48, window=30, softcap=4.0), [(1, i) for i in range(70)], sinks=True)
    twin = case.run(attention_torch.prefill_attention, exact=True)
    assert torch.allclose(case.run(PREFILL, exact=True), twin, atol=3e-6)
    assert torch.allclose(case.run(DECODE, slice(60, 62)), twin[60:62], atol=3e-6)


@pytest.mark.parametrize(
    ("n_cells", "chunk"), [(1, 128), (300, 128), (32768, 128), (32769, 256), (131072, 512)]
)
def test_a_slot_is_cut_into_256_chunks_at_most(n_cells, chunk):
    assert attention.chunk_cells(n_cells) == chunk


def test_the_grid_has_a_place_for_every_chunk_that_is_seen():
    for window in (1, 2, 127, 128, 129, 130, 257, 258, 399, 400, 401, 1000):
        seen = {len({c // 128 for c in range(max(0, p - window + 1), p + 1)}) for p in range(400)}
        assert attention._chunks_seen(400, window, 128) == max(seen)
    assert attention._chunks_seen(400, 0, 128) == 4
