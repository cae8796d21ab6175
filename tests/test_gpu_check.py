"""The frame of the script for a GPU: what is asked for, processes, budgets, failures, lines.

Its sections are tested in gpu/.
"""

import json
import re
import subprocess
import sys
import threading
import time
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import torch

from gguf_pp.triton.planes import LAYOUTS
from tests.gpu import check, harness
from tests.gpu.harness import Outcome, Section

SCRIPT = Path(check.__file__)
needs_no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


# What is asked for.


def test_sections_come_in_their_own_order_whatever_the_order_asked():
    asked = check.parse(["--sections", "ladder, kernels", "--budget", "7"])
    assert [section.name for section in asked.sections] == ["kernels", "ladder"]
    assert asked.budget == 7
    assert [section.name for section in check.parse([]).sections] == check.NAMES


def test_an_unknown_section_is_an_error_that_names_the_known(capsys):
    with pytest.raises(SystemExit):
        check.parse(["--sections", "kernels,kernel"])
    said = capsys.readouterr().err
    assert "no section 'kernel'" in said and "no_syncs" in said


def test_all_sections_together_end_within_nine_minutes_and_the_first_half_by_itself():
    assert check.parse([]).budget <= 540
    assert sum(section.budget_s for section in check.SECTIONS[:5]) <= 540


def test_every_type_that_has_kernels_is_a_part():
    names = {type.name for type in LAYOUTS}
    assert names == {*check.BLOCK_TYPES, *check.PLAIN_TYPES}
    assert names < set(check.KERNEL_PARTS)
    assert len(set(check.KERNEL_PARTS)) == len(check.KERNEL_PARTS)


def test_packages_that_are_lacking_are_named_at_once(monkeypatch):
    monkeypatch.setattr(check, "PACKAGES", ("json", "no_such_package"))
    assert check.why_not() == "packages: pip install no_such_package"


def test_packages_are_those_that_an_install_brings():
    project = tomllib.loads((check.ROOT / "pyproject.toml").read_text())["project"]
    named = {re.match(r"[a-z0-9]+", text)[0] for text in project["dependencies"]}
    assert named == set(check.PACKAGES)


@pytest.mark.parametrize("section", check.SECTIONS, ids=lambda section: section.name)
def test_what_a_section_names_is_there(section):
    module, _, name = section.target.partition(":")
    assert callable(getattr(import_module(module), name))


@needs_no_cuda
def test_without_cuda_it_says_so_in_one_line_and_exits_with_2(tmp_path):
    done = subprocess.run(
        [sys.executable, SCRIPT], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    (line,) = map(json.loads, done.stdout.splitlines())
    assert done.returncode == 2, done.stderr
    assert (line["section"], line["ok"]) == ("all", None)
    assert line["error"].startswith("not there: CUDA: ")


def test_the_source_tree_serves_without_an_install(tmp_path):
    code = f"""
import sys
sys.meta_path = [f for f in sys.meta_path if "editable" not in str(f).lower()]
sys.path.insert(0, {str(check.ROOT)!r})
from tests.gpu.check import use_source_tree
use_source_tree()
import gguf_pp.cli.main
from gguf_pp import arch
assert "llama" in arch.known()
"""
    subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, check=True)


# Processes, budgets, failures.

FAKES = """
import os, subprocess, sys, time
from tests.gpu.harness import Missing

def good(part, report):
    print("what a library says")
    report.tell(a=1 / 3, part=part, options=report.options)
    report.tell(worst=float("nan"))

def wrong(part, report):
    report.require(True, "not this")
    report.require(False, "too large")
    report.tell(a=1)

def raises(part, report):
    report.tell(a=1)
    raise ValueError("first line\\nsecond line")

def crashes(part, report):
    report.tell(a=1)
    os._exit(7)

def hangs(part, report):
    report.tell(a=1)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdout=1)
    time.sleep(600)

def lacks(part, report):
    raise Missing("a graph")

def lacks_some(part, report):
    report.missing("half of it")
    report.tell(a=1)

def parts(part, report):
    report.tell(name=part)
    report.require(part != "b", "is b")
"""


@pytest.fixture
def command(tmp_path):
    (tmp_path / "fakes.py").write_text(FAKES)
    child = (
        f"import sys; sys.path[:0] = [{str(check.ROOT)!r}, {str(tmp_path)!r}]\n"
        "from tests.gpu.harness import be_child\n"
        "sys.exit(be_child(*sys.argv[1:], {'x': 1}))"
    )
    return lambda section, part: [sys.executable, "-c", child, section.target, part]


def run(command, *names, budget_s=60.0, section_s=30.0, parts=("",), jobs=2):
    lines = []
    sections = [Section(name, section_s, f"fakes:{name}", parts) for name in names]
    code = harness.run_all(sections, command, budget_s, jobs, lines.append)
    json.dumps(lines, allow_nan=False)
    return code, {line["section"]: line for line in lines}


