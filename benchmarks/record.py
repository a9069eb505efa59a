"""Where a benchmark's numbers are kept: one JSON file per run, naming machine, load, threads and commit."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """What the numbers were measured on, the load average at this moment included."""
    words = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line)
    about = {name.strip(): value.strip() for name, value in words.items()}
    tiles = " AMX" if "amx_tile" in about.get("flags", "").split() else ""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    others = (":(top)", ":(top,exclude)benchmarks/results")  # an earlier script's result changes no code
    dirty = subprocess.run(["git", "status", "--porcelain", "--", *others], capture_output=True, text=True, check=False)
    return {
        "cpu": about.get("model name", platform.processor()),
        "instructions": torch.backends.cpu.get_cpu_capability() + tiles,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average_1m": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "commit": commit.stdout.strip() + ("+" if dirty.stdout.strip() else ""),
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def save(name: str, before: dict[str, Any], results: Any) -> Path:
    """Write `results/NAME.json` with the machine as it was before and the load after."""
    path = RESULTS / f"{name}.json"
    # Loading a small target sets one thread, so the number in force is known only now.
    before["threads"] = torch.get_num_threads()
    document = {"machine": before, "load_average_after_1m": round(os.getloadavg()[0], 2), "results": results}
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return path
