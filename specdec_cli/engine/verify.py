"""Verification: which drafted tokens stand, and the target's own next token. Every mode, in one place, batched.

Words: p the target's distribution, q the draft's (None: drafted without chance, one-hot at the drafted token), x the
drafted tokens of a row, k their number, u uniform numbers, own token the one the target adds (recovered or bonus).

| mode | a drafted token stands | own token |
|---|---|---|
| greedy | x = argmax p | argmax p |
| rejection | u < p(x)/q(x); of trees Jeon et al. 2024 | from (p - q)+ |
| block | the longest i with u_i < h_i | from (P_i p - q)+ |
| traversal | the same on a tree, from its leaves up | likewise |
| gumbel | x = argmax(log p + g) | argmax(log p + g) |
| exact-match | x = a draw from p | that draw |
| typical (lossy) | p(x) > min(epsilon, delta e^-H(p)) | from p |
| synthetic (lossy) | u < a given rate, as in vLLM; of trees first children alone | from p |

After full acceptance the own token comes from p at the last position. At temperature 0 every mode but synthetic is
greedy: with a one-hot p each of these rules accepts x = argmax p alone and adds argmax p. Noise is keyed by the
position at which the step began and the offset in it, gumbel's by the absolute position.

Letters: B rows, n places of rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import accumulate, chain, islice, takewhile
from math import exp, isfinite
from typing import Any

import torch
from torch import Tensor

from specdec_cli.drafted import CONTEXT_END, Drafted
from specdec_cli.drafters.contract import Guesses
from specdec_cli.sampling import noise
from specdec_cli.sampling.chain import Distribution, inverse_cdf
from specdec_cli.sampling.noise import Purpose
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.transfer import sent
from specdec_cli.verification import Rule

TYPICAL_EPSILON = 0.09
TYPICAL_DELTA = 0.3


@dataclass(slots=True)
class VerifyRow:
    """One sequence's step.

    Args:
        rule: judges it (`verification.rule_of`).
        params: its sampling parameters; seed and index key the noise.
        position: length of its context when the step began.
        guesses: what was drafted; may be empty.
        rates: for a rule that needs them, the chance of each drafted token when all before it stand; none is 0.
    """

    rule: Rule
    params: SamplingParams
    position: int
    guesses: Guesses
    rates: Sequence[float] = ()


@dataclass(slots=True)
class Verdict:
    """The drafted nodes that stand, each a child of the one before it, and the target's own token after them."""

    path: tuple[int, ...]
    own: int


@dataclass(slots=True)
class RowGroup:
    """The rows of one rule. What has a vocabulary's width lives on p's device, all else on the host, row by row.

    Args:
        p: the distribution of all rows of the call.
        rows: of the rule.
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
        """Each row's drafted tokens, without their parents."""
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
        """Values of each row's drafted tokens, from `values` [n, V] of the same places as p."""
        return self.by_row(self.at_drafted(values).tolist() if any(self.tokens) else [])

    def at_drafted(self, values: Tensor) -> Tensor:
        """The same of all rows [drafted]."""
        width = values.shape[1]
        flat = [
            place * width + token for place, token in zip(self.places(), chain.from_iterable(self.tokens), strict=True)
        ]
        return values.take(self._tensor(flat))

    def by_row(self, values: Iterable[float]) -> list[list[float]]:
        """Values of all rows' drafted tokens, row by row."""
        rest = iter(values)
        return [list(islice(rest, len(tokens))) for tokens in self.tokens]

    def uniforms(self, purpose: Purpose, n: int) -> list[list[float]]:
        """Each row's first n uniform numbers, keyed by the position at which the step began; the j-th is offset j."""
        keys = [row.params.seed for row in self.rows], [row.params.index for row in self.rows]
        drawn: list[list[float]] = noise.uniforms_many(*keys, [row.position for row in self.rows], purpose, n).tolist()
        return drawn

    def acceptance_uniforms(self) -> list[list[float]]:
        """Uniform numbers of each row's drafted tokens; a node's offset is its number."""
        most = max(map(len, self.tokens))
        drawn = self.uniforms(Purpose.ACCEPT, most) if most else [[] for _ in self.rows]
        return [row[: len(tokens)] for row, tokens in zip(drawn, self.tokens, strict=True)]

    def own_tokens(self, offsets: Any, most: int, weights: Tensor) -> Tensor:
        """Each row's own token [B] int64, drawn by a uniform number.

        Args:
            offsets: of the number among each row's [B], on the host or on weights' device.
            most: the largest of these that there may be.
            weights: of the tokens [B, V].
        """
        uniforms = self.uniforms(Purpose.OWN, most + 1)
        if not isinstance(offsets, Tensor):
            return inverse_cdf(weights, [row[offset] for row, offset in zip(uniforms, offsets, strict=True)])
        given = sent(uniforms, torch.float64, weights.device)
        return inverse_cdf(weights, given.gather(1, offsets[:, None])[:, 0])

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
        return sent(values, torch.int64, self.p.scores.device)


