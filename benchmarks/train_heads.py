"""Drafts trained from a script: three for the built-in target and one for another model, beside the drafts they rival.

    python benchmarks/train_heads.py RUN FOLDER [--steps N] [--resume] [--k 1 2 3 4 5]
    python benchmarks/train_heads.py eagle3-bitstories FOLDER --checkpoints DIR   # has bitstories-3M and stories260K
    python benchmarks/train_heads.py RUN FOLDER --measure                         # what a run has written so far

RUN is one of eagle3, eagle3-bitstories, dflash and distill, and trains in FOLDER/RUN for a fixed number of steps: 10 to
40 minutes on one free core. --resume continues one that was stopped. Prompts come from story_prompts.py; the target
answers them at temperature 0.5. The draft and its rival then decode the 36 prompts of builtin:stories greedily, which
neither was trained on. The result keeps the acceptance at every k and the run's curve, each run by its name.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import record
import story_prompts

from specdec_cli import SamplingParams
from specdec_cli.engine.engine import Engine

NUM_PROMPTS, NUM_HELD_OUT, NUM_TOKENS, BATCH_SIZE = 3072, 24, 128, 8


@dataclass(frozen=True)
class Run:
    """A training run.

    Args:
        target: name, or folder below that of --checkpoints.
        rival: the draft that it competes with, as `target`.
        steps: the budget.
        options: of `specdec train-draft`.
    """

    target: str
    rival: str
    steps: int
    options: str


RUNS = {
    "eagle3": Run("builtin:target", "builtin:draft", 3048, "--method eagle3 --depth 4 --intermediate-size 1280"),
    "eagle3-bitstories": Run(
        "bitstories-3M", "stories260K", 1500, "--method eagle3 --depth 4 --intermediate-size 768 --num-prompts 1536"
    ),
    "dflash": Run(
        "builtin:target",
        "builtin:draft",
        1000,
        "--method dflash --depth 5 --num-layers 2 --intermediate-size 640 --num-anchors 32 --layers 1-6-10",
    ),
    "distill": Run(
        "builtin:target",
        "builtin:draft",
        1200,
        "--method distill --depth 4 --num-layers 3 --intermediate-size 432 --learning-rate 0.001",
    ),
}


def train(run: Run, folder: Path, is_resumed: bool) -> None:
    """Train, or go on with, a draft in its folder."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    prompts = folder.parent / "prompts.jsonl"
    lines = [json.dumps({"prompt": prompt}) + "\n" for prompt in story_prompts.prompts(NUM_PROMPTS)]
    prompts.write_text("".join(lines), encoding="utf-8")
    words = [sys.executable, "-m", "specdec_cli", "train-draft", "-t", run.target, "--output", str(folder)]
    words += ["--data", str(prompts), "--num-held-out", str(NUM_HELD_OUT), "-n", str(NUM_TOKENS)]
    words += ["--temperature", "0.5", "--batch-size", str(BATCH_SIZE), "--max-steps", str(run.steps)]
    words += ["--cache-features", "--plot", str(folder.with_suffix(".svg")), *run.options.split()]
    subprocess.run([*words, *(["--resume"] if is_resumed else [])], check=True)


def acceptance(target: str, draft: str, ks: list[int]) -> list[dict[str, Any]]:
    """Greedy acceptance of a draft on the stories, for every k."""
    engine = Engine.load(target, draft)
    rows = story_prompts.HELD_OUT.read_text(encoding="utf-8").splitlines()
    prompts, found = [json.loads(row)["prompt"] for row in rows], []
    for k in ks:
        counts = [one.speculative for one in engine.generate(prompts, SamplingParams(max_new_tokens=NUM_TOKENS), k)]
        steps, accepted = sum(one.num_drafts for one in counts), sum(one.num_accepted_tokens for one in counts)
        found.append({"k": k, "acceptance_length": round(1 + accepted / steps, 3)})
        print(json.dumps({"draft": draft, **found[-1]}))
    return found


def curve(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Acceptance on the run's own held-out prompts, with the mean loss of the steps since the measurement before."""
    found, losses = [], []
    for row in log:
        if row["event"] == "step":
            losses.append(row["loss"])
        elif row["event"] == "evaluation":
            kept = {key: row[key] for key in ("step", "k", "acceptance_length", "acceptance_by_depth")}
            found.append({**kept, "mean_loss": round(fmean(losses), 3)})
            losses = []
    return found


def result(run: Run, folder: Path, ks: list[int]) -> dict[str, Any]:
    """Settings, speed, curve, and acceptance of draft and rival."""
    log = [json.loads(line) for line in (folder / "training" / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [row for row in log if row["event"] == "step"]
    return {
        "options": run.options,
        "batch_size": BATCH_SIZE,
        "steps_of_budget": run.steps,
        "num_steps": len(steps),
        "num_tokens": sum(row["num_tokens"] for row in steps),
        "seconds_of_steps": round(sum(row["seconds"] for row in steps)),
        "tokens_per_second": round(median(row["num_tokens"] / row["seconds"] for row in steps)),
        "draft_bytes": (folder / "model.safetensors").stat().st_size,
        "curve": curve(log),
        "draft": acceptance(run.target, str(folder), ks),
        "rival": {"name": Path(run.rival).name, "rows": acceptance(run.target, run.rival, ks)},
    }


def keep(name: str, before: dict[str, Any], found: dict[str, Any]) -> Path:
    """Put a run's result beside those of the others."""
    path = record.RESULTS / "train_heads.json"
    kept = json.loads(path.read_text(encoding="utf-8"))["results"] if path.exists() else {}
    return record.save("train_heads", before, {**kept, name: {"machine": record.brief(before), **found}})


def main() -> None:
    """Train, measure and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", choices=RUNS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, help="another budget")
    parser.add_argument("--checkpoints", type=Path, help="folder with bitstories-3M and stories260K")
    parser.add_argument("--k", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--measure", action="store_true", help="train nothing")
    options = parser.parse_args()
    run, folder = RUNS[options.run], options.folder / options.run
    run = replace(run, steps=options.steps or run.steps)
    if not run.target.startswith("builtin:"):
        if options.checkpoints is None:
            parser.error(f"{options.run} needs --checkpoints")
        run = replace(run, target=str(options.checkpoints / run.target), rival=str(options.checkpoints / run.rival))
    before = record.machine()
    if not options.measure:
        train(run, folder, options.resume)
    print(keep(options.run, before, result(run, folder, options.k)))


if __name__ == "__main__":
    main()
