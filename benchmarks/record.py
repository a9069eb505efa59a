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
    """The machine of the measurement, with the load average at this moment."""
    words = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line)
    about = {name.strip(): value.strip() for name, value in words.items()}
    tiles = " AMX" if "amx_tile" in about.get("flags", "").split() else ""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    others = (":(top)", ":(top,exclude)benchmarks/results")  # an earlier script's result changes no code
    dirty = subprocess.run(["git", "status", "--porcelain", "--", *others], capture_output=True, text=True, check=False)
    kind = f"family {about['cpu family']}, model {about['model']}" if "cpu family" in about else platform.machine()
    return {
        "cpu": f"{about.get('model name', platform.processor())} ({kind})",
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


def brief(before: dict[str, Any]) -> dict[str, Any]:
    """The machine of one result among several in a file."""
    return {key: before[key] for key in ("cpu", "load_average_1m", "commit", "measured")}


def save(name: str, before: dict[str, Any], results: Any, threads: int | None = None, path: Path | None = None) -> Path:
    """Write `results/NAME.json` with the machine as it was before and the load after.

    Args:
        name: of the file.
        before: `machine()` before the run.
        results: what was found.
        threads: of the process that was measured, where that was another.
        path: another file.
    """
    path = path or RESULTS / f"{name}.json"
    # Loading a small target sets one thread, so the number in force is known only now.
    before["threads"] = torch.get_num_threads() if threads is None else threads
    document = {"machine": before, "load_average_after_1m": round(os.getloadavg()[0], 2), "results": results}
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return path
