"""`gguf-pp plan`: what it says of models that fit, that do not, and that are none."""

import json
import re
import subprocess
import sys

import pytest

import gguf_pp
from gguf_pp.cli.main import main
from gguf_pp.cli.plan import IN_FLIGHT
from tests.gguf_bytes import STRING, gguf, key
from tests.tiny import NAMES, write_tiny
from tests.vocabs import SHARED

TWO_GPUS = "cuda:0=1GiB,cuda:1=512MiB"


def plan(capsys, *argv):
    code = main(["plan", *argv])
    return code, *capsys.readouterr()


def as_json(capsys, *argv):
    code, out, _ = plan(capsys, *argv, "--json")
    assert code == 0
    return json.loads(out)


def rows(out, first):
    """Cells of the table whose header begins with `first`."""
    lines = iter(out.splitlines())
    header = next(line for line in lines if line.startswith(first))
    titles = re.split(r"\s{2,}", header.strip())
    cells = []
    for line in lines:
        values = re.split(r"\s{2,}", line.strip())
        if len(values) != len(titles):
            break
        cells.append(dict(zip(titles, values, strict=True)))
    return cells


def test_each_device_has_a_row_with_all_that_it_holds(capsys, chat_model):
    code, out, err = plan(capsys, chat_model, "--memory", TWO_GPUS, "-c", "4096", "-ts", "3,1")
    assert code == 0
    assert "planned with the memory given, not looked at: cuda:0, cuda:1" in err
    first, second = rows(out, "device")
    assert " ".join(first) == (
        "device layers weights embed head KV copies (x2) scratch total free margin"
    )
    assert (first["device"], first["layers"], first["free"]) == ("cuda:0", "0-2", "1024.0 MiB")
    assert (second["device"], second["layers"], second["free"]) == ("cuda:1", "3-3", "512.0 MiB")
    assert (first["KV"], second["KV"]) == ("768.0 KiB", "256.0 KiB")
    assert (first["head"], second["embed"]) == ("0", "0")
    assert first["copies (x2)"] == second["copies (x2)"] == "128.0 KiB"


def test_what_the_figures_mean_is_said(capsys, chat_model):
    _, out, _ = plan(capsys, chat_model, "-dev", "cpu:0,cpu:1", "-c", "512", "-np", "3")
    lines = out.splitlines()
    assert "n_ctx 512 of 65536, 3 slots, ubatch 512" in lines
    assert "pipelining on: 2 copies" in lines
    assert "prefill: 64.0 KiB cross each boundary per ubatch (512 rows)" in lines
    assert "decode: 256 B cross each boundary per ubatch (2 rows)" in lines
    assert "largest context that fits: 65536, all of the model's" in lines
    assert "split by time: --layers 2,2" in lines
    assert "split by memory: --layers 2,2" in lines
    assert (
        "the model fits cpu alone: a split adds capacity and prompt throughput, "
        "not single-stream decode speed"
    ) in lines
    assert "cpu:0, cpu:1 share the RAM: free and margin are of all together" in lines


def test_virtual_devices_share_the_memory_of_theirs(capsys, chat_model):
    flags = ("--device", "cuda:0,cuda:0", "--memory", "cuda:0=1GiB", "-c", "512")
    code, out, _ = plan(capsys, chat_model, *flags)
    told = "cuda:0, cuda:0#2 share the memory of cuda:0: free and margin are of all together"
    assert code == 0 and told in out.splitlines()


def test_waiting_and_the_schedule_are_shown_for_this_number_of_stages(capsys, chat_model):
    flags = ("--memory", "cuda:0=1g,cuda:1=1g,cuda:2=1g", "-c", "64", "--n-copies", "3")
    _, out, _ = plan(capsys, chat_model, *flags)
    table = {row["in flight"]: row for row in rows(out, "in flight")}
    assert list(table) == [str(m) for m in IN_FLIGHT]
    assert table["1"]["prompt: bubble"] == "67%"
    assert table["4"] == {
        "in flight": "4",
        "prompt: bubble": "33%",
        "speed-up at most": "2.00",
        "decode: idle": "0%",
    }
    assert table["2"]["decode: idle"] == "33%"
    assert "schedule of 5 ubatches (u) on 3 copies (c)" in out
    assert "   3  u3·c0      u2·c2      u1·c1" in out.splitlines()


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("-dev cpu", "there is one device"),
        ("-dev cpu:0,cpu:1 -sm none", "there is one device"),
        ("-dev cpu:0,cpu:1 --n-copies 1", "--n-copies 1"),
        ("--memory cuda:0=66m,cuda:1=71m -ub 4096 -b 4096", "its buffers could not be allocated"),
    ],
)
def test_the_condition_that_keeps_pipelining_off_is_named(capsys, chat_model, flags, why):
    code, out, _ = plan(capsys, chat_model, *flags.split(), "-c", "64", "-ngl", "all")
    assert code == 0
    assert f"pipelining off: {why}" in out.splitlines()
    assert "schedule" not in out


