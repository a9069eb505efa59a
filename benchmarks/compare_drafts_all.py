"""Which draft for which text? Every kind of draft, on prose, on edits and on questions asked again.

    python benchmarks/compare_drafts_all.py [--trained FOLDER --prompts N --tokens N --minutes M --parts WORD --again]
    python benchmarks/compare_drafts_all.py --short --name try

Kept as results/NAME.json, part by part: a run that is started again goes on with the parts that are missing, and
`--minutes` begins no further one after so long. `draft_groups` names targets and drafts: the built-in target with
drafts that need no training, published heads (trained ones of `--trained`, whose subfolders are drafts; untrained ones
for what they cost), a draft with another tokenizer, and the shared checkpoints where they are beside the checkout.

- prose: stories; also with the adaptive depth, and beside the speed-up that a trace predicts (greedy)
- edits: a text of the prompt is written again. The built-in target is too small to copy by itself, so a regular
  expression holds it to the text and leaves it the names to choose
- asked again: the stories' prompts a second time, with prefix caching; `suffix` keeps the outputs of the first

Every prompt is decoded plain and by every arm, once in one order and once in the other (A B B A), greedy and at
temperature 1. Greedy texts must be equal. Speed-ups are medians over prompts of plain seconds per token over an
arm's, with bootstrap 95 % intervals; "none again" is plain decoding a second time and shows the noise. `suffix lookup`
is the time of a guess among a million cached tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from statistics import median
from time import monotonic, thread_time
from typing import Any

import numpy as np
import record
from draft_groups import PLAIN, Group, at, groups, loaded

import specdec_cli
from specdec_cli.drafters.suffix_index import GuessLimits, SuffixIndex
from specdec_cli.engine.driver import Driver
from specdec_cli.engine.engine import Engine
from specdec_cli.engine.outputs import Output, Outputs
from specdec_cli.measure.notebook import trace
from specdec_cli.measure.stats import bootstrap_median
from specdec_cli.sampling.grammar import Grammar, compile_grammar
from specdec_cli.sampling.params import SamplingParams

PLAIN_AGAIN = "none again"
PROMPTS = Path(specdec_cli.__file__).parent / "measure" / "workload" / "prompts" / "stories.jsonl"
TEXTS = (
    "{0} put the red ball into the old box. Then {0} ran down the hill to the pond and looked for {1}. The pond was "
    "deep and cold, and a big duck sat on a stone. {1} waved from the other side and called to {0}.",
    "The dog saw {0} at the gate and barked. {0} gave the dog a bone and sat down on the grass. Soon {1} came with a "
    "basket of bread, and the three of them ate it all. {1} said that it was the best bread in the town.",
    "One day {0} found a key under a tree. {1} said that the key was for the little door in the wall. {0} and {1} went "
    "to the wall and opened the door. Behind it was a garden with a swing, and {0} wanted to try it at once.",
    "{1} was afraid of the dark, so {0} lit a small lamp. The lamp made a warm round spot on the floor. {1} sat in the "
    "spot and {0} read a long book about a bear. When the bear fell asleep, {1} fell asleep as well.",
)
NAMES = ("Lily", "Tom", "Mia", "Ben", "Sue", "Max", "Anna", "Sam")


@dataclass(frozen=True)
class Task:
    """A prompt, and what its output must match."""

    prompt: str
    grammar: Grammar | None = None


def prose(num: int) -> list[Task]:
    """Beginnings of stories."""
    return [Task(json.loads(line)["prompt"]) for line in PROMPTS.read_text(encoding="utf-8").splitlines()[:num]]


def edits(num: int, engine: Engine) -> list[Task]:
    """Texts to be written again with names of the target's choice."""
    assert engine.tokenizer is not None, "the built-in target has a tokenizer"
    found, chance = [], random.Random(1)
    for i in range(num):
        text, (first, second) = TEXTS[i % len(TEXTS)], chance.sample(NAMES, 2)
        names = f"(?:{'|'.join(NAMES)})"
        expression = re.escape(text).replace(re.escape("{0}"), names).replace(re.escape("{1}"), names)
        prompt = f"{text.format(first, second)}\n\nThe same with other names:\n"
        found.append(Task(prompt, compile_grammar("regex", expression.replace("\\ ", " "), engine.tokenizer)))
    return found


