"""Compile kernels of Triton for GPUs that are not there, and read what came of it.

Needs Triton, but neither a GPU nor a driver. Triton keeps what it compiled in TRITON_CACHE_DIR by
content, so that a run which was interrupted goes on where it was.

The PTX for capabilities 86 and 89 is that for 80, and so is that for 90 where a kernel multiplies
no tiles: it is compiled once and assembled for each.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

from gguf_pp.triton.launching import Launch

SHARED_LIMITS = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""KiB of shared memory that a program may have, by compute capability."""

TENSOR_MEMORY = 512
"""Columns that a program may have on capability 100; Triton compiles what needs more."""

MULTIPLES_OF_16 = ("n_rows", "n_chunks", "n_cols", "stride")
WIDE_LOAD = re.compile(r"\bld\.global\S*\.v4\.b32\b")
COPY = re.compile(r"\bcp\.async\.c[ag]\.")
WIDE_COPY = re.compile(r"\bcp\.async\.cg\..*\], 0x10,")
PRODUCT = re.compile(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\.\S*")
"""The instructions of tensor cores."""

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class Case(NamedTuple):
    """One launch: a kernel with the types of its parameters, its constants and options.

    Parameters that a launch leaves out, or gives 1, are constants to Triton, and so here.
    `lanes` is how the 32 threads of a warp must stand to each other in the sum at its end. With
    `copies_wide`, all that goes to shared memory by itself goes in pieces of 128 bits.
    """

    name: str
    kernel: Any
    types: dict[str, str]
    launch: Launch
    least_wide_loads: int = 0
    lanes: str = ""
    copies_wide: bool = False


class Compiled(NamedTuple):
    """What Triton makes of a case, and the machine code of one GPU."""

    kernel: Any
    cubin: bytes


def compiled(case: Case, arch: int) -> Compiled:
    """The kernel for compute capability `arch`."""
    if arch not in (86, 89, 90):
        kernel = _kernel(case, arch)
        return Compiled(kernel, kernel.asm["cubin"])
    kernel = _kernel(case, 80)
    if arch == 90 and "tt.dot" in kernel.asm["ttir"]:
        kernel = _kernel(case, 90)
        return Compiled(kernel, kernel.asm["cubin"])
    backend = make_backend(GPUTarget("cuda", arch, 32))
    ptx = retargeted(kernel.asm["ptx"], 80, arch)
    options = backend.parse_options(dict(case.launch.options))
    return Compiled(kernel, backend.make_cubin(ptx, {}, options, arch))


def retargeted(ptx: str, arch: int, other: int) -> str:
    """The same for another capability."""
    return re.sub(rf"\.target sm_{arch}(a?)\b", rf".target sm_{other}\1", ptx)


def shares_ptx(case: Case, arch: int) -> bool:
    """Whether `compiled` is right to take what was made for 80, but for where lines are from."""
    ours, theirs = (_kernel(case, each).asm["ptx"] for each in (80, arch))
    return _code(retargeted(ours, 80, arch)) == _code(theirs.replace(f"sm_{arch}a", f"sm_{arch}"))


def _code(ptx: str) -> list[str]:
    return [line for line in ptx.splitlines() if not re.match(r"\s*(//|\.version)", line)]


def _kernel(case: Case, arch: int) -> Any:
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(case.kernel.params):
        name = parameter.name
        if name in case.launch.constants:
            signature[name], constants[(i,)] = "constexpr", case.launch.constants[name]
            continue
        signature[name] = case.types[name]
        is_aligned = signature[name].startswith("*") or name in MULTIPLES_OF_16
        is_free = parameter.do_not_specialize or parameter.do_not_specialize_on_alignment
        if is_aligned and not is_free:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(case.kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=case.launch.options)


def report(case: Case, arch: int) -> dict[str, Any]:
    """What one launch takes, and what is wrong with it."""
    try:
        kernel, cubin = compiled(case, arch)
    except Exception as error:  # noqa: BLE001 - of any kind, by version; it has told the reason
        problem = f"does not compile: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return {"case": case.name, "arch": arch, "problems": [problem]}
    usage, ptx = usage_of(cubin), kernel.asm["ptx"]
    wide = len(WIDE_LOAD.findall(ptx)) + len(WIDE_COPY.findall(ptx))
    return {
        "case": case.name, "arch": arch, "registers": usage["REG"],
        "shared": kernel.metadata.shared, "wide_loads": wide,
        "products": Counter(PRODUCT.findall(ptx)),
        "problems": list(_problems(case, arch, kernel, usage, wide)),
    }  # fmt: skip


def sharing(case: Case, arch: int) -> dict[str, Any]:
    """Whether one launch is for `arch` what it is for 80."""
    problems = [] if shares_ptx(case, arch) else [f"other PTX than for 80 on {arch}"]
    return {"case": case.name, "arch": arch, "problems": problems}


def _problems(
    case: Case, arch: int, kernel: Any, usage: dict[str, int], wide: int
) -> Iterator[str]:
    ptx = kernel.asm["ptx"]
    if usage["STACK"] or usage["LOCAL"]:
        yield "spills"
    if kernel.metadata.shared > SHARED_LIMITS[arch] * 1024:
        yield "shared memory"
    if (getattr(kernel.metadata, "tmem_size", 0) or 0) > TENSOR_MEMORY:
        yield "tensor memory"
    if wide < case.least_wide_loads:
        yield f"{wide} loads of 128 bits, wanted {case.least_wide_loads}"
    if case.copies_wide and not len(COPY.findall(ptx)) == len(WIDE_COPY.findall(ptx)) > 0:
        yield "narrow copies"
    if case.lanes and set(_lanes(kernel.asm["ttgir"])) != {case.lanes}:
        yield "lanes do not stand in one row"
    if "st.global" not in ptx:
        yield "nothing is stored"


def usage_of(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, and the bytes of its stack and local memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", file.name],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    found = {}
    for key in ("REG", "STACK", "LOCAL"):
        match = re.search(rf"{key}:(\d+)", done.stdout)
        assert match, done.stdout
        found[key] = int(match[1])
    return found


def _lanes(ttgir: str) -> list[str]:
    """How lanes lie in the operand of each sum; "" where a thread holds several of its terms."""
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.blocked<.*>)$", ttgir, re.MULTILINE))
    found = []
    for name in re.findall(r"\}\) : \(tensor<[\dx]+xf32, (#\w+)>\) ->", ttgir):
        per_thread, lanes = (
            re.search(rf"{key} = \[([\d, ]+)\]", layouts[name])[1]
            for key in ("sizePerThread", "threadsPerWarp")
        )
        found.append(lanes if per_thread.endswith("1") else "")
    return found


def parser(description: str) -> argparse.ArgumentParser:
    """Arguments that both lists of launches take."""
    result = argparse.ArgumentParser(description=description)
    result.add_argument("--arch", type=int, nargs="+", default=list(SHARED_LIMITS))
    result.add_argument("--only", default="", help="a regular expression for names of launches")
    result.add_argument("--sharing", action="store_true", help="only tell whether PTX is shared")
    return result


def run(cases: Iterable[Case], arguments: argparse.Namespace) -> int:
    """Print a line of JSON per launch; 1 if one has a problem, which it is not to compile."""
    assert os.environ.get("TRITON_INTERPRET") != "1", "the interpreter compiles nothing"
    n_bad = 0
    for case in cases:
        for arch in arguments.arch if re.search(arguments.only, case.name) else ():
            line = sharing(case, arch) if arguments.sharing else report(case, arch)
            n_bad += bool(line["problems"])
            print(json.dumps(line), flush=True)
    return int(n_bad > 0)


def reports(module: str, cache: Path, *arguments: str) -> list[dict[str, Any]]:
    """What `python -m tests.<module>` prints, in a process in which the interpreter is off."""
    settings = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", f"tests.{module}", *arguments],
        cwd=Path(__file__).parents[1],
        env={"TRITON_CACHE_DIR": str(cache)} | settings,
        capture_output=True,
        text=True,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines and not done.stderr, done.stderr
    return lines


def problems(lines: list[dict[str, Any]]) -> dict[tuple[str, int], list[str]]:
    """The launches that have any."""
    return {(line["case"], line["arch"]): line["problems"] for line in lines if line["problems"]}
