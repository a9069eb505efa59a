"""Losses compared on one small DSpark draft of the built-in target, at equal tokens, with the same data and seeds.

    python benchmarks/losses.py FOLDER [--steps N] [--seeds N]

The target answers prompts of story_prompts.py once, at temperature 1. Each loss then trains the draft from the same
random weights on the same batches, once for each seed. The engine decodes the held-out prompts with every draft, at
temperature 1 and greedily. `ce` is left out: it differs from `kl` by a constant, so both have the same gradient. The
result keeps every run, and of each loss the mean over seeds and the difference from `kl`, paired by seed, with its 95 %
interval.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from time import perf_counter
from typing import Any

import record
import story_prompts
import torch

from specdec_cli import SamplingParams
from specdec_cli.engine.engine import Engine
from specdec_cli.recipe.schema import Recipe, Target, Train
from specdec_cli.train.acceptance import measure_acceptance
from specdec_cli.train.events import Evaluated, Trained
from specdec_cli.train.features import CachedFeatures
from specdec_cli.train.folder import TrainingFolder
from specdec_cli.train.processes import Processes
from specdec_cli.train.session import TrainingData, TrainingSession

ARMS = [("kl", "decay"), ("tv", "decay"), ("nla", "decay"), ("hybrid", "decay"), ("ce-tv", "decay")]
ARMS += [("kl", "d-pace"), ("ce-tv", "d-pace")]
NUM_PROMPTS, NUM_HELD_OUT, NUM_TOKENS, DEPTH = 480, 32, 64, 5
HEAD: dict[str, Any] = {
    "method": "dspark",
    "depth": DEPTH,
    "num_layers": 1,
    "intermediate_size": 640,
    "num_anchors": 16,
}
TEMPERATURES = (1.0, 0.0)
STUDENT_T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""The 97.5 % quantile of Student's t by the number of seeds."""


def session(engine: Engine, folder: Path, settings: Train) -> TrainingSession:
    """A session on the built-in target."""
    recipe = Recipe(target=Target(model="builtin:target"), train=settings)
    tokens = [engine.encode(prompt) for prompt in story_prompts.prompts(NUM_PROMPTS + NUM_HELD_OUT)]
    data = TrainingData.of(tokens, engine.target.max_context, NUM_HELD_OUT, 1)
    begun = TrainingFolder(folder)
    begun.begin({"data": data.identity}, "", False, force=True)
    params = SamplingParams(max_new_tokens=NUM_TOKENS, temperature=1.0)
    return TrainingSession(engine, recipe, data, params, begun, Processes("cpu"))


def runs(folder: Path, steps: int, num_seeds: int) -> Iterator[dict[str, Any]]:
    """Every run: its loss, its seed, tokens, and acceptance."""
    engine = Engine.load("builtin:target", None, max_num_seqs=NUM_HELD_OUT)
    usual = Train(**HEAD, layers=(1, 6, 10), num_held_out=NUM_HELD_OUT, max_steps=steps, evaluate_every=steps)
    first = session(engine, folder / "answers", usual.model_copy(update={"cache_features": True}))
    samples = first.answer(lambda *_: None, lambda: False)
    features = first.features(samples)
    assert isinstance(features, CachedFeatures), "as the settings say"
    features.prepare(lambda *_: None, lambda: False)
    for seed in range(num_seeds):
        for loss, weights in ARMS:
            changes = {"loss": loss, "position_weights": weights, "seed": seed}
            path, begin = folder / f"{loss}-{weights}-{seed}", perf_counter()
            its = session(engine, path, usual.model_copy(update=changes))
            events = list(its.start(samples, False, features).run(lambda: False))
            num_tokens = sum(event.num_tokens for event in events if isinstance(event, Trained))
            [own] = [event for event in events if isinstance(event, Evaluated)]
            greedy = measure_acceptance(engine, path, its.data.held_out, replace(its.params, temperature=0.0), DEPTH)
            found = {"loss": loss, "position_weights": weights, "seed": seed, "num_tokens": num_tokens}
            for temperature, counts in zip(TEMPERATURES, (own, greedy), strict=True):
                found[f"acceptance_length_t{temperature:g}"] = round(counts.acceptance_length, 4)
            seconds = {"step_seconds": round(sum(event.seconds for event in events if isinstance(event, Trained)), 1)}
            print(json.dumps({**found, **seconds, "seconds": round(perf_counter() - begin)}), flush=True)
            yield found


def summary(rows: list[dict[str, Any]], temperature: float) -> list[dict[str, Any]]:
    """Of every loss the mean acceptance length and its difference from `kl`, by seed."""
    name = f"acceptance_length_t{temperature:g}"
    lengths: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        lengths.setdefault((row["loss"], row["position_weights"]), []).append(row[name])
    usual, table = lengths["kl", "decay"], []
    for (loss, weights), its in lengths.items():
        gains = [length - other for length, other in zip(its, usual, strict=True)]
        half = STUDENT_T[len(gains)] * stdev(gains) / len(gains) ** 0.5
        table.append(
            {
                "loss": loss,
                "position_weights": weights,
                "acceptance_length": round(fmean(its), 3),
                "difference_from_kl": round(fmean(gains), 3),
                "ci95": [round(fmean(gains) - half, 3), round(fmean(gains) + half, 3)],
            }
        )
    return table


def main() -> None:
    """Train, compare and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3, choices=STUDENT_T)
    options = parser.parse_args()
    torch.set_num_threads(1)
    before = record.machine()
    rows = list(runs(options.folder, options.steps, options.seeds))
    tables = {f"t{temperature:g}": summary(rows, temperature) for temperature in TEMPERATURES}
    about = {**HEAD, "steps": options.steps, "num_prompts": NUM_PROMPTS, "num_held_out": NUM_HELD_OUT}
    print(record.save("losses", before, {"head": about, **tables, "runs": rows}))


if __name__ == "__main__":
    main()