def decode(engine: Engine, task: Task, params: SamplingParams) -> Output:
    """A task's output."""
    outputs = Outputs()
    with Driver(engine) as driver:
        outputs.add(driver, engine.encode(task.prompt), task.prompt, params, grammar=task.grammar)
        for events in driver.steps():
            for event in events:
                outputs.observe(event)
    return outputs.finished()[0]


def compare(engines: dict[str, Engine], tasks: list[Task], params: SamplingParams, again: bool) -> dict[str, Any]:
    """Every arm beside the others.

    Args:
        engines: by arm.
        tasks: of one kind.
        params: how all are sampled.
        again: whether every arm decodes the tasks once before, and keeps what it learned.
    """
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    counts: dict[str, list[Any]] = {name: [] for name in engines}
    for engine in engines.values():
        engine.drafters.clear()
        for task in tasks if again else ():
            decode(engine, task, params)
    for task in tasks:
        each: dict[str, list[float]] = {name: [] for name in engines}
        texts = {}
        for name in (*engines, *reversed(engines)):
            if not again:
                engines[name].drafters.clear()
            output = decode(engines[name], task, params)
            assert output.timing.decode_s is not None, "an output has several tokens"
            each[name].append(output.timing.decode_s / max(len(output.token_ids) - 1, 1))
            texts[name] = output.token_ids
            counts[name].append(output.speculative)
        if params.temperature == 0:
            assert all(text == texts[PLAIN] for text in texts.values()), "greedy texts are equal"
        for name, values in each.items():
            seconds[name].append(float(np.mean(values)))
    return {name: figures(seconds[PLAIN], seconds[name], counts[name]) for name in engines if name != PLAIN}


def figures(plain: list[float], seconds: list[float], counts: list[Any]) -> dict[str, Any]:
    """An arm's speed-up and acceptance."""
    ratios = np.array(plain) / np.array(seconds)
    interval = bootstrap_median(ratios).ci95
    steps, accepted = (sum(getattr(one, key) for one in counts) for key in ("num_drafts", "num_accepted_tokens"))
    return {
        "speed-up": {"median": round(median(ratios), 3), "ci95": interval and [round(end, 3) for end in interval]},
        "acceptance length": round(1 + accepted / steps, 3) if steps else None,
        "tokens/s": round(1 / median(seconds), 1),
    }


def predicted(engine: Engine, tasks: list[Task], params: SamplingParams, k: int) -> float | None:
    """The speed-up that a trace predicts for a draft."""
    row = trace(engine, [task.prompt for task in tasks], params).predict(k=[k])[0]
    return None if row["speedup"] is None else round(float(row["speedup"]), 3)


