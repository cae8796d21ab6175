import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from gguf_pp.backend.cuda_host import Uploads
from gguf_pp.errors import FormatError, UnsupportedError
from gguf_pp.quants.raw import RawTensor
from gguf_pp.triton import planes
from gguf_pp.triton.matrix import DeviceMatrix
from gguf_pp.triton.planes import LAYOUTS, to_planes
from tests.cuda_now import Now
from tests.quantized import BLOCKS, PLAIN, T, name_of, random_raw, weights, width

CPU = torch.device("cpu")


def packed(*raws):
    sources = [torch.from_numpy(raw.data) for raw in raws]
    return to_planes(raws[0].type, raws[0].n_cols, sources, CPU)


def test_all_types_of_the_kernels_have_planes():
    assert set(LAYOUTS) == {*BLOCKS, *PLAIN}


@pytest.mark.parametrize("type", LAYOUTS, ids=name_of)
def test_fields_partition_a_block(type):
    fields = sorted(LAYOUTS[type], key=lambda field: field.start)
    edges = [0, *(field.stop for field in fields)]
    assert [field.start for field in fields] == edges[:-1]
    assert edges[-1] == GGML_QUANT_SIZES[type][1]


@pytest.mark.parametrize("type", [*LAYOUTS, T.IQ2_XS, T.IQ1_M], ids=name_of)
@settings(max_examples=5)
@given(rows=st.lists(st.integers(1, 5), min_size=1, max_size=3), n=st.sampled_from((1, 300, 900)))
def test_planes_are_the_bytes_of_the_file_and_turn_back_into_them(type, rows, n):
    raws = [random_raw(type, n_rows, width(type, n), seed=i) for i, n_rows in enumerate(rows)]
    whole = np.concatenate([raw.data for raw in raws])
    w = packed(*raws)
    assert w.n_bytes == whole.nbytes and w.n_rows == len(whole)
    assert torch.equal(w.blocks(), torch.from_numpy(whole))
    ids = torch.tensor([len(whole) - 1, 0, 0])
    assert torch.equal(w.blocks(ids), torch.from_numpy(whole[ids.numpy()]))


@pytest.mark.parametrize("type", BLOCKS, ids=name_of)
def test_codes_start_at_multiples_of_16_bytes(type):
    w = packed(random_raw(type, 3, width(type, 900)))
    assert w.planes["q"].stride(0) * w.planes["q"].element_size() % 16 == 0


