"""When does a tree pay? Chains and trees of the same number of drafted nodes, in turn, on one engine each.

    python benchmarks/trees.py [--target builtin:target] [--draft builtin:draft] [--prompts 8] [--tokens 96]

Each prompt is decoded plain and by every arm, once in one order and once in the other, greedy and at temperature 1.
Greedy texts must be equal. Speed-ups are medians over prompts of plain seconds per token over an
arm's, with bootstrap 95 % intervals; the acceptance length is tokens per verification over all prompts.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import record

import specdec_cli
from specdec_cli.engine.engine import Engine
from specdec_cli.engine.loading import LoadSettings, ModelSettings
from specdec_cli.measure.stats import bootstrap_median
from specdec_cli.sampling.params import SamplingParams

PROMPTS = Path(specdec_cli.__file__).parent / "measure" / "workload" / "prompts" / "stories.jsonl"
ARMS: dict[str, dict[str, Any]] = {
    "chain of 5": {"num_speculative_tokens": 5},
    "tree 2,1,1,1 (8 nodes)": {"tree": "2,1,1,1"},
    "tree 3,2 (9 nodes)": {"tree": "3,2"},
    "chain of 8": {"num_speculative_tokens": 8},
    "tree 2,2,1 (10 nodes)": {"tree": "2,2,1"},
    "dynamic tree of 8 nodes, depth 5": {"tree": "dynamic:8", "num_speculative_tokens": 5},
    "dynamic tree of 16 nodes, depth 6": {"tree": "dynamic:16", "num_speculative_tokens": 6},
}


def decode(engine: Engine, prompt: str, params: SamplingParams) -> tuple[float, Any]:
    """Seconds per token of a prompt's decoding, and its counts."""
    output = engine.generate(prompt, params)[0]
    assert output.timing.decode_s is not None, "an output has several tokens"
    return output.timing.decode_s / max(len(output.token_ids) - 1, 1), output


def compare(engines: dict[str, Engine], prompts: list[str], params: SamplingParams) -> dict[str, Any]:
    """Every arm beside plain decoding."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    counts: dict[str, list[Any]] = {name: [] for name in engines}
    for prompt in prompts:
        each: dict[str, list[float]] = {name: [] for name in engines}
        texts = {}
        for name in (*engines, *reversed(engines)):
            its, output = decode(engines[name], prompt, params)
            each[name].append(its)
            texts[name] = output.token_ids
            counts[name].append(output.speculative)
        if params.temperature == 0:
            assert all(text == texts["plain"] for text in texts.values()), "greedy texts are equal"
        for name, values in each.items():
            seconds[name].append(float(np.mean(values)))
    found = {}
    for name in engines:
        if name == "plain":
            continue
        ratios = np.array(seconds["plain"]) / np.array(seconds[name])
        interval = bootstrap_median(ratios).ci95
        steps = sum(one.num_drafts for one in counts[name])
        found[name] = {
            "speed-up": {"median": round(median(ratios), 3), "ci95": interval and [round(end, 3) for end in interval]},
            "acceptance length": round(1 + sum(one.num_accepted_tokens for one in counts[name]) / steps, 3),
        }
    return found


def main() -> None:
    """Measure greedy and at temperature 1, and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="builtin:target")
    parser.add_argument("--draft", default="builtin:draft")
    parser.add_argument("--quantize", default="int8", help="of the draft")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--name", default="trees_builtin", help="of the result's file")
    options = parser.parse_args()
    before = record.machine()
    settings = LoadSettings(draft=ModelSettings(quantize=options.quantize))
    engines = {"plain": Engine.load(options.target, None)}
    for name, wishes in ARMS.items():
        engines[name] = Engine.load(options.target, options.draft, settings=settings, max_num_seqs=1, **wishes)
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()[: options.prompts]
    prompts = [json.loads(line)["prompt"] for line in lines]
    results = {}
    for words, temperature in (("greedy", 0.0), ("temperature 1", 1.0)):
        params = SamplingParams(max_new_tokens=options.tokens, temperature=temperature)
        results[words] = compare(engines, prompts, params)
        print(words, json.dumps(results[words], indent=1), flush=True)
    print(record.save(options.name, before, results))


if __name__ == "__main__":
    main()
