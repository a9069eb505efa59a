"""Verification: which drafted tokens stand, and the target's own next token. Every mode, in one place, batched.

Words: p the target's distribution, q the draft's (None: drafted without chance, one-hot at the drafted token), x the
drafted tokens of a row, k their number, u uniform numbers, own token the one the target adds (recovered or bonus).

| mode | a drafted token stands | own token | source |
|---|---|---|---|
| greedy | x = argmax p | argmax p | |
| rejection | u < p(x)/q(x) | from (p - q)+ | Leviathan, Kalman, Matias 2022 |
| block | the longest i with u_i < h_i | from (P_i p - q)+ | Sun et al. 2024 |
| gumbel | x = argmax(log p + g) | argmax(log p + g) | Daliri, Musco, Suresh 2024 |
| exact-match | x = a draw from p | that draw | |
| typical (lossy) | p(x) > min(epsilon, delta e^-H(p)) | from p | Cai et al. 2024 (Medusa) |
| synthetic (lossy) | u < a given rate | from p | vLLM |

After full acceptance the own token comes from p at the last position. At temperature 0 every mode but synthetic is
greedy: with a one-hot p each of these rules accepts x = argmax p alone and adds argmax p. Noise is keyed by the
position at which the step began and the offset in it, gumbel's by the absolute position.

Letters: B rows, n positions of rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, takewhile
from math import exp, isfinite

import torch
from torch import Tensor

from specdec_cli.drafted import CONTEXT_END, Drafted
from specdec_cli.engine.group import RowGroup, Verdict, VerifyRow, together
from specdec_cli.errors import UsageError
from specdec_cli.sampling.chain import Distribution, inverse_cdf
from specdec_cli.sampling.noise import Purpose

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


def resolve_mode(mode: str, temperature: float) -> str:
    """The mode a request decodes with: `auto` is greedy at temperature 0 and block above it.

    Raises:
        UsageError: an unknown mode, or `greedy` for a request that samples.
    """
    if mode == AUTO:
        return GREEDY if temperature == 0 else "block"
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
    num_accepted = []
    # Where nothing is banned, nothing is looked up: on a GPU that would be two more waits.
    scores = group.of_drafted(group.p.scores) if group.p.may_ban else [[0.0] * len(row) for row in group.tokens]
    for row, uniforms, its in zip(group.rows, group.acceptance_uniforms(), scores, strict=True):
        chances = zip(uniforms, its, row.rates, strict=False)  # one without a rate never stands
        num_accepted.append(_num_leading(u < rate and isfinite(score) for u, score, rate in chances))
    places = [start + accepted for start, accepted in zip(group.starts, num_accepted, strict=True)]
    own = [group.p.likeliest[place] for place in places]
    if not group.p.one_hot[places].all():
        drawn = _draw_own(group, num_accepted, group.probs(places))
        own = [one if group.p.one_hot[place] else other for place, one, other in zip(places, own, drawn, strict=True)]
    return _leading(num_accepted, own)


def _rejection(group: RowGroup) -> list[Verdict]:
    num_accepted = [
        _num_leading(u * q < p for u, q, p in zip(uniforms, q_x, p_x, strict=True))
        for uniforms, q_x, p_x in zip(
            group.acceptance_uniforms(), group.q_of_drafted(), group.p_of_drafted(), strict=True
        )
    ]
    return _with_own(group, num_accepted, _residual(group, num_accepted, [1.0] * len(num_accepted)))


def _block(group: RowGroup) -> list[Verdict]:
    p_drafted = group.p_of_drafted()
    kept = [_kept_mass(p_x, q_x) for p_x, q_x in zip(p_drafted, group.q_of_drafted(), strict=True)]
    gains = _gains(group, kept, p_drafted)
    num_accepted = [_longest_block(*row) for row in zip(group.acceptance_uniforms(), kept, gains, strict=True)]
    scale = [mass[accepted] for mass, accepted in zip(kept, num_accepted, strict=True)]
    return _with_own(group, num_accepted, _residual(group, num_accepted, scale))


def _kept_mass(p_x: Sequence[float], q_x: Sequence[float]) -> list[float]:
    """P_0 … P_k of a row: P_0 = 1, P_i = min(1, P_{i-1} p(x_i)/q(x_i))."""
    return list(accumulate(zip(p_x, q_x, strict=True), lambda mass, x: min(1.0, mass * x[0] / x[1]), initial=1.0))


def _longest_block(uniforms: Sequence[float], kept: Sequence[float], gains: Sequence[float]) -> int:
    """The most tokens i with u_i < h_i, where h_i = S_i/(S_i + 1 - P_i) with S_i = Σ(P_i p - q)+, and h_k = P_k.

    Args:
        uniforms: u_1 … u_k.
        kept: P_0 … P_k.
        gains: S_1 … S_{k-1}.
    """
    for i in range(len(uniforms), 0, -1):
        chance = kept[i]
        if i < len(uniforms):
            total = gains[i - 1] + 1.0 - kept[i]
            chance = gains[i - 1] / total if total > 0 else 1.0
        if uniforms[i - 1] < chance:
            return i
    return 0


def _gains(group: RowGroup, kept: Sequence[Sequence[float]], p_drafted: Sequence[Sequence[float]]) -> list[list[float]]:
    """S_1 … S_{k-1} of each row: Σ(P_i p - q)+ behind i of its tokens."""
    # Without chance q is one-hot at x, so (P p - q)+ is P p everywhere but at x.
    gains = [
        [mass * (1.0 - one) for mass, one in zip(masses[1:-1], p_x[1:], strict=True)]
        for masses, p_x in zip(kept, p_drafted, strict=True)
    ]
    drawn = [i for i, row in enumerate(group.rows) if row.guesses.q is not None and gains[i]]
    if drawn:
        places = [group.starts[i] + j for i in drawn for j in range(1, len(kept[i]) - 1)]
        q = [row.guesses.q[1:] for row in (group.rows[i] for i in drawn) if row.guesses.q is not None]
        p = group.probs(places)
        scale = [mass for i in drawn for mass in kept[i][1:-1]]
        excess = _excess(p, together(q).to(p.device), scale)
        sums = iter(excess.sum(dim=-1, dtype=torch.float64).tolist())
        for i in drawn:
            gains[i] = list(islice(sums, len(gains[i])))
    return gains


def _excess(p: Tensor, q: Tensor, scale: Sequence[float]) -> Tensor:
    """(scale p - q)+ [n, V] from p, q [n, V] float32 and scale [n]."""
    return (p * torch.tensor(scale, device=p.device)[:, None]).sub_(q).clamp_(min=0)


def _p_behind(group: RowGroup, num_accepted: Sequence[int]) -> Tensor:
    """Each row's p [B, V] behind the tokens that stand."""
    return group.probs([start + accepted for start, accepted in zip(group.starts, num_accepted, strict=True)])


