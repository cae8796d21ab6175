import json
from dataclasses import asdict, replace

import pytest
import torch
import typer

from gguf_pp import doctor
from gguf_pp.backend import cpu_trials, cuda_edges, cuda_trials
from gguf_pp.backend.cpu import Budget, CpuBackend
from gguf_pp.cli import doctor as cli
from gguf_pp.doctor import Kernels, examine
from gguf_pp.native import describe, kernels
from gguf_pp.ops import make_ops
from gguf_pp.ops.check import KernelCheck, check_kernels, weight_types
from tests.cuda_double import Double

SOUND = (KernelCheck("Q4_0", 1e-7, ""),)


@pytest.fixture(autouse=True)
def small_trials(monkeypatch):
    for module in (cpu_trials, cuda_trials):
        monkeypatch.setattr(module, "COPY_BYTES", 4096)
    monkeypatch.setattr(cpu_trials, "N_PIECES", 2)
    monkeypatch.setattr(cuda_trials, "MATRIX_SIZE", 8)
    monkeypatch.setattr(doctor, "SMALL_BYTES", (64,))
    monkeypatch.setattr(doctor, "LARGE_BYTES", (256, 1024))


@pytest.fixture
def quick_kernels(monkeypatch):
    monkeypatch.setattr(doctor, "check_kernels", lambda make: SOUND)


@pytest.fixture
def quick_cpu(quick_kernels, monkeypatch):
    monkeypatch.setattr(cpu_trials, "overlap", lambda backend: 0.9)
    monkeypatch.setattr(cpu_trials, "ram_bytes_per_s", lambda: 1e9)
    monkeypatch.setattr(cpu_trials, "stray_cores", lambda core: 0)


def double(**kwargs):
    kwargs = {"n_devices": 2, "copy_s": 0.5, "kernel_s": 0.3} | kwargs
    return Double(**kwargs)


def named(checks):
    return {check.name: check for check in checks}


# The CPU.


def test_a_machine_without_cuda_is_examined_on_its_cpu(quick_kernels):
    told = []
    report = examine(api=double(n_devices=0), progress=told.append)
    assert told == ["cpu: memory and threads", "cpu: kernels"]
    assert (report.cuda, report.pairs, report.broken) == ((), (), ())
    assert report.cpu.bytes_per_s > 0
    assert named(report.cpu.checks)["overlap"].ok
    assert report.cpu.kernels.checks == SOUND
    assert [(c.what, c.choice) for c in report.choices] == [
        ("cpu kernels", report.cpu.kernels.name),
        ("devices", "cpu"),
    ]
    assert report.choices[1].why == "no CUDA device is visible"


def test_a_torch_without_cuda_is_said(quick_cpu):
    torch_double = double(n_devices=0)
    torch_double.version.cuda = None
    assert examine(api=torch_double).choices[-1].why == "torch 2.13.0+double is without CUDA"


@pytest.mark.skipif(kernels() is None, reason="the native kernels were not built")
def test_native_kernels_are_named_by_what_they_are_made_for(quick_cpu):
    assert examine(api=double(n_devices=0)).cpu.kernels.name == f"native ({describe()})"


def test_why_kernels_are_not_native_is_said(quick_cpu, monkeypatch):
    if kernels() is not None:
        monkeypatch.setenv("GGUF_PP_KERNELS", "torch")
    computing = examine(api=double(n_devices=0)).cpu.kernels
    assert computing.name == "torch"
    assert computing.why


def test_threads_that_stray_are_said_but_harmless(quick_cpu, monkeypatch):
    monkeypatch.setattr(cpu_trials, "stray_cores", lambda core: 3)
    report = examine(api=double(n_devices=0))
    check = named(report.cpu.checks)["affinity"]
    assert check.ok is False
    assert check.detail.endswith("may run on 3 others")
    assert report.broken == ()


