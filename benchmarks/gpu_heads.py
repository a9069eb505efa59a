"""On a GPU: an EAGLE-3 head beside a draft of 1 B at the same acceptance, as chains and as trees, and a DFlash block.

    python benchmarks/gpu_heads.py
    benchmarks/gpu_day.sh --cpu --steps heads  # a small pair, to try it

The target has the shape of Llama 3 8B, the draft that of Llama 3.2 1B, the head that of one for the target: one layer,
32,000 drafted tokens. The DFlash draft has five layers. All weights are random, and chance decides which tokens stand.
When its parent stands, a first child stands with the probability `--acceptance`, its siblings with `--further-ranks`;
so a tree emits as many tokens as it would with such a draft, though its accepted nodes are all first children. The tree
is the best one of 16 nodes by these chances. A token of the block stands with `--block-acceptance`. Every arm
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
from shaped_heads import BLOCK_SIZE, Target, dflash, eagle3

from specdec_cli import Engine, EngineOptions
from specdec_cli.drafted import Drafted
from specdec_cli.engine.build import load_engines
from specdec_cli.engine.loading import LoadSettings, ModelSettings
from specdec_cli.errors import SpecdecError
from specdec_cli.lm.files.dummy import shape_folder
from specdec_cli.measure.predict.tree_search import TreeSearch
from specdec_cli.tree_shape import TreeShape

DRAFTED = 32000
ABOUT = ("target", "draft", "dtype", "decoder", "acceptance", "further_ranks", "block_acceptance", "context")


@dataclass(frozen=True)
class HeadArm:
    """One way of decoding.

    Args:
        draft: `none`, `head`, `block` or `model`.
        k: tokens drafted one after another.
        num_nodes: of the best tree that is k deep; None for a chain.
        temperature: tokens are drawn at it.
    """

    draft: str
    k: int = 0
    num_nodes: int | None = None
    temperature: float = 0

    @property
    def name(self) -> str:
        """For the results."""
        tree = "" if self.num_nodes is None else f", tree of {self.num_nodes}"
        shape = "plain" if self.draft == "none" else f"{self.draft}, k = {self.k}{tree}"
        return f"{shape}, temperature {self.temperature:g}" if self.temperature else shape


ARMS = (
    HeadArm("none"),
    HeadArm("head", 3),
    HeadArm("head", 5),
    HeadArm("model", 3),
    HeadArm("model", 5),
    HeadArm("head", 5, 16),
    HeadArm("model", 5, 16),
    HeadArm("block", BLOCK_SIZE - 1),
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
    shape = shape_of(options.target)
    head = eagle3(folder / "head", shape, options.layers_read)
    block = dflash(folder / "block", shape, options.layers_read, options.block_layers)
    dummy = ModelSettings(dtype=options.dtype, device=options.device, load_format="dummy")
    settings = LoadSettings(target=dummy, decoder=options.decoder, max_model_len=options.max_model_len)
    drafts: dict[str, Any] = {"none": None, "head": head.options, "block": block.options, "model": options.draft}
    made = load_engines(
        Engine, options.target, list(drafts.values()), options=EngineOptions(max_num_seqs=1), settings=settings,
        draft_models=[dummy, ModelSettings(), ModelSettings(), dummy],  # a head runs as its target does
    )  # fmt: skip
    return dict(zip(drafts, made, strict=True))


def tree_of(arm: HeadArm, chances: Sequence[float]) -> TreeShape | None:
    """The best tree of an arm's size by the chance of each rank; None for a chain."""
    if arm.num_nodes is None:
        return None
    return TreeShape.of(TreeSearch(chances, arm.num_nodes, arm.k).best(arm.num_nodes, arm.k)[0])


def rates_of(arm: HeadArm, options: argparse.Namespace) -> tuple[float, ...]:
    """For each depth, the probability that a node of it stands, with all before it."""
    chances = [options.acceptance, *options.further_ranks]
    tree = tree_of(arm, chances)
    if tree is None:
        alone = options.block_acceptance if arm.draft == "block" else options.acceptance
        return tuple(alone**i for i in range(1, arm.k + 1))
    stands, rates, drafted = [1.0], [0.0] * tree.depth, Drafted(tuple(range(len(tree.parents))), tree.parents)
    for node, parent in enumerate(tree.parents):
        stands.append(stands[parent + 1] * chances[tree.children(parent).index(node)])
        rates[drafted.depth(node) - 1] += stands[-1]
    return tuple(rates)


def engine_of(arm: HeadArm, made: dict[str, Engine], options: argparse.Namespace) -> Engine:
    """An engine that decodes as an arm does."""
    its = made[arm.draft]
    if arm.draft == "none":
        return its
    tree = tree_of(arm, [options.acceptance, *options.further_ranks])
    chance = replace(
        its.options, num_speculative_tokens=arm.k, tree=None if tree is None else str(tree), verify="synthetic",
        synthetic_acceptance_rates=rates_of(arm, options),
    )  # fmt: skip
    return Engine(its.target, its.drafter, its.tokenizer, chance)


def measured(arms: Sequence[HeadArm], made: dict[str, Engine], options: argparse.Namespace) -> dict[str, Any]:
    """Every arm's runs, and the medians of what they found; of one that fails its error alone."""
    engines = {arm: engine_of(arm, made, options) for arm in arms}
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
        tree = tree_of(arm, [options.acceptance, *options.further_ranks])
        if tree is not None:
            found[arm.name]["tree"] = str(tree)
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
    parser.add_argument("--further-ranks", type=float, nargs="*", default=[0.08, 0.03, 0.01])
    parser.add_argument("--block-acceptance", type=float, default=0.9)
    parser.add_argument("--block-layers", type=int, default=5, help="of the DFlash draft")
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