def suffix_lookup(num_cached: int, num_looked_up: int = 2_000) -> dict[str, float]:
    """Seconds of the thread for guesses of 8 tokens among so many cached ones, and for a token to be taken in."""
    chance = random.Random(1)
    phrases = [[chance.randrange(50_000) for _ in range(chance.randrange(4, 40))] for _ in range(num_cached // 200)]
    cached = [token for _ in range(num_cached // 22) for token in chance.choice(phrases)][:num_cached]
    others = SuffixIndex()
    begin = thread_time()
    others.extend(cached)
    took = {"cached tokens": len(cached), "µs a token": round((thread_time() - begin) / len(cached) * 1e6, 3)}
    wish, times = GuessLimits(8, 8, None, 50_000, 0.1, 1.0), []
    for _ in range(num_looked_up):
        own, place = SuffixIndex(), chance.randrange(len(cached) - 40)
        own.extend(cached[place : place + 20])
        begin = thread_time()
        own.propose(wish, others)
        times.append((thread_time() - begin) * 1e6)
    times.sort()
    shares = {"median": 0.5, "p90": 0.9, "p99": 0.99}
    return took | {f"µs a guess, {name}": round(times[int(share * len(times))], 1) for name, share in shares.items()}


@dataclass
class Run:
    """A run of some parts.

    Args:
        options: of the command.
        group: the target and its drafts.
        params: of all requests but for the temperature.
    """

    options: argparse.Namespace
    group: Group
    params: SamplingParams

    def parts(self) -> dict[str, Callable[[], Any]]:
        """The measurements, by name."""
        found: dict[str, Callable[[], Any]] = {}
        for words, temperature in (("greedy", 0.0), ("temperature 1", 1.0)):
            params = replace(self.params, temperature=temperature)
            for name in ("prose", "prose, adaptive", "edits", "asked again"):
                found[f"{words}, {name}"] = partial(self.compare, name, params)
        return found | {"greedy, prose, predicted": self.predict}

    @cached_property
    def engines(self) -> dict[str, Engine]:
        """All arms."""
        return loaded(self.group, list(self.group.arms))

    def arms(self, name: str) -> dict[str, Engine]:
        """The arms of a set of texts, which have decoded a little: what only a first call does, all have done."""
        wishes: dict[str, dict[str, Any]] = {
            "prose, adaptive": {"depth_policy": "adaptive"},
            "asked again": {"prefix_caching": True},
        }
        found = at(self.group, self.engines, **wishes.get(name, {}))
        if not name.startswith("prose"):
            found = {arm: its for arm, its in found.items() if arm == PLAIN or not self.group.arms[arm].only_prose}
        for engine in found.values():
            decode(engine, prose(1)[0], SamplingParams(max_new_tokens=8))
        return {PLAIN: found[PLAIN], PLAIN_AGAIN: found[PLAIN]} | found

    def compare(self, name: str, params: SamplingParams) -> dict[str, Any]:
        """Every arm on a set of texts."""
        engines, num = self.arms(name), self.options.prompts
        tasks = edits(num, engines[PLAIN]) if name == "edits" else prose(num)
        return compare(engines, tasks, params, name == "asked again")

    def predict(self) -> dict[str, float | None]:
        """The speed-up that a trace predicts for each draft, to stand beside `greedy, prose`."""
        engines, tasks = self.arms("prose"), prose(self.options.prompts)
        return {
            name: predicted(engine, tasks, self.params, self.group.arms[name].k)
            for name, engine in engines.items()
            if name in self.group.arms
        }


def main() -> None:
    """Measure the parts that are missing, and keep each as soon as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trained", type=Path, help="folder whose subfolders are drafts trained for the target")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no further part after so long")
    parser.add_argument("--parts", default="", help="only parts whose name has this in it")
    parser.add_argument("--again", action="store_true", help="measure parts again that the file has")
    parser.add_argument("--short", action="store_true", help="two prompts of 24 tokens, to try the script")
    parser.add_argument("--name", default="compare_drafts_all", help="of the result's file")
    options = parser.parse_args()
    if options.short:
        options.prompts, options.tokens = 2, 24
    begin, path = monotonic(), record.RESULTS / f"{options.name}.json"
    results: dict[str, Any] = json.loads(path.read_text())["results"] if path.exists() and not options.again else {}
    if "parts" not in results or (results["prompts"], results["tokens"]) != (options.prompts, options.tokens):
        results = {"prompts": options.prompts, "tokens": options.tokens, "parts": {}}
    results.setdefault("suffix lookup", suffix_lookup(1_000_000))
    for name, make in groups(options.trained).items():
        group = make()
        if group is None:
            print(f"{name}: skipped, for the shared checkpoints are not here")
            continue
        run = Run(options, group, SamplingParams(max_new_tokens=options.tokens))
        for part, measure in run.parts().items():
            known, is_late = f"{name}, {part}", monotonic() - begin > 60 * options.minutes
            if known in results["parts"] or options.parts not in known or is_late:
                continue
            before = record.machine()
            found = {"machine": record.brief(before), "note": group.note, "arms": measure()}
            results["parts"][known] = found
            print(known, json.dumps(found["arms"], indent=1), flush=True)
            record.save(options.name, before, results)
    print(path)


if __name__ == "__main__":
    main()