def test_streams_that_wait_for_each_other_are_broken(monkeypatch):
    backend = CpuBackend("cpu", frozenset({0}), 1, Budget(0))
    one = backend.stream("1")
    monkeypatch.setattr(cpu_trials, "PATIENCE_S", 0.01)
    monkeypatch.setattr(CpuBackend, "stream", lambda self, name, compute=False: one)
    with pytest.raises(RuntimeError, match="a stream broke"):
        cpu_trials.overlap(backend)
    one.close()


def test_what_breaks_in_a_trial_is_broken(quick_cpu, monkeypatch):
    def fail(backend):
        raise RuntimeError("a stream broke")

    monkeypatch.setattr(cpu_trials, "overlap", fail)
    assert examine(api=double(n_devices=0)).broken == ("cpu: overlap: a stream broke",)


def test_versions_of_what_is_there_are_said(quick_cpu):
    versions = examine(api=double(n_devices=0)).versions
    wanted = "gguf_pp python torch cuda cuda_driver triton c_compiler"
    assert " ".join(versions) == wanted
    assert (versions["torch"], versions["cuda"], versions["cuda_driver"]) == (
        "2.13.0+double",
        "13.0",
        None,
    )


@pytest.mark.parametrize(("version", "dotted"), [(13010, "13.1"), (12080, "12.8"), (11000, "11.0")])
def test_the_driver_is_named_as_its_maker_does(version, dotted):
    assert doctor._dotted(version) == dotted


# CUDA devices.


def test_devices_and_pairs_are_tried_and_what_is_used_is_said(quick_cpu):
    torch_double = double()
    report = examine(
        api=torch_double, cuda_kernels=lambda i, tell: Kernels("triton", "it runs", SOUND)
    )
    assert [gpu.name for gpu in report.cuda] == ["cuda:0", "cuda:1"]
    gpu = report.cuda[1]
    assert (gpu.model, gpu.capability, gpu.total_bytes) == ("Double 1", (9, 0), 8 << 30)
    assert {check.name: check.ok for check in gpu.checks} == {
        "memory": True,
        "copies": True,
        "overlap": True,
        "graphs": True,
    }
    n = 4096
    assert gpu.bytes_per_s == gpu.up_bytes_per_s == gpu.down_bytes_per_s == pytest.approx(n / 0.5)
    assert [(p.source, p.target, p.mode) for p in report.pairs] == [
        ("cuda:0", "cuda:1", "p2p"),
        ("cuda:1", "cuda:0", "p2p"),
    ]
    assert all(check.ok for pair in report.pairs for check in pair.checks)
    assert report.pairs[0].p2p_bytes_per_s == pytest.approx(n / 0.5)
    assert report.pairs[0].host_bytes_per_s == pytest.approx(n / 1.0)
    assert report.broken == ()
    assert [(c.what, c.choice) for c in report.choices[1:]] == [
        ("devices", "cpu"),
        ("cuda:0 kernels", "triton"),
        ("cuda:0 decode", "graphs"),
        ("cuda:1 kernels", "triton"),
        ("cuda:1 decode", "graphs"),
        ("cuda:0 to cuda:1", "p2p"),
        ("cuda:1 to cuda:0", "p2p"),
    ]
    assert "--device cuda:0,cuda:1" in report.choices[1].why
    assert torch_double.world.races == []


@pytest.mark.parametrize(
    ("damages", "host_damages", "mode", "broken"),
    [
        (lambda s, t, n: (s, t) == (0, 1), False, "host", ()),
        (lambda s, t, n: (s, t) == (0, 1) and n > 300, False, "host", ()),
        (
            lambda s, t, n: (s, t) == (0, 1),
            True,
            None,
            ("cuda:0 to cuda:1: 1 of 64 bytes differ",),
        ),
        (lambda s, t, n: False, True, "p2p", ()),
    ],
)
def test_damaged_copies_change_what_is_used(damages, host_damages, mode, broken, quick_cpu):
    torch_double = double()
    torch_double.damages, torch_double.host_damages = damages, host_damages
    report = examine(api=torch_double)
    assert [pair.mode for pair in report.pairs] == [mode, "p2p"]
    assert report.broken == broken
    assert report.choices[-2].choice == (mode or "nothing")


