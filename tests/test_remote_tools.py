"""plan, bench, tune and timelines with devices of real workers."""

import json
import re
import subprocess
import sys
from itertools import pairwise

import pytest

import gguf_pp
from gguf_pp import config
from gguf_pp.cli.main import main
from gguf_pp.config import Options
from gguf_pp.errors import PlacementError
from gguf_pp.gguf import ModelFile
from gguf_pp.pipeline.build import Pipeline
from gguf_pp.pipeline.estimate import estimate
from gguf_pp.pipeline.planned import resolve
from tests.workers import WorkerProcess, workers

MIB = 1 << 20


@pytest.fixture(scope="module")
def lenders(tmp_path_factory):
    """A worker with two devices of one thread each, and one with little memory."""
    folder = tmp_path_factory.mktemp("lenders")
    with (
        workers(1, folder / "two", "--device", "cpu:0,cpu:1", "-t", "1,1") as two,
        workers(1, folder / "small", "--memory", "3MiB", "-t", "1") as small,
    ):
        yield two[0], small[0]


@pytest.fixture
def two(lenders) -> WorkerProcess:
    return lenders[0]


@pytest.fixture
def small(lenders) -> WorkerProcess:
    return lenders[1]


def planned(path, **flags):
    with ModelFile.open(path) as file:
        return estimate(file, *resolve(Options(**flags)))


LAYOUTS = {
    "behind": "cpu,{two}",
    "in front": "{two},cpu",
    "all around": "{two}/cpu:1,cpu,{two}/cpu:0",
    "alone": "{two}",
    "one device of two": "cpu:0,cpu:1,{two}/cpu:1",
    "two workers": "cpu,{small},{two}",
}
FLAGS = {
    "as it comes": {},
    "shares": {"tensor_split": "2,1,1", "n_copies": 3, "parallel": 2},
    "layers": {"layers": "1,2,1", "cache_type_k": "f32"},
}
SPLIT = [("all around", flags) for flags in FLAGS] + [("behind", "as it comes")]


@pytest.mark.parametrize(
    ("layout", "flags"), [*SPLIT, *((name, "as it comes") for name in LAYOUTS if name != "behind")]
)
def test_what_is_planned_is_what_workers_then_hold(layout, flags, lenders, chat_model):
    two, small = lenders
    device = LAYOUTS[layout].format(two=two.device, small=small.device)
    options = {"ctx_size": 64, **FLAGS[flags]}
    plan = planned(chat_model, device=device, **options)
    with gguf_pp.load(chat_model, device.split(","), **options) as llm:
        assert llm.n_copies == plan.rung.n_copies
        assert llm.not_pipelined_because == plan.not_pipelined_because
        uses = {use.name: use for use in llm.devices()}
    assert [stage.device.name for stage in plan.stages] == list(uses)
    for stage in plan.stages:
        use, need = uses[stage.device.name], stage.need
        assert use.layers == (stage.layers.start, stage.layers.stop)
        held = (use.weight_bytes, use.kv_bytes, use.buffer_bytes)
        assert held == (need.weights, need.kv, need.copies + need.scratch)


@pytest.mark.parametrize(
    ("device", "memory", "too_many"),
    [
        ("cpu,{small}", None, 12),
        ("{small},cpu,{two}/cpu:0", "40MiB", 16),
        ("{two},cpu", "38MiB", 16),
    ],
)
def test_little_memory_here_or_there_is_planned_as_it_is_had(
    device, memory, too_many, lenders, chat_model
):
    two, small = (worker.device for worker in lenders)
    rungs = []
    for n_copies in (4, too_many):
        asked = Options(
            device=device.format(two=two, small=small),
            memory=memory,
            ctx_size=512,
            parallel=8,
            ubatch_size=512,
            n_copies=n_copies,
        )
        with ModelFile.open(chat_model) as file:
            plan = estimate(file, *resolve(asked))
            real = Pipeline(file, config.resolve(asked), lambda done, total: None)
        real.close()
        assert real.rung == plan.rung
        rungs.append((plan.rung, plan.asked))
    assert rungs[0][0] == rungs[0][1]
    assert rungs[-1][0] != rungs[-1][1]


