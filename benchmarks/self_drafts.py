"""The speed of drafts made of the target, an int8 copy and its first layers, on a target of 356 M parameters.

    python benchmarks/inflated_builtin.py OUT
    python benchmarks/self_drafts.py OUT [--dtypes float32,bfloat16 --prompts N --tokens N --name NAME]

Each prompt is decoded plain and by every arm, once in one order and once in the other, greedy (see `trees`). Texts
must be equal. Kept as results/self_drafts.json for the inflated built-in target, whose text is a trained model's;
results/self_drafts_embedded.json is of `embedded_pair`'s target, whose weights are random: rounding to bfloat16 alone
changes every twelfth of its tokens, so that an int8 copy is often wrong, and its first 8 layers hold its whole text.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import record
from trees import PLAIN, PROMPTS, compare

from specdec_cli.engine.build import load_engines
from specdec_cli.engine.engine import Engine
from specdec_cli.engine.loading import LoadSettings, ModelSettings
from specdec_cli.engine.options import EngineOptions
from specdec_cli.sampling.params import SamplingParams

DRAFTS = {"self-int8": (2, 3, 4), "self-exit:8": (2,)}


def engines_of(target: str, dtype: str) -> Iterator[tuple[str, Engine]]:
    """Plain decoding and every arm, around one target in memory."""
    settings = LoadSettings(target=ModelSettings(dtype=dtype), max_model_len=512)
    loaded = load_engines(Engine, target, list(DRAFTS), options=EngineOptions(8, max_num_seqs=1), settings=settings)
    for (spec, depths), engine in zip(DRAFTS.items(), loaded, strict=True):
        models = engine.target, engine.drafter, engine.tokenizer
        if spec == next(iter(DRAFTS)):
            yield PLAIN, Engine(*models, EngineOptions(0, max_num_seqs=1), engine.eos_token_ids)
        for k in depths:
            yield f"{spec}, k = {k}", Engine(*models, EngineOptions(k, max_num_seqs=1), engine.eos_token_ids)


def main() -> None:
    """Measure each dtype, and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--name", default="self_drafts", help="of the result's file")
    options = parser.parse_args()
    before = record.machine()
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()[: options.prompts]
    prompts = [json.loads(line)["prompt"] for line in lines]
    params = SamplingParams(max_new_tokens=options.tokens, ignore_eos=True)
    results: dict[str, Any] = {
        "target": Path(options.target).name, "prompts": len(prompts), "tokens": options.tokens,
    }  # fmt: skip
    for dtype in options.dtypes.split(","):
        engines = dict(engines_of(options.target, dtype))
        for engine in engines.values():
            engine.generate(prompts[0], SamplingParams(max_new_tokens=4))  # what only a first call does, for all alike
        draft = engines["self-int8, k = 3"].drafter.lm
        assert draft is not None, "a draft made of the target is a language model"
        results[dtype] = {"bytes of the int8 copy and its cache": draft.num_bytes, **compare(engines, prompts, params)}
        print(dtype, json.dumps(results[dtype], indent=1), flush=True)
    print(record.save(options.name, before, results))


if __name__ == "__main__":
    main()