def test_figures_of_a_section_are_one_line(command):
    code, lines = run(command, "good")
    assert code == 0
    line = lines["good"]
    assert set(line) == {"section", "ok", "seconds", "figures", "error"}
    assert (line["ok"], line["error"]) == (True, None)
    assert line["figures"] == {"a": 0.3333, "part": "", "options": {"x": 1}, "worst": "nan"}
    assert lines["all"]["ok"] is True


def test_a_failure_ends_nothing_but_its_section(command):
    code, lines = run(command, "wrong", "raises", "crashes", "good")
    assert code == 1
    errors = {name: line["error"] for name, line in lines.items()}
    assert errors["wrong"] == "too large"
    assert errors["raises"].startswith("ValueError: first line at ")
    line = 1 + FAKES[: FAKES.index("raise V")].count("\n")
    assert errors["raises"].endswith(f"fakes.py:{line}")
    assert errors["crashes"] == "ended with code 7"
    assert [line["ok"] for line in lines.values()] == [False, False, False, True, False]
    assert all(lines[name]["figures"] == {"a": 1} for name in ("wrong", "raises", "crashes"))
    assert lines["all"]["figures"] == {"right": 1, "wrong": 3, "not there": 0, "cut short": 0}


def heard(monkeypatch):
    """An event: a section has said something."""
    started = threading.Event()

    class Noticed(Outcome):
        def hear(self, text):
            started.set()
            return super().hear(text)

    monkeypatch.setattr(harness, "Outcome", Noticed)
    return started


def wait_for_a_word(monkeypatch):
    """Time only counts from when a section has said something."""
    monkeypatch.setattr(harness, "LEAST_S", 0.0)
    started = heard(monkeypatch)

    class Patient(threading.Timer):
        def run(self):
            assert started.wait(60)
            super().run()

    monkeypatch.setattr(threading, "Timer", Patient)


def test_a_section_that_hangs_is_stopped_with_all_it_started(command, monkeypatch):
    wait_for_a_word(monkeypatch)
    code, lines = run(command, "hangs", section_s=2.0)
    assert code == 1
    assert lines["hangs"]["error"] == "stopped after 2 s"
    assert lines["hangs"]["figures"] == {"a": 1}


def test_what_the_budget_stops_is_not_wrong(command, monkeypatch):
    wait_for_a_word(monkeypatch)
    code, lines = run(command, "hangs", budget_s=1.0)
    assert code == 3
    assert (lines["all"]["ok"], lines["all"]["figures"]["cut short"]) == (None, 1)
    assert (lines["hangs"]["ok"], lines["hangs"]["figures"]) == (None, {"a": 1})
    assert lines["hangs"]["error"] == "not there: stopped after 1 s"


def test_an_interrupt_ends_what_was_started(command, monkeypatch):
    monkeypatch.setattr(harness, "_children", children := [])
    started = heard(monkeypatch)

    def interrupted(pool, work, parts):
        for part in parts:
            pool.submit(work, part)
        assert started.wait(60)
        raise KeyboardInterrupt

    monkeypatch.setattr(harness.ThreadPoolExecutor, "map", interrupted)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run(command, "hangs", section_s=120.0)
    assert time.monotonic() - start < 60
    assert children == []


def test_a_line_that_was_cut_is_told():
    outcome = Outcome()
    assert not outcome.hear('{"figures": {"a"')
    assert outcome.ok is False and outcome.faults[0].startswith("said ")


@needs_no_cuda
def test_a_section_of_the_script_is_a_process_that_tells_how_it_failed():
    words = [sys.executable, SCRIPT, "--child", "tests.gpu.versions:check", ""]
    outcome = harness.run_part(words, 60)
    assert outcome.figures["torch"] == torch.__version__
    assert len(outcome.faults) == 1 and "stopped" not in outcome.faults[0]


def test_what_is_not_there_is_not_wrong(command):
    code, lines = run(command, "lacks", "lacks_some")
    assert code == 0
    assert (lines["lacks"]["ok"], lines["lacks"]["error"]) == (None, "not there: a graph")
    assert (lines["lacks_some"]["ok"], lines["lacks_some"]["error"]) == (
        True,
        "not there: half of it",
    )


def test_without_time_left_sections_are_told_and_not_started(command):
    code, lines = run(command, "crashes", budget_s=harness.LEAST_S / 2)
    assert code == 3
    assert (lines["crashes"]["ok"], lines["crashes"]["figures"]) == (None, {})
    assert "budget" in lines["crashes"]["error"]


def test_parts_run_in_processes_of_their_own(command):
    code, lines = run(command, "parts", parts=("a", "b", "c"))
    assert code == 1
    assert lines["parts"]["figures"] == {name: {"name": name} for name in "abc"}
    assert lines["parts"]["error"] == "b: is b"


def test_only_what_was_tried_is_right():
    assert Outcome().ok is True
    assert Outcome(nothing=True).ok is None
    assert Outcome(nothing=True, faults=["x"]).ok is False
