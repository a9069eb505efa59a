"""The steps of gpu_day.sh: each in a process of its own with a time limit, so that a failure loses no other step.

    benchmarks/gpu_day.sh                      # every step: tests, exactness, ...; then speeds and a sweep
    benchmarks/gpu_day.sh --cpu                # the same steps, shortened
    benchmarks/gpu_day.sh --steps tests audit  # some of them

Steps whose results are no times run first and together, the others one after another. The results of all steps are one
file, `gpu_day_DEVICE.json`, rewritten after every step; `gpu_day_DEVICE.log` holds
their output. Both are in `--out`, else $OUT, else results/; with --cpu nothing is kept without a folder. Exit status 1
when a step failed, ran out of time or was left out for want of time, 2 when nothing could run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from time import monotonic
from typing import Any

ROOT = Path(__file__).parents[1]
BUDGET_SECONDS = 515
"""For all steps: nine minutes without what setting up and finding the device take."""
_LEAST_SECONDS = 8  # a step that has less left is left out
_GRACE_SECONDS = 5
_TAIL_LINES = 40

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class DayStep:
    """One step.

    Args:
        name: for `--steps` and the results.
        arguments: of the interpreter. `{document}` is replaced by the file that the step writes.
        on_gpu: further arguments there.
        on_cpu: further arguments of the shortened form.
        limit_seconds: it is stopped after these and what the steps before it left of theirs.
        is_timed: what it measures is time, so that it runs alone.
    """

    name: str
    arguments: str
    on_gpu: str
    on_cpu: str
    limit_seconds: float
    is_timed: bool = True

    def command(self, is_on_gpu: bool, document: Path) -> list[str]:
        """The command, with this interpreter."""
        given = f"{self.arguments} {self.on_gpu if is_on_gpu else self.on_cpu}".split()
        return [sys.executable, *(one.replace("{document}", str(document)) for one in given)]


_SPECDEC = "-m specdec_cli"
_TESTS = "-m pytest -p no:cacheprovider -p no:benchmark -vv"  # a line for each test, before time is up
_OF_GPUS = "-m not(slow)and(gpu)"
_GPU, _CPU = "--device cuda --draft-device cuda", "--device cpu --draft-device cpu"
STEPS = (
    DayStep(
        "rounds",
        f"{_TESTS} tests/engine/test_device_verdicts.py tests/engine/test_rounds_ahead.py",
        f"{_OF_GPUS} -n 4",
        "-k used_again",
        140,
        is_timed=False,
    ),
    DayStep(
        "tests",
        _TESTS,
        f"{_OF_GPUS} tests/lm -n 8",
        "tests/lm/forward/test_lm_graph_trees.py",
        140,
        is_timed=False,
    ),
    DayStep(
        "exact",
        "benchmarks/exact.py --short --output {document}",
        "--device cuda",
        "--device cpu --precision float32 --tokens 1400",
        110,
        is_timed=False,
    ),
    DayStep(
        "audit",
        f"{_SPECDEC} audit --output {{document}}",
        f"{_GPU} --time-limit 30",
        f"{_CPU} --time-limit 1 --num-prompts 2 --k-values 2 --batch-sizes 1",
        110,
        is_timed=False,
    ),
    DayStep(
        "training",
        f"{_SPECDEC} train-draft --method eagle3 --data builtin:stories --output {{document}}.head",
        "--device cuda -n 64 --max-steps 150",
        "--device cpu -n 8 --max-steps 3 --num-prompts 8 --num-held-out 2",
        110,
        is_timed=False,
    ),
    DayStep(
        "drafts",
        "benchmarks/every_draft.py --output {document}",
        "--device cuda --tokens 12 --prompts 2",
        "--only ngram eagle3 --tokens 8 --prompts 2",
        140,
        is_timed=False,
    ),
    DayStep(
        "trees",
        f"{_SPECDEC} bench --quiet --repeats 1 --output {{document}}",
        f"{_GPU} --tree 4,2,1 --num-prompts 6 -n 96",
        f"{_CPU} --tree 2,1 --num-prompts 2 -n 12",
        30,
    ),
    DayStep(
        "heads",
        "benchmarks/gpu_heads.py --output {document}",
        "--tokens 160",
        "--device cpu --decoder transformers --dtype float32 --target shape:tinyllama-1.1b?layers=4 "
        "--layers-read 1 2 3 --block-layers 1 --draft shape:tinyllama-1.1b?layers=1 --context 16 --tokens 16 "
        "--repeats 1 --max-model-len 128",
        150,
    ),
    DayStep(
        "speeds",
        "benchmarks/gpu.py --decoder auto --acceptance 0.8 --output {document}",
        "--targets shape:llama-2-7b --rows 1 4 8 16 64 --tokens 128 --repeats 8",
        "--device cpu --dtype float32 --targets builtin:target --draft builtin:draft --rows 1 4 --context 32 "
        "--tokens 64 --repeats 2 --max-model-len 256",
        95,
    ),
    DayStep(
        "weights",
        "benchmarks/gpu_weights.py --output {document}",
        "--repeats 10",
        "--device cpu --decoder transformers --target shape:tinyllama-1.1b?layers=1 --context 16 --repeats 1",
        40,
    ),
    DayStep(
        "sweep-k",
        f"{_SPECDEC} sweep-k --quiet --output {{document}}",
        f"{_GPU} --num-prompts 6 -n 64 --k-max 6",
        f"{_CPU} --num-prompts 2 -n 12 --k-max 2",
        60,
    ),
)


def missing_packages() -> list[str]:
    """Packages of pyproject.toml that are not installed, or too old."""
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = []
    for requirement in map(Requirement, project["dependencies"]):
        try:
            if not requirement.specifier.contains(metadata.version(requirement.name), prereleases=True):
                found.append(str(requirement))
        except metadata.PackageNotFoundError:
            found.append(str(requirement))
    return found


def run_step(command: Sequence[str], limit_seconds: float, log: Path) -> tuple[str, int | None]:
    """Run a command in a session of its own, its output in a file; all of it ends at the limit.

    Returns:
        `passed`, `failed` or `timed out`, and its exit status.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            status = process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            _end(process)
            return "timed out", process.returncode
    return ("failed" if status else "passed"), status


