"""Cores and RAM of this machine, as far as this process may use them. No torch."""

import contextlib
import os
from itertools import pairwise
from pathlib import Path


def share_cores(n_devices: int) -> list[frozenset[int]]:
    """Deal the cores this process may use to `n_devices`, in contiguous shares.

    With fewer cores than devices, devices share a core.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    cores = cores or list(range(os.cpu_count() or 1))
    edges = [i * len(cores) // n_devices for i in range(n_devices + 1)]
    return [frozenset(cores[a : max(a + 1, b)]) for a, b in pairwise(edges)]


def system_memory(
    proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")
) -> tuple[int, int]:
    """Total and available bytes of RAM, the container's limit respected where there is one.

    Sources: proc(5) /proc/meminfo, and memory.max, memory.current, memory.stat of cgroup v2. What
    a container has cached of files counts as its own, but gives way when memory is wanted.
    """
    total = available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError, KeyError):
        lines = (proc / "meminfo").read_text().splitlines()
        kib = {key: int(rest.split()[0]) for key, rest in (line.split(":", 1) for line in lines)}
        total, available = kib["MemTotal"] << 10, kib["MemAvailable"] << 10
    with contextlib.suppress(OSError, ValueError, KeyError):
        limit = int((cgroup / "memory.max").read_text())  # the word "max" is no number: no limit
        used = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        used -= int(stat["active_file"]) + int(stat["inactive_file"])
        total, available = min(total, limit), min(available, max(0, limit - used))
    return total, available
