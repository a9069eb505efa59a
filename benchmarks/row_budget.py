"""The most that verifying only the likeliest drafted tokens of all requests could give over the best fixed k.

    python benchmarks/row_budget.py    # half a minute on one core

The built-in target continues 36 stories and 36 other prompts. At each position of these texts every draft guesses 8
tokens, with how sure it is: the draft model's largest q, or the length of the repeated text. A forward's seconds by
rows and the draft's by k are measured in processor time, and so is the rest of a step. Groups of requests are then
replayed on these costs with every fixed k, and with every k and threshold on a token's survival, the probability that
it and all before it are accepted: a threshold spends a step's rows on the likeliest tokens of all requests.

The second is a bound: survival is read off the same texts, and the best threshold is chosen afterwards. `certain` goes
further and verifies exactly the tokens that will be accepted. Speed-ups are over no draft, with a bootstrap 95 %
interval over groups for the bound over the best fixed k.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import log
from pathlib import Path
from time import process_time

import numpy as np
import record

import specdec_cli
from specdec_cli import Engine, EngineOptions, SamplingParams
from specdec_cli.drafted import Drafted
from specdec_cli.lm.door import LM, Row
from specdec_cli.measure.stats import ratio_of_totals

FOLDER = Path(specdec_cli.__file__).parent / "measure" / "workload" / "prompts"
K, TOKENS, STREAMS, GROUPS, REPEATS, CONTEXT = 8, 96, (1, 4, 16), 12, 10, 64
THRESHOLDS = [i / 10 for i in range(1, 10)]
Seconds = Callable[[float], float]


@dataclass
class Guess:
    """Drafted tokens at a position of a text: how many are right, how sure each is, and their survival."""

    num_right: int
    sure: list[int]
    survival: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Costs:
    """Seconds of a step's parts: the forward by rows, drafting by streams and k, the rest by streams."""

    forward: Seconds
    draft: dict[int, Seconds]
    rest: Seconds


def line(points: dict[int, float]) -> Seconds:
    """A function through measured points."""
    places, values = zip(*sorted(points.items()), strict=True)
    return lambda at: float(np.interp(at, places, values))


def lower_quartile(calls: Mapping[int, Callable[[], object]]) -> dict[int, float]:
    """Processor seconds of calls, made in turn in orders drawn by chance."""
    took, chance = defaultdict(list), random.Random(0)
    for _ in range(REPEATS):
        for key in chance.sample(list(calls), len(calls)):
            begin = process_time()
            calls[key]()
            took[key].append(process_time() - begin)
    return {key: float(np.quantile(its, 0.25)) for key, its in took.items()}


def measure(engine: Engine, draft: LM, tokens: list[int], prompts: list[str]) -> Costs:
    """Measure a step's parts."""
    context = tokens[:CONTEXT]

    def score(num_rows: int) -> object:
        streams = min(num_rows, max(STREAMS))
        each = [num_rows // streams + (i < num_rows % streams) for i in range(streams)]
        return engine.target.score([Row(i, context, n, Drafted.chain(context[: n - 1])) for i, n in enumerate(each)])

    def guess(streams: int, k: int) -> object:
        return draft.guess([Row(i, [*context, 5], k) for i in range(streams)], engine.num_tokens)

    most = max(STREAMS)
    rows = sorted({*range(1, 10), *range(most, 2 * most, 2), *range(2 * most, most * (K + 1) + 1, most)})
    forward = line(lower_quartile({num: partial(score, num) for num in rows}))
    drafts = {
        streams: line({0: 0.0} | lower_quartile({k: partial(guess, streams, k) for k in (1, 2, 4, K)}))
        for streams in STREAMS
    }
    for i in range(most):
        engine.target.release(i)
        draft.release(i)
    params = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True)
    whole = {n: partial(engine.generate, prompts[:n], params, 0) for n in STREAMS}
    rest = {n: max(seconds / TOKENS - forward(n), 0.0) for n, seconds in lower_quartile(whole).items()}
    return Costs(forward, drafts, line(rest))


def model_guesses(draft: LM, num_tokens: int, prompt: list[int], text: list[int]) -> list[Guess]:
    """Guesses of the draft model at every position behind the first, and how sure it is."""
    guesses = []
    for begin in range(1, len(text), max(STREAMS)):
        guesses += some_model_guesses(
            draft, num_tokens, prompt, text, range(begin, min(begin + max(STREAMS), len(text)))
        )
    return guesses


def some_model_guesses(draft: LM, num_tokens: int, prompt: list[int], text: list[int], places: range) -> list[Guess]:
    """The same at some positions."""
    chains: dict[int, list[int]] = {place: [] for place in places}
    sure: dict[int, list[int]] = {place: [] for place in places}
    for _ in range(K):
        logits = draft.score([Row(place, [*prompt, *text[:place], *chains[place]], 1) for place in places])
        most, tokens = logits[:, :num_tokens].softmax(dim=-1).max(dim=-1)
        for place, q, token in zip(places, most.tolist(), tokens.tolist(), strict=True):
            chains[place].append(token)
            sure[place].append(int(3 * log(q / max(1 - q, 1e-5))))
    for place in places:
        draft.release(place)
    return [judged(text, place, chains[place], sure[place]) for place in places]


def lookup_guesses(prompt: list[int], text: list[int], longest: int) -> list[Guess]:
    """Tokens that followed the latest of the longest repeated texts of 2 to `longest` tokens, at every position."""
    guesses = []
    for place in range(1, len(text)):
        context = [*prompt, *text[:place]]
        lengths = (common_end(context, end, longest) for end in range(len(context) - 1, 0, -1))
        length, end = max(((length, end) for end, length in zip(range(len(context) - 1, 0, -1), lengths, strict=True)))
        chain = [] if length < 2 else context[end:]
        while chain and len(chain) < K:
            chain += chain[: K - len(chain)]
        guesses.append(judged(text, place, chain[:K], [min(length + i, 24) for i in range(K)]))
    return guesses


