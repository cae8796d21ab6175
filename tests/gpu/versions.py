"""What the machine has, and whether Triton's kernels can be used on it."""

import importlib
import os
import platform
import shutil
from contextlib import suppress
from importlib import metadata

import torch

from gguf_pp.triton import why_unusable
from tests.gpu.harness import Report

PACKAGES = ("numpy", "triton", "gguf", "tokenizers", "jinja2", "typer", "rich")


def check(part: str, report: Report) -> None:
    """Everything that figures depend on, and what of the product's packages is not there."""
    packages = {}
    for name in PACKAGES:
        packages[name] = None
        with suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    report.tell(
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        cudnn=torch.backends.cudnn.version(),
        packages=packages,
        c_compiler=next((n for n in ("cc", "gcc", "clang") if shutil.which(n)), None),
        max_connections=os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "default"),
        native_kernels=_native(),
    )
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info(0)
    report.tell(
        n_devices=torch.cuda.device_count(),
        device=properties.name,
        capability=torch.cuda.get_device_capability(0),
        multiprocessors=properties.multi_processor_count,
        l2_mib=getattr(properties, "L2_cache_size", 0) >> 20,
        total_gib=total / 2**30,
        free_gib=free / 2**30,
    )
    why = why_unusable(torch.device("cuda:0"))
    report.tell(triton_unusable_because=why)
    report.require(why is None, f"Triton's kernels are not used: {why}")
    report.require(packages["gguf"] is not None, "the package gguf is not installed")


def _native() -> str:
    """How the CPU computes, to which the device is compared."""
    native = importlib.import_module("gguf_pp.native")
    return native.describe() if native.kernels() is not None else "torch"
