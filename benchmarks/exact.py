"""Tokens with a draft against plain decoding of the same precision: token for token, and logit for logit.

    python benchmarks/exact.py                  # 100,000 tokens; some minutes on the built-in pair
    python benchmarks/exact.py --short          # the form that the tests run

Every precision × draft (the draft, the target itself, n-gram) × chains of k = 1…8, static and dynamic trees × greedy
and shared noise (`gumbel` above temperature 0) × batch 1…4 decodes the same prompts; plain decoding is one sequence at
a time. bfloat16 and int8 promise every bit on a CPU, so there each emitted position's logits are compared with plain
decoding's too; float32 promises tokens. On a GPU bfloat16 and int8 promise tokens up to near ties: differences are
counted. Every other prompt is a story told twice, for n-gram to find something. Exit status 1 when anything differs
against a promise, or when a draft had nothing accepted to get wrong. Kept as results/exact.json, or exact_NAME.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import record
import torch
from torch import Tensor

import specdec_cli
from specdec_cli import SamplingParams
from specdec_cli.drafted import CONTEXT_END, MOST_NODES
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
MOST_DEPTH = 6
SHAPES: dict[str, list[EngineOptions]] = {
    "chains": [EngineOptions(num_speculative_tokens=k) for k in range(1, 9)],
    "static trees": [EngineOptions(num_speculative_tokens=MOST_DEPTH, tree=tree) for tree in ("4,2,1", "2,2,2,1,1,1")],
    "dynamic trees": [
        EngineOptions(num_speculative_tokens=MOST_DEPTH, tree=f"dynamic:{num_nodes}") for num_nodes in (4, 16, 60)
    ],
}
SHORT_SHAPES = {
    "chains": [SHAPES["chains"][0], SHAPES["chains"][7]],
    "static trees": SHAPES["static trees"][1:],
    "dynamic trees": SHAPES["dynamic trees"][1:2],
}
NOISES = {"greedy": SamplingParams(ignore_eos=True), "shared": SamplingParams(ignore_eos=True, temperature=0.5, seed=7)}
BATCHES = {False: (1, 2, 3, 4), True: (1, 4)}
SHORT_TOKENS = 6000


class Recorder:
    """The target with a memory: the logits that it gave after each text of each sequence, drafted nodes' among them."""

    def __init__(self, lm: LM) -> None:
        self._lm = lm
        self.logits: dict[int, dict[tuple[int, ...], Tensor]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lm, name)

    def score(self, rows: Sequence[Row]) -> Tensor:
        """The target's own answer, kept by sequence and text."""
        logits = self._lm.score(rows)
        for row, its in zip(rows, torch.split(logits, [row.num_logits for row in rows]), strict=True):
            ends = range(CONTEXT_END, len(row.drafted)) if row.num_logits else ()
            texts = [(*row.context, *row.drafted.tokens_to(end)) for end in ends]
            if row.unread is not None:  # a GPU's guess, which it has scored without the host
                texts = [tuple(row.unread.known(text)) for text in texts]
            self.logits.setdefault(row.handle, {}).update(zip(texts, its.clone(), strict=True))
        return logits


@dataclass(slots=True)
class Text:
    """One prompt's tokens, the logits [V] behind each of them, and how many drafted tokens stood."""

    tokens: list[int]
    logits: list[Tensor]
    num_accepted: int


def decode(engine: Engine, prompts: list[list[int]], params: SamplingParams, options: EngineOptions) -> list[Text]:
    """Decode prompts, so many together as the options say."""
    verify = "gumbel" if params.temperature else "greedy"
    options, texts = replace(options, verify=verify), []
    for first in range(0, len(prompts), options.max_num_seqs):
        recorder = Recorder(engine.target)
        group = prompts[first : first + options.max_num_seqs]
        each = [replace(params, index=first + i) for i in range(len(group))]
        outputs = Engine(recorder, engine.drafter, engine.tokenizer, options).generate(group, each)
        for handle, (prompt, output) in enumerate(zip(group, outputs, strict=True)):
            whole = (*prompt, *output.token_ids)
            logits = [recorder.logits[handle][whole[:end]] for end in range(len(prompt), len(whole))]
            texts.append(Text(output.token_ids, logits, output.speculative.num_accepted_tokens))
    return texts


