"""Seconds of one engine step outside the two models' forwards: schedule, propose, verify on a 32k vocabulary, events.

    python benchmarks/step_overhead.py

Both models are stand-ins that hand out ready logits, so that what is left is the engine's own work. One sequence,
k = 4; medians over steps, the best of several rounds taken in turn over the modes.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from time import perf_counter

import record
import torch

from specdec_cli.drafters.contract import Resources
from specdec_cli.drafters.model import Drafter
from specdec_cli.engine.engine import Engine
from specdec_cli.engine.options import EngineOptions
from specdec_cli.lm.door import Row
from specdec_cli.measure.audit.table import LMWithoutWeights
from specdec_cli.sampling.params import SamplingParams

V, K, STEPS, ROUNDS = 32_000, 4, 150, 5


class ReadyLM(LMWithoutWeights):
    """Logits by position from a table; draft and target share it, so every greedy draft is accepted."""

    name, vocab_size, max_context, num_blocks, block_size, num_free_blocks = "ready", V, 100_000, 10_000, 16, 10_000

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table
        self.seconds = 0.0

    def score(self, rows: Sequence[Row]) -> torch.Tensor:
        """Logits [n, V] of the wanted positions."""
        begin = perf_counter()
        index = [
            i % len(self.table) for row in rows for i in range(len(row.context) - row.num_logits, len(row.context))
        ]
        logits = self.table[index]
        self.seconds += perf_counter() - begin
        return logits

    def release(self, handle: int) -> None:
        """Nothing is held."""


def measure(params: SamplingParams, verify: str, table: torch.Tensor) -> float:
    """Median milliseconds of a step outside the models."""
    target, draft = ReadyLM(table), ReadyLM(table)
    drafter = Drafter(model="ready")
    drafter.load(Resources(lambda _: draft, None, V))
    engine = Engine(target, drafter, None, EngineOptions(num_speculative_tokens=K, verify=verify))
    engine.add([1, 2, 3], params)
    engine.step()
    times = []
    for _ in range(STEPS):
        target.seconds = draft.seconds = 0.0
        begin = perf_counter()
        engine.step()
        times.append(perf_counter() - begin - target.seconds - draft.seconds)
    return median(times) * 1e3


def main() -> None:
    """Measure every mode in turn and keep the result."""
    torch.manual_seed(0)
    table = torch.randn(64, V) * 4
    before = record.machine()
    greedy = SamplingParams(max_new_tokens=10**6)
    sampled = SamplingParams(max_new_tokens=10**6, temperature=1.0)
    modes = {
        "greedy": (greedy, "auto"),
        "rejection": (sampled, "rejection"),
        "block": (sampled, "block"),
        "gumbel": (sampled, "gumbel"),
    }
    rounds = [{name: measure(*args, table) for name, args in modes.items()} for _ in range(ROUNDS)]
    results = {
        name: {"median_ms": median(r[name] for r in rounds), "best_ms": min(r[name] for r in rounds)} for name in modes
    }
    for name, one in results.items():
        print(f"{name:10} {one['median_ms']:.3f} ms a step (best round {one['best_ms']:.3f}), V={V}, k={K}, batch 1")
    print(record.save("step_overhead", before, {"vocabulary": V, "k": K, "batch": 1, "modes": results}))


if __name__ == "__main__":
    main()
