"""Every launch of Triton's kernels for products compiles for each kind of GPU.

By default a sample; the slow tests take half an hour on one core, and go on where they were if
TRITON_CACHE_DIR names a folder that lasts. They compile each kernel for every type, every number of
rows of x that has a launch of its own, and both sizes of W, for 80, 90, 100 and 120. 86 and 89 take
the PTX that was made for 80, and 90 does too where no tiles are multiplied; that it is the same is
tested for some of each kernel. Left out: capabilities 75 and 103, dimensions that 16 does
not divide, and whatever only a GPU tells: that the code is right, and fast.
"""

import pytest

import tests.interpreted  # noqa: F401
from tests.aot import SHARED_LIMITS, problems, reports


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("triton")


def test_a_sample_compiles_without_spills_and_with_wide_loads(cache):
    sample = ("--kernels", "gemv_int8", "gemm", "--types", "Q4_K", "--rows", "1", "16")
    lines = reports("triton_aot", cache, "--arch", "90", *sample)
    assert len(lines) == 6
    assert problems(lines) == {}


def test_a_sample_of_what_makes_rows_ready_compiles_without_spills(cache):
    sample = ("--kernels", "quantize", "--before", "normed", "gelu_tanh", "--columns", "4096")
    lines = reports("triton_aot", cache, "--arch", "90", "--types", *sample)
    assert len(lines) == 10
    assert problems(lines) == {}


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90, 100, 120])
def test_a_product_is_summed_in_the_same_steps_for_16_rows_as_for_64(arch, cache):
    # The instruction takes 8 rows of x at a time, or all of them; 16 columns each way.
    sample = ("--kernels", "gemm", "--types", "Q4_K", "--rows", "16", "32", "64")
    lines = reports("triton_aot", cache, "--arch", str(arch), "--only", r"M=\d+$", *sample)
    steps = set()
    for rows, line in zip((16, 32, 64), lines, strict=True):
        ((name, n),) = line["products"].items()
        takes_all = arch in (90, 100)
        steps.add((name.replace(f"n{rows}k16", "nTk16"), n if takes_all else n * 8 / rows))
    assert len(steps) == 1


TILES = "gemm"
KERNELS = ("gemv_int8", "gemv_exact", "gemv_plain", "dequantize", "quantize")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "kernels"), [(86, (*KERNELS, TILES)), (89, (*KERNELS, TILES)), (90, KERNELS)]
)
def test_what_was_compiled_for_80_is_what_others_get(arch, kernels, cache):
    sample = ("--types", "Q4_K", "Q6_K", "F16", "--rows", "1", "8", "64", "--columns", "1024")
    sample += ("--before", "normed", "silu", "--kernels", *kernels)
    lines = reports("triton_aot", cache, "--arch", str(arch), "--sharing", *sample)
    assert len(lines) >= 30
    assert problems(lines) == {}


@pytest.mark.slow
@pytest.mark.parametrize("arch", SHARED_LIMITS)
def test_every_launch_compiles_without_spills_and_with_wide_loads(arch, cache):
    assert problems(reports("triton_aot", cache, "--arch", str(arch))) == {}