def test_what_is_less_than_asked_is_said(capsys, chat_model):
    flags = ("--memory", "cuda:0=70m,cuda:1=75m", "-ub", "4096", "-b", "4096", "-c", "64")
    flags += ("-ngl", "all")
    _, out, _ = plan(capsys, chat_model, *flags)
    line = next(line for line in out.splitlines() if line.startswith("less than asked"))
    assert "n_copies 1 instead of 2, ubatch 2048 instead of 4096" in line


def test_json_has_the_documented_keys(capsys, chat_model):
    got = as_json(capsys, chat_model, "--memory", TWO_GPUS, "-c", "64", "-np", "2")
    assert " ".join(got) == (
        "model architecture weight_bytes fits ctx_size ctx_train max_ctx_size parallel ubatch_size "
        "n_copies pipeline devices memory boundary waiting split fits_alone schedule notes"
    )
    assert " ".join(got["devices"][0]) == (
        "name source layers weight_bytes embedding_bytes head_bytes kv_bytes copy_bytes "
        "scratch_bytes total_bytes"
    )
    assert " ".join(got["memory"][0]) == (
        "name devices total_bytes free_bytes planned_bytes margin_bytes"
    )
    assert (got["fits"], got["n_copies"], got["parallel"]) == (True, 2, 2)
    assert got["pipeline"] == {"enabled": True, "reason": None}
    assert got["boundary"]["decode"] == {"rows": 1, "n_bytes": 128}
    assert got["schedule"][0] == {"tick": 0, "i_stage": 0, "i_ubatch": 0, "i_copy": 0}
    assert got["split"]["by_memory"] != got["split"]["by_time"] == [2, 2]


def test_json_agrees_with_what_a_run_says(capsys, chat_model):
    flags = ("-dev", "cpu:0,cpu:1", "-c", "256")
    got = as_json(capsys, chat_model, *flags)
    with gguf_pp.load(chat_model, devices=["cpu:0", "cpu:1"], ctx_size=256) as llm:
        used = [(u.name, list(u.layers), u.weight_bytes, u.kv_bytes) for u in llm.devices()]
        buffers = [use.buffer_bytes for use in llm.devices()]
    keys = ("name", "layers", "weight_bytes", "kv_bytes")
    assert [tuple(device[key] for key in keys) for device in got["devices"]] == used
    assert [d["copy_bytes"] + d["scratch_bytes"] for d in got["devices"]] == buffers


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_a_model_that_fits_nowhere_ends_with_what_is_missing(capsys, chat_model, flags):
    memory = ("--memory", "cuda:0=34m,cuda:1=32m", "-ngl", "all")
    code, out, err = plan(capsys, chat_model, *memory, *flags)
    assert code == 1
    assert "error: the model does not fit: cuda:1 lacks " in err
    assert "smaller quantization" in err
    if flags:
        assert json.loads(out)["fits"] is False
        return
    table = {row["memory"]: row for row in rows(out, "memory")}
    assert list(next(iter(table.values()))) == ["memory", "needed", "free", "missing"]
    assert (table["cuda:0"]["missing"], table["cuda:1"]["free"]) == ("0", "32.0 MiB")
    assert table["cuda:1"]["missing"] != "0"
    assert out.splitlines()[-1].startswith("cuda:1")


def test_one_device_with_room_is_pointed_at(capsys, chat_model):
    memory = ("--memory", "cuda:0=1g,cuda:1=1m")
    code, _, err = plan(capsys, chat_model, *memory, "-ngl", "all")
    assert code == 1
    assert err.splitlines()[-1] == " hint: split another way: cuda:0 alone can hold it"


@pytest.mark.parametrize(
    ("ngl", "names", "layers"),
    [
        ("3", ["cpu", "cuda:0", "cuda:1"], [[0, 1], [1, 3], [3, 4]]),
        ("0", ["cpu"], [[0, 4]]),
        ("4", ["cuda:0", "cuda:1"], [[0, 2], [2, 4]]),
        ("all", ["cuda:0", "cuda:1"], [[0, 2], [2, 4]]),
        ("auto", ["cuda:0", "cuda:1"], [[0, 2], [2, 4]]),
    ],
)
def test_layers_that_ngl_keeps_off_the_gpus_are_on_the_cpu_in_front(
    capsys, chat_model, ngl, names, layers
):
    got = as_json(capsys, chat_model, "--memory", TWO_GPUS, "-ngl", ngl, "-c", "64")
    assert [d["name"] for d in got["devices"]] == names
    assert [d["layers"] for d in got["devices"]] == layers
    assert got["devices"][0]["embedding_bytes"] > 0
    assert got["pipeline"]["enabled"] is (len(names) > 1)


def test_what_does_not_fit_the_gpus_is_planned_on_the_cpu_and_said(capsys, chat_model):
    memory = ("--memory", "cuda:0=66800KiB,16GiB", "-dev", "cuda:0", "-ub", "16", "-c", "256")
    code, out, err = plan(capsys, chat_model, *memory)
    assert code == 0
    cpu, gpu = rows(out, "device")
    assert (cpu["device"], gpu["device"], gpu["free"]) == ("cpu", "cuda:0", "65.2 MiB")
    assert cpu["free"] == "16.0 GiB"
    assert (cpu["head"], gpu["embed"]) == ("0", "0")
    n = int(gpu["layers"][-1]) - int(gpu["layers"][0]) + 1
    assert f"warning: {n} of 4 layers fit the GPUs with a context of 256, " in err
    assert float(gpu["total"].removesuffix(" MiB")) <= 65.2


