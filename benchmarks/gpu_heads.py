"""On a GPU: an EAGLE-3 head beside a draft of 1 B at the same acceptance, as chains and as trees.

    python benchmarks/gpu_heads.py
    benchmarks/gpu_day.sh --cpu --steps heads  # a small pair, to try it

The target has the shape of Llama 3 8B, the draft that of Llama 3.2 1B, the head that of one for the target: one layer,
32,000 drafted tokens. All weights are random, and chance decides which tokens stand: each with the probability
`--acceptance` when those before it do; of trees the first child of each depth. So what differs is time alone. Every arm
decodes the same number of tokens of one sequence, in the order A B C … C B A, `--repeats` times; a speed-up is over
plain decoding at the same temperature. Kept as results/gpu_heads.json; without a GPU the
script can be tried, and nothing is kept except in `--output`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import record
import torch
from gpu import decoded, waits_per_step
from shaped_heads import Target, eagle3

from specdec_cli import Engine, EngineOptions
from specdec_cli.engine.build import load_engines
from specdec_cli.engine.loading import LoadSettings, ModelSettings
from specdec_cli.errors import SpecdecError
from specdec_cli.lm.files.dummy import shape_folder

DRAFTED = 32000
ABOUT = ("target", "draft", "dtype", "decoder", "acceptance", "context")


@dataclass(frozen=True)
class HeadArm:
    """One way of decoding.

    Args:
        draft: `none`, `head` or `model`.
        k: tokens drafted one after another.
        tree: their shape; None for a chain.
        temperature: tokens are drawn at it.
    """

    draft: str
    k: int = 0
    tree: str | None = None
    temperature: float = 0

    @property
    def name(self) -> str:
        """For the results."""
        shape = "plain" if self.draft == "none" else f"{self.draft}, {self.tree or f'k = {self.k}'}"
        return f"{shape}, temperature {self.temperature:g}" if self.temperature else shape


ARMS = (
    HeadArm("none"),
    HeadArm("head", 3),
    HeadArm("head", 5),
    HeadArm("model", 3),
    HeadArm("model", 5),
    HeadArm("head", 4, "3,2,1,1"),
    HeadArm("model", 4, "3,2,1,1"),
    HeadArm("none", temperature=1),
    HeadArm("head", 3, temperature=1),
    HeadArm("model", 3, temperature=1),
)


def shape_of(target: str) -> Target:
    """The shape of a head for a target."""
    config = json.loads((shape_folder(target) / "config.json").read_text(encoding="utf-8"))
    names = "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size"
    hidden, inner, heads, kv_heads, vocab = (int(config[name]) for name in names)
    return Target(hidden, inner, heads, kv_heads, vocab, min(DRAFTED, vocab))


def loaded(options: argparse.Namespace, folder: Path) -> dict[str, Engine]:
    """The target, loaded once, with each draft."""
    head = eagle3(folder / "head", shape_of(options.target), options.layers_read)
    dummy = ModelSettings(dtype=options.dtype, device=options.device, load_format="dummy")
    settings = LoadSettings(target=dummy, decoder=options.decoder, max_model_len=options.max_model_len)
    drafts: dict[str, Any] = {"none": None, "head": head.options, "model": options.draft}
    made = load_engines(
        Engine, options.target, list(drafts.values()), options=EngineOptions(max_num_seqs=1), settings=settings,
        draft_models=[dummy, ModelSettings(), dummy],  # a head runs as its target does
    )  # fmt: skip
    return dict(zip(drafts, made, strict=True))


def engine_of(arm: HeadArm, made: dict[str, Engine], acceptance: float) -> Engine:
    """An engine that decodes as an arm does."""
    its = made[arm.draft]
    if arm.draft == "none":
        return Engine(its.target, its.drafter, its.tokenizer, its.options)
    rates = tuple(acceptance**i for i in range(1, arm.k + 1))
    chance = replace(
        its.options, num_speculative_tokens=arm.k, tree=arm.tree, verify="synthetic", synthetic_acceptance_rates=rates
    )
    return Engine(its.target, its.drafter, its.tokenizer, chance)


def measured(arms: Sequence[HeadArm], made: dict[str, Engine], options: argparse.Namespace) -> dict[str, Any]:
    """Every arm's runs, and the medians of what they found; of one that fails its error alone."""
    engines = {arm: engine_of(arm, made, options.acceptance) for arm in arms}
    runs: dict[HeadArm, list[dict[str, Any]]] = {}
    found: dict[str, Any] = {}
    for arm in arms:  # graphs are recorded in these
        try:
            decoded(engines[arm], options.context, options.tokens, arm.k, arm.temperature)
            runs[arm] = []
        except SpecdecError as error:
            found[arm.name] = {"error": error.message}
            print(arm.name, error.message, flush=True)
    for _ in range(options.repeats):
        for arm in (*runs, *reversed(runs)):
            runs[arm].append(decoded(engines[arm], options.context, options.tokens, arm.k, arm.temperature))
    for arm, its in runs.items():
        plain = median(run["tokens_per_second"] for run in runs[HeadArm("none", temperature=arm.temperature)])
        rates = [run["tokens_per_second"] for run in its]
        found[arm.name] = {
            "tokens_per_second": round(median(rates), 1),
            "speedup": round(median(rates) / plain, 3),
            "runs": rates,
            "ms_per_step": round(median(run["ms_per_step"] for run in its), 3),
            "tokens_per_step": round(median(run["tokens_per_step"] for run in its), 3),
        }
        if options.device != "cpu":
            found[arm.name]["host_waits_per_step"] = waits_per_step(
                engines[arm], options.context, arm.k, arm.temperature
            )
        print(arm.name, json.dumps(found[arm.name]), flush=True)
    return found


def main() -> None:
    """Measure every arm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--decoder", default="graphs")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--target", default="shape:llama-3-8b")
    parser.add_argument("--draft", default="shape:llama-3.2-1b")
    parser.add_argument("--layers-read", type=int, nargs=3, default=[2, 16, 29], help="that the head reads")
    parser.add_argument("--acceptance", type=float, default=0.8)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--output", type=Path, help="where the result is kept; default: results/")
    options = parser.parse_args()
    if options.device != "cpu" and not torch.cuda.is_available():
        parser.exit(1, "there is no GPU here: nothing was measured\n")
    before = record.machine()
    with tempfile.TemporaryDirectory() as folder:
        made = loaded(options, Path(folder))
    about = {name: getattr(options, name) for name in ABOUT}
    found: dict[str, Any] = {**about, "arms": measured(ARMS, made, options)}
    if options.device != "cpu":
        found["gpu"] = torch.cuda.get_device_name(torch.device(options.device))
    if options.device != "cpu" or options.output:
        print(record.save("gpu_heads", before, found, path=options.output))
    else:
        print("this is no GPU: nothing is kept")
    if any("error" in arm for arm in found["arms"].values()):
        parser.exit(1, "an arm failed\n")


if __name__ == "__main__":
    main()
