"""When does a tree pay? Chains and trees of the same number of drafted nodes, in turn, beside one another.

    python benchmarks/trees.py [--target MODEL --draft MODEL --dtype DTYPE --quantize int8|none --name NAME]

Kept as results/NAME.json: `trees_builtin` is the built-in pair, `trees_stories` bitstories-3M with stories260K in its
own precision, `trees_embedded` the pair of `embedded_pair.py` with draft_n0.02 in bfloat16, whose weights are random.

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
from specdec_cli.engine.options import EngineOptions
from specdec_cli.measure.stats import bootstrap_median
from specdec_cli.sampling.params import SamplingParams

PROMPTS = Path(specdec_cli.__file__).parent / "measure" / "workload" / "prompts" / "stories.jsonl"
PLAIN = "no draft"
ARMS: dict[str, dict[str, Any]] = {
    PLAIN: {"num_speculative_tokens": 0},
    "chain of 5": {"num_speculative_tokens": 5},
    "tree 2,1+0,1,1": {"num_speculative_tokens": 4, "tree": "2,1+0,1,1"},
    "chain of 8": {"num_speculative_tokens": 8},
    "tree 2,1,1,1": {"num_speculative_tokens": 4, "tree": "2,1,1,1"},
    "tree dynamic:8, depth 5": {"num_speculative_tokens": 5, "tree": "dynamic:8"},
    "chain of 16": {"num_speculative_tokens": 16},
    "tree 4,1,1,1": {"num_speculative_tokens": 4, "tree": "4,1,1,1"},
    "tree dynamic:16, depth 6": {"num_speculative_tokens": 6, "tree": "dynamic:16"},
}


def decode(engine: Engine, prompt: str, params: SamplingParams) -> tuple[float, Any]:
    """Seconds per token of a prompt's decoding, and its counts."""
    output = engine.generate(prompt, params)[0]
    assert output.timing.decode_s is not None, "an output has several tokens"
    return output.timing.decode_s / max(len(output.token_ids) - 1, 1), output


def compare(engines: dict[str, Engine], prompts: list[str], params: SamplingParams) -> dict[str, Any]:
    """Every arm beside the others."""
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
            assert all(text == texts[PLAIN] for text in texts.values()), "greedy texts are equal"
        for name, values in each.items():
            seconds[name].append(float(np.mean(values)))
    found = {}
    for name, engine in engines.items():
        ratios = np.array(seconds[PLAIN]) / np.array(seconds[name])
        interval = bootstrap_median(ratios).ci95
        steps = sum(one.num_drafts for one in counts[name])
        accepted = sum(one.num_accepted_tokens for one in counts[name])
        found[name] = {
            "nodes": engine.options.most_nodes,
            "acceptance length": round(1 + accepted / steps, 3) if steps else 1.0,
            "tokens/s": round(1 / median(seconds[name]), 2),
            "speed-up": {"median": round(median(ratios), 3), "ci95": interval and [round(end, 3) for end in interval]},
        }
    return found


def main() -> None:
    """Measure greedy and at temperature 1, and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="builtin:target")
    parser.add_argument("--draft", default="builtin:draft")
    parser.add_argument("--dtype", default="auto", help="of both")
    parser.add_argument("--quantize", default="int8", help="of the draft")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--name", default="trees_builtin", help="of the result's file")
    options = parser.parse_args()
    before = record.machine()
    settings = LoadSettings(
        target=ModelSettings(dtype=options.dtype), draft=ModelSettings(dtype=options.dtype, quantize=options.quantize)
    )
    loaded = Engine.load(options.target, options.draft, settings=settings, max_num_seqs=1, num_speculative_tokens=16)
    models = loaded.target, loaded.drafter, loaded.tokenizer
    engines = {
        name: Engine(*models, EngineOptions(max_num_seqs=1, **wishes), loaded.eos_token_ids)
        for name, wishes in ARMS.items()
    }
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()[: options.prompts]
    prompts = [json.loads(line)["prompt"] for line in lines]
    names = {"target": Path(options.target).name, "draft": Path(options.draft).name, "quantize": options.quantize}
    for engine in engines.values():
        engine.generate(prompts[0], SamplingParams(max_new_tokens=8))  # what only a first call does, for all alike
    results: dict[str, Any] = {**names, "prompts": len(prompts), "tokens": options.tokens}
    for words, temperature in (("greedy", 0.0), ("temperature 1", 1.0)):
        params = SamplingParams(max_new_tokens=options.tokens, temperature=temperature)
        results[words] = compare(engines, prompts, params)
        print(words, json.dumps(results[words], indent=1), flush=True)
    print(record.save(options.name, before, results))


if __name__ == "__main__":
    main()
