"""An EAGLE-3 head for the built-in target, trained from nothing, against the draft model that the package ships.

    python benchmarks/train_heads.py FOLDER [--num-prompts 3072] [--epochs 5] [--intermediate-size 640] [--k 1 2 3 4 5]
    python benchmarks/train_heads.py --head HEAD     # one that train-draft has written

Prompts come from story_prompts.py; the target answers them at temperature 0.5. Both drafts then decode the 36 prompts
of builtin:stories greedily, which neither was trained on. The result has the acceptance at every k and the run's curve.
A run that was stopped continues; the training takes about half an hour on one free core.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import record
import story_prompts

from specdec_cli import SamplingParams
from specdec_cli.engine.engine import Engine

NUM_TOKENS = 128


def train(options: argparse.Namespace) -> Path:
    """Train, or go on with, the head; its folder."""
    folder: Path = options.folder
    prompts, head = folder / "prompts.jsonl", folder / "eagle3"
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"prompt": prompt}) + "\n" for prompt in story_prompts.prompts(options.num_prompts)]
    prompts.write_text("".join(lines), encoding="utf-8")
    words = [sys.executable, "-m", "specdec_cli", "train-draft", "--method", "eagle3", "--data", str(prompts)]
    words += ["--output", str(head), "-n", str(NUM_TOKENS), "--temperature", "0.5", "--depth", "4"]
    words += ["--epochs", str(options.epochs), "--intermediate-size", str(options.intermediate_size)]
    words += ["--num-held-out", "24", "--cache-features"]
    subprocess.run([*words, *(["--resume"] if (head / "training").exists() else [])], check=True)
    return head


def acceptance(draft: str, ks: list[int]) -> list[dict[str, Any]]:
    """Greedy acceptance of a draft on the held-out stories, for every k."""
    engine = Engine.load("builtin:target", draft)
    rows = story_prompts.HELD_OUT.read_text(encoding="utf-8").splitlines()
    prompts, found = [json.loads(row)["prompt"] for row in rows], []
    for k in ks:
        counts = [one.speculative for one in engine.generate(prompts, SamplingParams(max_new_tokens=NUM_TOKENS), k)]
        steps, accepted = sum(one.num_drafts for one in counts), sum(one.num_accepted_tokens for one in counts)
        found.append({"draft": draft, "k": k, "acceptance_length": round(1 + accepted / steps, 3)})
        print(json.dumps(found[-1]))
    return found


def main() -> None:
    """Train, measure and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--head", type=Path, help="folder of a head to measure instead of training one")
    parser.add_argument("--num-prompts", type=int, default=3072)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--intermediate-size", type=int, default=640)
    parser.add_argument("--k", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    options = parser.parse_args()
    if (options.folder is None) == (options.head is None):
        parser.error("name a folder to train in, or a head")
    before = record.machine()
    head = options.head or train(options)
    log = [json.loads(line) for line in (head / "training" / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    curve = [row for row in log if row["event"] == "evaluation"]
    rows = [row for draft in (str(head), "builtin:draft") for row in acceptance(draft, options.k)]
    plan = json.loads((head / "training" / "plan.json").read_text(encoding="utf-8"))
    losses = [row["loss"] for row in log if row["event"] == "step"]
    means = {end: round(sum(losses[end - 150 : end]) / 150, 3) for end in range(150, len(losses) + 1, 150)}
    rate = median(row["num_tokens"] / row["seconds"] for row in log if row["event"] == "step")
    found = {
        "plan": plan,
        "num_steps": len(losses),
        "tokens_per_second": round(rate),
        "rows": rows,
        "curve": curve,
        "mean_loss_of_150_steps": means,
    }
    print(record.save("train_heads", before, found))


if __name__ == "__main__":
    main()
