"""Where a step's time goes: one engine with transformers' forward, one with our own decoder, transformers beside them.

    python benchmarks/steps.py
    python benchmarks/steps.py --target FOLDER --draft FOLDER --dtype bfloat16 --threads 2 --name embedded

Plain decoding and a draft's k tokens with the same prompt, in turn (A B B A), after a warm-up; medians over steps of a
round, then over rounds. Greedy texts of one decoder must be equal with and without the draft. Kept as
results/steps.json, or steps_NAME.json.
"""

from __future__ import annotations

import argparse
from statistics import median
from time import perf_counter
from typing import Any

import record
import torch

from specdec_cli.engine.engine import Engine
from specdec_cli.engine.loading import LoadSettings, ModelSettings
from specdec_cli.events import Stepped
from specdec_cli.lm.peers import load_peer
from specdec_cli.recipe.values import Decoder
from specdec_cli.sampling.params import SamplingParams

DECODERS: tuple[Decoder, ...] = ("transformers", "auto")
PROMPT = "Once upon a time there was a girl who lived in a small house near the forest. One day she found a key and"


def run(engine: Engine, prompt: list[int], k: int, num_tokens: int) -> tuple[dict[str, float], list[int]]:
    """Median milliseconds of a step's parts, tokens per second of decoding, and the text."""
    steps: list[Stepped] = []
    tokens: list[int] = []
    times: list[float] = []
    params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
    for event in engine.stream([prompt], params, k):
        if isinstance(event, Stepped):
            steps.append(event)
            tokens += [token for one in event.emitted for token in one.tokens]
            times.append(perf_counter())
    decoded = steps[1:]
    parts = {
        "draft_token_ms": median(one.draft_seconds for one in decoded) * 1e3 / max(1, k),
        "verify_ms": median(one.verify_seconds for one in decoded) * 1e3,
        "overhead_ms": median(one.overhead_seconds for one in decoded) * 1e3,
        "tokens_per_step": (len(tokens) - 1) / len(decoded),
        "tokens_per_second": (len(tokens) - 1) / (times[-1] - times[0]),
    }
    return parts, tokens


def middle(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Each figure's median over rounds."""
    return {name: round(median(one[name] for one in rounds), 3) for name in rounds[0]}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Both decoders and transformers in turn."""
    settings = ModelSettings(dtype=options.dtype)
    engines = {
        name: Engine.load(
            options.target,
            options.draft,
            settings=LoadSettings(target=settings, draft=settings, decoder=name),
            num_speculative_tokens=max(options.k),
            max_num_seqs=1,
        )
        for name in DECODERS
    }
    if options.threads:
        torch.set_num_threads(options.threads)
    prompt = engines["auto"].encode(PROMPT)
    peer = load_peer(options.target, dtype=options.dtype)
    arms = [(name, k) for name in DECODERS for k in (0, *options.k)]
    found: dict[tuple[str, int], list[dict[str, float]]] = {arm: [] for arm in arms}
    theirs: list[float] = []
    texts = {arm: run(engines[arm[0]], prompt, arm[1], options.num_tokens)[1] for arm in arms}
    for repeat in range(options.rounds):
        for arm in arms if repeat % 2 == 0 else arms[::-1]:
            parts, text = run(engines[arm[0]], prompt, arm[1], options.num_tokens)
            assert text == texts[arm], "a greedy text changed between rounds"
            found[arm].append(parts)
        given = peer.generate([prompt], options.num_tokens, ())
        theirs.append((options.num_tokens - given.num_first) / (given.total_seconds - given.first_seconds))
    own = median(theirs)
    results: dict[str, Any] = {"transformers_generate_tokens_per_second": round(own, 1)}
    for name, k in arms:
        one: dict[str, Any] = middle(found[name, k])
        plain = middle(found[name, 0])["tokens_per_second"]
        one["over_its_own_plain"] = round(one["tokens_per_second"] / plain, 3)
        one["over_transformers_generate"] = round(one["tokens_per_second"] / own, 3)
        one["text_equals_plain"] = texts[name, k] == texts[name, 0]
        one["text_equals_transformers_forward"] = texts[name, k] == texts["transformers", 0]
        results[f"{name} k={k}"] = one
    return results


def main() -> None:
    """Measure a pair and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="builtin:target")
    parser.add_argument("--draft", default="builtin:draft")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=0, help="0 leaves the engine's own choice")
    parser.add_argument("-k", type=int, nargs="+", default=[2, 4, 6])
    parser.add_argument("--num-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--name", default="")
    options = parser.parse_args()
    before = record.machine()
    results = measure(options)
    for name, one in results.items():
        print(name, one)
    print(record.save("steps" + (f"_{options.name}" if options.name else ""), before, vars(options) | results))


if __name__ == "__main__":
    main()
