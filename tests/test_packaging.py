"""pyproject.toml lists every package and every source that exists, and nothing else."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import gguf_pp

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONFIG = PROJECT["tool"]["setuptools"]


def python(code):
    return subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)


def test_every_folder_is_listed():
    found = set()
    for name, folder in CONFIG["package-dir"].items():
        for path in (ROOT / folder).rglob("*.py"):
            assert (path.parent / "__init__.py").exists(), f"{path.parent} lacks __init__.py"
            tail = path.parent.relative_to(ROOT / folder).parts
            found.add(".".join((name, *tail)))
    assert found == set(CONFIG["packages"])


def test_every_source_of_the_extension_is_listed():
    (extension,) = CONFIG["ext-modules"]
    native = ROOT / "gguf_pp" / "native"
    for key, pattern in (("sources", "*.c"), ("depends", "*.h")):
        found = {str(path.relative_to(ROOT)) for path in native.glob(pattern)}
        assert found == set(extension[key])
    assert extension["optional"] is True


def test_types_are_shipped():
    assert "py.typed" in CONFIG["package-data"]["gguf_pp"]
    assert (ROOT / "gguf_pp" / "py.typed").exists()


def test_the_version_is_the_same_everywhere():
    assert PROJECT["project"]["version"] == gguf_pp.__version__


@pytest.mark.parametrize("name", ["cli", "models"])
def test_bare_names_do_not_import(name):
    done = python(f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {name}")
    assert done.returncode == 1
    assert f"ImportError: import gguf_pp.{name}" in done.stderr


def test_help_does_not_load_torch():
    done = python(
        "import sys\n"
        "from gguf_pp.cli.main import main\n"
        "try:\n"
        "    main(['--help'])\n"
        "except SystemExit:\n"
        "    pass\n"
        "assert 'torch' not in sys.modules\n"
        "assert 'numpy' not in sys.modules\n"
    )
    assert done.returncode == 0, done.stderr
    assert "run" in done.stdout


def test_public_names_are_all_reachable_and_no_others():
    assert [name for name in gguf_pp.__all__ if not hasattr(gguf_pp, name)] == []
    with pytest.raises(AttributeError, match="'gguf_pp' has no attribute 'lama'"):
        _ = gguf_pp.lama