def compare(plain: list[Text], decoded: Iterable[list[Text]]) -> dict[str, int]:
    """One draft in every shape and batch size against plain decoding."""
    found = {"tokens": 0, "accepted": 0, "token_mismatches": 0, "logit_mismatches": 0}
    for texts in decoded:
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
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tokens", type=int, help="compared in all, about; default: 100,000, or 4,000 with --short")
    parser.add_argument("--length", type=int, default=48, help="tokens of each text, at most")
    parser.add_argument("--short", action="store_true", help="some shapes and batch sizes; kept in --output alone")
    parser.add_argument("--output", type=Path, help="where the result is kept; default: results/")
    parser.add_argument("--name", default="")
    options = parser.parse_args()
    before, rows = record.machine(), []
    drafts = {"draft": options.draft, "the target itself": options.target, "ngram": "ngram"}
    shapes, batches = SHORT_SHAPES if options.short else SHAPES, BATCHES[options.short]
    num_texts = len(options.precision) * len(drafts) * len(NOISES) * sum(map(len, shapes.values())) * len(batches)
    each = -(-(options.tokens or (SHORT_TOKENS if options.short else 100_000)) // num_texts)
    num_prompts = max(*batches, -(-each // options.length))
    num_tokens = -(-each // num_prompts)
    stories = [json.loads(line)["prompt"] for line in STORIES.read_text(encoding="utf-8").splitlines()]
    texts = [" ".join([story] * (1 + i % 2)) for i, story in enumerate(stories[:num_prompts])]
    for precision in options.precision:
        model = replace(PRECISIONS[precision], device=options.device)
        settings = LoadSettings(target=model, draft=model, max_model_len=512)
        loading = EngineOptions(num_speculative_tokens=MOST_NODES, max_num_seqs=max(batches))
        engines = load_engines(Engine, options.target, list(drafts.values()), options=loading, settings=settings)
        prompts = [engines[0].encode(text) for text in texts]
        promise = _promise(precision, engines[0].target.device.type)
        for noise, params in NOISES.items():
            params = replace(params, max_new_tokens=num_tokens)
            plain = decode(engines[0], prompts, params, EngineOptions(num_speculative_tokens=0, max_num_seqs=1))
            for (name, engine), shape in product(zip(drafts, engines, strict=True), shapes):
                ways = [replace(way, max_num_seqs=num) for way, num in product(shapes[shape], batches)]
                row = {"precision": precision, "promise": promise, "draft": name, "shape": shape, "noise": noise}
                row |= compare(plain, (decode(engine, prompts, params, way) for way in ways))
                rows.append({**row, "prompts": len(prompts), "length": num_tokens})
                print(json.dumps(rows[-1]), flush=True)
    total = sum(row["tokens"] for row in rows)
    wrong = [row for row in rows if not row["accepted"] or _is_broken(row)]
    results = {"target": Path(options.target).name, "draft": Path(options.draft).name, "tokens": total, "rows": rows}
    if options.output or not options.short:
        name = "exact" + (f"_{options.name}" if options.name else "")
        print(record.save(name, before, results, path=options.output))
    print(f"{total:,} tokens compared, {len(wrong)} of {len(rows)} rows break their promise")
    sys.exit(1 if wrong else 0)


def _promise(precision: str, device: str) -> str:
    """The promise of a precision on a device, which a draft may not break."""
    if precision == "float32":
        return "tokens"
    return "bits" if device == "cpu" else "tokens up to near ties"


def _is_broken(row: dict[str, Any]) -> bool:
    """Whether something differs that was promised."""
    promised = {"tokens": ("token_mismatches",), "bits": ("token_mismatches", "logit_mismatches")}
    return any(row[name] for name in promised.get(row["promise"], ()))


if __name__ == "__main__":
    main()
