"""The adaptive depth against none and a fixed k: is speculation ever slower than none, and how near is it to the best?

    python benchmarks/adaptive.py --draft builtin:draft --batch 1
    python benchmarks/adaptive.py --draft builtin:draft --random-weights --batch 8     # a draft that is never right
    python benchmarks/adaptive.py --draft ngram --batch 1

Story prompts are decoded greedily, `--batch` together, by four engines around the same target and draft (where weights
lie in memory makes some per cent), one after the other in an order drawn by chance for each group of prompts. All have
run before; the adaptive one knows nothing before the first group, with `--cold` before any, where all are recreated:
each group then tells what learning from nothing costs in a run of that length. A ratio is plain seconds over the arm's,
prompts included: `total` of all groups, with a bootstrap 95 % interval over groups. `plain_again` is what the same
measurement says of plain decoding against itself: how much of a difference is the machine's noise.
Runs add to `results/adaptive.json`, each replacing an earlier one of the same draft, batch, kind and length; each row
names its own commit and load.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import numpy as np
import record

import specdec_cli
from specdec_cli import Engine, EngineOptions, SamplingParams
from specdec_cli.engine.depth.adaptive import Adaptive
from specdec_cli.engine.garbage import leave_alone
from specdec_cli.engine.loading import LoadSettings, ModelSettings
from specdec_cli.events import Event, Stepped
from specdec_cli.measure.stats import ratio_of_totals

PROMPTS = Path(specdec_cli.__file__).parent / "measure" / "workload" / "prompts" / "stories.jsonl"
ARMS = ("none", "fixed", "adaptive", "plain_again")


def engines(draft: str, random_weights: bool, k: int, batch: int) -> dict[str, Engine]:
    """The arms, around the same models: never two of them have work at one time."""
    settings = LoadSettings(draft=ModelSettings(load_format="dummy" if random_weights else "auto"))
    # The adaptive one may draft deeper than the fixed one: to choose is its work.
    options = {
        "none": EngineOptions(max_num_seqs=batch, num_speculative_tokens=0),
        "fixed": EngineOptions(max_num_seqs=batch, num_speculative_tokens=k),
        "adaptive": EngineOptions(max_num_seqs=batch, num_speculative_tokens=k + 3, depth_policy="adaptive"),
        "plain_again": EngineOptions(max_num_seqs=batch, num_speculative_tokens=0),
    }
    # Blocks for the deepest of them.
    loaded = Engine.load("builtin:target", draft, options=options["adaptive"], settings=settings, max_model_len=512)
    return {name: as_new(loaded, own) for name, own in options.items()}


def as_new(engine: Engine, options: EngineOptions) -> Engine:
    """An engine of the same models that learned nothing yet."""
    return Engine(engine.target, engine.drafter, engine.tokenizer, options, engine.eos_token_ids)


@dataclass
class Run:
    """Times and tokens of one engine's decoding of a group."""

    seconds: float = 0.0
    texts: dict[int, list[int]] = field(default_factory=dict)
    num_drafted: int = 0
    num_steps: int = 0  # of each sequence

    def add(self, events: list[Event]) -> None:
        """Take in what a step gave."""
        for event in events:
            for one in event.emitted if isinstance(event, Stepped) else ():
                self.texts.setdefault(one.sequence_id, []).extend(one.tokens)
                self.num_drafted += one.num_drafted
                self.num_steps += not one.from_prefill


def in_turn(
    arms: dict[str, Engine], prompts: list[str], params: SamplingParams, chance: random.Random
) -> dict[str, Run]:
    """Decode the prompts with every engine, in an order drawn by chance."""
    runs = {name: Run() for name in arms}
    for name in chance.sample(list(arms), len(arms)):
        engine, events, begin = arms[name], [], perf_counter()
        for prompt in prompts:
            engine.add(prompt, params)
        while engine.has_work:
            events += engine.step()
        runs[name].seconds = perf_counter() - begin
        runs[name].add(events)
    return runs


def main() -> None:
    """Measure one draft at one batch size and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", default="builtin:draft")
    parser.add_argument("--random-weights", action="store_true", help="the draft's shape without what it learned")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--groups", type=int, default=36, help="of prompts; there are 36 prompts, then the first again")
    parser.add_argument("--cold", action="store_true", help="learn again for each group")
    options = parser.parse_args()
    before = record.machine()
    arms = engines(options.draft, options.random_weights, options.k, options.batch)
    prompts = [json.loads(line)["prompt"] for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    params = SamplingParams(max_new_tokens=options.tokens)
    for arm in arms.values():
        arm.generate(prompts[: options.batch], params)
    arms["adaptive"] = as_new(arms["adaptive"], arms["adaptive"].options)
    leave_alone()
    runs: list[dict[str, Run]] = []
    policies: list[Adaptive] = []
    chance = random.Random(0)
    for group in range(options.groups):
        own = [prompts[(group * options.batch + i) % len(prompts)] for i in range(options.batch)]
        if options.cold:
            arms = {name: as_new(arm, arm.options) for name, arm in arms.items()}
        policy = arms["adaptive"].policy
        assert isinstance(policy, Adaptive), "the arm is adaptive"
        if policy not in policies:
            policies.append(policy)
        runs.append(in_turn(arms, own, params, chance))
    accounts = [policy.account for policy in policies]
    share = sum(account.exploring_seconds for account in accounts) / sum(account.seconds for account in accounts)
    plain = np.array([run["none"].seconds for run in runs])
    row = {
        "draft": options.draft + (" with random weights" if options.random_weights else ""),
        "batch": options.batch,
        "cold": options.cold,
        "fixed_k": options.k,
        "groups": options.groups,
        "tokens": options.tokens,
        "plain_seconds": round(float(plain.sum()), 3),
        "mismatches": sum(
            list(run[name].texts.values()) != list(run["none"].texts.values()) for run in runs for name in ARMS
        ),
        "exploring": [sum(account.num_exploring for account in accounts), round(share, 4)],
        "measured_on": record.brief(before),
    }
    for name in ARMS[1:]:
        total = ratio_of_totals(plain, np.array([run[name].seconds for run in runs]))
        row[name] = {
            "total": round(total.median, 3),
            "ci95": [round(end, 3) for end in total.ci95 or ()],
            "drafted_per_step": round(
                sum(run[name].num_drafted for run in runs) / sum(run[name].num_steps for run in runs), 2
            ),
        }
    print(json.dumps(row, indent=1))
    path = record.RESULTS / "adaptive.json"
    kept = json.loads(path.read_text(encoding="utf-8"))["results"] if path.exists() else []
    same = ("draft", "batch", "cold", "tokens", "fixed_k")
    kept = [one for one in kept if any(one.get(key) != row[key] for key in same)]
    record.save(
        "adaptive",
        before,
        sorted([*kept, row], key=lambda one: [one[key] for key in ("draft", "cold", "tokens", "batch")]),
    )


if __name__ == "__main__":
    main()