def _residual(group: RowGroup, num_accepted: Sequence[int], scale: Sequence[float]) -> Tensor:
    """Distribution of own tokens, [B, V], not normalized: (scale p - q)+ after a rejection, p after full acceptance."""
    p = _p_behind(group, num_accepted)
    refused = [i for i, tokens in enumerate(group.tokens) if num_accepted[i] < len(tokens)]
    if not refused:
        return p
    drawn = {i: q[num_accepted[i]] for i in refused if (q := group.rows[i].guesses.q) is not None}
    if drawn:
        nothing = torch.zeros(p.shape[1], device=p.device)
        q = torch.stack([drawn[i].to(p.device) if i in drawn else nothing for i in range(len(group.rows))])
        weights = _excess(p, q, [one if i in drawn else 1.0 for i, one in enumerate(scale)])
    else:
        weights = p.clone()
    for i in refused:
        if i not in drawn:  # without chance q is one-hot at the refused token
            weights[i, group.tokens[i][num_accepted[i]]] = 0.0
    # Where p equals q a refusal comes from the last bits alone, and nothing is left over: draw from p.
    empty = weights.sum(dim=-1, keepdim=True) <= 0
    return torch.where(empty, p, weights)


def _with_own(group: RowGroup, num_accepted: Sequence[int], weights: Tensor) -> list[Verdict]:
    """Verdicts with own tokens drawn from weights [B, V]."""
    return _leading(num_accepted, _draw_own(group, num_accepted, weights))


def _leading(num_accepted: Sequence[int], own: Sequence[int]) -> list[Verdict]:
    """Verdicts of chains, of which so many first tokens stand."""
    return [Verdict(tuple(range(num)), token) for num, token in zip(num_accepted, own, strict=True)]


def _draw_own(group: RowGroup, num_accepted: Sequence[int], weights: Tensor) -> list[int]:
    """Own tokens drawn from weights [B, V]."""
    uniforms = group.uniforms(Purpose.OWN, max(num_accepted) + 1)
    drawn: list[int] = inverse_cdf(weights, [u[i] for u, i in zip(uniforms, num_accepted, strict=True)]).tolist()
    return drawn


GREEDY = "greedy"
AUTO = "auto"
RULES: dict[str, Rule] = {
    GREEDY: Rule(_greedy, samples=False, keeps_tokens=True, judges_trees=True),
    "rejection": Rule(_rejection, needs_q=True),
    "block": Rule(_block, needs_q=True),
    "gumbel": Rule(_gumbel, shares_noise=True, keeps_tokens=True, judges_trees=True),
    "exact-match": Rule(_exact_match, judges_trees=True),
    "typical": Rule(_typical, is_lossless=False),
    "synthetic": Rule(_synthetic, is_lossless=False, needs_rates=True),
}
"""Every verification mode. The order is that of messages."""
MODES = tuple(name for name, rule in RULES.items() if not rule.needs_rates)
"""The modes that verify."""
