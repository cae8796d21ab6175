"""Sections that run in processes of their own, so that a crash or a hang ends nothing but itself.

A child says what it finds as JSON lines while it goes: {"figures": {...}}, {"fault": text},
{"missing": text} (with "nothing": true where that leaves nothing to try) and at last
{"done": true}. What it had said when it was stopped is kept.
"""

import contextlib
import importlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

LEAST_S = 3.0
"""Less time than this is not worth a start."""


class Missing(Exception):
    """What a section is about is not there: no failure."""


@dataclass(frozen=True)
class Section:
    """`target` is module:function, called with a part's name and a Report.

    Parts run at the same time, each in a process of its own; all have `budget_s` together.
    """

    name: str
    budget_s: float
    target: str
    parts: tuple[str, ...] = ("",)


class Report:
    """What a child says. `options` are those of the command line."""

    def __init__(self, out: TextIO, options: dict[str, Any] | None = None) -> None:
        self._out = out
        self.options = options or {}
        self.is_sound = True

    def tell(self, **figures: Any) -> None:
        """Keep figures; later ones of the same name replace earlier ones."""
        self._say({"figures": figures})

    def fault(self, text: str) -> None:
        """Something is wrong; the section goes on."""
        self.is_sound = False
        self._say({"fault": text})

    def require(self, is_right: bool, text: str) -> None:
        """A fault unless it is right."""
        if not is_right:
            self.fault(text)

    def missing(self, text: str) -> None:
        """Something is not there."""
        self._say({"missing": text})

    def nothing(self, text: str) -> None:
        """There is nothing to try, because something is not there."""
        self._say({"missing": text, "nothing": True})

    def done(self) -> None:
        """All was tried."""
        self._say({"done": True})

    def _say(self, line: dict[str, Any]) -> None:
        print(json.dumps(finite(line)), file=self._out, flush=True)


def finite(value: Any) -> Any:
    """The same with numbers short, and without those that JSON does not have."""
    if isinstance(value, dict):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else str(value)
    return value


def be_child(target: str, part: str, options: dict[str, Any]) -> int:
    """Do one part of a section; what anything prints goes to stderr, but for the lines."""
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        report = Report(out, options)
        module, _, name = target.partition(":")
        try:
            getattr(importlib.import_module(module), name)(part, report)
        except Missing as exc:
            report.nothing(str(exc))
        except BaseException as exc:  # noqa: BLE001 - a check tells of every failure
            report.fault(in_short(exc))
            traceback.print_exc()
        report.done()
    return 0 if report.is_sound else 1


def in_short(exc: BaseException) -> str:
    """What was raised, and where in a line."""
    frames = traceback.extract_tb(exc.__traceback__)
    where = ""
    if frames:
        where = f" at {'/'.join(Path(frames[-1].filename).parts[-2:])}:{frames[-1].lineno}"
    first = (str(exc).splitlines() or [""])[0]
    return f"{type(exc).__name__}: {first}"[:400] + where


@dataclass
class Outcome:
    """What came of a part or a section."""

    figures: dict[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    nothing: bool = False
    is_cut: bool = False
    seconds: float = 0.0

    @property
    def ok(self) -> bool | None:
        """None if there was nothing to try, or no time to go through with it."""
        return False if self.faults else None if self.nothing or self.is_cut else True

    def hear(self, text: str) -> bool:
        """Take in what a child says; whether that was all."""
        try:
            line = json.loads(text)
        except ValueError:  # it was stopped while it spoke
            line = {"fault": f"said {text[:80]!r}"}
        self.figures.update(line.get("figures", {}))
        self.faults += [line["fault"]] if "fault" in line else []
        self.missing += [line["missing"]] if "missing" in line else []
        self.nothing |= line.get("nothing", False)
        return bool(line.get("done"))

    def line(self, name: str) -> dict[str, Any]:
        """As it is printed."""
        texts = self.faults + [f"not there: {text}" for text in self.missing]
        return {
            "section": name,
            "ok": self.ok,
            "seconds": round(self.seconds, 1),
            "figures": self.figures,
            "error": "; ".join(texts) or None,
        }


def run_part(command: Sequence[str], timeout_s: float, *, is_cut: bool = False) -> Outcome:
    """Run a child; after `timeout_s` it and all that it started are killed, which is no fault if
    `is_cut`: it might have had longer."""
    outcome = Outcome()
    start = time.monotonic()
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, process_group=0
    )
    late = threading.Event()
    timer = threading.Timer(timeout_s, lambda: (late.set(), _kill(child)))
    _children.append(child)
    timer.start()
    assert child.stdout is not None
    try:
        with child.stdout:
            is_done = any(outcome.hear(text) for text in child.stdout)
        if is_done:
            _end(child)
    finally:
        timer.cancel()
        timer.join()
        _kill(child)
        code = child.wait()
        _children.remove(child)
    if late.is_set():
        (outcome.missing if is_cut else outcome.faults).append(f"stopped after {timeout_s:.0f} s")
        outcome.is_cut = is_cut
    elif not is_done:
        outcome.faults.append(f"ended with code {code}")
    outcome.seconds = time.monotonic() - start
    return outcome