def test_a_card_without_room_leaves_the_model_to_the_cpu(capsys, chat_model):
    code, out, err = plan(capsys, chat_model, "--memory", "cuda:0=1m,cuda:1=32m", "-c", "64")
    assert code == 0
    assert [row["device"] for row in rows(out, "device")] == ["cpu"]
    assert "warning: no layer fits the GPUs with a context of 64, the CPU has all 4" in err


BAD_FLAGS = {
    "-dev cpu:0,cpu:1 -ts 0,0": "leaves no device",
    "-dev cpu:0,cpu:1 -ts nan,1": "finite",
    "-dev cpu:0,cpu:1 -ts 1,2,3": "3 shares for 2 devices",
    "-dev cpu:0,cpu:1 --layers 1,2": "--layers adds up to 3, but the model has 4 layers",
    "-dev cpu:0,cpu:1 --layers 1,2,1": "--layers has 3 numbers for 2 devices",
    "-dev cuda:0": "its memory is not known",
    "-dev gpu:0": "no device 'gpu:0'",
    "-dev cuda:0 --memory cuda:0=lots": "--memory 'lots' is not a size",
    "-dev cpu --memory cuda:0=1g": "'cuda:0', which is not among the devices",
    "--memory cuda:0=1g,cuda:0=1g": "gives 'cuda:0' twice",
    "-dev cpu:0,cpu:1,cpu:2,cpu:3,cpu:4": "4 layers cannot be split over 5 devices",
    "-np 0": "--parallel cannot be 0",
    "-ctk q4": "--cache-type-k cannot be 'q4'",
    "--override-kv nonsense": "nonsense",
}


@pytest.mark.parametrize("flags", BAD_FLAGS)
def test_a_bad_flag_gives_one_clear_line(capsys, chat_model, flags):
    code, out, err = plan(capsys, chat_model, *flags.split())
    lines = err.splitlines()
    assert (code, out) == (1, "")
    assert lines[0].startswith("error: ")
    assert BAD_FLAGS[flags] in lines[0]
    assert all(line.startswith(" hint: ") for line in lines[1:])


def test_a_table_in_a_pipe_is_not_cut(chat_model):
    memory = ",".join(
        f"tcp://a-rather-long-name-of-a-host-{i}.example:50052=1GiB" for i in range(4)
    )
    done = subprocess.run(
        [sys.executable, "-m", "gguf_pp", "plan", chat_model, "--memory", memory],
        capture_output=True,
        text=True,
        env={"COLUMNS": "80"},
        check=True,
    )
    table = rows(done.stdout, "device")
    assert [row["device"] for row in table] == [part.split("=")[0] for part in memory.split(",")]


@pytest.mark.parametrize("n_columns", [40, 80, 200])
def test_nothing_is_cut_on_a_terminal(capsys, monkeypatch, chat_model, n_columns):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(n_columns))
    _, out, _ = plan(capsys, chat_model, "--memory", TWO_GPUS, "-c", "64")
    lines = re.sub("\x1b\\[[0-9;]*m", "", out).splitlines()
    at = next(i for i, line in enumerate(lines) if "device" in line)
    assert "margin" in lines[at]
    figures = "".join(lines[at + 1 : lines.index("", at)])
    assert figures.count("MiB") + figures.count("KiB") + figures.count(" B") >= 12
    assert "1024.0" in figures
    assert "…" not in out


def test_torch_is_not_loaded(tmp_path):
    path = write_tiny("qwen2", tmp_path / "m.gguf")
    code = (
        "import sys; from gguf_pp.cli.main import main\n"
        f"assert main(['plan', {str(path)!r}, '--device', 'cpu:0,cpu:1']) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_every_architecture_can_be_planned(capsys, tmp_path, name):
    path = write_tiny(name, tmp_path / f"{name}.gguf")
    got = as_json(capsys, str(path), "--memory", TWO_GPUS)
    (_, first_end), (second_start, _) = (device["layers"] for device in got["devices"])
    assert first_end == second_start
    assert got["fits"]


def test_a_file_without_weights_is_refused(capsys, tmp_path):
    path = tmp_path / "vocab.gguf"
    path.write_bytes(gguf([key("general.architecture", STRING, "llama")]))
    code, out, err = plan(capsys, str(path))
    assert (code, out) == (1, "")
    assert err.splitlines()[0] == f"error: {path}: the file has a vocabulary only, no tensors"


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared vocabularies are not here")
def test_every_shared_vocabulary_is_refused(capsys):
    paths = sorted(SHARED.glob("*.gguf"))
    assert paths
    for path in paths:
        code, out, err = plan(capsys, str(path))
        assert (code, out) == (1, "")
        assert "a vocabulary only" in err
