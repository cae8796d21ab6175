"""The kernels that choose tokens compile for each kind of GPU."""

import pytest

import tests.interpreted  # noqa: F401
from tests.aot import SHARED_LIMITS, problems, reports


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("triton")


def test_all_launches_compile_without_spills(cache):
    lines = reports("triton_draw_aot", cache, "--arch", "90")
    assert len(lines) == 4 and problems(lines) == {}


@pytest.mark.slow
@pytest.mark.parametrize("arch", SHARED_LIMITS)
def test_all_launches_compile_without_spills_everywhere(arch, cache):
    assert problems(reports("triton_draw_aot", cache, "--arch", str(arch))) == {}