def together(parts: Sequence[Tensor]) -> Tensor:
    """Parts [n_i, V] one after another; one alone is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def verify(p: Distribution, rows: Sequence[VerifyRow], starts: Sequence[int] = ()) -> list[Verdict]:
    """Judge every row's guesses.

    Args:
        p: the target's distribution, at len(guesses.drafted) + 1 places of each row, rows in order.
        rows: the sequences; modes and lengths may differ.
        starts: each row's first place in p, where some rows have further places, of which nothing is needed.

    Returns:
        One verdict per row; it depends on that row alone.
    """
    if not starts:
        starts = [0, *accumulate(len(row.guesses.drafted) + 1 for row in rows)]
        assert len(p.likeliest) == starts[-1], "p has a place for each drafted token and one more per row"
    places_by_rule: dict[Rule, list[int]] = {}
    for place, row in enumerate(rows):
        is_sampled = not p.one_hot[starts[place]]
        assert row.rule.samples == is_sampled or row.rule.needs_rates, "the rule of temperature 0 is greedy, alone"
        places_by_rule.setdefault(row.rule, []).append(place)
    verdicts: dict[int, Verdict] = {}
    for rule, places in places_by_rule.items():
        group = RowGroup(p, [rows[place] for place in places], [starts[place] for place in places])
        assert rule.judges_trees or all(drafted.is_chain for drafted in group.drafted), "a rule judges chains alone"
        verdicts.update(zip(places, judge_of(rule.judge)(group), strict=True))
    return [verdicts[place] for place in range(len(rows))]


@cache
def judge_of(path: str) -> Callable[[RowGroup], list[Verdict]]:
    """The judge that a rule names; imported late, as `residual` builds on this file."""
    module, name = path.split(":")
    judge: Callable[[RowGroup], list[Verdict]] = getattr(import_module(f"specdec_cli.{module}"), name)
    return judge


def _num_leading(stands: Iterable[bool]) -> int:
    """How many stand before the first that does not."""
    return sum(1 for _ in takewhile(bool, stands))


def _walk(drafted: Drafted, chosen: Sequence[int], start: int) -> Verdict:
    """Accept one row's nodes as long as the target's own choice is among the children; `start` is its first place."""
    path = drafted.walk(chosen[start : start + len(drafted) + 1])
    return Verdict(path, chosen[start + (path[-1] + 1 if path else 0)])


def _walk_all(group: RowGroup, chosen: list[int]) -> list[Verdict]:
    """Walk every row, by the tokens chosen at all places of the group."""
    starts = accumulate((len(drafted) + 1 for drafted in group.drafted), initial=0)
    return [_walk(drafted, chosen, start) for drafted, start in zip(group.drafted, starts, strict=False)]


def greedy(group: RowGroup) -> list[Verdict]:
    """The nodes that are the target's likeliest tokens, and its likeliest token behind them."""
    return [
        _walk(drafted, group.p.likeliest, start) for drafted, start in zip(group.drafted, group.starts, strict=True)
    ]


def gumbel(group: RowGroup) -> list[Verdict]:
    """The nodes that are the likeliest under the noise of their positions."""
    return _walk_all(group, group.gumbel_tokens())


def exact_match(group: RowGroup) -> list[Verdict]:
    """The nodes that are the target's own draws at their positions."""
    uniforms = group.uniforms(Purpose.OWN, max(drafted.max_depth for drafted in group.drafted) + 1)
    used = [
        row[drafted.depth(node)]
        for row, drafted in zip(uniforms, group.drafted, strict=True)
        for node in range(CONTEXT_END, len(drafted))
    ]
    return _walk_all(group, inverse_cdf(group.probs(group.all_places()), used).tolist())


def typical(group: RowGroup) -> list[Verdict]:
    """The first tokens that pass a bound which falls with the entropy of p."""
    p = group.probs(group.places())
    entropy = group.by_row(torch.special.entr(p).sum(dim=-1, dtype=torch.float64).tolist())
    num_accepted = [
        _num_leading(x > min(TYPICAL_EPSILON, TYPICAL_DELTA * exp(-h)) for x, h in zip(p_x, entropies, strict=True))
        for p_x, entropies in zip(group.of_drafted(group.p.dense()), entropy, strict=True)
    ]
    return from_p(group, num_accepted)


def synthetic(group: RowGroup) -> list[Verdict]:
    """Chance alone decides, but a token that cannot occur (banned, or against a grammar) never stands."""
    # Where nothing is banned, nothing is looked up: on a GPU that would be two more waits.
    scores = group.of_drafted(group.p.scores) if group.p.may_ban else [[0.0] * len(row) for row in group.tokens]
    drawn = zip(group.rows, group.acceptance_uniforms(), scores, strict=True)
    paths = [_path_by_chance(row.guesses.drafted, row.rates, us, row_scores) for row, us, row_scores in drawn]
    places = [start + (path[-1] + 1 if path else 0) for start, path in zip(group.starts, paths, strict=True)]
    own = [group.p.likeliest[place] for place in places]
    if not group.p.one_hot[places].all():
        sampled = _from_places(group, [len(path) for path in paths], places)
        pairs = zip(places, own, sampled, strict=True)
        own = [likeliest if group.p.one_hot[place] else token for place, likeliest, token in pairs]
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


def from_p(group: RowGroup, num_accepted: Sequence[int] = ()) -> list[Verdict]:
    """Verdicts of chains, of which so many first tokens stand, and own tokens from p behind these; none without."""
    nums = num_accepted or [0] * len(group.rows)
    own = _from_places(group, nums, [start + num for start, num in zip(group.starts, nums, strict=True)])
    return [Verdict(tuple(range(num)), token) for num, token in zip(nums, own, strict=True)]


def _from_places(group: RowGroup, num_accepted: Sequence[int], places: list[int]) -> list[int]:
    """Each row's own token from p at a place, so many drafted tokens after the step's begin."""
    own: list[int] = group.own_tokens(num_accepted, max(num_accepted), group.probs(places)).tolist()
    return own