def run_cli(capsys, *argv):
    assert main(list(argv)) == 0
    return capsys.readouterr()


def test_plan_asks_a_worker_and_says_what_it_has_and_needs_no_torch(two, chat_model):
    program = "import sys; from gguf_pp.cli.main import main; code = main(sys.argv[1:]); "
    program += "assert 'torch' not in sys.modules; sys.exit(code)"
    argv = ["plan", chat_model, "--rpc", two.address, "-c", "64"]
    command = [sys.executable, "-c", program, *argv]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    names = [f"{two.device}/cpu:{i}" for i in (0, 1)]
    lines = done.stdout.splitlines()
    table = [line.split()[0] for line in lines if re.match(r"(cpu|tcp)\S* ", line)]
    assert [name for name in table if not name.endswith((":", ","))] == ["cpu", *names]
    both = ", ".join(names)
    assert f"{both} share the RAM: free and margin are of all together" in lines
    size = r"[\d.]+ [GM]iB"
    assert re.search(f"^{both}: the worker says it has {size} free of {size}$", done.stdout, re.M)
    assert done.stderr == ""


def test_planned_memory_is_what_the_worker_may_use(small, capsys, chat_model):
    argv = ("plan", chat_model, "--device", f"cpu,{small.device}", "-c", "64", "--json")
    got = json.loads(run_cli(capsys, *argv).out)
    name = f"{small.device}/cpu"
    assert [(d["name"], d["source"]) for d in got["devices"]] == [("cpu", "here"), (name, "worker")]
    mine, its = got["memory"]
    assert (its["name"], its["devices"]) == (f"{small.address} ram", [name])
    assert its["free_bytes"] == 3 * MIB
    assert its["total_bytes"] == mine["total_bytes"] > 1 << 30
    assert got["notes"] == []
    assert main([*argv[:-1], "-np", "1024"]) == 1
    err = capsys.readouterr().err
    assert f"{small.address} ram lacks " in err
    with pytest.raises(PlacementError):
        gguf_pp.load(chat_model, ["cpu", small.device], ctx_size=64, parallel=1024)


SHORT = ("-r", "1", "--no-warmup", "-ub", "8", "-o", "json")


def test_rows_of_a_benchmark_are_about_devices_wherever_they_are(two, small, capsys, chat_model):
    device = f"{small.device},cpu,{two.device}"
    argv = ("-p", "16", "-n", "4", "--parallel", "3", "--wire", "f16", "--n-copies", "2")
    out = run_cli(capsys, "bench", chat_model, "--device", device, *argv, *SHORT).out
    names = [f"{small.device}/cpu", "cpu", f"{two.device}/cpu:0", f"{two.device}/cpu:1"]
    with gguf_pp.load(chat_model, device.split(","), ctx_size=18, parallel=3, ubatch_size=8) as llm:
        held = [use.weight_bytes + use.kv_bytes + use.buffer_bytes for use in llm.devices()]
    way = ["cpu", names[0], "cpu", names[2], names[3], "cpu"]
    rows = json.loads(out)
    for row in rows:
        assert (row["devices"], row["layers_per_device"]) == (names, [1, 1, 1, 1])
        assert row["kernels"] == [row["kernels"][1]] * 4
        assert row["threads"][0] == row["threads"][2] == row["threads"][3] == 1
        assert row["edges"] == [f"{a} to {b}" for a, b in pairwise(way)]
        n_rows = 3 * (row["n_prompt"] or row["n_gen"])
        assert row["bytes_per_edge"] == [n_rows * 32 * n for n in (2, 2, 2, 4, 2)]
        assert not row["pipeline"] or row["peak_memory"] == held
        assert all(0 < share <= 1 for share in row["busy_share"])
        assert row["bubble_share"] == pytest.approx(1 - sum(row["busy_share"]) / 4)
        waits = sum(row[f"waiting_{cause}"] for cause in ("starved", "uneven", "transfer"))
        assert waits == pytest.approx(1)
    assert rows[0]["bubble_predicted"] == 1 - 1 / 4
    assert rows[2]["pipeline"]
    assert rows[2]["bubble_predicted"] == pytest.approx(3 / (6 + 3))


