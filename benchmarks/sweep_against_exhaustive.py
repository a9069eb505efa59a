"""Prediction against measurement for k = 1…8, and what a sweep recommends against an exhaustive one (issue 3, 1 and 2).

    python benchmarks/sweep_against_exhaustive.py --name builtin [--temperature 1] [--num-prompts 24] [--tokens 128]
    python benchmarks/sweep_against_exhaustive.py --name stories --target DIR --draft DIR --prompts FILE
    python benchmarks/sweep_against_exhaustive.py --name suffix --target FILE --draft suffix --prompts FILE --chat

First what `specdec sweep-k` does by default: trace, profile, predict, measure the few candidates. Then every k is
measured, as with `--exhaustive`, but more often. Both are timed: the exhaustive one up to the repeats that the command
makes, with the same trace and profile, as the command makes them too. The loss of the recommendation is read from the
exhaustive measurement alone, prompt by prompt.

A shared machine drifts by more than predictions err, so what is predicted and what is measured run in turn (the
protocol): a short profile of step costs stands between every few groups of the exhaustive measurement, and the
prediction that is compared with it rests on those. `own_profile` is the error of the profile that was taken before.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import record

import specdec_cli
from specdec_cli import Engine, SamplingParams
from specdec_cli.draft_shape import DraftShape
from specdec_cli.engine.prompts import PromptRow
from specdec_cli.measure.bench.passes import against
from specdec_cli.measure.bench.sweep import Sweep, profile_workload
from specdec_cli.measure.predict.cost import Costs, Rounds
from specdec_cli.measure.predict.predict import Prediction
from specdec_cli.measure.predict.traced import Traced, obtain_trace
from specdec_cli.measure.workload.workload import Workload, tokenize

GROUPS_PER_PROFILE = 6
STORIES = Path(specdec_cli.__file__).parent / "measure" / "workload" / "prompts" / "stories.jsonl"


def read_workload(engine: Engine, path: Path, num: int, chat: bool, params: SamplingParams) -> Workload:
    """The first prompts of a file, tokenized."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[:num]]
    rows = [PromptRow(i, line.get("prompt") or line["turns"][0]) for i, line in enumerate(lines)]

    def encode(row: PromptRow) -> list[int]:
        return engine.encode(row.chat() if chat else row.prompt)

    return tokenize(rows, path.name, encode, params, engine.target.max_context)


def middle(profiles: list[Costs]) -> Costs:
    """The median of profiles that were taken at different times."""
    parts = {
        name: np.median([getattr(one, name) for one in profiles], axis=0)
        for name in ("target_seconds", "draft_seconds", "overhead_seconds")
    }
    num, seconds = sum(one.num_repeats for one in profiles), sum(one.seconds for one in profiles)
    rounds = Rounds.joined([one.rounds for one in profiles if one.rounds is not None])
    return replace(profiles[0], **parts, num_repeats=num, seconds=seconds, rounds=rounds)


def measure_every(sweep: Sweep, profiles: list[Costs], engine: Engine, repeats: int) -> float:
    """Measure every k, a short profile between every few groups; seconds of the first `repeats` without profiles."""
    begin, profiling, counted = perf_counter(), 0.0, 0.0
    num_arms, num_groups = 1 + sweep.k_max, len(sweep.workload.requests)
    for at in sweep.run():
        if at.done == repeats * num_groups * num_arms:
            counted = counted or perf_counter() - begin - profiling
        if at.done % (GROUPS_PER_PROFILE * num_arms) == 0 and at.done:
            before = perf_counter()
            profiles.append(profile_workload(engine, sweep.workload, sweep.k_max, 1, seconds=0.01))
            profiling += perf_counter() - before
    return counted


