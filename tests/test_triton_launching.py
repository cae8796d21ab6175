"""What a launch remembers, and when it asks Triton again."""

from itertools import combinations

import pytest
import torch

from gguf_pp.errors import KernelError
from gguf_pp.triton import launching
from gguf_pp.triton.launching import Launch, cdiv, power_of_2

MEMORY = torch.zeros(64)


class Compiled:
    packed_metadata = ()

    def __init__(self, launched):
        self._launched = launched

    def __getitem__(self, grid):
        return lambda *arguments: self._launched.append((grid, arguments))


class Kernel:
    """Of Triton's, with parameters x, n, gain, bias, BLOCK and WIDE."""

    arg_names = ("x", "n", "gain", "bias", "BLOCK", "WIDE")

    def __init__(self):
        self.asked, self.launched = [], []

    def __getitem__(self, grid):
        def run(*arguments, **settings):
            self.asked.append((grid, arguments, settings))
            return self.compiled

        return run

    @property
    def compiled(self):
        return Compiled(self.launched)


class Interpreted(Kernel):
    compiled = None


ALIGNED = (MEMORY, 32, 0.5, None)
OTHERS = (
    (MEMORY[1:], 32, 0.5, None),
    (MEMORY.half(), 32, 0.5, None),
    (MEMORY, 33, 0.5, None),
    (MEMORY, 1, 0.5, None),
    (MEMORY, 1 << 31, 0.5, None),
    (MEMORY, 32, None, None),
    (MEMORY, 32, 0.5, MEMORY),
)


def launch():
    return Launch({"WIDE": True, "BLOCK": 8}, {"num_warps": 1})


def test_triton_is_asked_once_for_arguments_of_the_same_kinds():
    kernel, how = Kernel(), launch()
    how(kernel, (3,), *ALIGNED)
    assert kernel.asked == [((3,), ALIGNED, {"WIDE": True, "BLOCK": 8, "num_warps": 1})]
    same = (torch.zeros(8), 48, 2.0, None)
    how(kernel, (5, 2), *same)
    assert len(kernel.asked) == 1
    grid, arguments = kernel.launched[0]
    assert grid[:3] == (5, 2, 1)
    assert arguments == (*same, 8, True)


@pytest.mark.parametrize(("one", "other"), [*combinations((ALIGNED, *OTHERS), 2)])
def test_triton_is_asked_again_where_it_may_compile_something_else(one, other):
    kernel, how = Kernel(), launch()
    how(kernel, (1,), *one)
    how(kernel, (1,), *other)
    assert [asked[1] for asked in kernel.asked] == [one, other]


def test_other_kernels_and_other_constants_are_other_launches():
    one, other, how = Kernel(), Kernel(), launch()
    for kernel in (one, other):
        how(kernel, (1,), *ALIGNED)
    launch()(one, (1,), *ALIGNED)
    assert (len(one.asked), len(other.asked)) == (2, 1)


def test_what_takes_long_because_it_compiles_is_said_once(monkeypatch, caplog):
    launching._say_that_it_compiles.cache_clear()
    launch()(Kernel(), (1,), *ALIGNED)
    assert caplog.messages == []
    monkeypatch.setattr(launching, "SECONDS", 0.0)
    for _ in range(2):
        launch()(Kernel(), (1,), *ALIGNED)
    assert [message.split(":")[0] for message in caplog.messages] == [
        "compiling kernels for the GPU"
    ]


class Large(Kernel):
    __name__ = "large"

    def __getitem__(self, grid):
        raise self.error


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (TypeError("failed to specialize\nand more"), "TypeError: failed to specialize"),
        (RuntimeError("PassManager::run failed"), "RuntimeError: PassManager::run failed"),
    ],
    ids=str,
)
def test_what_triton_cannot_launch_is_told_with_a_way_out(error, says):
    kernel = Large()
    kernel.error = error
    with pytest.raises(KernelError, match=f"launch large: {says}$") as info:
        launch()(kernel, (1,), *ALIGNED)
    assert "--kernels torch" in info.value.hint


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        torch.OutOfMemoryError("2 GiB"),
    ],
    ids=str,
)
def test_what_the_device_says_is_left_as_it_is(error):
    kernel = Large()
    kernel.error = error
    with pytest.raises(type(error)) as info:
        launch()(kernel, (1,), *ALIGNED)
    assert info.value is error


def test_what_the_interpreter_ran_is_not_remembered():
    kernel, how = Interpreted(), launch()
    for _ in range(2):
        how(kernel, (1,), *ALIGNED)
    assert len(kernel.asked) == 2


def test_an_argument_that_is_none_of_these_is_refused():
    with pytest.raises(AssertionError):
        launch()(Kernel(), (1,), MEMORY, True, 0.5, None)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 1023, 1024, 1025])
def test_numbers_are_rounded_up(n):
    assert power_of_2(n) >= n > power_of_2(n) // 2
    assert 4 * cdiv(n, 4) >= n > 4 * (cdiv(n, 4) - 1)
