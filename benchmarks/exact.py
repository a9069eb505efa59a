"""Greedy tokens with a draft against plain decoding of the same precision: token for token, and logit for logit.

    python benchmarks/exact.py                  # 100,000 tokens; some minutes on the built-in pair
    python benchmarks/exact.py --short          # the form that the tests run

Every precision × draft (the draft, the target itself, n-gram) × k = 1…8 × batch 1…4 decodes the same prompts; plain
decoding is one sequence at a time. bfloat16 and int8 promise every bit, so there each emitted position's logits are
compared with plain decoding's too; float32 promises tokens. Every other prompt is a story told twice, for n-gram to
find something. Exit status 1 when anything differs, or when a draft had nothing accepted to get wrong. Kept as
results/exact.json, or exact_NAME.json.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import record
import torch
from torch import Tensor

import specdec_cli
from specdec_cli import SamplingParams
from specdec_cli.engine.build import load_engines
from specdec_cli.engine.engine import Engine
from specdec_cli.engine.loading import LoadSettings, ModelSettings
from specdec_cli.engine.options import EngineOptions
from specdec_cli.lm.door import LM, Row

STORIES = Path(specdec_cli.__file__).parent / "measure" / "workload" / "prompts" / "stories.jsonl"
PRECISIONS = {
    "float32": ModelSettings(dtype="float32"),
    "bfloat16": ModelSettings(dtype="bfloat16"),
    "int8": ModelSettings(dtype="bfloat16", quantize="int8"),
}
GRIDS = {False: (range(1, 9), range(1, 5)), True: ((1, 4, 8), (1, 4))}
SHORT_TOKENS = 4000


class Recorder:
    """The target with a memory: the logits that it last gave for each position of each sequence.

    A refused draft's positions are scored again with the right token, so the last ones are those of the text.
    """

    def __init__(self, lm: LM) -> None:
        self._lm = lm
        self.logits: dict[int, dict[int, Tensor]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lm, name)

    def score(self, rows: Sequence[Row]) -> Tensor:
        """The target's own answer, kept by sequence and position."""
        logits, first = self._lm.score(rows), 0
        for row in rows:
            kept = self.logits.setdefault(row.handle, {})
            for i in range(row.num_logits):
                kept[row.num_tokens - row.num_logits + i] = logits[first + i].clone()
            first += row.num_logits
        return logits


Grid = tuple[Sequence[int], Sequence[int]]
"""k and batch sizes."""


@dataclass(slots=True)
class Text:
    """One prompt's tokens, the logits [V] behind each of them, and how many drafted tokens stood."""

    tokens: list[int]
    logits: list[Tensor]
    num_accepted: int


def decode(engine: Engine, prompts: list[list[int]], num_tokens: int, k: int, batch_size: int) -> list[Text]:
    """Decode prompts greedily, so many together."""
    options = replace(engine.options, max_num_seqs=batch_size)
    params, texts = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True), []
    for first in range(0, len(prompts), batch_size):
        recorder = Recorder(engine.target)
        group = prompts[first : first + batch_size]
        outputs = Engine(recorder, engine.drafter, engine.tokenizer, options).generate(group, params, k)
        for handle, (prompt, output) in enumerate(zip(group, outputs, strict=True)):
            places = range(len(prompt) - 1, len(prompt) - 1 + len(output.token_ids))
            logits = [recorder.logits[handle][place] for place in places]
            texts.append(Text(output.token_ids, logits, output.speculative.num_accepted_tokens))
    return texts


def compare(engine: Engine, plain: list[Text], prompts: list[list[int]], num_tokens: int, grid: Grid) -> dict[str, int]:
    """One draft in every k and batch size against plain decoding."""
    found = {"tokens": 0, "accepted": 0, "token_mismatches": 0, "logit_mismatches": 0}
    for k, batch_size in product(*grid):
        texts = decode(engine, prompts, num_tokens, k, batch_size)
        for text, right in zip(texts, plain, strict=True):
            found["tokens"] += len(text.tokens)
            found["accepted"] += text.num_accepted
            found["token_mismatches"] += text.tokens != right.tokens
            pairs = zip(text.logits, right.logits, strict=True)
            found["logit_mismatches"] += sum(not torch.equal(one, other) for one, other in pairs)
    return found


def main() -> None:
    """Compare every precision and draft, and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="builtin:target")
    parser.add_argument("--draft", default="builtin:draft")
    parser.add_argument("--precision", nargs="+", choices=list(PRECISIONS), default=list(PRECISIONS))
    parser.add_argument("--tokens", type=int, default=100_000, help="compared in all, about")
    parser.add_argument("--length", type=int, default=48, help="tokens of each text, at most")
    parser.add_argument("--short", action="store_true", help="some of k and batch sizes; nothing is kept")
    parser.add_argument("--name", default="")
    options = parser.parse_args()
    before, rows = record.machine(), []
    drafts = {"draft": options.draft, "the target itself": options.target, "ngram": "ngram"}
    grid = GRIDS[options.short]
    num_texts = len(options.precision) * len(drafts) * math.prod(map(len, grid))
    each = -(-(SHORT_TOKENS if options.short else options.tokens) // num_texts)
    num_prompts = max(*grid[1], -(-each // options.length))
    num_tokens = -(-each // num_prompts)
    stories = [json.loads(line)["prompt"] for line in STORIES.read_text(encoding="utf-8").splitlines()]
    texts = [" ".join([story] * (1 + i % 2)) for i, story in enumerate(stories[:num_prompts])]
    for precision in options.precision:
        settings = LoadSettings(target=PRECISIONS[precision], draft=PRECISIONS[precision], max_model_len=512)
        loading = EngineOptions(num_speculative_tokens=max(grid[0]), max_num_seqs=max(grid[1]))
        engines = load_engines(Engine, options.target, list(drafts.values()), options=loading, settings=settings)
        prompts = [engines[0].encode(text) for text in texts]
        plain = decode(engines[0], prompts, num_tokens, 0, 1)
        for name, engine in zip(drafts, engines, strict=True):
            row = {"precision": precision, "draft": name, **compare(engine, plain, prompts, num_tokens, grid)}
            rows.append({**row, "prompts": len(prompts), "length": num_tokens})
            print(json.dumps(rows[-1]), flush=True)
    total = sum(row["tokens"] for row in rows)
    wrong = [row for row in rows if row["token_mismatches"] or not row["accepted"] or _lost_bits(row)]
    results = {"target": Path(options.target).name, "draft": Path(options.draft).name, "tokens": total, "rows": rows}
    if not options.short:
        print(record.save("exact" + (f"_{options.name}" if options.name else ""), before, results))
    print(f"{total:,} tokens compared, {len(wrong)} of {len(rows)} rows differ")
    sys.exit(1 if wrong else 0)


def _lost_bits(row: dict[str, Any]) -> bool:
    """Whether logits differ where every bit is promised."""
    return row["precision"] != "float32" and bool(row["logit_mismatches"])


if __name__ == "__main__":
    main()
