"""The rules of verification: the name of each, what it asks of a draft, and what it promises of the output.

Recipes, help, checks, exports, the audit and the engine read this one table. Its judges need torch, so it names them;
`engine/verify.py`, where their formulas are, imports each when it first judges.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdec_cli.errors import UsageError
from specdec_cli.tree_shape import TreeShape

GREEDY = "greedy"
AUTO = "auto"


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """A way to decide which drafted tokens stand, and what it asks of a draft and promises of the output.

    Everything that depends on the verification mode asks these fields, so a new rule is one entry in RULES and the
    function that it names.

    Args:
        judge: `module:function` of this package that gives one verdict for each row of a group.
        meaning: when a drafted token is accepted, in a few words.
        source: authors, year and arXiv number, where others described it first.
        samples: whether it decides at temperatures above 0.
        needs_q: whether a draft that draws its tokens by chance has to say what from. Without its q such a token would
            be judged as if the draft had proposed it with certainty, which biases the output.
        judges_jointly: whether the tokens of a row are judged together, so that a token more likely under q than under
            p makes up for one that is less likely.
        shares_noise: whether the target chooses each token by noise that is keyed by the token's position alone, so
            that a draft which chooses by the same noise often chooses the same token.
        is_lossless: whether the output follows the target's distribution.
        keeps_tokens: whether the output is, token for token, that of decoding without a draft.
        needs_rates: whether given chances decide, at every temperature, and not the target.
        judges_trees: whether it judges nodes that are no chain.
        on_device: `module:function` that does the same on a device, for rounds that the host does not wait for; without
            one, a GPU waits for the host.
    """

    judge: str
    meaning: str
    source: str = ""
    samples: bool = True
    needs_q: bool = False
    judges_jointly: bool = False
    shares_noise: bool = False
    is_lossless: bool = True
    keeps_tokens: bool = False
    needs_rates: bool = False
    judges_trees: bool = False
    on_device: str = ""


_BY_NODES = "engine.residual:traversal"
_BY_NODES_ON_DEVICE = "engine.device_verdicts:traversal"
RULES: dict[str, Rule] = {
    GREEDY: Rule(
        "engine.verify:greedy",
        "if it is the target's most likely token",
        on_device="engine.device_verdicts:greedy",
        samples=False,
        keeps_tokens=True,
        judges_trees=True,
    ),
    "rejection": Rule(
        "engine.residual:rejection",
        "each token by itself, with probability min(1, p/q)",
        "Leviathan et al. 2022, arXiv:2211.17192",
        needs_q=True,
        on_device="engine.device_verdicts:rejection",
        judges_trees=True,
    ),
    "block": Rule(
        _BY_NODES,
        "tokens of a step together; accepts at least as many as `rejection`",
        "Sun et al. 2024, arXiv:2403.10444",
        needs_q=True,
        judges_jointly=True,
        on_device=_BY_NODES_ON_DEVICE,
    ),
    "traversal": Rule(
        _BY_NODES,
        "as `block`; in a drafted tree, along its best path",
        "Weng et al. 2025, arXiv:2505.12398",
        needs_q=True,
        judges_jointly=True,
        on_device=_BY_NODES_ON_DEVICE,
        judges_trees=True,
    ),
    "gumbel": Rule(
        "engine.verify:gumbel",
        "if the target draws the same token from the same noise",
        "Daliri, Musco, Suresh 2024, arXiv:2408.07978",
        shares_noise=True,
        keeps_tokens=True,
        on_device="engine.device_verdicts:gumbel",
        judges_trees=True,
    ),
    "exact-match": Rule(
        "engine.verify:exact_match",
        "if the target's own sample is the same token; accepts the fewest",
        on_device="engine.device_verdicts:exact_match",
        judges_trees=True,
    ),
    "typical": Rule(
        "engine.verify:typical",
        "if the target finds it likely enough",
        "Cai et al. 2024 (Medusa), arXiv:2401.10774",
        on_device="engine.device_verdicts:typical",
        is_lossless=False,
    ),
    "synthetic": Rule(
        "engine.verify:synthetic",
        "by chance at given rates, to measure costs",
        is_lossless=False,
        needs_rates=True,
        judges_trees=True,
        on_device="engine.device_verdicts:synthetic",
    ),
}
"""Every verification mode. The order is that of messages."""
MODES = tuple(name for name, rule in RULES.items() if not rule.needs_rates)
"""The modes that verify."""


def lossless_modes() -> list[str]:
    """`auto`, and every mode whose output follows the target's distribution."""
    return [AUTO, *(name for name, rule in RULES.items() if rule.is_lossless)]


def resolve_mode(mode: str, temperature: float, tree: TreeShape | None = None, draws: bool = False) -> str:
    """The mode a request decodes with.

    `auto` is greedy at temperature 0. Above it, block judges chains; trees that were built without chance are judged by
    the target's own draws, than which no lossless rule accepts more of them; sampled trees by traversal.

    Args:
        mode: a name in RULES, or `auto`.
        temperature: the request's.
        tree: shape of its drafts; None for chains.
        draws: whether its drafter draws tokens by chance.

    Raises:
        UsageError: an unknown mode, or `greedy` for a request that samples.
    """
    if mode == AUTO:
        if temperature == 0:
            return GREEDY
        if tree is None:
            return "block"
        return "traversal" if draws and not tree.is_dynamic else "exact-match"
    if mode not in RULES:
        raise UsageError(f"unknown verification mode `{mode}`", f"one of {AUTO}, {', '.join(MODES)}")
    if temperature > 0 and not RULES[mode].samples:
        raise UsageError(
            f"verification mode `{mode}` does not fit temperature `{temperature:g}`",
            "use --verify auto, or --temperature 0",
        )
    return mode


def rule_of(mode: str, temperature: float) -> Rule:
    """The rule that judges a request: at temperature 0, where every other one comes to the same, greedy.

    With a one-hot p each rule that looks at p accepts its token alone and adds it, `typical` as well.

    Args:
        mode: a name in RULES, or `auto`.
        temperature: the request's.

    Raises:
        UsageError: as `resolve_mode`.
    """
    rule = RULES[resolve_mode(mode, temperature)]
    return RULES[GREEDY] if temperature == 0 and not rule.needs_rates else rule


def check_trees(mode: str, temperature: float) -> None:
    """Refuse a mode that has no rule for drafted trees; ask before anything runs.

    Args:
        mode: a name in RULES, or `auto`.
        temperature: the request's.

    Raises:
        UsageError: it judges chains alone; or as `resolve_mode`.
    """
    if not rule_of(mode, temperature).judges_trees:
        fitting = ", ".join(
            name for name, rule in RULES.items() if rule.judges_trees and rule.samples and not rule.needs_rates
        )
        raise UsageError(
            f"verification mode `{resolve_mode(mode, temperature)}` judges chains alone, and this draft builds trees",
            f"use --verify with one of {fitting}, or leave the tree out",
        )
