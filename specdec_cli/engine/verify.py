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

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice, takewhile
from math import exp, isfinite

import torch
from torch import Tensor

from specdec_cli.drafted import CONTEXT_END, Drafted
from specdec_cli.drafters.contract import Guesses
from specdec_cli.errors import UsageError
from specdec_cli.sampling import noise
from specdec_cli.sampling.chain import Distribution, inverse_cdf
from specdec_cli.sampling.noise import Purpose
from specdec_cli.sampling.params import SamplingParams

TYPICAL = "typical"
"""The mode that changes the distribution."""
MODES = ("greedy", "rejection", "block", "gumbel", "exact-match", TYPICAL)
LOSSLESS = frozenset(MODES) - {TYPICAL}
SYNTHETIC = "synthetic"
"""The mode that verifies nothing; it needs rates."""
TYPICAL_EPSILON = 0.09
TYPICAL_DELTA = 0.3


@dataclass(slots=True)
class VerifyRow:
    """One sequence's step.

    Args:
        mode: one of MODES, or SYNTHETIC.
        params: its sampling parameters; seed and index key the noise.
        position: length of its context when the step began.
        guesses: what was drafted; may be empty.
        rates: of mode synthetic, the chance of each drafted token when all before it stand; none is 0.
    """

    mode: str
    params: SamplingParams
    position: int
    guesses: Guesses
    rates: Sequence[float] = ()


@dataclass(slots=True)
class Verdict:
    """The drafted nodes that stand, each a child of the one before it, and the target's own token after them."""

    path: tuple[int, ...]
    own: int


def resolve_mode(mode: str, temperature: float) -> str:
    """The mode a request decodes with: `auto` is greedy at temperature 0 and block above it.

    Raises:
        UsageError: an unknown mode, or `greedy` for a request that samples.
    """
    if mode == "auto":
        return "greedy" if temperature == 0 else "block"
    if mode not in (*MODES, SYNTHETIC):
        raise UsageError(f"unknown verification mode `{mode}`", f"one of auto, {', '.join(MODES)}")
    if mode == "greedy" and temperature > 0:
        raise UsageError(
            f"verification mode `greedy` does not fit temperature `{temperature:g}`",
            "use --verify auto, or --temperature 0",
        )
    return mode


def is_lossless(mode: str) -> bool:
    """Whether the mode leaves the target's distribution unchanged."""
    return mode in LOSSLESS


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
    verdicts: dict[int, Verdict] = {}
    members: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        if p.one_hot[starts[i]] and row.mode != SYNTHETIC:
            verdicts[i] = _walk(row.guesses.drafted, p.likeliest, starts[i])
        else:
            assert row.mode != "greedy", "greedy verification is for temperature 0"
            members.setdefault(row.mode, []).append(i)
    for mode, places in members.items():
        group = _Group(p, [rows[i] for i in places], [starts[i] for i in places])
        verdicts.update(zip(places, _RULES[mode](group), strict=True))
    return [verdicts[i] for i in range(len(rows))]