def common_end(context: Sequence[int], end: int, longest: int) -> int:
    """How many tokens before `end` agree with those at the context's end."""
    length = 0
    while length < min(longest, end) and context[end - 1 - length] == context[-1 - length]:
        length += 1
    return length


def judged(text: list[int], place: int, chain: list[int], sure: list[int]) -> Guess:
    """A guess beside the text that came."""
    chain = chain[: len(text) - place - 1]
    wrong = [i for i, token in enumerate(chain) if token != text[place + i]]
    return Guess(wrong[0] if wrong else len(chain), sure[: len(chain)])


def calibrate(texts: Sequence[Sequence[Guess]]) -> None:
    """Give every token its survival, from how often one as sure at its depth was accepted in these texts."""
    counts: dict[tuple[int, int], list[int]] = defaultdict(lambda: [1, 2])
    guesses = [guess for text in texts for guess in text]
    for guess in guesses:
        for depth, sure in enumerate(guess.sure[: guess.num_right + 1]):
            counts[sure, min(depth, 2)][0] += depth < guess.num_right
            counts[sure, min(depth, 2)][1] += 1
    for guess in guesses:
        alive = 1.0
        for depth, sure in enumerate(guess.sure):
            accepted, tried = counts[sure, min(depth, 2)]
            alive *= accepted / tried
            guess.survival.append(alive)


def replay(
    groups: Sequence[Sequence[Sequence[Guess]]], k: int, costs: Costs, draft: Seconds, keeps: Callable[[Guess], int]
) -> list[float]:
    """Seconds of each group, decoded together with at most k guesses of which `keeps` are verified."""
    seconds = []
    for group in groups:
        places, took = [0] * len(group), 0.0
        while running := [i for i, text in enumerate(group) if places[i] < len(text)]:
            guesses = [group[i][places[i]] for i in running]
            kept = [min(keeps(guess), k, len(guess.sure)) for guess in guesses]
            drafting = draft(k) * len(running) / len(group)
            took += costs.forward(len(running) + sum(kept)) + drafting + costs.rest(len(running))
            for i, guess, num in zip(running, guesses, kept, strict=True):
                places[i] += 1 + min(guess.num_right, num)
        seconds.append(took)
    return seconds


def num_likely(guess: Guess, least: float) -> int:
    """How many of its tokens survive with at least this probability."""
    return sum(survival >= least for survival in guess.survival)


def row(
    name: str, streams: int, texts: Sequence[Sequence[Guess]], costs: Costs, draft: Seconds, chance: random.Random
) -> dict[str, object]:
    """The best fixed k beside the best threshold, for groups of so many of these texts."""
    groups = [chance.sample(texts, streams) for _ in range(GROUPS)]
    depths = [1, 2, 3, 4, 6, K]
    plain = sum(replay(groups, 0, costs, draft, lambda _: 0))
    fixed = {k: replay(groups, k, costs, draft, lambda _: K) for k in depths}
    cut = {
        (k, least): replay(groups, k, costs, draft, partial(num_likely, least=least))
        for k in depths
        for least in THRESHOLDS
    }
    certain = min(sum(replay(groups, k, costs, draft, lambda its: its.num_right)) for k in depths)
    best_k, best_cut = min(fixed, key=lambda k: sum(fixed[k])), min(cut, key=lambda key: sum(cut[key]))
    gain = ratio_of_totals(np.array(fixed[best_k]), np.array(cut[best_cut]))
    return {
        "draft": name,
        "streams": streams,
        "fixed": {"k": best_k, "speed_up": round(plain / sum(fixed[best_k]), 3)},
        "cut": {"k": best_cut[0], "least_survival": best_cut[1], "speed_up": round(plain / sum(cut[best_cut]), 3)},
        "cut_over_fixed": {"total": round(gain.median, 3), "ci95": [round(end, 3) for end in gain.ci95 or ()]},
        "certain": round(plain / certain, 3),
    }


def main() -> None:
    """Record, measure, replay, and keep the result."""
    before, chance = record.machine(), random.Random(0)
    options = EngineOptions(max_num_seqs=max(STREAMS), num_speculative_tokens=K)
    engine = Engine.load("builtin:target", options=options, max_model_len=256)
    draft = engine.drafter.lm
    assert draft is not None, "the built-in draft is a model"
    lines = [(FOLDER / name).read_text(encoding="utf-8").splitlines() for name in ("stories.jsonl", "mini.jsonl")]
    prompts = [json.loads(each)["prompt"] for some in lines for each in some[:36]]
    params = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True)
    outputs = engine.generate(prompts, params, 0)
    texts = [(engine.encode(prompt), list(output.token_ids)) for prompt, output in zip(prompts, outputs, strict=True)]
    costs = measure(engine, draft, texts[0][0] + texts[0][1], prompts)
    kinds: dict[str, list[list[Guess]]] = {
        "builtin:draft": [model_guesses(draft, engine.num_tokens, *text) for text in texts],
        "lookup of up to 4": [lookup_guesses(*text, 4) for text in texts],
        "lookup of up to 32": [lookup_guesses(*text, 32) for text in texts],
    }
    results = []
    for name, guesses in kinds.items():
        calibrate(guesses)
        for streams in STREAMS:
            drafting = costs.draft[streams] if name == "builtin:draft" else lambda _: 0.0
            results.append(row(name, streams, guesses, costs, drafting, chance))
            print(json.dumps(results[-1]))
    record.save("row_budget", before, results)


if __name__ == "__main__":
    main()