_children: "list[subprocess.Popen[str]]" = []


def _kill(child: "subprocess.Popen[str]") -> None:
    """It, unless it has ended and was waited for, and all that it started."""
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


def _end(child: "subprocess.Popen[str]") -> None:
    """Let one that has said all end by itself, if it can: a driver may hang."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(5)


def run_section(
    section: Section, command: Callable[[Section, str], Sequence[str]], left_s: float, jobs: int
) -> Outcome:
    """Run all parts in what the section may take and is left. Figures of a part that has a name are
    under that name, its faults too."""
    start = time.monotonic()
    timeout_s, is_cut = min(left_s, section.budget_s), left_s < section.budget_s

    def one(part: str) -> Outcome:
        left_s = timeout_s - (time.monotonic() - start)
        if left_s < LEAST_S:
            told = ["no time left"]
            return Outcome(missing=told, is_cut=True) if is_cut else Outcome(faults=told)
        return run_part(command(section, part), left_s, is_cut=is_cut)

    whole = Outcome()
    with ThreadPoolExecutor(jobs) as pool:
        try:
            outcomes = list(pool.map(one, section.parts))
        except BaseException:  # an interrupt: nobody else ends them
            for child in list(_children):
                _kill(child)
            raise
        for part, outcome in zip(section.parts, outcomes, strict=True):
            if part and outcome.figures:
                whole.figures[part] = outcome.figures
            elif not part:
                whole.figures.update(outcome.figures)
            prefix = f"{part}: " if part else ""
            whole.faults += [prefix + text for text in outcome.faults]
            whole.missing += [prefix + text for text in outcome.missing]
            whole.nothing |= outcome.nothing
            whole.is_cut |= outcome.is_cut
    whole.seconds = time.monotonic() - start
    return whole


def run_all(
    sections: Iterable[Section],
    command: Callable[[Section, str], Sequence[str]],
    budget_s: float,
    jobs: int,
    emit: Callable[[dict[str, Any]], None],
) -> int:
    """Run sections in turn within `budget_s`, emit a line for each and one for all.

    Returns 0, or 1 if anything is wrong, or 3 if there was no time for all of it.
    """
    start = time.monotonic()
    results: list[bool | None] = []
    n_cut = 0
    for section in sections:
        left_s = budget_s - (time.monotonic() - start)
        if left_s < LEAST_S:
            outcome = Outcome(missing=["time: the budget is spent"], is_cut=True)
        else:
            outcome = run_section(section, command, left_s, jobs)
        results.append(outcome.ok)
        n_cut += outcome.is_cut and outcome.ok is None
        emit(finite(outcome.line(section.name)))
    meaning = {"right": True, "wrong": False, "not there": None}
    figures = {name: results.count(ok) for name, ok in meaning.items()}
    figures |= {"not there": figures["not there"] - n_cut, "cut short": n_cut}
    whole = Outcome(figures, is_cut=n_cut > 0, seconds=time.monotonic() - start)
    whole.faults += ["see the sections"] if False in results else []
    emit(whole.line("all"))
    return 1 if False in results else 3 if n_cut else 0


def out_of(stream: TextIO = sys.stdout) -> Callable[[dict[str, Any]], None]:
    """Print lines as JSON."""
    return lambda line: print(json.dumps(line), file=stream, flush=True)
