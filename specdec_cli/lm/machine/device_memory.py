"""How much memory a device has for this process; everything that plans memory asks here.

A CPU's free memory is the smallest of what the machine has left, what each control group of this process has left
(`cgroups`), and what the shell's limits allow (`ulimit -v`, `ulimit -d`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from specdec_cli.errors import RunError
from specdec_cli.lm.machine.cgroups import MemoryLimit, cgroup_limits

_MAPS = Path("/proc/self/maps")


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of a device, as this process may use it.

    Args:
        total_bytes: in all.
        free_bytes: what can still be taken.
        limit: the tightest limit below the machine's own memory; None without one.
    """

    total_bytes: int
    free_bytes: int
    limit: MemoryLimit | None = None


def device_memory(device: torch.device) -> DeviceMemory:
    """A device's memory at the moment."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(total, free)
    machine = psutil.virtual_memory()
    groups, shell = cgroup_limits(), list(_shell_limits())
    limits = [limit for limit in (*groups, *shell) if limit.limit_bytes < machine.total]
    tightest = min(limits, key=lambda limit: limit.limit_bytes, default=None)
    # Mapped weights are page cache, which everybody calls free, and every step reads them.
    resident = min([machine.available, *(limit.free_bytes for limit in groups)]) - _mapped_weights()
    free = max(min([resident, *(limit.free_bytes for limit in shell)]), 0)
    return DeviceMemory(machine.total if tightest is None else tightest.limit_bytes, free, tightest)


def check_room(name: str, load_bytes: int, what: str, device: torch.device, hint: str) -> None:
    """Refuse a model that cannot be loaded before a weight is read: a container's limit kills without a word.

    Args:
        name: of the model.
        load_bytes: what loading takes at least.
        what: their dtype or form, for the message.
        device: where they are to lie.
        hint: what to do.

    Raises:
        RunError: there is less memory.
    """
    memory = device_memory(device)
    if load_bytes > memory.free_bytes:
        limited = f" within the limit of {memory.limit.name}" if memory.limit is not None else ""
        raise RunError(
            f"`{name}` in {what} needs {load_bytes / 1e9:.1f} GB to load, and "
            f"`{memory.free_bytes / 1e9:.1f}` GB of {device.type} memory are free{limited}",
            hint,
        )


def _shell_limits() -> Iterator[MemoryLimit]:
    """Limits that `ulimit` and job schedulers set. Linux enforces them; other systems only accept them."""
    if sys.platform != "linux":
        return
    import resource

    used = psutil.Process().memory_info()
    for name, kind, taken in (("-v", resource.RLIMIT_AS, used.vms), ("-d", resource.RLIMIT_DATA, used.data)):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            yield MemoryLimit(f"ulimit {name}", soft, taken)


def _mapped_weights() -> int:
    """Bytes of safetensors files that this process has mapped."""
    total = 0
    with suppress(OSError):  # there is no /proc
        for line in _MAPS.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.removesuffix(" (deleted)").endswith(".safetensors"):
                begin, _, end = line.split()[0].partition("-")
                total += int(end, 16) - int(begin, 16)
    return total
