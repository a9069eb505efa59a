"""Verification: which drafted tokens stand, and the target's own next token. Every mode, in one place, batched.

Words: p the target's distribution, q the draft's (None: drafted without chance, one-hot at the drafted token), x the
drafted tokens of a row, k their number, u uniform numbers, own token the one the target adds (recovered or bonus).

| mode | a drafted token stands | own token | source |
|---|---|---|---|
| greedy | x = argmax p | argmax p | |
| rejection | u < p(x)/q(x) | from (p - q)+ | Leviathan, Kalman, Matias 2022; of trees Jeon et al. 2024 |
| block | the longest i with u_i < h_i | from (P_i p - q)+ | Sun et al. 2024 |
| traversal | the same on a tree, from its leaves up | likewise | Weng et al. 2025 |
| gumbel | x = argmax(log p + g) | argmax(log p + g) | Daliri, Musco, Suresh 2024 |
| exact-match | x = a draw from p | that draw | |
| typical (lossy) | p(x) > min(epsilon, delta e^-H(p)) | from p | Cai et al. 2024 (Medusa) |
| synthetic (lossy) | u < a given rate; of trees first children alone | from p | vLLM |

After full acceptance the own token comes from p at the last position. At temperature 0 every mode but synthetic is
greedy: with a one-hot p each of these rules accepts x = argmax p alone and adds argmax p. Noise is keyed by the
position at which the step began and the offset in it, gumbel's by the absolute position.

Letters: B rows, n positions of rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from math import exp, isfinite

import torch
from torch import Tensor

from specdec_cli.drafted import CONTEXT_END, Drafted
from specdec_cli.engine.group import RowGroup, Verdict, VerifyRow
from specdec_cli.engine.residual import rejection, traversal
from specdec_cli.errors import UsageError
from specdec_cli.sampling.chain import Distribution, inverse_cdf
from specdec_cli.sampling.noise import Purpose
from specdec_cli.tree_shape import TreeShape

TYPICAL_EPSILON = 0.09
TYPICAL_DELTA = 0.3


@dataclass(frozen=True, slots=True)
class Rule:
    """A way to decide which drafted tokens stand, and what it asks of a draft and promises of the output.

    Everything that depends on the verification mode asks these fields, so a new rule is one entry in RULES.

    Args:
        judge: one verdict for each row of a group.
        samples: whether it decides at temperatures above 0.
        needs_q: whether a draft that draws its tokens by chance has to say what from. Without its q such a token would
            be judged as if the draft had proposed it with certainty, which biases the output.
        shares_noise: whether the target chooses each token by noise that is keyed by the token's position alone, so
            that a draft which chooses by the same noise often chooses the same token.
        is_lossless: whether the output follows the target's distribution.
        keeps_tokens: whether the output is, token for token, that of decoding without a draft.
        needs_rates: whether given chances decide, at every temperature, and not the target.
        judges_trees: whether it judges nodes that are no chain.
    """

    judge: Callable[[RowGroup], list[Verdict]]
    samples: bool = True
    needs_q: bool = False
    shares_noise: bool = False
    is_lossless: bool = True
    keeps_tokens: bool = False
    needs_rates: bool = False
    judges_trees: bool = False


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


def verify(p: Distribution, rows: Sequence[VerifyRow]) -> list[Verdict]:
    """Judge every row's guesses.

    Args:
        p: the target's distribution, at len(guesses.drafted) + 1 places of each row, rows in order.
        rows: the sequences; modes and lengths may differ.

    Returns:
        One verdict per row; it depends on that row alone.
    """
    starts = [0, *accumulate(len(row.guesses.drafted) + 1 for row in rows)]
    assert len(p.likeliest) == starts[-1], "p has a place for each drafted token and one more per row"
    members: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        is_greedy = p.one_hot[starts[i]] and not RULES[row.mode].needs_rates
        assert is_greedy or RULES[row.mode].samples, f"`{row.mode}` verification is for temperature 0"
        members.setdefault(GREEDY if is_greedy else row.mode, []).append(i)
    verdicts: dict[int, Verdict] = {}
    for mode, places in members.items():
        rule, group = RULES[mode], RowGroup(p, [rows[i] for i in places], [starts[i] for i in places])
        assert rule.judges_trees or all(drafted.is_chain for drafted in group.drafted), f"`{mode}` judges chains alone"
        verdicts.update(zip(places, rule.judge(group), strict=True))
    return [verdicts[i] for i in range(len(rows))]


def _num_leading(stands: Iterable[bool]) -> int:
    """How many stand before the first that does not."""
    return sum(1 for _ in takewhile(bool, stands))


def _walk(drafted: Drafted, chosen: Sequence[int], start: int) -> Verdict:
    """Accept one row's nodes as long as the target's own choice is among the children; `start` is its first place."""
    path = drafted.walk(chosen[start : start + len(drafted) + 1])
    return Verdict(path, chosen[start + (path[-1] + 1 if path else 0)])


def _walk_all(group: RowGroup, chosen: list[int]) -> list[Verdict]:
    """The same of all rows, chosen at all their places."""
    starts = accumulate((len(drafted) + 1 for drafted in group.drafted), initial=0)
    return [_walk(drafted, chosen, start) for drafted, start in zip(group.drafted, starts, strict=False)]


def _greedy(group: RowGroup) -> list[Verdict]:
    return [
        _walk(drafted, group.p.likeliest, start) for drafted, start in zip(group.drafted, group.starts, strict=True)
    ]


def _gumbel(group: RowGroup) -> list[Verdict]:
    return _walk_all(group, group.gumbel_tokens())


def _exact_match(group: RowGroup) -> list[Verdict]:
    uniforms = group.uniforms(Purpose.OWN, max(drafted.max_depth for drafted in group.drafted) + 1)
    used = [
        row[drafted.depth(node)]
        for row, drafted in zip(uniforms, group.drafted, strict=True)
        for node in range(CONTEXT_END, len(drafted))
    ]
    return _walk_all(group, inverse_cdf(group.probs(group.all_places()), used).tolist())


def _typical(group: RowGroup) -> list[Verdict]:
    p = group.probs(group.places())
    entropy = group.by_row(torch.special.entr(p).sum(dim=-1, dtype=torch.float64).tolist())
    num_accepted = [
        _num_leading(one > min(TYPICAL_EPSILON, TYPICAL_DELTA * exp(-h)) for one, h in zip(p_x, entropies, strict=True))
        for p_x, entropies in zip(group.p_of_drafted(), entropy, strict=True)
    ]
    return _with_own(group, num_accepted, _p_behind(group, num_accepted))


def _synthetic(group: RowGroup) -> list[Verdict]:
    """Chance alone decides, but a token that cannot occur (banned, or against a grammar) never stands."""
    # Where nothing is banned, nothing is looked up: on a GPU that would be two more waits.
    scores = group.of_drafted(group.p.scores) if group.p.may_ban else [[0.0] * len(row) for row in group.tokens]
    drawn = zip(group.rows, group.acceptance_uniforms(), scores, strict=True)
    paths = [_path_by_chance(row.guesses.drafted, row.rates, uniforms, its) for row, uniforms, its in drawn]
    places = [start + (path[-1] + 1 if path else 0) for start, path in zip(group.starts, paths, strict=True)]
    own = [group.p.likeliest[place] for place in places]
    if not group.p.one_hot[places].all():
        weighed = group.own_tokens([len(path) for path in paths], group.probs(places))
        own = [one if group.p.one_hot[place] else other for place, one, other in zip(places, own, weighed, strict=True)]
    return [Verdict(path, token) for path, token in zip(paths, own, strict=True)]


def _path_by_chance(
    drafted: Drafted, rates: Sequence[float], uniforms: Sequence[float], scores: Sequence[float]
) -> tuple[int, ...]:
    """The nodes that stand: at each depth the first child that can occur, by the rate of the depth."""
    path: list[int] = []
    for rate in rates:  # a node deeper than these never stands
        children = drafted.children(path[-1] if path else CONTEXT_END)
        node = next((child for child in children if isfinite(scores[child])), None)
        if node is None or uniforms[node] >= rate:
            break
        path.append(node)
    return tuple(path)


def _p_behind(group: RowGroup, num_accepted: Sequence[int]) -> Tensor:
    """Each row's p [B, V] behind the tokens that stand."""
    return group.probs([start + accepted for start, accepted in zip(group.starts, num_accepted, strict=True)])


