"""Acceptance length from a trace against what the engine counts: k = 1…8 under every rule (issue 3, "Must show" 3).

    python benchmarks/replay_against_reality.py [--target DIR] [--draft DIR] [--prompts FILE] [--tokens 96]
        [--greedy-prompts 60] [--sampled-rounds 6] [--counted-rounds 4] [--k-max 8]

One trace at temperature 0 and one at temperature 1 give every k and rule. The engine then decodes the same prompts with
the draft, for each k and rule. Greedy and gumbel text does not depend on chance: counts should agree but for near-ties.
The other rules' texts differ from the trace's, so both sides carry sampling noise; each side's standard error (a
bootstrap over prompts) is kept beside the difference. The trace is cheap: it covers the prompts `--sampled-rounds`
times, each with noise of its own; the engine decodes them `--counted-rounds` times for each k and rule.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import record

from specdec_cli import Engine, SamplingParams
from specdec_cli.engine.decoding import Request
from specdec_cli.engine.driver import Driver
from specdec_cli.engine.prompts import PromptRow
from specdec_cli.events import Stepped
from specdec_cli.measure.predict.replay import replay
from specdec_cli.measure.predict.trace import Trace
from specdec_cli.measure.predict.tracing import trace_draft, trace_target
from specdec_cli.measure.stats import ratio_of_totals

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
SAMPLED = ("rejection", "block", "exact-match", "gumbel")


def read_prompts(path: Path) -> list[str]:
    """The first turn of every row."""
    return [json.loads(line)["turns"][0] for line in path.read_text(encoding="utf-8").splitlines()]


def make_requests(engine: Engine, prompts: list[str], params: SamplingParams, rounds: int) -> list[Request]:
    """The prompts `rounds` times over, each with noise of its own."""
    return [
        Request(PromptRow(i, prompt, category="story"), engine.encode(prompt), replace(params, index=i))
        for i, prompt in enumerate(prompts * rounds)
    ]


def count(engine: Engine, requests: list[Request], k: int, rule: str) -> tuple[np.ndarray, np.ndarray]:
    """Accepted tokens plus drafting steps [B], and drafting steps [B], of each request."""
    accepted, drafts = np.zeros(len(requests)), np.zeros(len(requests))
    with Driver(engine) as driver:
        places = {driver.add(one.token_ids, one.params, k, verify=rule): i for i, one in enumerate(requests)}
        steps = (event for events in driver.steps() for event in events if isinstance(event, Stepped))
        for emitted in (emitted for step in steps for emitted in step.emitted):
            if emitted.num_drafted:
                drafts[places[emitted.sequence_id]] += 1
                accepted[places[emitted.sequence_id]] += emitted.num_accepted
    return accepted + drafts, drafts


def compare(engine: Engine, trace: Trace, requests: list[Request], rule: str, k_max: int) -> list[dict[str, Any]]:
    """One row for each k."""
    rows = []
    for one in replay(trace, "draft", rule, k_max):
        begin = perf_counter()
        counted = ratio_of_totals(*count(engine, requests, one.k, rule))
        expected = one.acceptance_length()
        rows.append(
            {
                "rule": rule,
                "k": one.k,
                "replayed": round(expected.median, 4),
                "replayed_ci95": [round(x, 4) for x in expected.ci95 or ()],
                "counted": round(counted.median, 4),
                "counted_ci95": [round(x, 4) for x in counted.ci95 or ()],
                "difference": round(expected.median / counted.median - 1, 5),
                "seconds": round(perf_counter() - begin, 1),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    """Trace twice, count every k and rule, keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(SHARED / "checkpoints/bitstories-3M"))
    parser.add_argument("--draft", default=str(SHARED / "checkpoints/stories260K"))
    parser.add_argument("--prompts", type=Path, default=SHARED / "prompts/tinystories_dev_300.jsonl")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--greedy-prompts", type=int, default=60)
    parser.add_argument("--sampled-prompts", type=int, default=200)
    parser.add_argument("--sampled-rounds", type=int, default=6)
    parser.add_argument("--counted-rounds", type=int, default=4, help="at most --sampled-rounds")
    parser.add_argument("--k-max", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--rules", default=",".join(("greedy", *SAMPLED)))
    parser.add_argument("--name", default="replay_against_reality")
    options = parser.parse_args()
    before = record.machine()
    engine = Engine.load(
        options.target, options.draft, num_speculative_tokens=options.k_max, max_num_seqs=options.batch_size
    )
    prompts = read_prompts(options.prompts)
    rows: list[dict[str, Any]] = []
    wanted = options.rules.split(",")
    tokens: dict[str, int] = {}
    for rules, temperature, num, rounds in (
        (("greedy",), 0.0, options.greedy_prompts, 1),
        (SAMPLED, 1.0, options.sampled_prompts, options.sampled_rounds),
    ):
        if not set(rules) & set(wanted):
            continue
        params = SamplingParams(max_new_tokens=options.tokens, temperature=temperature)
        requests = make_requests(engine, prompts[:num], params, rounds)
        begin = perf_counter()
        trace = trace_target(engine, requests)
        trace.drafts["draft"] = trace_draft(trace, engine.drafter, options.k_max)
        tokens[f"temperature {temperature:g}"] = trace.num_output_tokens
        print(f"traced {trace.num_output_tokens} tokens in {perf_counter() - begin:.1f} s", flush=True)
        for rule in rules:
            if rule in wanted:
                # Gumbel's text is the trace's own, whatever k: few prompts are enough, and they must be the same.
                few = requests[: options.greedy_prompts if rule == "gumbel" else num * options.counted_rounds]
                known = replay_subset(trace, len(few)) if rule == "gumbel" else trace
                rows += compare(engine, known, few, rule, options.k_max)
    worst = max(rows, key=lambda row: abs(row["difference"]))
    settings = {name: Path(str(value)).name for name, value in vars(options).items()}
    results = {**settings, "traced_tokens": tokens, "worst": worst, "rows": rows}
    print(f"worst difference {worst['difference']:.2%} ({worst['rule']}, k = {worst['k']})")
    print(record.save(options.name, before, results))


def replay_subset(trace: Trace, num: int) -> Trace:
    """The trace of its first prompts."""
    if num == len(trace.prompts):
        return trace
    size = sum(len(prompt.output) for prompt in trace.prompts[:num])
    draft: Any = trace.drafts["draft"]
    fields = {name: getattr(draft, name) for name in type(draft).__slots__}
    arrays = {name: values[:size] for name, values in fields.items() if isinstance(values, np.ndarray)}
    cut = replace(trace, prompts=trace.prompts[:num], log_p=trace.log_p[:size], drafts={})
    cut.drafts["draft"] = replace(draft, **arrays)
    return cut


if __name__ == "__main__":
    main()