@dataclass(slots=True)
class _Group:
    """The rows of one mode. What has a vocabulary's width lives on p's device, all else on the host, row by row.

    Args:
        p: the distribution of all rows of the call.
        rows: this mode's rows.
        starts: each row's first position in p.
    """

    p: Distribution
    rows: list[VerifyRow]
    starts: list[int]

    @property
    def drafted(self) -> list[Drafted]:
        """Each row's drafted tokens."""
        return [row.guesses.drafted for row in self.rows]

    @property
    def tokens(self) -> list[tuple[int, ...]]:
        """The same without their order."""
        return [row.guesses.drafted.tokens for row in self.rows]

    def places(self) -> list[int]:
        """Where in p each row's drafted tokens are decided: behind their parents."""
        return [
            start + parent + 1
            for start, drafted in zip(self.starts, self.drafted, strict=True)
            for parent in drafted.parents
        ]

    def all_places(self) -> list[int]:
        """Every place of these rows in p."""
        return [
            place
            for start, drafted in zip(self.starts, self.drafted, strict=True)
            for place in range(start, start + len(drafted) + 1)
        ]

    def probs(self, places: list[int]) -> Tensor:
        """Rows [len(places), V] of p, to be read only."""
        assert self.p.probs is not None, "rows that sample have a dense p"
        if places and places == list(range(places[0], places[-1] + 1)):  # no copy
            return self.p.probs[places[0] : places[-1] + 1]
        return self.p.probs[self._tensor(places)]

    def of_drafted(self, values: Tensor) -> list[list[float]]:
        """What values [n, V], of the same places as p, say of each row's drafted tokens."""
        width = values.shape[1]
        flat = [
            place * width + token for place, token in zip(self.places(), chain.from_iterable(self.tokens), strict=True)
        ]
        return self.by_row(values.take(self._tensor(flat)).tolist() if flat else [])

    def p_of_drafted(self) -> list[list[float]]:
        """Each row's p(x)."""
        assert self.p.probs is not None, "rows that sample have a dense p"
        return self.of_drafted(self.p.probs)

    def by_row(self, values: Iterable[float]) -> list[list[float]]:
        """Values of all rows' drafted tokens, row by row."""
        rest = iter(values)
        return [list(islice(rest, len(tokens))) for tokens in self.tokens]

    def q_of_drafted(self) -> list[list[float]]:
        """Each row's q(x), 1 where it was drafted without chance."""
        drawn = [row.guesses for row in self.rows if row.guesses.q is not None and row.guesses.drafted]
        values: Iterator[float] = iter(())
        if drawn:
            q = _together([guesses.q for guesses in drawn if guesses.q is not None])
            tokens = torch.tensor([token for guesses in drawn for token in guesses.drafted.tokens], device=q.device)
            shape = len(tokens), self.p.scores.shape[1]
            assert q.shape == shape, "q has a row for each drafted token, as wide as p"
            found = q.gather(1, tokens[:, None])[:, 0].tolist()
            assert min(found) > 0, "a drafted token has a probability under the q that it was sampled from"
            values = iter(found)
        return [
            [1.0] * len(drafted) if row.guesses.q is None else list(islice(values, len(drafted)))
            for row, drafted in zip(self.rows, self.drafted, strict=True)
        ]

    def uniforms(self, purpose: Purpose, n: int) -> list[list[float]]:
        """Each row's first n uniform numbers, keyed by the position at which the step began; the j-th is offset j."""
        keys = [row.params.seed for row in self.rows], [row.params.index for row in self.rows]
        found: list[list[float]] = noise.uniforms_many(*keys, [row.position for row in self.rows], purpose, n).tolist()
        return found

    def acceptance_uniforms(self) -> list[list[float]]:
        """Uniform numbers of each row's drafted tokens."""
        most = max(map(len, self.tokens))
        drawn = self.uniforms(Purpose.ACCEPT, most) if most else [[] for _ in self.rows]
        return [row[: len(tokens)] for row, tokens in zip(drawn, self.tokens, strict=True)]

    def gumbel_tokens(self) -> list[int]:
        """argmax(log p + g) at all places of these rows, g keyed by the position of the token that is chosen."""
        keys = [
            (row.params.seed, row.params.index, row.position + drafted.depth(node))
            for row, drafted in zip(self.rows, self.drafted, strict=True)
            for node in range(CONTEXT_END, len(drafted))
        ]
        tokens: list[int] = noise.gumbel_argmax(self.probs(self.all_places()), *zip(*keys, strict=True)).tolist()
        return tokens

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.p.scores.device)


