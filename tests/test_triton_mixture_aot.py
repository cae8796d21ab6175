"""Every launch of mixtures of experts compiles for each kind of GPU; see `test_triton_aot`."""

import pytest

import tests.interpreted  # noqa: F401
from tests.aot import SHARED_LIMITS, problems, reports


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("triton")


def test_a_sample_compiles_without_spills_and_with_wide_loads(cache):
    only = "best_experts E=128|weighted_sum added|(gemv_int8.*N=4|M=16) gate"
    sample = ("--types", "Q4_K", "--only", only)
    lines = reports("triton_mixture_aot", cache, "--arch", "90", *sample)
    assert len(lines) == 4
    assert problems(lines) == {}


@pytest.mark.slow
@pytest.mark.parametrize("arch", SHARED_LIMITS)
def test_every_launch_compiles_without_spills_and_with_wide_loads(arch, cache):
    assert problems(reports("triton_mixture_aot", cache, "--arch", str(arch))) == {}
