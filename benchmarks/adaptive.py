"""The adaptive depth against none and a fixed k: is speculation ever slower than none, and how near is it to the best?

    python benchmarks/adaptive.py                            # all rows: 7 minutes on two cores
    python benchmarks/adaptive.py --only cold --only ngram   # the rows whose names contain a word
    python benchmarks/adaptive.py --list

Story prompts are decoded greedily, `batch` together, by four engines around the same target and draft (where weights
lie in memory makes some per cent), one after the other in an order drawn by chance for each group of prompts. All have
run before; the adaptive one knows nothing before the first group, in `cold` rows before any, where all are recreated:
each group then tells what learning from nothing costs in a run of that length. A ratio is plain seconds over the arm's,
prompts included: `total` of all groups, with a bootstrap 95 % interval over groups. `plain_again` is what the same
measurement says of plain decoding against itself: how much of a difference is the machine's noise.
A draft with random weights is never right. Rows add to `results/adaptive.json`, each replacing an earlier one of the
same draft, batch, kind and length; each names its own commit and load.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

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
FIXED_K = 3
COLD = ((1, 150, 32), (1, 42, 128), (16, 10, 128))
"""Batch, groups and tokens of the rows in which every group meets a new engine."""


@dataclass(frozen=True)
class Case:
    """A row of the table; groups of prompts are as many as take about eight seconds without a draft."""

    draft: str
    batch: int
    groups: int
    tokens: int = 96
    is_cold: bool = False
    has_random_weights: bool = False

    @property
    def draft_name(self) -> str:
        """The draft, and that it learned nothing."""
        return self.draft + (" with random weights" if self.has_random_weights else "")

    @property
    def name(self) -> str:
        """Name on the command line."""
        return f"{self.draft_name}, batch {self.batch}, {self.tokens} tokens{', cold' if self.is_cold else ''}"


CASES = [
    *(Case("builtin:draft", batch, groups) for batch, groups in ((1, 60), (4, 36), (8, 26), (16, 14))),
    *(Case("builtin:draft", batch, groups, tokens, True) for batch, groups, tokens in COLD),
    *(Case("builtin:draft", batch, groups, has_random_weights=True) for batch, groups in ((1, 60), (4, 36), (16, 14))),
    *(Case("builtin:draft", batch, groups, tokens, True, True) for batch, groups, tokens in COLD),
    *(Case("ngram", batch, groups) for batch, groups in ((1, 60), (16, 14))),
]


def engines(case: Case) -> dict[str, Engine]:
    """The arms, around the same models: never two of them have work at one time."""
    settings = LoadSettings(draft=ModelSettings(load_format="dummy" if case.has_random_weights else "auto"))
    batch, k = case.batch, FIXED_K
    # The adaptive one may draft deeper than the fixed one: to choose is its work.
    options = {
        "none": EngineOptions(max_num_seqs=batch, num_speculative_tokens=0),
        "fixed": EngineOptions(max_num_seqs=batch, num_speculative_tokens=k),
        "adaptive": EngineOptions(max_num_seqs=batch, num_speculative_tokens=k + 3, depth_policy="adaptive"),
        "plain_again": EngineOptions(max_num_seqs=batch, num_speculative_tokens=0),
    }
    # Blocks for the deepest of them.
    loaded = Engine.load(
        "builtin:target", case.draft, options=options["adaptive"], settings=settings, max_model_len=512
    )
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


def measure(case: Case, before: dict[str, Any]) -> dict[str, object]:
    """Measure a row on a machine that was like that before."""
    arms = engines(case)
    prompts = [json.loads(line)["prompt"] for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    params = SamplingParams(max_new_tokens=case.tokens)
    for arm in arms.values():
        arm.generate(prompts[: case.batch], params)
    arms["adaptive"] = as_new(arms["adaptive"], arms["adaptive"].options)
    leave_alone()
    runs: list[dict[str, Run]] = []
    policies: list[Adaptive] = []
    chance = random.Random(0)
    for group in range(case.groups):
        own = [prompts[(group * case.batch + i) % len(prompts)] for i in range(case.batch)]
        if case.is_cold:
            arms = {name: as_new(arm, arm.options) for name, arm in arms.items()}
        policy = arms["adaptive"].policy
        assert isinstance(policy, Adaptive), "the arm is adaptive"
        if policy not in policies:
            policies.append(policy)
        runs.append(in_turn(arms, own, params, chance))
    accounts = [policy.account for policy in policies]
    share = sum(account.exploring_seconds for account in accounts) / sum(account.seconds for account in accounts)
    plain = np.array([run["none"].seconds for run in runs])
    row: dict[str, object] = {
        "draft": case.draft_name,
        "batch": case.batch,
        "cold": case.is_cold,
        "fixed_k": FIXED_K,
        "groups": case.groups,
        "tokens": case.tokens,
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
    return row


def main() -> None:
    """Measure the rows that are asked for and keep each as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="WORD", help="rows whose names contain it")
    parser.add_argument("--list", action="store_true", help="print the rows' names and end")
    options = parser.parse_args()
    cases = [case for case in CASES if options.only is None or any(word in case.name for word in options.only)]
    if not cases:
        parser.error("no row's name contains that; see --list")
    for case in cases:
        print(case.name)
        if not options.list:
            before = record.machine()
            keep(measure(case, before), before)


def keep(row: dict[str, object], before: dict[str, Any]) -> None:
    """Print a row and replace the earlier one of its kind in the results."""
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