def test_copies_that_wait_for_computations_are_said_but_harmless(quick_cpu):
    torch_double = double()
    stream = torch_double.cuda.Stream(device=0)
    torch_double.cuda.Stream = lambda device, priority=0: stream  # all work in one queue
    share = cuda_trials.overlap(torch_double, 0)
    assert share == 0
    assert cuda_trials.overlap(double(), 0) == 1


def test_a_graph_that_computes_something_else_is_broken_as_a_run_would_not_notice(quick_cpu):
    torch_double = double(n_devices=1)
    torch_double.replay = lambda items: None
    report = examine(api=torch_double)
    assert report.choices[-1].choice == "graphs"
    (fault,) = report.broken
    assert fault.startswith("cuda:0: graphs: a captured graph computes something else")
    assert "--no-cuda-graphs" in fault


def test_without_graphs_a_run_goes_kernel_by_kernel(quick_cpu):
    def fail(items):
        raise RuntimeError("CUDA error: operation not supported\nmore")

    torch_double = double(n_devices=1)
    torch_double.replay = fail
    report = examine(api=torch_double)
    assert (report.choices[-1].choice, report.choices[-1].why) == (
        "eager",
        "CUDA error: operation not supported",
    )
    assert report.broken == ()


BUSY = "CUDA error: all CUDA-capable devices are busy"


@pytest.mark.parametrize(
    ("asked", "broken"),
    [
        ("mem_get_info", ("cuda:0: memory",)),
        ("get_device_name", ("cuda:0: memory",)),
        ("get_device_capability", ("cuda:0: memory",)),
        ("Stream", ("cuda:0: copies", "cuda:0: kernels")),
        ("can_device_access_peer", ()),
    ],
)
def test_a_device_that_fails_is_broken_and_the_others_are_still_tried(asked, broken, quick_cpu):
    torch_double = double()
    ask = getattr(torch_double.cuda, asked)

    def fail_on_first(*args, **kwargs):
        if 0 in (*args, *kwargs.values()):
            raise RuntimeError(f"{BUSY}\nCompile with ...")
        return ask(*args, **kwargs)

    setattr(torch_double.cuda, asked, fail_on_first)
    found = Kernels("triton", "it runs", SOUND)
    report = examine(api=torch_double, cuda_kernels=lambda i, tell: found)
    of_devices = [fault for fault in report.broken if " to " not in fault]
    assert of_devices == [f"{what}: {BUSY}" for what in broken]
    assert (report.cuda[1].total_bytes, report.cuda[1].kernels) == (8 << 30, found)
    assert report.cuda[1].model == "Double 1"


class CompilerError(Exception):
    """Triton has such, which are no RuntimeError."""


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, CompilerError, AssertionError])
def test_kernels_that_cannot_be_tried_are_broken_and_the_others_are_still_tried(kind, quick_cpu):
    def try_kernels(i, tell):
        if i == 0:
            raise kind("CUDA out of memory. Tried to allocate 2.00 MiB\nmore")
        return Kernels("triton", "it runs", SOUND)

    report = examine(api=double(), cuda_kernels=try_kernels)
    assert [gpu.kernels is None for gpu in report.cuda] == [True, False]
    assert report.broken == ("cuda:0: kernels: CUDA out of memory. Tried to allocate 2.00 MiB",)
    assert report.choices[1].why.endswith(": --device cuda:1")


def test_kernels_of_a_device_are_tried_with_the_device_current(quick_cpu):
    torch_double, seen = double(), []

    def try_kernels(i, tell):
        seen.append((i, torch_double.current_stream().device_index))
        return Kernels("triton", "it runs", (KernelCheck("Q6_K", None, "off by nan"),))

    report = examine(api=torch_double, cuda_kernels=try_kernels)
    assert seen == [(0, 0), (1, 1)]
    assert report.broken[0] == "cuda:0: kernels of Q6_K: off by nan"


