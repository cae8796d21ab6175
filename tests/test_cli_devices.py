import json

import pytest

from gguf_pp.backend.host import system_memory
from gguf_pp.cli.devices import cuda_devices
from gguf_pp.cli.main import main
from gguf_pp.native import describe, kernels


class Cuda:
    """Two of three devices see each other's memory."""

    def is_available(self):
        return True

    def device_count(self):
        return 3

    def mem_get_info(self, i):
        return (i + 1) << 30, 8 << 30

    def get_device_name(self, i):
        return f"GPU {i}"

    def get_device_capability(self, i):
        return (9, i)

    def can_device_access_peer(self, i, j):
        return {i, j} == {0, 2}


def devices(capsys, *argv):
    code = main(["devices", *argv])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return out


def test_the_cpu_is_listed_with_cores_memory_and_kernels(capsys):
    got = json.loads(devices(capsys, "--json"))
    assert " ".join(got) == "cpu cuda"
    cpu = got["cpu"]
    assert " ".join(cpu) == "name cores total_bytes free_bytes kernels why_not_native"
    assert cpu["cores"] >= 1
    assert 0 < cpu["free_bytes"] <= cpu["total_bytes"] == system_memory()[0]
    out = devices(capsys)
    assert f"{cpu['cores']} cores, {cpu['kernels']} kernels" in out
    assert "--device cpu is all" in out


@pytest.mark.skipif(kernels() is None, reason="the native kernels were not built")
def test_native_kernels_are_named_by_what_they_are_made_for(capsys):
    cpu = json.loads(devices(capsys, "--json"))["cpu"]
    assert (cpu["kernels"], cpu["why_not_native"]) == (f"native ({describe()})", None)


def test_why_kernels_are_not_native_is_said(capsys, monkeypatch):
    if kernels() is not None:
        monkeypatch.setenv("GGUF_PP_KERNELS", "torch")
    cpu = json.loads(devices(capsys, "--json"))["cpu"]
    assert cpu["kernels"] == "torch"
    assert cpu["why_not_native"]
    assert f"no native kernels: {cpu['why_not_native']}" in devices(capsys).splitlines()


def test_cuda_devices_are_described(capsys):
    first, second, third = cuda_devices(Cuda())
    assert first == {
        "name": "cuda:0",
        "model": "GPU 0",
        "capability": [9, 0],
        "total_bytes": 8 << 30,
        "free_bytes": 1 << 30,
        "peers": ["cuda:2"],
    }
    assert (second["peers"], third["peers"]) == ([], ["cuda:0"])


def test_cuda_devices_are_listed_with_their_memory(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda", Cuda())
    lines = devices(capsys).splitlines()
    assert any(
        line.startswith("cuda:0  GPU 0, capability 9.0, reaches cuda:2 ")
        and line.rstrip().endswith("8192.0 MiB  1024.0 MiB")
        for line in lines
    )
    assert any(line.startswith("--device cuda:0,cuda:1,cuda:2 is all GPUs") for line in lines)


def test_no_cuda_is_an_empty_list(monkeypatch):
    cuda = Cuda()
    monkeypatch.setattr(cuda, "is_available", lambda: False)
    assert cuda_devices(cuda) == []
