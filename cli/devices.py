"""`gguf-pp devices`: what there is to run on, and by which name."""

import os
from typing import Annotated, Any

import typer

from gguf_pp.errors import ConfigError
from gguf_pp.native import describe, kernels

from .session import print_json
from .tables import print_table, size


def devices(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the devices of this machine and their names for --device."""
    import torch

    cpu, gpus = cpu_device(), cuda_devices(torch.cuda)
    if as_json:
        print_json({"cpu": cpu, "cuda": gpus})
        return
    rows = [(cpu["name"], f"{cpu['cores']} cores, {cpu['kernels']} kernels", *_memory(cpu))]
    rows += [(gpu["name"], _describe(gpu), *_memory(gpu)) for gpu in gpus]
    print_table(("device", "what", "total", "free"), rows, n_left=2)
    if cpu["why_not_native"]:
        print(f"no native kernels: {cpu['why_not_native']}")
    print(f"--device cpu is all {cpu['cores']} cores; cpu:0,cpu:1,... share them out evenly")
    if gpus:
        names = ",".join(gpu["name"] for gpu in gpus)
        print(f"--device {names} is all GPUs; layers that do not fit there go to the CPU")
    print("--device tcp://host:port is what a worker lends: gguf-pp worker --check host:port")


def cpu_device() -> dict[str, Any]:
    """Cores and bytes that this process may use, and the kernels that would compute.

    `why_not_native` is None where those are ours.
    """
    from gguf_pp.backend.host import share_cores, system_memory

    total, free = system_memory()
    return {
        "name": "cpu",
        "cores": len(share_cores(1)[0]),
        "total_bytes": total,
        "free_bytes": free,
        "kernels": "torch" if kernels() is None else f"native ({describe()})",
        "why_not_native": _why_not_native(),
    }


def _why_not_native() -> str | None:
    if kernels() is not None:
        return None
    try:
        kernels("native")
    except ConfigError as exc:
        return str(exc)
    return f"GGUF_PP_KERNELS is {os.environ['GGUF_PP_KERNELS']}"


def cuda_devices(cuda: Any) -> list[dict[str, Any]]:
    """What `cuda`, which is torch.cuda, sees. `peers` are those whose memory it can reach."""
    n_devices = cuda.device_count() if cuda.is_available() else 0
    return [_cuda_device(cuda, i, n_devices) for i in range(n_devices)]


def _cuda_device(cuda: Any, i: int, n_devices: int) -> dict[str, Any]:
    free, total = cuda.mem_get_info(i)
    others = [j for j in range(n_devices) if j != i]
    return {
        "name": f"cuda:{i}",
        "model": cuda.get_device_name(i),
        "capability": list(cuda.get_device_capability(i)),
        "total_bytes": total,
        "free_bytes": free,
        "peers": [f"cuda:{j}" for j in others if cuda.can_device_access_peer(i, j)],
    }


def _describe(gpu: dict[str, Any]) -> str:
    major, minor = gpu["capability"]
    peers = f", reaches {', '.join(gpu['peers'])}" if gpu["peers"] else ""
    return f"{gpu['model']}, capability {major}.{minor}{peers}"


def _memory(device: dict[str, Any]) -> tuple[str, str]:
    return size(device["total_bytes"]), size(device["free_bytes"])
