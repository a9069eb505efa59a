"""The cost of verification and the loop when drafting costs nothing: speed-up over plain ÷ tokens per step, by k.

    python benchmarks/free_draft.py
    python benchmarks/free_draft.py --name embedded --target DIR/target --dtype bfloat16 [--quantize int8]

Every prompt is decoded plainly (A), then with its own text as `prediction` (B), so that every drafted token is right
and none needs a model, in the order A B B A. Both arms emit the same tokens. The efficiency of a k is A's seconds over
B's, divided by B's tokens per step: 1 is a step that costs what a plain one does. Median over prompts with a bootstrap
95 % interval; steps that read a prompt are left out. Runs add to `results/free_draft.json`, each replacing one of its
name.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import record

import specdec_cli
from specdec_cli import Engine, SamplingParams
from specdec_cli.engine.driver import Driver
from specdec_cli.engine.loading import LoadSettings, ModelSettings
from specdec_cli.events import Stepped
from specdec_cli.measure.stats import bootstrap_median

PROMPTS = Path(specdec_cli.__file__).parent / "measure" / "workload" / "prompts" / "stories.jsonl"


def decode(
    engine: Engine, prompt: str, params: SamplingParams, k: int, prediction: list[int]
) -> tuple[list[int], float, int]:
    """Tokens, seconds and number of the steps behind the prompt's."""
    tokens, seconds, num_steps = [], 0.0, 0
    with Driver(engine) as driver:
        driver.add(prompt, params, k, prediction=prediction or None)
        for event in (event for events in driver.steps() for event in events):
            if not isinstance(event, Stepped):
                continue
            tokens += [token for one in event.emitted for token in one.tokens]
            if not event.num_prefill_tokens:
                seconds += event.draft_seconds + event.verify_seconds + event.overhead_seconds
                num_steps += 1
    return tokens, seconds, num_steps


def main() -> None:
    """Measure every k over all prompts and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="builtin")
    parser.add_argument("--target", default="builtin:target")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantize", default="none")
    parser.add_argument("-k", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96)
    options = parser.parse_args()
    before = record.machine()
    model = ModelSettings(dtype=options.dtype, quantize=options.quantize)
    draft, settings = {"method": "prediction", "per_request": True}, LoadSettings(target=model)
    engine = Engine.load(options.target, draft, settings=settings, max_num_seqs=1, max_model_len=512)
    prompts = [json.loads(line)["prompt"] for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    params = SamplingParams(max_new_tokens=options.tokens, ignore_eos=True)
    mismatches, rows = 0, []
    for k in options.k:
        efficiencies, tokens_per_step = [], []
        for prompt in prompts[: options.num_prompts]:
            text = decode(engine, prompt, params, 0, [])[0]
            runs = [decode(engine, prompt, params, depth, text if depth else []) for depth in (0, k, k, 0)]
            mismatches += any(run[0] != text for run in runs)
            plain, own = runs[0][1] + runs[3][1], runs[1][1] + runs[2][1]
            num_tokens = (len(text) - 1) / runs[1][2]
            tokens_per_step.append(num_tokens)
            efficiencies.append(plain / own / num_tokens)
        found = bootstrap_median(np.array(efficiencies))
        rows.append(
            {
                "k": k,
                "tokens_per_step": round(float(np.median(tokens_per_step)), 2),
                "efficiency": round(found.median, 3),
                "ci95": [round(end, 3) for end in found.ci95 or ()],
            }
        )
        print(json.dumps(rows[-1]))
    name = options.name + ("" if options.quantize == "none" else f" {options.quantize}")
    run = {"name": name, "dtype": options.dtype, "quantize": options.quantize, "mismatches": mismatches}
    path = record.RESULTS / "free_draft.json"
    kept = json.loads(path.read_text(encoding="utf-8"))["results"] if path.exists() else []
    kept = [one for one in kept if one["name"] != name]
    results = sorted([*kept, {**run, "measured_on": before, "rows": rows}], key=lambda one: one["name"])
    print(record.save("free_draft", before, results))


if __name__ == "__main__":
    main()
