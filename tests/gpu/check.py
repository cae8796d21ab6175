"""What a run relies on, tried on one CUDA device in less than ten minutes. JSON lines on stdout.

    python tests/gpu/check.py [--sections kernels,races] [--budget 540] [--model model.gguf]

Runs from the source tree, installed or not, with torch 2.11 and Triton 3.6 or later; of packages it
needs those that gguf-pp does. The first layers of a real model are tried as well, if `gguf-pp pull
smollm2-135m` has put it into the cache. Sections come in the order of what is worst to have wrong.
A line has: section, ok (null where there is nothing to try, or no time for it), seconds, figures,
error. Exits with 0, with 1 if anything is wrong, with 2 where there is no CUDA device or a package
is lacking, with 3 if there was no time for all of it. stderr is for whoever looks into it.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

# Before CUDA starts: with 8 queues, streams that have nothing to do with each other share one.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # instead of this folder, whose names are no modules

from tests.gpu.harness import Outcome, Section, be_child, out_of, run_all  # noqa: E402

BLOCK_TYPES = (
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4", "IQ4_XS",
    "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
)  # fmt: skip
PLAIN_TYPES = ("F16", "BF16", "F32")
KERNEL_PARTS = (
    "attention",
    *BLOCK_TYPES,
    *(f"mix {name}" for name in ("Q4_K", "Q6_K", "Q8_0", "MXFP4", "F16")),
    *(f"attention {size}" for size in (64, 80, 96, 128, 256)),
    *PLAIN_TYPES,
    *("quantize", "choose", "rope", "others"),
)
"""In the order in which they are begun: what compiles longest first."""
WAYS = ("exact", "default", "with the CPU")

SECTIONS = (
    Section("versions", 60, "tests.gpu.versions:check"),
    Section("kernels", 240, "tests.gpu.kernels:check", KERNEL_PARTS),
    Section("overlap", 40, "tests.gpu.schedule:check_overlap"),
    Section("races", 50, "tests.gpu.schedule:check_races"),
    Section("end_to_end", 140, "tests.gpu.models:check_end_to_end", (*WAYS, "stages", "cap")),
    Section("graphs", 75, "tests.gpu.models:check_graphs"),
    Section("no_syncs", 45, "tests.gpu.syncs:check"),
    Section("rates", 60, "tests.gpu.models:check_rates"),
    Section("ladder", 15, "tests.gpu.memory:check"),
    Section("bandwidth", 50, "tests.gpu.speed:check_bandwidth"),
    Section("remote", 55, "tests.gpu.models:check_remote"),
    Section("real", 60, "tests.gpu.models:check_real", WAYS),
    Section("attention", 30, "tests.gpu.speed:check_attention"),
    Section("crossover", 60, "tests.gpu.speed:check_crossover"),
)
"""Budgets are what a section may take at most, most of it for kernels that nobody has compiled
before; all together end with --budget."""
PACKAGES = ("gguf", "numpy", "torch", "typer", "rich", "tokenizers", "jinja2")
NAMES = [section.name for section in SECTIONS]


def parse(words: Sequence[str]) -> argparse.Namespace:
    """What is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sections", type=chosen, default=list(SECTIONS), metavar="NAME,...",
                        help=", ".join(NAMES))  # fmt: skip
    parser.add_argument("--budget", type=float, default=540, metavar="SECONDS", help="in all")
    parser.add_argument("--jobs", type=int, default=default_jobs(), metavar="N",
                        help="kernels that are compiled at once")  # fmt: skip
    parser.add_argument("--model", metavar="PATH", help="for end_to_end, instead of a made one")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args(words)


def chosen(text: str) -> list[Section]:
    """Sections by name, in the order of all of them."""
    names = [name.strip() for name in text.split(",")]
    if unknown := sorted(set(names) - set(NAMES)):
        raise argparse.ArgumentTypeError(f"no section {unknown[0]!r}; there are {', '.join(NAMES)}")
    return [section for section in SECTIONS if section.name in names]


def default_jobs() -> int:
    """A core to each compiler, and two for the rest."""
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(20, (n_cores or 1) - 2))


def use_source_tree() -> None:
    """Let `gguf_pp.cli` and `gguf_pp.models` be the folders beside gguf_pp, as an install does."""
    import gguf_pp

    if str(ROOT) not in gguf_pp.__path__:
        gguf_pp.__path__.append(str(ROOT))


def why_not() -> str | None:
    """Why there is nothing to do, or None."""
    if lacking := [name for name in PACKAGES if find_spec(name) is None]:
        return f"packages: pip install {' '.join(lacking)}"
    if why := why_no_cuda():
        return f"CUDA: {why}"
    return None


def why_no_cuda() -> str | None:
    """Why there is no CUDA device, or None."""
    try:
        import torch
    except ImportError as exc:
        return f"torch does not load: {exc}"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is without CUDA"
    return None if torch.cuda.is_available() else "no CUDA device is visible"


def main(words: Sequence[str]) -> int:
    """Run what is asked for."""
    if words[:1] == ["gguf-pp"]:
        return run_command_line(words[1:])
    asked = parse(words)
    options: dict[str, Any] = {"model": asked.model}
    if asked.child is not None:
        use_source_tree()
        return be_child(*asked.child, options)
    emit = out_of()
    if why := why_not():
        emit(Outcome(missing=[why], nothing=True).line("all"))
        return 2
    model = [] if asked.model is None else ["--model", asked.model]

    signal.signal(signal.SIGTERM, signal.default_int_handler)

    def command(section: Section, part: str) -> list[str]:
        return [sys.executable, __file__, *model, "--child", section.target, part]

    return run_all(asked.sections, command, asked.budget, asked.jobs, emit)


def run_command_line(words: Sequence[str]) -> int:
    """`gguf-pp` from the source tree."""
    use_source_tree()
    from gguf_pp.cli.main import main as command_line

    sys.argv = ["gguf-pp", *words]
    command_line()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