def _end(process: subprocess.Popen[bytes]) -> None:
    """Stop a process and its children: politely, then not."""
    for which in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, which)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)


def _read_document(path: Path) -> Any:
    """The JSON that a step wrote; None where it wrote none, or not all of it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def run_day(steps: Sequence[DayStep], is_on_gpu: bool, about: Document, folder: Path, budget: float) -> Document:
    """Run steps one after another, with their results in a folder after each of them.

    Args:
        steps: in this order.
        is_on_gpu: in their full form.
        about: the machine, for the results; `device` names the files.
        folder: where results go.
        budget: seconds for all steps.
    """
    name = "gpu_day_" + re.sub(r"[^a-z0-9]+", "_", about["device"].lower()).strip("_")
    log, began = folder / f"{name}.log", monotonic()
    log.write_bytes(b"")
    found: Document = {**about, "steps": []}

    def take(document: Document, said: bytes) -> None:
        with log.open("ab") as output:
            output.write(said)
        found["steps"].append(document)
        if document["outcome"] != "passed":
            print(*(f"    {line}" for line in document["output"]), sep="\n")
        (folder / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    together = [step for step in steps if not step.is_timed]
    with ThreadPoolExecutor(max(1, len(together))) as pool:
        for ended in pool.map(lambda step: _ran(step, is_on_gpu, min(step.limit_seconds, budget)), together):
            take(*ended)
    allotted = max((step.limit_seconds for step in together), default=0.0)
    for step in steps:
        if step.is_timed:
            allotted += step.limit_seconds
            take(*_ran(step, is_on_gpu, min(allotted, budget) - (monotonic() - began)))
    found["file"] = str(folder / f"{name}.json")
    return found


def _ran(step: DayStep, is_on_gpu: bool, limit: float) -> tuple[Document, bytes]:
    """Run a step within a limit in seconds: its results, and its output."""
    print(f"{step.name}: at most {limit:.0f} s", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        document, log, start = Path(scratch) / "document.json", Path(scratch) / "log", monotonic()
        log.touch()
        command = step.command(is_on_gpu, document)
        outcome, status = run_step(command, limit, log) if limit >= _LEAST_SECONDS else ("left out", None)
        said = log.read_bytes()
        found = {
            "step": step.name,
            "outcome": outcome,
            "exit_status": status,
            "seconds": round(monotonic() - start, 1),
            "limit_seconds": round(limit, 1),
            "command": [Path(command[0]).name, *command[1:]],
            "document": _read_document(document),
            "output": said.decode("utf-8", "replace").splitlines()[-_TAIL_LINES:],
        }
    return found, said


def summary(found: Document) -> str:
    """A line for each step, and where the results are."""
    lines = [f"{one['step']:<10} {one['outcome']:<10} {one['seconds']:>6.1f} s" for one in found["steps"]]
    wrong = [one["step"] for one in found["steps"] if one["outcome"] != "passed"]
    verdict = f"NOT OK: {', '.join(wrong)}" if wrong else f"OK: {len(lines)} steps"
    return "\n".join([found["device"], *lines, verdict, found["file"]])


def _machine(is_on_gpu: bool) -> Document:
    import record
    import torch

    about = {"device": "cpu", **record.machine()}
    if is_on_gpu:
        size, (major, minor) = torch.cuda.get_device_properties(0).total_memory, torch.cuda.get_device_capability(0)
        about |= {"device": torch.cuda.get_device_name(0), "cuda": torch.version.cuda}
        about |= {"memory_gb": round(size / 1e9, 1), "capability": f"{major}.{minor}"}
        with suppress(metadata.PackageNotFoundError):
            about["triton"] = metadata.version("triton")
    return about


def _stop(message: str) -> None:
    print(message, file=sys.stderr)
    sys.exit(2)


def main() -> None:
    """Run the steps and print a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="run every step shortened, without a GPU")
    parser.add_argument("--steps", nargs="+", choices=[step.name for step in STEPS], help="default: all")
    parser.add_argument("--out", type=Path, help="folder of the results; default: $OUT, else benchmarks/results")
    parser.add_argument("--seconds", type=float, default=BUDGET_SECONDS, help="for all steps")
    parser.add_argument("--check-packages", action="store_true", help="only say which packages are missing")
    options = parser.parse_args()
    missing = missing_packages()
    if missing:
        _stop(f"missing packages: {', '.join(missing)}; collect wheels with `benchmarks/gpu_day.sh --wheels`")
    if options.check_packages:
        return
    import torch

    if not options.cpu and not torch.cuda.is_available():
        _stop("there is no GPU here: nothing ran; --cpu runs every step shortened")
    folder = options.out or (Path(os.environ["OUT"]) if "OUT" in os.environ else None)
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="gpu_day_")) if options.cpu else ROOT / "benchmarks" / "results"
    folder.mkdir(parents=True, exist_ok=True)
    steps = [step for step in STEPS if options.steps is None or step.name in options.steps]
    found = run_day(steps, not options.cpu, _machine(not options.cpu), folder, options.seconds)
    print(summary(found))
    sys.exit(any(one["outcome"] != "passed" for one in found["steps"]))


if __name__ == "__main__":
    main()