def errors(sweep: Sweep, prediction: Prediction) -> list[dict[str, Any]]:
    """Predicted and measured speed-up of each k."""
    rows = []
    for shape, measured in sweep.measured().items():
        predicted = prediction.rows[shape.k - 1]
        rows.append(
            {
                "k": shape.k,
                "predicted": round(predicted.speedup.median, 4),
                "predicted_ci95": [round(x, 4) for x in predicted.speedup.ci95 or ()],
                "measured": round(measured.speedup.median, 4),
                "measured_ci95": [round(x, 4) for x in measured.speedup.ci95 or ()],
                "error": round(predicted.speedup.median / measured.speedup.median - 1, 4),
                "acceptance_length": round(measured.counts.acceptance_length or 1.0, 3),
                "iid": None if predicted.iid_speedup is None else round(predicted.iid_speedup, 4),
            }
        )
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Median and worst absolute error."""
    absolute = [abs(row["error"]) for row in rows]
    return {"median_absolute_error": round(float(np.median(absolute)), 4), "worst_absolute_error": max(absolute)}


def main() -> None:
    """Sweep twice and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", required=True, help="of the pair, in the result's file name")
    parser.add_argument("--target", default="builtin:target")
    parser.add_argument("--draft", default="builtin:draft")
    parser.add_argument("--prompts", type=Path, default=STORIES)
    parser.add_argument("--chat", action="store_true", help="apply the target's chat template")
    parser.add_argument("--num-prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--k-max", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=1, help="of the sweep")
    parser.add_argument("--exhaustive-repeats", type=int, default=2, help="of the exhaustive sweep that is timed")
    parser.add_argument("--all-repeats", type=int, default=3, help="of the exhaustive measurement altogether")
    options = parser.parse_args()
    before = record.machine()
    engine = Engine.load(options.target, options.draft, num_speculative_tokens=options.k_max)
    params = SamplingParams(max_new_tokens=options.tokens, temperature=options.temperature)
    workload = read_workload(engine, options.prompts, options.num_prompts, options.chat, params)
    begin = perf_counter()
    text = Traced(obtain_trace(engine, workload.requests, "draft", options.k_max), "draft")
    traced = perf_counter()
    costs = profile_workload(engine, workload, options.k_max, 1)
    profiled = perf_counter()
    prediction = text.predict(options.k_max, costs)
    given = {"engine": engine, "workload": workload, "costs": costs, "prediction": prediction, "k_max": options.k_max}
    few = Sweep(**given, repeats=options.repeats)
    few.profile_in_turn(text)
    list(few.run())
    swept = perf_counter()
    every = Sweep(**given, is_exhaustive=True, repeats=options.all_repeats)
    profiles: list[Costs] = []
    measuring = measure_every(every, profiles, engine, options.exhaustive_repeats)
    in_turn = text.predict(options.k_max, middle(profiles))
    rows, own = errors(every, in_turn), errors(every, prediction)
    found, measured = few.recommended(), every.measured()
    best = max(measured.values(), key=lambda one: one.speedup.median)
    pair = against(every.track(DraftShape(found.k)), every.track(best.shape)) if found.k else None
    sweep_seconds, exhaustive_seconds = swept - begin, (profiled - begin) + measuring
    results = {
        **{
            key: Path(value).name if key in ("target", "draft", "prompts") else value
            for key, value in vars(options).items()
        },
        "seconds": {
            "trace": round(traced - begin, 1),
            "profile": round(profiled - traced, 1),
            "sweep": round(sweep_seconds, 1),
            "exhaustive": round(exhaustive_seconds, 1),
            "ratio": round(sweep_seconds / exhaustive_seconds, 3),
        },
        "measured_k": sorted(shape.k for shape in few.shapes),
        "settled_after": few.settled_after,
        "recommended": found.k,
        "verdict": found.verdict,
        "best": best.shape.k,
        "loss_against_best": None if pair is None else round(1 - pair.ratio.median, 4),
        "loss_ci95": None if pair is None else [round(1 - x, 4) for x in reversed(pair.ratio.ci95 or ())],
        **summary(rows),
        "own_profile": summary(own),
        "rows": rows,
    }
    print(json.dumps(results, indent=1))
    print(record.save(f"sweep_{options.name}_t{options.temperature:g}", before, results))


if __name__ == "__main__":
    main()
