"""The machine: versions, processor, devices, memory, load. Read, never changed; no network is asked."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil
import torch

from specdec_cli.document import Count, computed
from specdec_cli.lm.machine.device_memory import device_memory
from specdec_cli.lm.machine.threads import allot_threads
from specdec_cli.measure.machine.load import Load, num_cores

PACKAGES = ("specdec-cli", "torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "numpy")
EXTRAS = {
    "serve": ("fastapi", "uvicorn"),
    "plots": ("matplotlib",),
    "structured": ("llguidance",),
    "gguf": ("gguf",),
}
_FLAGS = (
    *("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_bf16", "amx_int8", "avx_vnni"),
)
_HUB_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_ENDPOINT", "HF_HOME", "HF_HUB_CACHE")


@dataclass(frozen=True, slots=True)
class Device:
    """A CPU or a GPU.

    Args:
        name: as `--device` takes it.
        model: its maker's name.
        memory_bytes: in all, or the limit that this process is under.
        free_bytes: what this process can still take.
        dtypes: number format to `native`, `emulated` (correct and slow) or `no`.
    """

    name: str
    model: str
    memory_bytes: int
    free_bytes: int
    dtypes: dict[str, str]


@dataclass(frozen=True, slots=True)
class Machine:
    """A description of this machine.

    Args:
        versions: package to version; None where it is not installed.
        system: operating system.
        cpu_flags: the processor's abilities that matter here.
        num_cores: cores that this process may use.
        num_threads: that a model's forwards run on, no more than a container's share of the processors.
        load_average: runnable processes in the last 1, 5 and 15 minutes.
        devices: the CPU first.
        memory_limit_bytes: of this process's container or shell, where one is set below the machine's memory.
        memory_limited_by: who sets it.
        extras: specdec's optional extras to whether all they need is installed.
        hub: what the environment says about the Hugging Face hub.
    """

    versions: dict[str, str | None]
    system: str
    cpu_flags: tuple[str, ...]
    num_cores: Count
    num_threads: Count
    load_average: tuple[float, float, float]
    devices: tuple[Device, ...]
    memory_limit_bytes: Count | None
    memory_limited_by: str | None
    extras: dict[str, bool]
    hub: dict[str, bool | str]

    @property
    def load(self) -> Load:
        """Runnable processes when this was written down."""
        return Load(self.load_average[0], self.num_cores)

    @computed
    def busy(self) -> str | None:
        """A sentence when something else is running."""
        return self.load.busy

    def device(self, name: str) -> Device | None:
        """The device that `--device NAME` means, or None."""
        if name == "auto":
            return self.devices[1] if len(self.devices) > 1 else self.devices[0]
        wanted = "cuda:0" if name == "cuda" else name
        return next((device for device in self.devices if device.name == wanted), None)


def look() -> Machine:
    """Describe this machine."""
    has = set(_cpu_info("flags").split())
    flags = tuple(flag for flag in _FLAGS if flag in has)
    limit = device_memory(torch.device("cpu")).limit
    versions: dict[str, str | None] = {"python": platform.python_version()}
    versions.update({package: _version(package) for package in PACKAGES})
    return Machine(
        versions=versions,
        system=platform.platform(),
        cpu_flags=flags,
        num_cores=num_cores(),
        num_threads=allot_threads(),
        load_average=psutil.getloadavg(),
        devices=(_cpu(flags), *_gpus()),
        memory_limit_bytes=None if limit is None else limit.limit_bytes,
        memory_limited_by=None if limit is None else limit.name,
        extras={name: all(map(importlib.util.find_spec, modules)) for name, modules in EXTRAS.items()},
        hub=_hub(),
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_info(key: str) -> str:
    """A line of /proc/cpuinfo; empty where there is none."""
    path = Path("/proc/cpuinfo")
    if not path.is_file():
        return ""
    match = re.search(rf"^{key}\s*:\s*(.*)$", path.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    return match[1] if match else ""


def _cpu(flags: tuple[str, ...]) -> Device:
    memory = device_memory(torch.device("cpu"))
    is_apple = sys.platform == "darwin" and platform.machine() == "arm64"
    native_bf16 = is_apple or bool({"avx512_bf16", "amx_bf16"} & set(flags))
    dtypes = {
        "float32": "native",
        "bfloat16": "native" if native_bf16 else "emulated",
        "float16": "native" if is_apple or "avx512_fp16" in flags else "emulated",
    }
    return Device("cpu", cpu_model(), memory.total_bytes, memory.free_bytes, dtypes)


def cpu_model() -> str:
    """The processor's name."""
    return _cpu_info("model name") or platform.processor() or platform.machine()


def _gpus() -> list[Device]:
    devices = []
    for index in range(torch.cuda.device_count()):
        memory = device_memory(torch.device("cuda", index))
        has_bf16 = torch.cuda.get_device_capability(index) >= (8, 0)
        dtypes = {"float32": "native", "bfloat16": "native" if has_bf16 else "emulated", "float16": "native"}
        model = torch.cuda.get_device_name(index)
        devices.append(Device(f"cuda:{index}", model, memory.total_bytes, memory.free_bytes, dtypes))
    return devices


def _hub() -> dict[str, str | bool]:
    given: dict[str, str | bool] = {
        "offline": any(os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in _HUB_VARIABLES[:2]),
        "token": bool(os.environ.get("HF_TOKEN")),
    }
    given.update({name: os.environ[name] for name in _HUB_VARIABLES if os.environ.get(name)})
    return given
