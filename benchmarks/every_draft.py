"""Tokens with every kind of draft against plain decoding, on any device.

    python benchmarks/every_draft.py [--device cuda] [--trained FOLDER] [--only WORD ...]

The drafts are those of `draft_groups` for the built-in target: without training, published heads with random weights,
and trained ones in the subfolders of --trained, by default those of .heads/ where there are some. Each decodes the same
prompts as chains and, where it can, as a static and a dynamic tree, greedily and with shared noise (`gumbel` at
temperature 0.5), alone and together, and a second time with prefix caching. float32 promises every token. Exit status 1
when one differs, or when a draft fails; one that the target cannot have there is named alone.
Kept as results/every_draft.json, or every_draft_DEVICE.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import record
import torch
from draft_groups import PLAIN, Group, builtin
from exact import NOISES, STORIES, Text, compare

from specdec_cli import SamplingParams
from specdec_cli.drafted import MOST_NODES
from specdec_cli.engine.build import load_engines
from specdec_cli.engine.engine import Engine
from specdec_cli.engine.loading import LoadSettings, ModelSettings
from specdec_cli.engine.options import EngineOptions
from specdec_cli.errors import SpecdecError, UsageError

HEADS = Path(__file__).parents[1] / ".heads"
TREES = ("3,2,1", "dynamic:12")


def decode(engine: Engine, prompts: list[list[int]], params: SamplingParams, options: EngineOptions) -> list[Text]:
    """Decode prompts twice, the second time with what the first left in the caches; all texts."""
    own = Engine(engine.target, engine.drafter, engine.tokenizer, options)
    each = [replace(params, index=i) for i in range(len(prompts))]
    outputs = [*own.generate(prompts, each), *own.generate(prompts, each)]
    return [Text(one.token_ids, [], one.speculative.num_accepted_tokens) for one in outputs]


def ways_of(engine: Engine, k: int) -> list[EngineOptions]:
    """The shapes that a draft can guess in."""
    most = engine.drafter.most_depth or k
    chains = [EngineOptions(num_speculative_tokens=one) for one in sorted({1, min(k, most)})]
    trees = TREES if engine.drafter.builds_trees else ()
    return [*chains, *(EngineOptions(num_speculative_tokens=min(4, most), tree=tree) for tree in trees)]


def row_of(group: Group, name: str, options: argparse.Namespace, stories: list[str]) -> dict[str, Any]:
    """One draft in every shape against plain decoding.

    Raises:
        SpecdecError: it does not load or decode.
    """
    arm, target = group.arms[name], ModelSettings(dtype="float32", device=options.device)
    engines = load_engines(
        Engine, group.target, [None, arm.spec], settings=LoadSettings(target=target, max_model_len=512),
        options=EngineOptions(num_speculative_tokens=MOST_NODES, max_num_seqs=len(stories)),
        draft_models=[ModelSettings(), ModelSettings(quantize=arm.quantize)],
    )  # fmt: skip
    plain, engine = engines
    prompts, found = [engine.encode(story) for story in stories], dict[str, int]()
    for noise, params in NOISES.items():
        params = replace(params, max_new_tokens=options.tokens)
        verify = "greedy" if noise == "greedy" else "gumbel"
        right = decode(plain, prompts, params, EngineOptions(num_speculative_tokens=0, verify=verify))
        ways = [
            replace(way, max_num_seqs=num, verify=verify, prefix_caching=True)
            for way in ways_of(engine, arm.k)
            for num in {1, len(prompts)}
        ]
        for key, num in compare(right, (decode(engine, prompts, params, way) for way in ways)).items():
            found[key] = found.get(key, 0) + num
    shapes = [way.tree or f"k = {way.num_speculative_tokens}" for way in ways_of(engine, arm.k)]
    del found["logit_mismatches"]
    return {"draft": name, "shapes": shapes, **found, "graphs_obstacle": engine.drafter.graphs_obstacle}


def main() -> None:
    """Compare every draft, and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--trained", type=Path, help="a folder whose subfolders are drafts for the built-in target")
    parser.add_argument("--only", nargs="+", help="drafts whose names contain one of these words")
    parser.add_argument("--tokens", type=int, default=32, help="of each text")
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--output", type=Path, help="where the result is kept; default: results/")
    options = parser.parse_args()
    if options.device != "cpu" and not torch.cuda.is_available():
        parser.exit(1, "there is no GPU here: nothing was compared\n")
    if options.trained is not None and not options.trained.is_dir():
        parser.error(f"--trained: there is no folder {options.trained}")
    before, rows = record.machine(), list[dict[str, Any]]()
    stories = [json.loads(line)["prompt"] for line in STORIES.read_text(encoding="utf-8").splitlines()]
    with tempfile.TemporaryDirectory() as folder:
        group = builtin(options.trained or (HEADS if HEADS.is_dir() else None), Path(folder))
        names = [one for one in group.arms if not options.only or any(word in one for word in options.only)]
        assert PLAIN not in names, "plain decoding is what drafts are compared with"
        for name in names:
            try:
                rows.append(row_of(group, name, options, stories[: options.prompts]))
            except UsageError as error:
                rows.append({"draft": name, "refused": error.message})
            except SpecdecError as error:
                rows.append({"draft": name, "error": error.message})
            print(json.dumps(rows[-1]), flush=True)
    wrong = [row["draft"] for row in rows if "error" in row or row.get("token_mismatches")]
    name = "every_draft" + ("" if options.device == "cpu" else f"_{options.device}")
    print(record.save(name, before, {"device": options.device, "rows": rows}, path=options.output))
    print(
        f"{sum(row.get('tokens', 0) for row in rows):,} tokens compared, of {len(rows)} drafts wrong: {wrong or 'none'}"
    )
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
