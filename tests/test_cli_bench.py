"""`gguf-pp bench` and `timeline`: what they print, write and refuse."""

import csv
import io
import json
import re
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from gguf_pp import trace_file
from gguf_pp.bench import keys
from gguf_pp.cli import bench as bench_command
from gguf_pp.cli.main import main
from gguf_pp.cli.plot import lines
from gguf_pp.timeline import Lane

TWO = ("--device", "cpu:0,cpu:1")
SHORT = ("-p", "16", "-n", "2", "-r", "1", "--no-warmup", "-ub", "8")


def bench(capsys, model: str, *argv: str) -> tuple[int, str, str]:
    code = main(["bench", model, *SHORT, *argv])
    return code, *capsys.readouterr()


def test_json_is_a_list_of_rows_with_the_documented_keys(capsys, chat_model):
    code, out, _ = bench(capsys, chat_model, *TWO, "-o", "json", "--parallel", "1,2")
    rows = json.loads(out)
    assert (code, len(rows)) == (0, 8)
    assert all(list(row) == list(keys()) for row in rows)
    assert [row["test"] for row in rows[:4]] == ["pp16", "pp16 @ 2", "tg2", "tg2 @ 2"]
    assert rows[4]["devices"] == ["cpu:0", "cpu:1"]
    assert rows[4]["speedup"] == rows[4]["tokens_per_s"] / rows[0]["tokens_per_s"]
    assert list(rows[0]["versions"]) == ["gguf_pp", "python", "torch"]


def test_jsonl_has_a_row_per_line(capsys, chat_model):
    code, out, _ = bench(capsys, chat_model, "-o", "jsonl")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [list(row) for row in rows] == [list(keys())] * 2


def test_csv_has_the_keys_as_its_first_line_and_lists_with_slashes(capsys, chat_model):
    code, out, _ = bench(capsys, chat_model, *TWO, "-o", "csv", "-n", "0")
    header, *rows = csv.reader(io.StringIO(out))
    assert (code, header, len(rows)) == (0, list(keys()), 2)
    row = dict(zip(header, rows[1], strict=True))
    assert (row["devices"], row["layers_per_device"]) == ("cpu:0/cpu:1", "2/2")
    assert (row["pipeline"], row["pipeline_reason"], row["groups_in_flight"]) == ("true", "", "")
    assert row["versions"].startswith("gguf_pp ")


def test_markdown_is_the_default_where_nobody_looks_and_ends_with_what_there_is_to_say(
    capsys, chat_model
):
    code, out, err = bench(capsys, chat_model, *TWO, "--baseline")
    heading, _, titles, rule, *rows = out.split("\n")
    assert code == 0
    assert re.match(r"chat\.gguf: F32, [\d.]+ KiB, 0\.0 M weights; gguf_pp [\d.]+, python", heading)
    assert titles.startswith("| test | devices | layers | copies | ubatch | tokens/s | speed-up |")
    assert titles.count("|") == rule.count("|") == rows[0].count("|")
    assert [row.split(" | ")[0] for row in rows[:6]] == ["| pp16", "| tg2"] * 3
    assert "decode of one stream is sequential: 2 devices cannot speed it up." in rows
    assert err == "added as a baseline: cpu:0,cpu:1 with n_copies 1\n"


def test_a_terminal_gets_a_table_with_the_same_cells(capsys, chat_model, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "250")
    code, styled, _ = bench(capsys, chat_model, "-n", "0")
    out = re.sub(r"\x1b\[\d*m", "", styled)
    assert code == 0
    assert re.search(r"^test +devices +layers +copies +ubatch +tokens/s ", out, re.MULTILINE)
    assert re.search(r"^pp16 +cpu +4 +1 +8 ", out, re.MULTILINE)


def test_lists_are_swept_and_sets_are_separated_by_semicolons(capsys, chat_model):
    argv = ("--device", "cpu;cpu:0,cpu:1", "--n-copies", "1,3", "-ub", "4,8", "-n", "0")
    _, out, _ = bench(capsys, chat_model, *argv, "-o", "json")
    found = [(len(r["devices"]), r["n_copies"], r["ubatch_size"]) for r in json.loads(out)]
    assert found == [(1, 1, 4), (1, 1, 8), (2, 1, 4), (2, 1, 8), (2, 3, 4), (2, 3, 8)]
    argv = (*TWO, "--layers", "1,3;3,1", "--n-copies", "1", "-n", "0", "-sm", "layer,none")
    _, out, _ = bench(capsys, chat_model, *argv, "-o", "json")
    assert [r["layers_per_device"] for r in json.loads(out)] == [[4], [1, 3], [3, 1]]


def test_interrupting_prints_the_rows_that_are_done(capsys, chat_model, monkeypatch):
    @contextmanager
    def interrupted(text: str, *, in_bytes: bool):
        def update(done: int, total: int) -> None:
            if done == 3:
                raise KeyboardInterrupt

        yield update

    monkeypatch.setattr(bench_command, "progress", interrupted)
    code, out, _ = bench(capsys, chat_model, *TWO, "-o", "jsonl")
    assert (code, len(out.splitlines())) == (130, 3)


MISUSE = {
    ("-p", "x"): "-p 'x' is not a list of whole numbers from 0 on",
    ("--parallel", "0"): "--parallel '0' is not a list of whole numbers from 1 on",
    ("-d", "-1"): "-d '-1' is not a list of whole numbers from 0 on",
    ("-p", "0", "-n", "0"): "nothing to measure: both -p and -n are 0",
    ("-o", "xml"): "-o cannot be 'xml'",
    ("-c", "512"): "-c has no place here",
    ("--plot", "a.pdf"): "--plot a.pdf: a figure is a .png or a .svg",
    ("--n-copies", "2,x"): "Invalid value: 'x' is neither a whole number nor auto",
}


