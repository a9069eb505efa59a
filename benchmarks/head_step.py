"""k drafted tokens of draft heads on a CPU, beside what reading their weights costs at that time.

    python benchmarks/head_step.py
    python benchmarks/head_step.py --kinds dflash --hidden 4096 --inner 14336 --heads 32 --name 8b

The heads (EAGLE-3, P-EAGLE with four layers, DFlash with five, MTP) have random weights in the shape of those for a
published target. One sequence; each proposal brings the hidden states of `--new` tokens and drafts k. Each head runs in
compiled code (A) and in torch's operators (B), as it did before, in the order A B B A. Its floor is the bytes that a
proposal has to read over the bandwidth of reading huge pages, measured beside each. All of it is this process's
processor time on one thread, so that a busy machine slows it by its caches alone. Kept as results/head_step_NAME.json.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import record
import torch
from shaped_heads import KINDS, HiddenStates, Published, Target, drafter_of
from torch import Tensor

from specdec_cli.drafters.contract import Drafter, DraftRow, Resources
from specdec_cli.lm.cache.memory import Arena
from specdec_cli.lm.heads import stacks
from specdec_cli.lm.plan import DTYPES
from specdec_cli.sampling.params import SamplingParams

ARMS = ("compiled", "torch", "torch", "compiled")
READ_BYTES = 256 << 20


@dataclass
class Arm:
    """A drafter of one sequence.

    Args:
        drafter: loaded.
        states: of a text, as the drafter reads them.
        new: states that a proposal brings.
    """

    drafter: Drafter
    states: Tensor
    new: int
    context: list[int] = field(default_factory=list)

    def begin(self) -> None:
        """ForwardInput the text."""
        self.drafter.release(0)
        self.context = [3 + i % 1000 for i in range(len(self.states) + 1)]
        self._propose(self.states, 1, 0.0)

    def seconds(self, k: int, temperature: float) -> float:
        """Processor seconds of one proposal of k tokens, with the states that it brings."""
        if len(self.context) > 3500:
            self.begin()
        self.context += range(5, 5 + self.new)
        begin = process_time()
        self._propose(self.states[: self.new], k, temperature)
        return process_time() - begin

    def _propose(self, states: Tensor, k: int, temperature: float) -> None:
        params, needs_q = SamplingParams(temperature=temperature, seed=1), temperature > 0
        row = DraftRow(0, self.context, 1, k, params, frozenset(), needs_q, False, 0.0, features=states)
        assert len(self.drafter.propose([row])[0].drafted) == k


@contextmanager
def torchs_operators() -> Iterator[None]:
    """Heads that are loaded meanwhile have layers of torch's operators, and the products that they had then."""
    before = stacks.compiles, stacks.compiled_family
    stacks.compiles, stacks.compiled_family = lambda *_: False, lambda *_: None
    try:
        yield
    finally:
        stacks.compiles, stacks.compiled_family = before


def bytes_per_second(buffer: Tensor) -> float:
    """Bandwidth of reading a buffer once."""
    begin = process_time()
    buffer.sum()
    return buffer.nbytes / (process_time() - begin)


def measure(arms: dict[str, Arm], published: Published, options: argparse.Namespace) -> dict[str, Any]:
    """Every k and temperature, the arms in turn, with the bandwidth before each."""
    itemsize = DTYPES[options.dtype].itemsize
    buffer = Arena().zeros(READ_BYTES).view(torch.int64).fill_(1)
    found = {}
    for arm in arms.values():
        arm.begin()
    for k in options.k:
        for temperature in (0.0, 1.0):
            seconds: dict[str, list[float]] = {name: [] for name in arms}
            floors: list[float] = []
            for _ in range(options.turns):
                for name in ARMS:
                    floors.append(published.numbers(k) * itemsize / bytes_per_second(buffer))
                    seconds[name].append(arms[name].seconds(k, temperature))
            floor = median(floors)
            each = {f"{name}_ms": median(its) * 1e3 for name, its in seconds.items()}
            ratios = {f"{name}_ratio": median(its) / floor for name, its in seconds.items()}
            found[f"k={k} T={temperature:g}"] = each | {"floor_ms": floor * 1e3} | ratios
    return found


def run(kind: str, target: Target, options: argparse.Namespace) -> dict[str, Any]:
    """One kind of head."""
    dtype = DTYPES[options.dtype]
    with tempfile.TemporaryDirectory() as folder:
        published = KINDS[kind](Path(folder) / "head", target)
        stand_in, arms = HiddenStates(Path(folder) / "head", target, dtype), {}
        states = torch.randn(options.context, published.num_taps, options.hidden).to(dtype)
        for name in ("compiled", "torch"):
            drafter = drafter_of(published)
            resources = Resources(lambda _: stand_in, None, options.vocab, stand_in)
            if name == "compiled":
                drafter.load(resources)
            else:
                with torchs_operators():
                    drafter.load(resources)
            arms[name] = Arm(drafter, states, options.new)
    return measure(arms, published, options)


def main() -> None:
    """Measure and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="1b")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--drafted", type=int, default=32_000)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--k", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--new", type=int, default=3, help="states that each proposal brings")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--turns", type=int, default=4)
    options = parser.parse_args()
    before = record.machine()
    torch.set_num_threads(1)
    names = ("hidden", "inner", "heads", "kv_heads", "vocab", "drafted")
    target, found = Target(**{name: getattr(options, name) for name in names}), {}
    for kind in options.kinds:
        found[kind] = run(kind, target, options)
        for name, one in found[kind].items():
            print(kind, name, {key: round(value, 2) for key, value in one.items()}, flush=True)
    print(record.save(f"head_step_{options.name}", before, {"shape": vars(options), "by_kind": found}))


if __name__ == "__main__":
    main()