def test_linked_workers_are_rows_too_though_nothing_passes_here(two, small, capsys, chat_model):
    device = f"cpu,{small.device},{two.device}/cpu:1"
    argv = ("-p", "40", "-n", "0", "--n-copies", "2")
    out = run_cli(capsys, "bench", chat_model, "--device", device, *argv, *SHORT).out
    rows = json.loads(out)
    assert [row["pipeline"] for row in rows] == [False, True]
    for row in rows:
        assert row["layers_per_device"] == [2, 1, 1]
        assert row["bytes_per_edge"] == [40 * 32 * 4] * 3
        assert all(0 < share <= 1 for share in row["busy_share"])


def test_a_recorded_run_with_a_worker_is_summed_up_by_device(two, capsys, chat_model, tmp_path):
    path, device = tmp_path / "t.json", f"cpu,{two.device}"
    argv = ("-p", "Hello" * 9, "-n", "4", "--temp", "0", "-c", "256", "--timeline", str(path))
    done = run_cli(capsys, "run", chat_model, "--device", device, *argv, "--json")
    names = ["cpu", f"{two.device}/cpu:0", f"{two.device}/cpu:1"]
    placed = json.loads(done.out)["devices"]
    assert [(d["name"], d["layers"]) for d in placed] == [
        (name, list(layers)) for name, layers in zip(names, [(0, 2), (2, 3), (3, 4)], strict=True)
    ]
    table = [line.split()[:2] for line in done.err.splitlines() if line.startswith(("cpu ", "tcp"))]
    assert table == [[names[0], "0-1"], [names[1], "2-2"], [names[2], "3-3"]]
    got = json.loads(run_cli(capsys, "timeline", str(path), "--json").out)
    assert (got["devices"], got["layers_per_device"]) == (names, [2, 1, 1])
    worker = f"{two.device}/cpu:0+cpu:1"
    assert got["edges"] == [f"cpu to {worker}", f"{worker} to cpu"]
    for i in range(3):
        parts = [got[key][i] for key in ("busy_s", "starved_s", "uneven_s", "transfer_s")]
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(got["span_s"])
    shown = run_cli(capsys, "timeline", str(path)).out.splitlines()
    assert [line.split()[:2] for line in shown[2:5]] == [
        [name, n] for name, n in zip(names, "211", strict=True)
    ]


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr("gguf_pp.probe.MIN_SECONDS", 0.0)
    monkeypatch.setattr("gguf_pp.cli.tune._N_GEN", 2)
    monkeypatch.setattr("gguf_pp.cli.tune._ENOUGH_S", 0.0)


def test_tune_times_devices_of_workers_and_its_flags_name_each(two, capsys, chat_model, hasty):
    argv = ("--device", f"{two.device},cpu", "-p", "32", "--parallel", "3", "-ub", "8", "--json")
    got = json.loads(run_cli(capsys, "tune", chat_model, *argv).out)
    names = [f"{two.device}/cpu:0", f"{two.device}/cpu:1", "cpu"]
    assert got["devices"] == names
    assert [(j["workload"], j["n_rows"]) for j in got["jobs"]] == [("prefill", 8), ("decode", 1)]
    for job in got["jobs"]:
        assert [len(times) for times in job["layer_s"]] == [4, 4, 4]
        assert min(min(times) for times in job["layer_s"]) > 0
        first, second, head = job["head_s"]
        assert (first, second) == (None, None)
        assert head > 0
        assert len(job["edge_s"]) == 2
    splits = [split["layers_per_device"] for split in got["splits"]]
    assert all(sum(split) == 4 and min(split) > 0 for split in splits)
    assert all(len(split["measured_tokens_per_s"]) == 2 for split in got["splits"])
    used = [f"--device {','.join(names)} --layers {','.join(map(str, s))}" for s in splits]
    assert got["flags"] in used
