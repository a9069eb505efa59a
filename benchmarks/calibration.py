"""Expected calibration error of a DSpark draft's confidences, before and after sequential temperature scaling.

    python benchmarks/calibration.py HEAD     # a folder of losses.py, such as FOLDER/ce-tv-decay-0

The temperatures are fitted on prompts of story_prompts.py, and the error is measured on the 36 prompts of
builtin:stories; the draft was trained on neither.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean
from typing import Any

import record
import story_prompts

from specdec_cli import SamplingParams
from specdec_cli.engine.engine import Engine
from specdec_cli.train.answers import TrainingPrompt
from specdec_cli.train.calibration import calibration_errors, fitted_temperatures, observed_confidences

NUM_FITTED, SEED = 96, 7


def measured(engine: Engine, depth: int, temperature: float) -> dict[str, Any]:
    """The temperatures at one sampling temperature, and the errors of every position."""
    params = SamplingParams(max_new_tokens=128, temperature=temperature)
    others = [json.loads(row)["prompt"] for row in story_prompts.HELD_OUT.read_text(encoding="utf-8").splitlines()]
    texts = (story_prompts.prompts(NUM_FITTED, SEED), others)
    given, tested = ([TrainingPrompt(engine.encode(text), i) for i, text in enumerate(its)] for its in texts)
    fitted = fitted_temperatures(*observed_confidences(engine, given, params, depth))
    logits, accepted = observed_confidences(engine, tested, params, depth)
    errors = {"before": calibration_errors(logits, accepted)}
    errors["after"] = calibration_errors(logits, accepted, fitted.temperatures)
    found: dict[str, Any] = {
        "temperature": temperature,
        "steps_fitted": fitted.num_samples,
        "steps_tested": len(logits),
    }
    found["temperatures"] = [round(each, 3) for each in fitted.temperatures]
    for name, its in errors.items():
        found |= {f"ece_{name}": [round(each, 4) for each in its], f"mean_ece_{name}": round(fmean(its), 4)}
    print(json.dumps(found), flush=True)
    return found


def main() -> None:
    """Fit, test and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", type=Path)
    parser.add_argument("--depth", type=int, default=5)
    options = parser.parse_args()
    before = record.machine()
    engine = Engine.load("builtin:target", str(options.head), max_num_seqs=36)
    rows = [measured(engine, options.depth, temperature) for temperature in (0.0, 1.0)]
    print(record.save("calibration", before, {"head": options.head.name, "depth": options.depth, "rows": rows}))


if __name__ == "__main__":
    main()
