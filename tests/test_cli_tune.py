"""`gguf-pp tune`: what it measures, decides, prints and refuses."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from gguf_pp.cli import tune as tune_command
from gguf_pp.cli.main import main
from gguf_pp.cli.tune import Outcome, choose
from tests import cuda_now
from tests.test_cuda_pipeline import now

__all__ = ["now"]

TWO = ("--device", "cpu:0,cpu:1")
SHORT = ("-p", "16", "--parallel", "2")


@pytest.fixture
def hasty(monkeypatch):
    """Times every layer only a few times, and no more rounds than must be."""
    monkeypatch.setattr("gguf_pp.probe.MIN_SECONDS", 0.0)
    monkeypatch.setattr("gguf_pp.probe._N_REMEMBERED", 4)
    monkeypatch.setattr(tune_command, "_N_GEN", 2)
    monkeypatch.setattr(tune_command, "_ENOUGH_S", 0.0)


@pytest.fixture
def uneven(monkeypatch):
    """The fastest split is not the default."""
    split = [range(3), range(3, 4)]
    monkeypatch.setattr(tune_command, "fastest_split", lambda costs, fits: split)


def test_tune_compares_the_default_split_with_the_fastest_and_names_the_flags(
    capsys, chat_model, hasty, uneven
):
    assert main(["tune", chat_model, *TWO, *SHORT, "-t", "1,1"]) == 0
    out = capsys.readouterr().out.splitlines()
    titles = "device prefill ms a layer decode ms a layer prefill ms head decode ms head"
    assert " ".join(out[0].split()) == titles
    assert [line.split()[0] for line in out[1:3]] == ["cpu:0", "cpu:1"]
    default, fastest = (line.split() for line in out[5:7])
    assert (default[:2], fastest[:2]) == (["default", "2,2"], ["fastest", "3,1"])
    assert [len(default), len(fastest)] == [6, 6]
    assert all(float(cell) > 0 for cell in (*default[2:], *fastest[2:]))
    number = r"\d+\.\d\d"
    found = rf"--layers 3,1 is predicted {number} times as fast as the default, "
    found += rf"measured {number} ± {number} in 3 rounds"
    for workload in ("prefill", "decode"):
        assert any(re.match(f"{workload}: {found}", line) for line in out[8:])
    used = {f"use --device cpu:0,cpu:1 --layers {split[1]} -t 1,1" for split in (default, fastest)}
    assert out[-1] in used


def test_splits_take_turns_and_the_later_is_the_next_ones_first(
    chat_model, hasty, uneven, monkeypatch
):
    ran = []

    def measure(path, cases, **settings):
        for case in cases:
            ran.append((case.config.layers, case.phase))
            speed = 10.0 if case.config.layers == (2, 2) else 20.0
            yield SimpleNamespace(row=SimpleNamespace(tokens_per_s=speed))

    monkeypatch.setattr("gguf_pp.measure.measure", measure)
    assert main(["tune", chat_model, *TWO, *SHORT]) == 0
    turns = [(2, 2), (3, 1), (3, 1), (2, 2), (2, 2), (3, 1)]
    assert ran == [(layers, phase) for layers in turns for phase in ("prompt", "decode")]


def test_tune_as_json_has_costs_splits_and_flags(capsys, chat_model, hasty):
    argv = ("-p", "16", "--for", "prefill", "--no-verify", "--json")
    assert main(["tune", chat_model, *TWO, *argv]) == 0
    got = json.loads(capsys.readouterr().out)
    assert list(got) == ["devices", "jobs", "splits", "speedups", "flags"]
    [job] = got["jobs"]
    assert (job["workload"], job["n_tokens"]) == ("prefill", 16)
    assert [len(times) for times in job["layer_s"]] == [4, 4]
    default, fastest = got["splits"]
    assert (default["layers_per_device"], default["measured_tokens_per_s"]) == ([2, 2], None)
    assert sum(fastest["layers_per_device"]) == 4
    [speedup] = got["speedups"]
    assert (speedup["measured"], speedup["error"], speedup["clear"]) == (None, None, False)


GPUS = ("--kernels", "torch", "--exact", "-p", "16", "--no-verify", "--json")


@pytest.mark.parametrize(
    ("device", "names"),
    [
        ("cuda:0,cuda:1", ["cuda:0", "cuda:1"]),
        ("cuda:0,cuda:0", ["cuda:0", "cuda:0#2"]),
        ("cpu,cuda:1", ["cpu", "cuda:1"]),
    ],
)
def test_tune_times_cuda_devices_by_their_own_clocks(
    capsys, chat_model, hasty, now, monkeypatch, device, names
):
    record = cuda_now.Event.record

    def record_late(event, stream=None):
        record(event, stream)
        event.at_s *= 1e6  # no work takes so long by the clock of the host

    monkeypatch.setattr(cuda_now.Event, "record", record_late)
    assert main(["tune", chat_model, "--device", device, "--parallel", "2", *GPUS]) == 0
    got = json.loads(capsys.readouterr().out)
    assert got["devices"] == names
    for job in got["jobs"]:
        by_clock = [min(times) > 1.0 for times in job["layer_s"]]
        assert by_clock == [name != "cpu" for name in names]
    assert got["flags"].startswith(f"--device {device} --layers ")


def test_tune_knows_the_layers_that_do_not_fit_a_cuda_device(capsys, chat_model, hasty, now):
    memory = ("--memory", "cuda:0=66800KiB", "-ub", "16", "--parallel", "2")
    assert main(["tune", chat_model, "--device", "cuda:0", *memory, *GPUS]) == 0
    got = json.loads(capsys.readouterr().out)
    assert got["devices"] == ["cpu", "cuda:0"]
    n_cpu, n_gpu = got["splits"][0]["layers_per_device"]
    assert n_cpu > 0 < n_gpu
    assert got["flags"].startswith("--device cpu,cuda:0 --layers ")


DEFAULT = Outcome("default", (2, 2), (10.0, 5.0))
FASTEST = Outcome("fastest", (3, 1), (12.0, 5.0))


def test_what_was_measured_overrules_what_was_predicted_if_it_is_clear():
    assert choose(DEFAULT, FASTEST) is FASTEST
    assert choose(DEFAULT, replace(FASTEST, predicted=(10.0, 5.0))) is DEFAULT
    default = replace(DEFAULT, rounds=((9.0, 9.1, 9.2), (4.0, 4.0, 4.0)))
    slower = replace(FASTEST, rounds=((8.0, 8.1, 8.2), (4.0, 4.0, 4.0)))
    assert choose(default, slower) is default
    noisy = replace(FASTEST, rounds=((8.0, 4.0, 18.0), (4.0, 4.0, 4.0)))
    assert choose(default, noisy) is noisy


def test_the_verdict_names_noise_and_the_workload_that_would_choose_otherwise():
    default = replace(DEFAULT, rounds=((9.0, 9.0, 9.0), (4.0, 4.0, 4.0)))
    fastest = replace(FASTEST, rounds=((18.0, 18.2, 17.8), (3.0, 3.0, 3.1)))
    assert list(tune_command._verdict(["prefill", "decode"], default, fastest)) == [
        "prefill: --layers 3,1 is predicted 1.20 times as fast as the default, "
        "measured 2.00 ± 0.06 in 3 rounds",
        "decode: --layers 3,1 is predicted 1.00 times as fast as the default, "
        "measured 0.75 ± 0.04 in 3 rounds",
        "for decode alone the default split is better: tune --for decode",
    ]
    noisy = replace(FASTEST, rounds=((8.0, 4.0, 18.0), (4.0, 4.0, 4.1)))
    said = list(tune_command._verdict(["prefill", "decode"], default, noisy))
    assert len(said) == 2
    assert all(t.endswith("rounds, which is within the noise: the prediction stands") for t in said)
    same = replace(DEFAULT, name="fastest")
    assert list(tune_command._verdict(["prefill"], DEFAULT, same)) == [
        "the default split is the fastest"
    ]
    assert choose(DEFAULT, same) is DEFAULT


TUNE_MISUSE = {
    ("--for", "chat"): "--for cannot be 'chat'",
    ("-ts", "1,1"): "-ts and --layers are what tune finds",
    ("--device", "cpu"): "there is nothing to split on one device",
}


@pytest.mark.parametrize("argv", TUNE_MISUSE, ids=" ".join)
def test_misuse_of_tune_is_told_before_anything_is_loaded(capsys, argv):
    assert main(["tune", "missing.gguf", *TWO, *argv]) == 2
    assert capsys.readouterr().err.splitlines()[0] == f"error: {TUNE_MISUSE[argv]}"