def _with_own(group: RowGroup, num_accepted: Sequence[int], weights: Tensor) -> list[Verdict]:
    """Verdicts with own tokens drawn from weights [B, V]."""
    return _leading(num_accepted, group.own_tokens(num_accepted, weights))


def _leading(num_accepted: Sequence[int], own: Sequence[int]) -> list[Verdict]:
    """Verdicts of chains, of which so many first tokens stand."""
    return [Verdict(tuple(range(num)), token) for num, token in zip(num_accepted, own, strict=True)]


GREEDY = "greedy"
AUTO = "auto"
RULES: dict[str, Rule] = {
    GREEDY: Rule(_greedy, samples=False, keeps_tokens=True, judges_trees=True),
    "rejection": Rule(rejection, needs_q=True, judges_trees=True),
    "block": Rule(traversal, needs_q=True),
    "traversal": Rule(traversal, needs_q=True, judges_trees=True),
    "gumbel": Rule(_gumbel, shares_noise=True, keeps_tokens=True, judges_trees=True),
    "exact-match": Rule(_exact_match, judges_trees=True),
    "typical": Rule(_typical, is_lossless=False),
    "synthetic": Rule(_synthetic, is_lossless=False, needs_rates=True, judges_trees=True),
}
"""Every verification mode. The order is that of messages."""
MODES = tuple(name for name, rule in RULES.items() if not rule.needs_rates)
"""The modes that verify."""