@pytest.mark.parametrize("argv", MISUSE, ids=" ".join)
def test_misuse_is_told_before_anything_is_loaded(capsys, argv):
    code, out, err = bench(capsys, "missing.gguf", *argv)
    assert (code, out) == (2, "")
    assert err.splitlines()[0] == f"error: {MISUSE[argv]}"


def test_a_bad_set_among_good_ones_is_told_before_anything_is_loaded(capsys):
    code, out, err = bench(capsys, "missing.gguf", "--device", "cpu;gpu")
    assert (code, out) == (1, "")
    assert err.startswith("error: no device 'gpu'")
    code, _, err = bench(capsys, "missing.gguf", *TWO, "-ts", "1,1;3,2,1")
    assert (code, err.splitlines()[0]) == (1, "error: -ts has 3 shares for 2 devices")


def test_help_explains_every_key(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["bench", "--help"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert [f"{key}: {text}" for key, text in keys().items()] == [
        line for line in lines if line.partition(":")[0] in keys()
    ]


def test_a_plot_without_matplotlib_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = bench(capsys, "missing.gguf", "--plot", "a.png")
    assert (code, out) == (1, "")
    assert err.splitlines() == [
        "error: --plot needs matplotlib, which is not installed",
        " hint: pip install 'gguf-pp[plot]'",
    ]


@pytest.mark.parametrize(("name", "magic"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml")])
def test_a_plot_is_drawn(capsys, chat_model, tmp_path, name, magic):
    pytest.importorskip("matplotlib")
    path = tmp_path / name
    assert bench(capsys, chat_model, *TWO, "--plot", str(path))[0] == 0
    assert path.read_bytes().startswith(magic)


def row(**changes) -> SimpleNamespace:
    """What drawing lines looks at."""
    plain = {"test": "pp8", "n_prompt": 8, "ubatch_size": 8, "n_copies": 1, "threads": (1, 1)}
    placed = {"devices": ("a", "b"), "layers_per_device": (2, 2)}
    return SimpleNamespace(**{**plain, **placed, **changes})


def test_lines_of_a_plot_have_rows_that_differ_in_copies():
    auto = [row(n_copies=2, ubatch_size=4), row(), row(test="pp8 @ 2")]
    assert lines(auto) == {"pp8": [auto[1], auto[0]], "pp8 @ 2": [auto[2]]}
    swept = [row(n_copies=n, ubatch_size=size) for size in (4, 8) for n in (1, 2)]
    assert lines(swept) == {"pp8, ubatch 4": swept[:2], "pp8, ubatch 8": swept[2:]}
    moved = [row(), row(layers_per_device=(3, 1))]
    assert list(lines(moved)) == ["pp8, a,b (2,2)", "pp8, a,b (3,1)"]


def test_the_timeline_of_a_benchmark_is_that_of_its_last_row(capsys, chat_model, tmp_path):
    path = tmp_path / "t.json"
    assert bench(capsys, chat_model, *TWO, "-n", "0", "--timeline", str(path))[0] == 0
    timeline = trace_file.read(path)
    assert timeline.lanes == (Lane(("cpu:0",), (2,)), Lane(("cpu:1",), (2,)))
    computed = [(s.i_stage, s.n_rows) for s in timeline.slices if s.kind == "compute"]
    assert computed == [(0, 8), (1, 8)] * 2


def timeline_of_a_run(model: str, path: Path) -> None:
    argv = ["-p", "Hello", "-n", "4", "--temp", "0", "-c", "256", "--timeline", str(path)]
    assert main(["run", model, *TWO, *argv]) == 0


def test_a_run_records_its_timeline(capsys, chat_model, tmp_path):
    path = tmp_path / "t.json"
    timeline_of_a_run(chat_model, path)
    computed = [s for s in trace_file.read(path).slices if s.kind == "compute" and s.i_stage == 1]
    assert sum(s.n_rows for s in computed) == 5 + 3


def test_timeline_says_who_waited_and_what_to_try(capsys, chat_model, tmp_path):
    path = tmp_path / "t.json"
    timeline_of_a_run(chat_model, path)
    capsys.readouterr()
    assert main(["timeline", str(path)]) == 0
    first, titles, one, two, verdict, hint = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"4 ubatches over 2 devices in [\d.]+ s", first)
    assert titles.split() == ["device", "layers", "busy", "starved", "uneven", "transfer"]
    assert [line.split()[:2] for line in (one, two)] == [["cpu:0", "2"], ["cpu:1", "2"]]
    assert re.fullmatch(r"devices waited \d+ % of the time, \d+ % of that .*", verdict)
    assert "try" in hint


def test_timeline_has_the_same_numbers_as_json(capsys, chat_model, tmp_path):
    path = tmp_path / "t.json"
    timeline_of_a_run(chat_model, path)
    capsys.readouterr()
    assert main(["timeline", str(path), "--json"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert " ".join(got) == (
        "devices layers_per_device n_ubatches n_copies span_s busy_s edges edge_s host_s "
        "bubble_share starved_s uneven_s transfer_s advice"
    )
    for i in (0, 1):
        parts = [got[key][i] for key in ("busy_s", "starved_s", "uneven_s", "transfer_s")]
        assert sum(parts) == pytest.approx(got["span_s"])


def test_what_is_no_timeline_is_an_error(capsys, tmp_path):
    path = tmp_path / "t.json"
    path.write_text("{}")
    assert main(["timeline", str(path)]) == 1
    assert capsys.readouterr().err.splitlines() == [
        f"error: {path} is not a timeline of gguf-pp: otherData is no dict",
        " hint: --timeline FILE writes one",
    ]
