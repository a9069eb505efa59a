"""The adaptive depth against none and a fixed k: is speculation ever slower than none, and how near is it to the best?

    python benchmarks/adaptive.py --draft builtin:draft --batch 1
    python benchmarks/adaptive.py --draft builtin:draft --random-weights --batch 8     # a draft that is never right
    python benchmarks/adaptive.py --draft ngram --batch 1

Story prompts are decoded greedily, `--batch` together, by three engines around one target and one draft, each group of
prompts there and back (none, fixed, adaptive, adaptive, fixed, none), beginning with another arm each time; all arms
have run before. The adaptive one knows nothing before the first group, with `--cold` before any: each group then tells
what learning from nothing costs in a run of that length. A ratio is plain seconds over the arm's, prompts included:
`total` of all runs, `median` of the groups with a bootstrap 95 % interval. `plain_again` is what the same measurement
says of plain decoding against itself, in a fourth arm: how much of a difference is the machine's noise.
Runs add to `results/adaptive.json`, each replacing an earlier one of the same draft, batch and kind.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import record

import specdec_cli
from specdec_cli import Engine, SamplingParams
from specdec_cli.engine.build import LoadSettings, ModelSettings, load_engine
from specdec_cli.measure.stats import bootstrap_median

PROMPTS = Path(specdec_cli.__file__).parent / "measure" / "prompts" / "stories.jsonl"
ARMS = ("none", "fixed", "adaptive", "plain_again")


def engines(draft: str, random_weights: bool, k: int, batch: int) -> dict[str, Engine]:
    """The arms: engines of one target, two of them with the draft."""
    settings = LoadSettings(draft=ModelSettings(load_format="dummy" if random_weights else "auto"))
    fixed = load_engine(
        "builtin:target", draft, settings=settings, num_speculative_tokens=k, max_num_seqs=batch, max_model_len=512
    )
    none = alike(fixed, num_speculative_tokens=0)
    return {"none": none, "fixed": fixed, "adaptive": adaptive(fixed), "plain_again": none}


def alike(engine: Engine, **changes: object) -> Engine:
    """An engine around the same models."""
    options = replace(engine.options, **changes)
    return Engine(engine.target, engine.drafter, engine.tokenizer, options, engine.eos_token_ids)


def adaptive(fixed: Engine) -> Engine:
    """One that learned nothing yet. It may draft deeper than the fixed one: to choose is its work."""
    return alike(fixed, depth_policy="adaptive", num_speculative_tokens=fixed.options.num_speculative_tokens + 3)


def interval(values: list[float]) -> list[float]:
    """Bootstrap 95 % interval of the median."""
    return [round(end, 3) for end in bootstrap_median(np.array(values)).ci95 or ()]


def main() -> None:
    """Measure one draft at one batch size and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", default="builtin:draft")
    parser.add_argument("--random-weights", action="store_true", help="the draft's shape without what it learned")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--groups", type=int, default=12, help="of prompts; there are 36 prompts, then the first again")
    parser.add_argument("--cold", action="store_true", help="learn anew for each group")
    options = parser.parse_args()
    before = record.machine()
    arms = engines(options.draft, options.random_weights, options.k, options.batch)
    prompts = [json.loads(line)["prompt"] for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    params = SamplingParams(max_new_tokens=options.tokens)
    for arm in arms.values():
        arm.generate(prompts[: options.batch], params)
    arms["adaptive"] = adaptive(arms["fixed"])
    seconds: dict[str, list[float]] = {name: [] for name in ARMS}
    steps = dict.fromkeys(ARMS, 0)
    drafted = dict.fromkeys(ARMS, 0)
    mismatches, policies = 0, []
    for group in range(options.groups):
        own = [prompts[(group * options.batch + i) % len(prompts)] for i in range(options.batch)]
        if options.cold:
            arms["adaptive"] = adaptive(arms["fixed"])
        if arms["adaptive"].policy not in policies:
            policies.append(arms["adaptive"].policy)
        took, texts = dict.fromkeys(ARMS, 0.0), []
        order = [ARMS[(group + i) % len(ARMS)] for i in range(len(ARMS))]
        for name in (*order, *reversed(order)):
            begin = perf_counter()
            outputs = arms[name].generate(own, params)
            took[name] += perf_counter() - begin
            texts.append([output.token_ids for output in outputs])
            steps[name] += sum(output.speculative.num_steps for output in outputs)
            drafted[name] += sum(output.speculative.num_draft_tokens for output in outputs)
        mismatches += sum(text != texts[0] for text in texts)
        for name in ARMS:
            seconds[name].append(took[name])
    num_exploring = sum(policy.num_exploring for policy in policies)
    share = sum(policy.exploring_seconds for policy in policies) / sum(policy.seconds for policy in policies)
    row = {
        "draft": options.draft + (" with random weights" if options.random_weights else ""),
        "batch": options.batch,
        "cold": options.cold,
        "fixed_k": options.k,
        "groups": options.groups,
        "tokens": options.tokens,
        "plain_seconds": round(sum(seconds["none"]), 3),
        "mismatches": mismatches,
        "exploring": [num_exploring, round(share, 4)],
    }
    for name in ARMS[1:]:
        ratios = [plain / own for plain, own in zip(seconds["none"], seconds[name], strict=True)]
        row[name] = {
            "total": round(sum(seconds["none"]) / sum(seconds[name]), 3),
            "median": round(median(ratios), 3),
            "ci95": interval(ratios),
            "drafted_per_step": round(drafted[name] / steps[name], 2),
        }
    print(json.dumps(row, indent=1))
    path = record.RESULTS / "adaptive.json"
    kept = json.loads(path.read_text(encoding="utf-8"))["results"] if path.exists() else []
    same = ("draft", "batch", "cold")
    kept = [one for one in kept if any(one.get(key) != row[key] for key in same)]
    record.save("adaptive", before, sorted([*kept, row], key=lambda one: (one["draft"], one["cold"], one["batch"])))


if __name__ == "__main__":
    main()
