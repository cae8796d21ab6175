import importlib.machinery
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
import tomllib
from pathlib import Path

import pytest

from gguf_pp.errors import ConfigError
from gguf_pp.native import describe, kernels, start_team


def test_the_kernels_say_what_they_are_made_for():
    module = kernels()
    known = ("portable", "avx2", "avx512", "avx512-vnni")
    assert describe() == "none" if module is None else describe() in known


def test_kernels_can_be_declined(monkeypatch):
    assert kernels("torch") is None
    monkeypatch.setenv("GGUF_PP_KERNELS", "torch")
    assert kernels() is None
    assert describe() == "none"


def test_missing_kernels_are_none_unless_they_were_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf_pp.native._kernels", None)
    assert kernels() is None
    assert describe() == "none"
    with pytest.raises(ConfigError, match="the native kernels do not load") as failure:
        kernels("native")
    assert "C compiler" in failure.value.hint


def test_no_torch_is_imported():
    code = "import sys, gguf_pp.native as n; n.kernels(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


ROOT = Path(__file__).parent.parent
PORTABLE_TESTS = "err_only or bit_for_bit or overflow or many_rows"
native = pytest.mark.skipif(kernels() is None, reason="the kernels are not built")


@native
def test_a_lower_level_can_be_asked_for_and_a_higher_one_is_not_obeyed():
    code = "import gguf_pp.native as n; print(n.describe())"

    def asked(level):
        env = {**os.environ, "GGUF_PP_ISA": level}
        run = [sys.executable, "-c", code]
        return subprocess.run(run, env=env, capture_output=True, text=True, check=True).stdout

    assert asked("portable") == "portable\n"
    assert asked("avx512-vnni") == asked("nonsense")


@native
def test_a_team_starts_as_many_threads_as_it_lacks_and_ends_them():
    tasks = Path("/proc/self/task")

    def count():
        return len(list(tasks.iterdir())) if tasks.is_dir() else 0

    before = count()
    one, three = start_team(1), start_team(3)
    assert (one.n_threads, three.n_threads) == (1, 3)
    assert count() in (0, before + 2)
    one.close()
    three.close()
    three.close()
    assert count() == before
    with pytest.raises(ValueError, match="the team is closed"):
        _ = three.n_threads


@native
@pytest.mark.parametrize("n_threads", [0, -1, 1025])
def test_a_team_needs_a_sensible_number_of_threads(n_threads):
    with pytest.raises(ValueError, match="n_threads"):
        start_team(n_threads)


@native
def test_teams_can_be_started_and_ended_from_many_threads_at_once():
    failures = []

    def start_and_end():
        try:
            for _ in range(20):
                start_team(3).close()
        except OSError as exc:
            failures.append(exc)

    threads = [threading.Thread(target=start_and_end) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def run_kernel_tests(*options, env=None, before="pass"):
    code = f"import sys, pytest\n{before}\nsys.exit(pytest.main(sys.argv[1:]))"
    command = [
        sys.executable,
        "-c",
        code,
        "tests/test_quants_planes.py",
        "-q",
        "-p",
        "no:cacheprovider",
        *options,
    ]
    done = subprocess.run(
        command, env={**os.environ, **(env or {})}, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@native
def test_the_portable_kernels_pass_too():
    run_kernel_tests("-k", PORTABLE_TESTS, env={"GGUF_PP_ISA": "portable"})


@native
@pytest.mark.slow
@pytest.mark.parametrize("level", sorted({"portable", describe()}))
def test_sanitizers_find_nothing(level, tmp_path):
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no gcc")
    library = subprocess.run(
        [compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not Path(library).is_absolute():
        pytest.skip("no libasan")
    target = tmp_path / f"_kernels{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    extension = setup["ext-modules"][0]
    flags = [flag for flag in extension["extra-compile-args"] if flag != "-O3"]
    flags += ["-O1", "-g", "-shared", "-fPIC", "-fsanitize=address,undefined"]
    flags += ["-fno-sanitize-recover=undefined", f"-I{sysconfig.get_path('include')}"]
    command = [compiler, *flags, *extension["sources"], "-o", str(target), "-lm"]
    subprocess.run(command, cwd=ROOT, check=True)
    before = (
        "import importlib.util as u\n"
        f"spec = u.spec_from_file_location('gguf_pp.native._kernels', {str(target)!r})\n"
        "module = sys.modules[spec.name] = u.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)"
    )
    env = {"LD_PRELOAD": library, "ASAN_OPTIONS": "detect_leaks=0", "GGUF_PP_ISA": level}
    chosen = ("-k", PORTABLE_TESTS) if level == "portable" else ()
    run_kernel_tests("-m", "not slow", *chosen, env=env, before=before)
