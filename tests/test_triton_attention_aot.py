"""Every launch of attention and rotation compiles for each kind of GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

ROOT = Path(__file__).parents[1]
ARCHITECTURES = (80, 86, 89, 90, 100, 120)


def reports(cache, *arguments):
    """In a process of its own: in this one the interpreter may be on."""
    settings = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.triton_attention_aot", *arguments],
        cwd=ROOT,
        env=settings | {"TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines and not done.stderr, done.stderr
    return lines


def problems(lines):
    return {(line["case"], line["arch"]): line["problems"] for line in lines if line["problems"]}


def test_a_sample_compiles_without_spills_and_with_wide_loads(tmp_path):
    lines = reports(
        tmp_path, "--arch", "89", "--head-sizes", "80", "--only", "chunks 80 fp16 plain"
    )
    assert [line["problems"] for line in lines] == [[]]


@pytest.mark.slow
@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_launch_compiles_without_spills_and_with_wide_loads(arch, head_size, tmp_path):
    lines = reports(tmp_path, "--arch", str(arch), "--head-sizes", str(head_size))
    assert problems(lines) == {}
