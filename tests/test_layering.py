"""Imports point downwards only, and what must start fast does not load torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = [
    {"errors"},
    {"gguf", "fetch", "native", "batch"},
    {"wire"},
    {"net"},
    {"config"},  # no torch at or below this line
    {"quants", "tokenizer", "backend"},
    {"ops", "sampling", "text"},
    {"arch", "request", "triton"},
    {"parts"},
    {"decoder"},
    {"models"},
    {"pipeline"},
    {"worker", "engine", "timeline", "tune"},
    {"api", "bench", "trace_file", "probe", "doctor"},
    {"measure"},
    {"cli"},
    {"__main__"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
TORCH_FREE_RANKS = 5
TORCH_FREE = (
    "gguf_pp",
    "gguf_pp.errors",
    "gguf_pp.config",
    "gguf_pp.gguf",
    "gguf_pp.fetch",
    "gguf_pp.native",
    "gguf_pp.batch",
    "gguf_pp.bench",
    "gguf_pp.timeline",
    "gguf_pp.trace_file",
    "gguf_pp.tune",
    "gguf_pp.sampling",
    "gguf_pp.text",
    "gguf_pp.tokenizer",
    "gguf_pp.wire",
    "gguf_pp.net",
    "gguf_pp.worker.store",
    "gguf_pp.request",
    "gguf_pp.arch",
    "gguf_pp.models.llama",
    "gguf_pp.pipeline.estimate",
    "gguf_pp.pipeline.groups",
    "gguf_pp.pipeline.offload",
    "gguf_pp.pipeline.plan",
    "gguf_pp.pipeline.split",
)
FILES = [p for d in ("gguf_pp", "cli", "models") for p in sorted((ROOT / d).rglob("*.py"))]
MAX_LINES = 400


def name_of(path):
    return str(path.relative_to(ROOT))


def unit(path):
    """The layer name of a file: its folder or module directly below the import root."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[1] if parts[0] == "gguf_pp" else parts[0]


def imports(path):
    """Full names of what a file imports; those from its own folder begin with a dot."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            whole = module in ("gguf_pp", "gguf_pp.models", ".")
            yield from [f"{module}.{alias.name}" for alias in node.names] if whole else [module]


def test_every_module_has_its_layer():
    assert {unit(path) for path in FILES} == {*RANK, "__init__"}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_point_down(path):
    me = unit(path)
    if me == "__init__":
        return
    for target in imports(path):
        assert not target.startswith(".."), f"{target}: name it from the import root"
        parts = target.split(".")
        if parts[0] == "gguf_pp" and (other := parts[1]) in RANK and other != me:
            assert RANK[other] < RANK[me], f"{me} must not import {other}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_low_layers_do_not_name_torch(path):
    if RANK.get(unit(path), 0) < TORCH_FREE_RANKS:
        assert not [t for t in imports(path) if t.split(".")[0] == "torch"]


@pytest.mark.parametrize("path", sorted((ROOT / "models").glob("*.py")), ids=name_of)
def test_models_do_not_import_each_other(path):
    assert not [t for t in imports(path) if t.startswith((".", "gguf_pp.models"))]


def test_what_plans_and_reads_headers_does_not_load_torch():
    code = (
        "import importlib, sys\n"
        f"for name in {TORCH_FREE!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_files_fit_in_the_head():
    sources = [*FILES, *(ROOT / "gguf_pp" / "native").glob("*.[ch]"), *ROOT.glob("tests/*.py")]
    lines = {name_of(path): len(path.read_text().splitlines()) for path in sources}
    assert {name: n for name, n in lines.items() if n > MAX_LINES} == {}
