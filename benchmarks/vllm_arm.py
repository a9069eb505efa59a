"""An installed vLLM as an arm: `bench` and `compare-drafts` on the built-in pair, its own log, and several devices.

    python benchmarks/vllm_arm.py --engine-command /opt/vllm/bin/vllm --engine-args='--enforce-eager' -- --num-prompts 8
    python benchmarks/vllm_arm.py --embedded /tmp/embedded --only 'embedded pair, sweep-k'
    python benchmarks/vllm_arm.py --stories bitstories-3M stories260K-wide --only 'stories pair, serve'

The counts of `bench` are those of vLLM's answers; beside them stand the sums of the lines that vLLM logs itself.
Options behind `--` go to `bench` and `compare-drafts`. A part that fails keeps its sentence.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import sleep
from typing import Any

import record
from engine_front import front

from specdec_cli.cli.other_engine import OtherEngine
from specdec_cli.cli.screen import open_screen
from specdec_cli.cli.shared import Shared
from specdec_cli.engine.driver import never
from specdec_cli.measure.elsewhere.server_arm import ServerArm, requests_of
from specdec_cli.measure.endpoint.server_counts import ServerCounts
from specdec_cli.measure.imported.logs import read_log
from specdec_cli.measure.workload.workload import read_rows

_LOGGED_SECONDS = 1  # between two of vLLM's lines
_NUM_PROMPTS = 4


def specdec(words: list[str]) -> dict[str, Any]:
    """One command's document, or the sentence with which it failed."""
    command = [sys.executable, "-m", "specdec_cli", *words, "--json", "--quiet"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        return {"exit_code": run.returncode, "error": run.stderr.strip().splitlines()[:1]}
    return {"exit_code": 0, "document": json.loads(run.stdout)}


def counted(given: argparse.Namespace, *more: str) -> dict[str, Any]:
    """The counts of some answers by themselves and by the lines that vLLM logs; `more` are keys of the recipe."""
    sets = ("engine.name=vllm", "target.dtype=float32", "sampling.max_new_tokens=48", *more)
    command = f"env VLLM_LOG_STATS_INTERVAL={_LOGGED_SECONDS} {given.engine_command}"
    shared = Shared(sets=sets, takes_engine=True, engine_command=command, engine_args=given.engine_args)
    engine = OtherEngine.of(shared.resolve(), shared)
    process = engine.process(open_screen(is_quiet=True, streams_text=False))
    arm = ServerArm("vLLM", process, engine.resolved.recipe.sampling, drafts=True)
    counts = ServerCounts()
    try:
        arm.start()
        rows = read_rows("builtin:mini", None, _NUM_PROMPTS).rows
        for request in requests_of(rows, engine.resolved.recipe).requests:
            run = arm.run([request], never)
            assert run is not None, "nothing stops it"
            counts.add_run(run.counters or {}, sum(run.lengths) - 1)
        sleep(3 * _LOGGED_SECONDS)  # for its last line
    finally:
        arm.stop()
    logged = next(iter(read_log(dict(enumerate(process.log_text.split("\n"))))[0]), None)
    return {"version": arm.version, "metrics": counts.as_dict(), "log": None if logged is None else logged.counts}


def compared(target: Path, drafts: list[str], k: int, engine: list[str], more: list[str]) -> dict[str, Any]:
    """`compare-drafts`."""
    named = [word for draft in drafts for word in ("-d", draft)]
    sets = ["--set", f"speculation.num_speculative_tokens={k}"]
    return specdec(["compare-drafts", *engine, "-t", str(target), *named, *sets, *more])


def pair_parts(
    name: str, target: Path, drafts: list[Path], engine: list[str], given: argparse.Namespace
) -> dict[str, Callable[[], dict[str, Any]]]:
    """On a pair: counts, `bench`, `sweep-k`, `compare-drafts` with `ngram` beside the drafts, the server in front."""
    draft = drafts[0]
    few = ["--dataset", "builtin:mini", "--num-prompts", "8", "--max-new-tokens", "48", "--ignore-eos"]
    dtype = engine[engine.index("--dtype") + 1]
    sets = (f"target.model={target}", f"draft.model={draft}", f"target.dtype={dtype}")
    pair = [*engine, "-t", str(target), "-d", str(draft)]
    more = ["--dataset", "builtin:stories", "--num-prompts", "24", "--max-new-tokens", "96", "--ignore-eos"]
    sweep = ["sweep-k", *pair, "--k-max", "6"]
    return {
        f"{name}, counters": lambda: counted(given, *sets),
        f"{name}, bench": lambda: specdec(["bench", *pair, *few]),
        f"{name}, sweep-k": lambda: specdec([*sweep, *few]),
        f"{name}, sweep-k on stories": lambda: specdec([*sweep, *more]),
        f"{name}, sweep-k on stories again": lambda: specdec([*sweep, *more]),
        f"{name}, compare-drafts": lambda: compared(target, [*map(str, drafts), "ngram"], 4, engine, few),
        f"{name}, serve": lambda: front([*pair, "-k", "4"]),
    }


def embedded(folder: Path, engine: list[str]) -> dict[str, Callable[[], dict[str, Any]]]:
    """The embedded pair of 356 M parameters in two processes, which can share its heads."""
    pair = [*engine, "-t", str(folder / "target"), "-d", str(folder / "draft_n0.02")]
    one = ["generate", *pair, "-n", "16", "--ignore-eos", "Once upon a time"]
    two = [*one, "--tensor-parallel-size", "2"]
    return {
        "embedded pair, tensor-parallel-size 2": lambda: specdec(two),
        "embedded pair, draft in one process": lambda: specdec([*two, "--speculative-draft-tensor-parallel-size", "1"]),
    }


def main() -> None:
    """Run the parts and keep what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine-command", default="vllm")
    parser.add_argument("--engine-args", default="")
    parser.add_argument("--embedded", type=Path, help="folder of the pair that embedded_pair.py makes")
    parser.add_argument("--stories", type=Path, nargs=2, metavar=("TARGET", "DRAFT"), help="another pair, in float32")
    parser.add_argument("--only", nargs="*", default=None, help="parts; the file keeps the others")
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    given, more = parser.parse_args(words[:end]), words[end + 1 :]
    before = record.machine()
    installed = ["--engine", "vllm", "--engine-command", given.engine_command, f"--engine-args={given.engine_args}"]
    engine = [*installed, "--dtype", "float32"]
    one = ["generate", *engine, "-n", "16", "Once upon a time"]
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "counters": lambda: counted(given),
        "bench": lambda: specdec(["bench", *engine, *more]),
        "tensor-parallel-size 2": lambda: specdec([*one, "--tensor-parallel-size", "2"]),
        "ray": lambda: specdec([*one, "--distributed-executor-backend", "ray"]),
        "compare-drafts": lambda: specdec(["compare-drafts", *engine, "-d", "builtin:draft", "-d", "ngram", *more]),
    }
    if given.embedded is not None:
        of_pair = [*installed, "--dtype", "bfloat16"]
        parts |= embedded(given.embedded, of_pair)
        drafts = [given.embedded / name for name in ("draft_n0.02", "draft_n0.06")]
        parts |= pair_parts("embedded pair", given.embedded / "target", drafts, of_pair, given)
    if given.stories is not None:
        target, draft = given.stories
        parts |= pair_parts("stories pair", target, [draft], engine, given)
    path = record.RESULTS / "vllm_arm.json"
    results: dict[str, Any] = json.loads(path.read_text())["results"] if given.only and path.exists() else {}
    results["command"] = shlex.join(["python", "benchmarks/vllm_arm.py", *words])
    for name, part in parts.items():
        if given.only is None or name in given.only:
            results[name] = part()
            print(name, record.save("vllm_arm", before, results), flush=True)


if __name__ == "__main__":
    main()
