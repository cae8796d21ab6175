"""Every launch of attention and rotation compiles for each kind of GPU."""

import pytest

import tests.interpreted  # noqa: F401
from tests.aot import SHARED_LIMITS, problems, reports
from tests.triton_attention_aot import HEAD_SIZES


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("triton")


def test_a_sample_compiles_without_spills_and_with_wide_copies(cache):
    sample = ("--arch", "89", "--head-sizes", "80", "--only", "chunks 80 fp16 plain")
    lines = reports("triton_attention_aot", cache, *sample)
    assert [line["problems"] for line in lines] == [[]]


@pytest.mark.slow
@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("arch", SHARED_LIMITS)
def test_every_launch_compiles_without_spills_and_with_wide_copies(arch, head_size, cache):
    sizes = ("--arch", str(arch), "--head-sizes", str(head_size))
    assert problems(reports("triton_attention_aot", cache, *sizes)) == {}
