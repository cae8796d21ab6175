"""What Triton really launches for a model's steps, on a driver that computes nothing.

The interpreter skips all of this: how arguments are bound, which forms of a kernel they ask for,
that those compile and load, and what goes to the driver.
"""

import pytest

import tests.interpreted  # noqa: F401
from tests.aot import SHARED_LIMITS, reports
from tests.mixed import KINDS, write_mixed
from tests.real import real

N_LAYERS = 2
PER_LAYER, PER_STEP = 11, 7
"""Launches of a step like llama's; besides layers, rows are looked up, the head's are normed and
multiplied, and tokens chosen twice, in two launches each time."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("triton")


def split(lines):
    """Steps by title, and kernels."""
    steps = {line["step"]: line for line in lines if "step" in line}
    kernels = [line for line in lines if "kernel" in line]
    assert len(steps) + len(kernels) == len(lines) and kernels
    return steps, kernels


def check(lines):
    steps, kernels = split(lines)
    assert all(step["as_triton"] for step in steps.values())
    assert [kernel for kernel in kernels if kernel["spilled_bytes"]] == []
    later = {title: step for title, step in steps.items() if "rows at" in title}
    later = {title: step for title, step in later.items() if not title.endswith(" 0")}
    assert {step["compiled"] for step in later.values()} == {0}
    assert len({step["launches"] for step in later.values()}) == 1
    return steps


def test_where_a_step_stands_compiles_nothing_anew_and_nothing_spills(cache):
    options = ("--arch", "90", "--layers", str(N_LAYERS), "--rows", "1")
    steps = check(reports("triton_driver", cache, str(real("smollm2-135m")), *options))
    assert steps["1 rows at 1000"]["launches"] == N_LAYERS * PER_LAYER + PER_STEP
    assert steps["1 rows at 0"]["compiled"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("exact", [(), ("--exact",)])
@pytest.mark.parametrize("name", KINDS)
def test_the_same_is_so_for_all_kinds_of_models(cache, tmp_path, name, exact):
    path = write_mixed(name, tmp_path / "model.gguf")
    check(reports("triton_driver", cache, str(path), "--arch", "90", *exact))


@pytest.mark.slow
@pytest.mark.parametrize("arch", SHARED_LIMITS)
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_the_same_is_so_on_all_devices(cache, name, arch):
    check(reports("triton_driver", cache, str(real(name)), "--arch", str(arch)))
