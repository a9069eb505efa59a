"""The built-in pair on prompts it was not trained on: greedy acceptance and decode speed-up over no draft, by k.

    python benchmarks/builtin_pair.py [--k 1 2 3 4 5] [--tokens 128] [--draft builtin:draft]

Every prompt is decoded alone, at every k in turn, without a draft (A) and with it (B) in the order A B B A; a prompt's
speed-up is the ratio of its decode times (both arms emit the same tokens), reported as the median over prompts with a
bootstrap 95 % interval. Prompts: specdec_cli/measure/workload/prompts/stories.jsonl, written for this project.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import record

import specdec_cli
from specdec_cli import Output, SamplingParams
from specdec_cli.engine.engine import Engine
from specdec_cli.engine.loading import LoadSettings, ModelSettings
from specdec_cli.measure.stats import bootstrap_median

PROMPTS = Path(specdec_cli.__file__).parent / "measure" / "workload" / "prompts" / "stories.jsonl"


def interval(values: list[float]) -> list[float]:
    """Bootstrap 95 % interval of the median."""
    return [round(end, 3) for end in bootstrap_median(np.array(values)).ci95 or ()]


@dataclass
class Row:
    """Times and tokens of one k on the prompts so far."""

    ratios: list[float] = field(default_factory=list)
    plain_rates: list[float] = field(default_factory=list)
    num_drafts: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    mismatches: int = 0

    def add(self, runs: list[Output]) -> None:
        """Take in a prompt, decoded A B B A."""
        plain, draft = (runs[0], runs[3]), (runs[1], runs[2])
        self.mismatches += runs[0].token_ids != runs[1].token_ids
        seconds = [sum(run.timing.decode_s or 0.0 for run in arm) for arm in (plain, draft)]
        self.ratios.append(seconds[0] / seconds[1])
        self.plain_rates.append(plain[0].timing.decode_tokens_per_second or 0.0)
        counts = draft[0].speculative
        self.num_drafts += counts.num_drafts
        self.num_drafted += counts.num_draft_tokens
        self.num_accepted += counts.num_accepted_tokens

    def as_dict(self, k: int) -> dict[str, Any]:
        """The part that is kept."""
        speedup = {"median": round(median(self.ratios), 3), "ci95": interval(self.ratios), "pairs": len(self.ratios)}
        return {
            "k": k,
            "acceptance_rate": round(self.num_accepted / self.num_drafted, 4),
            "acceptance_length": round(1 + self.num_accepted / self.num_drafts, 3),
            "speedup_decode": speedup,
            "plain_tokens_per_second": round(median(self.plain_rates), 1),
            "prompts_with_other_tokens": self.mismatches,
        }


def main() -> None:
    """Measure every k over all prompts and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--k", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--target", default="builtin:target")
    parser.add_argument("--draft", default="builtin:draft")
    parser.add_argument("--draft-quantize", default="none")
    options = parser.parse_args()
    before = record.machine()
    settings = LoadSettings(draft=ModelSettings(quantize=options.draft_quantize))
    engine = Engine.load(options.target, options.draft, settings=settings)
    prompts = [json.loads(line)["prompt"] for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    params = SamplingParams(max_new_tokens=options.tokens)
    engine.generate(prompts[0], params)
    engine.generate(prompts[0], params, 0)
    by_k = {k: Row() for k in options.k}
    for prompt in prompts:
        for k, row in by_k.items():
            row.add([engine.generate(prompt, params, depth)[0] for depth in (0, k, k, 0)])
    rows = [row.as_dict(k) for k, row in by_k.items()]
    for found in rows:
        print(json.dumps(found))
    named = {
        "target": options.target,
        "draft": options.draft,
        "draft_quantize": options.draft_quantize,
        "max_new_tokens": options.tokens,
    }
    print(record.save("builtin_pair", before, {**named, "prompts": len(prompts), "rows": rows}))


if __name__ == "__main__":
    main()