# The command.


def test_each_type_is_told_before_its_kernels_are_compiled(monkeypatch):
    monkeypatch.setattr("gguf_pp.ops.check.weight_types", lambda: weight_types()[-5:-3])
    told, real = [], check_kernels

    def on_the_cpu(make, device, tell):
        return real(lambda exact: make_ops("torch", 1, exact=exact), n_rows=4, tell=tell)

    monkeypatch.setattr("gguf_pp.ops.check.check_kernels", on_the_cpu)
    monkeypatch.setattr("gguf_pp.triton.why_unusable", lambda device: "asked for")
    found = cli._cuda_kernels(3, told.append)
    assert [f"cuda:3: kernels of {check.type}" for check in found.checks] == told
    assert len(told) == 2


def run(capsys, monkeypatch, report, *flags):
    monkeypatch.setattr(doctor, "examine", lambda **kwargs: report)
    app = typer.Typer()
    app.command()(cli.doctor)
    code = app(list(flags), standalone_mode=False)
    out, err = capsys.readouterr()
    assert err == ""
    return code, out


@pytest.fixture
def healthy(quick_cpu):
    return examine(api=double(), cuda_kernels=lambda i, tell: Kernels("triton", "it runs", SOUND))


def test_json_is_the_report(healthy, capsys, monkeypatch):
    code, out = run(capsys, monkeypatch, healthy, "--json")
    assert json.loads(out) == json.loads(json.dumps(asdict(healthy)))
    assert code is None


def test_the_table_ends_with_what_is_used_and_why(healthy, capsys, monkeypatch):
    _, out = run(capsys, monkeypatch, healthy)
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0].startswith("gguf_pp ")
    assert "cuda_driver not there" in lines[0]
    for line in (
        "device tried result detail",
        "cuda:1 overlap ok 100% of the shorter ran beside the longer",
        "cuda:0 kernels ok triton: 1 of 1 block type right, at most 1e-07 off",
        "cuda:0 to cuda:1 p2p large ok arrives unharmed",
        "for used because",
        "cuda:0 to cuda:1 p2p data arrives unharmed",
    ):
        assert line in lines
    assert lines[-1] == "all that would be used works"


def test_without_cuda_it_is_said_that_only_the_cpu_was_tried(healthy, capsys, monkeypatch):
    _, out = run(capsys, monkeypatch, replace(healthy, cuda=(), pairs=()))
    assert out.splitlines()[-2:] == ["only the CPU side was tried", "all that would be used works"]


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_something_broken_is_exit_code_1(healthy, flags, capsys, monkeypatch):
    report = replace(healthy, broken=("cuda:0: kernels of Q6_K: off by nan\x1b[2J",))
    code, out = run(capsys, monkeypatch, report, *flags)
    assert code == 1
    assert "\x1b" not in out
    if not flags:
        assert out.splitlines()[-1] == "broken: cuda:0: kernels of Q6_K: off by nan\\x1b[2J"


def test_a_type_that_fails_has_a_line_of_its_own(healthy, capsys, monkeypatch):
    checks = (*SOUND, KernelCheck("Q6_K", 0.5, "off by 5.0e-01, at most 1e-05 is right"))
    cpu = replace(healthy.cpu, kernels=Kernels("native (avx2)", "built", checks))
    _, out = run(capsys, monkeypatch, replace(healthy, cpu=cpu))
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "cpu kernels fails native (avx2): 1 of 2 block types right, at most 1e-07 off" in lines
    assert "cpu kernels Q6_K fails off by 5.0e-01, at most 1e-05 is right" in lines


def test_the_real_self_test_is_of_small_and_large_copies(monkeypatch):
    monkeypatch.undo()
    assert doctor.SMALL_BYTES + doctor.LARGE_BYTES == cuda_edges.TEST_BYTES