@pytest.mark.parametrize("n_bytes", [1, 1000, 2100, 1 << 20])
@pytest.mark.parametrize("type", [*LAYOUTS, T.IQ2_XS, T.IQ1_M], ids=name_of)
def test_planes_are_the_same_chunk_by_chunk_and_through_pinned_memory(type, n_bytes, monkeypatch):
    raws = [random_raw(type, n_rows, width(type, 512), seed=n_rows) for n_rows in (5, 1, 4, 2)]
    sources = [torch.from_numpy(raw.data) for raw in raws]
    wanted = to_planes(type, raws[0].n_cols, sources, CPU)
    now = Now()
    monkeypatch.setattr(planes, "CHUNK_BYTES", n_bytes)
    for uploads in (None, Uploads(now, 2, n_bytes)):
        got = to_planes(type, raws[0].n_cols, sources, CPU, uploads)
        assert got.planes.keys() == wanted.planes.keys()
        for name, plane in wanted.planes.items():
            assert torch.equal(got.planes[name].view(torch.uint8), plane.view(torch.uint8))
        assert got.gain == wanted.gain
    row_bytes = raws[0].data.shape[1]
    step = max(1, n_bytes // row_bytes)
    n_sent = 0 if n_bytes < row_bytes else -(-12 // step)
    assert now.log.count("synchronize") == n_sent


def test_small_sources_go_to_the_device_together():
    sources = [torch.full((2, 34), i, dtype=torch.uint8) for i in range(9)]
    chunks = list(planes._chunks(sources, 34 * 5))
    assert [[len(piece) for piece in pieces] for pieces in chunks] == [
        [2, 2, 1],
        [1, 2, 2],
        [2, 2, 1],
        [1, 2],
    ]
    assert torch.equal(torch.cat([*map(torch.cat, chunks)]), torch.cat(sources))


def test_a_source_larger_than_a_chunk_is_cut():
    chunks = list(planes._chunks([torch.zeros(7, 10), torch.zeros(1, 10)], 39))
    assert [[len(piece) for piece in pieces] for pieces in chunks] == [[3], [3], [1, 1]]


def test_what_is_no_number_does_not_decide_the_gain():
    halves = np.array([[1, np.nan], [3, -5]], np.float16)
    raw = RawTensor("w", T.F16, (2, 2), halves.view(np.uint8))
    assert packed(raw).gain == 1.0
    source = [torch.from_numpy(raw.data)]
    assert to_planes(T.F16, 2, source, CPU, Uploads(Now(), 2, 4)).gain == 2.0**12


@pytest.mark.parametrize("type", [*BLOCKS, *PLAIN], ids=name_of)
@pytest.mark.parametrize("seed", range(3))
def test_gain_brings_weights_near_the_largest_half_and_not_above(type, seed):
    raw = random_raw(type, 4, width(type, 512), seed)
    largest = float(weights(raw).abs().max()) * packed(raw).gain
    assert largest < 2**15 or type in (T.F32, T.BF16)
    assert largest > 2**6


def test_gain_is_a_power_of_two_and_1_for_what_has_no_size():
    assert packed(random_raw(T.Q4_0, 2, 64)).gain in {2.0**i for i in range(-30, 60)}
    zeros = RawTensor("w", T.Q4_0, (2, 64), np.zeros((2, 36), np.uint8))
    assert packed(zeros).gain == 1.0
    infinite = RawTensor("w", T.F16, (1, 2), np.array([[0, 0x7C, 0, 0]], np.uint8))
    assert packed(infinite).gain == 1.0


def test_a_matrix_joins_neighbours_of_one_type():
    raws = [random_raw(T.Q4_0, 3, 256), random_raw(T.Q4_0, 2, 256), random_raw(T.Q6_K, 4, 256)]
    w = DeviceMatrix(raws, "cpu")
    assert [(first, part.type, part.n_rows) for first, part in w.parts()] == [
        (0, T.Q4_0, 5),
        (5, T.Q6_K, 4),
    ]
    assert (w.n_rows, w.n_cols) == (9, 256)
    assert w.n_bytes == sum(raw.n_bytes for raw in raws)


def test_a_slice_shares_its_memory():
    raws = [random_raw(T.Q4_0, 5, 256), random_raw(T.Q6_K, 4, 256)]
    w = DeviceMatrix(raws, "cpu")
    (_, first), (at, second) = w.slice_rows(3, 7).parts()
    assert (first.type, first.n_rows, at, second.n_rows) == (T.Q4_0, 2, 2, 2)
    (_, whole), _ = w.parts()
    assert first.planes["q"].data_ptr() == whole.planes["q"][3].data_ptr()
    assert torch.equal(second.blocks(), torch.from_numpy(raws[1].data[:2]))
    assert first.gain == whole.gain


def test_tensors_of_unequal_width_are_an_error():
    with pytest.raises(FormatError, match="b has 64 columns, but a has 32"):
        DeviceMatrix(
            [random_raw(T.Q8_0, 1, 32, name="a"), random_raw(T.Q8_0, 1, 64, name="b")], "cpu"
        )


def test_a_type_that_nothing_reads_is_an_error(monkeypatch):
    unknown = next(t for t in GGMLQuantizationType if t.name == "Q8_1")
    raw = RawTensor("blk.0.w", unknown, (1, 32), np.zeros((1, 36), np.uint8))
    with pytest.raises(UnsupportedError, match=r"blk\.0\.w"):
        DeviceMatrix([raw], "cpu")