def _together(parts: Sequence[Tensor]) -> Tensor:
    """Parts [n_i, V] one after another; one alone is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _num_leading(stands: Iterable[bool]) -> int:
    """How many stand before the first that does not."""
    return sum(1 for _ in takewhile(bool, stands))


def _walk(drafted: Drafted, chosen: Sequence[int], start: int) -> Verdict:
    """Accept one row's nodes as long as the target's own choice is among the children; `start` is its first place."""
    path, node = [], CONTEXT_END
    while (child := drafted.child(node, chosen[start + node + 1])) is not None:
        path.append(child)
        node = child
    return Verdict(tuple(path), chosen[start + node + 1])


def _walk_all(group: _Group, chosen: list[int]) -> list[Verdict]:
    """The same of all rows, chosen at all their places."""
    starts = accumulate((len(drafted) + 1 for drafted in group.drafted), initial=0)
    return [_walk(drafted, chosen, start) for drafted, start in zip(group.drafted, starts, strict=False)]


def _gumbel(group: _Group) -> list[Verdict]:
    return _walk_all(group, group.gumbel_tokens())


def _exact_match(group: _Group) -> list[Verdict]:
    uniforms = group.uniforms(Purpose.OWN, max(drafted.max_depth for drafted in group.drafted) + 1)
    used = [
        row[drafted.depth(node)]
        for row, drafted in zip(uniforms, group.drafted, strict=True)
        for node in range(CONTEXT_END, len(drafted))
    ]
    return _walk_all(group, inverse_cdf(group.probs(group.all_places()), used).tolist())


def _typical(group: _Group) -> list[Verdict]:
    p = group.probs(group.places())
    entropy = group.by_row(torch.special.entr(p).sum(dim=-1, dtype=torch.float64).tolist())
    num_accepted = [
        _num_leading(one > min(TYPICAL_EPSILON, TYPICAL_DELTA * exp(-h)) for one, h in zip(p_x, entropies, strict=True))
        for p_x, entropies in zip(group.p_of_drafted(), entropy, strict=True)
    ]
    return _with_own(group, num_accepted, _p_behind(group, num_accepted))


def _synthetic(group: _Group) -> list[Verdict]:
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


def _rejection(group: _Group) -> list[Verdict]:
    num_accepted = [
        _num_leading(u * q < p for u, q, p in zip(uniforms, q_x, p_x, strict=True))
        for uniforms, q_x, p_x in zip(
            group.acceptance_uniforms(), group.q_of_drafted(), group.p_of_drafted(), strict=True
        )
    ]
    return _with_own(group, num_accepted, _residual(group, num_accepted, [1.0] * len(num_accepted)))


def _block(group: _Group) -> list[Verdict]:
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


def _gains(group: _Group, kept: Sequence[Sequence[float]], p_drafted: Sequence[Sequence[float]]) -> list[list[float]]:
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
        excess = _excess(p, _together(q).to(p.device), scale)
        sums = iter(excess.sum(dim=-1, dtype=torch.float64).tolist())
        for i in drawn:
            gains[i] = list(islice(sums, len(gains[i])))
    return gains


def _excess(p: Tensor, q: Tensor, scale: Sequence[float]) -> Tensor:
    """(scale p - q)+ [n, V] from p, q [n, V] float32 and scale [n]."""
    return (p * torch.tensor(scale, device=p.device)[:, None]).sub_(q).clamp_(min=0)


def _p_behind(group: _Group, num_accepted: Sequence[int]) -> Tensor:
    """Each row's p [B, V] behind the tokens that stand."""
    return group.probs([start + accepted for start, accepted in zip(group.starts, num_accepted, strict=True)])


def _residual(group: _Group, num_accepted: Sequence[int], scale: Sequence[float]) -> Tensor:
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


def _with_own(group: _Group, num_accepted: Sequence[int], weights: Tensor) -> list[Verdict]:
    """Verdicts with own tokens drawn from weights [B, V]."""
    return _leading(num_accepted, _draw_own(group, num_accepted, weights))


def _leading(num_accepted: Sequence[int], own: Sequence[int]) -> list[Verdict]:
    """Verdicts of chains, of which so many first tokens stand."""
    return [Verdict(tuple(range(num)), token) for num, token in zip(num_accepted, own, strict=True)]


def _draw_own(group: _Group, num_accepted: Sequence[int], weights: Tensor) -> list[int]:
    """Own tokens drawn from weights [B, V]."""
    uniforms = group.uniforms(Purpose.OWN, max(num_accepted) + 1)
    drawn: list[int] = inverse_cdf(weights, [u[i] for u, i in zip(uniforms, num_accepted, strict=True)]).tolist()
    return drawn


_RULES: dict[str, Callable[[_Group], list[Verdict]]] = {
    "rejection": _rejection,
    "block": _block,
    "gumbel": _gumbel,
    "exact-match": _exact_match,
    TYPICAL: _typical,
    SYNTHETIC: _synthetic,
}
