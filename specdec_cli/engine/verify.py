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

Letters: B rows, K the longest row's drafted tokens, n positions of all rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specdec_cli.drafters.contract import Guesses
from specdec_cli.errors import UsageError
from specdec_cli.sampling import noise
from specdec_cli.sampling.chain import Distribution, inverse_cdf
from specdec_cli.sampling.noise import Purpose
from specdec_cli.sampling.params import SamplingParams

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]

MODES = ("greedy", "rejection", "block", "gumbel", "exact-match", "typical")
LOSSLESS = frozenset(MODES) - {"typical"}
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
    """How many drafted tokens stand, and the target's own token after them."""

    num_accepted: int
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
        p: the target's distribution, len(guesses.tokens) + 1 positions per row, rows in order.
        rows: the sequences; modes and lengths may differ.

    Returns:
        One verdict per row; it depends on that row alone.
    """
    lengths = [len(row.guesses.tokens) for row in rows]
    starts = [0, *accumulate(length + 1 for length in lengths)]
    assert len(p.likeliest) == starts[-1], "p has a position for each drafted token and one more per row"
    verdicts: dict[int, Verdict] = {}
    members: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        if p.one_hot[starts[i]] and row.mode != SYNTHETIC:
            verdicts[i] = _follow(row.guesses.tokens, p.likeliest, starts[i])
        else:
            assert row.mode != "greedy", "greedy verification is for temperature 0"
            members.setdefault(row.mode, []).append(i)
    for mode, places in members.items():
        its = [rows[i] for i in places]
        group = _Group.of(p, its, [starts[i] for i in places], [lengths[i] for i in places])
        num_accepted, own = _RULES[mode](group)
        for i, accepted, token in zip(places, num_accepted.tolist(), own.tolist(), strict=True):
            verdicts[i] = Verdict(accepted, token)
    return [verdicts[i] for i in range(len(rows))]


@dataclass(slots=True)
class _Group:
    """The rows of one mode. Small things [B, K] live on the host, what has a vocabulary's width on p's device.

    Args:
        p: the distribution of all rows of the call.
        rows: this mode's rows.
        starts: [B] each row's first position in p.
        lengths: [B] each row's number of drafted tokens.
        tokens: [B, K] int64 drafted tokens, 0 behind a row's end.
        is_drafted: [B, K] bool, False behind a row's end.
    """

    p: Distribution
    rows: list[VerifyRow]
    starts: IntArray
    lengths: IntArray
    tokens: IntArray
    is_drafted: BoolArray

    @classmethod
    def of(cls, p: Distribution, rows: list[VerifyRow], first: list[int], num_drafted: list[int]) -> _Group:
        starts, lengths = (np.array(numbers, dtype=np.int64) for numbers in (first, num_drafted))
        is_drafted = np.arange(lengths.max()) < lengths[:, None]
        tokens = np.zeros(is_drafted.shape, dtype=np.int64)
        tokens[is_drafted] = [token for row in rows for token in row.guesses.tokens]
        return cls(p, rows, starts, lengths, tokens, is_drafted)

    def positions(self) -> IntArray:
        """Places [n] in p of all positions of these rows."""
        ends = np.cumsum(self.lengths + 1)
        return np.arange(ends[-1]) + np.repeat(self.starts - ends + self.lengths + 1, self.lengths + 1)

    def drafted_positions(self) -> IntArray:
        """Places [sum of lengths] in p at which the drafted tokens stand."""
        return (self.starts[:, None] + np.arange(self.is_drafted.shape[1]))[self.is_drafted]

    def probs(self, places: IntArray) -> Tensor:
        """Rows [len(places), V] of p."""
        assert self.p.probs is not None, "rows that sample have a dense p"
        if len(places) == self.p.probs.shape[0] and bool((np.diff(places) == 1).all()):
            return self.p.probs
        return self.p.probs[self._index(places)]

    def p_of_drafted(self) -> FloatArray:
        """p(x) [B, K], 0 behind a row's end."""
        assert self.p.probs is not None, "rows that sample have a dense p"
        at = self._index(self.drafted_positions())
        return self._spread(self.p.probs[at, self._index(self.tokens[self.is_drafted])])

    def q(self) -> tuple[BoolArray, Tensor | None]:
        """Which drafted tokens [B, K] were sampled, and what from, [their number, V]; None when none was."""
        has_q = np.array([row.guesses.q is not None for row in self.rows], dtype=np.bool_)
        is_sampled = self.is_drafted & has_q[:, None]
        if not is_sampled.any():
            return is_sampled, None
        parts = [row.guesses.q for row in self.rows if row.guesses.q is not None and row.guesses.tokens]
        q = (parts[0] if len(parts) == 1 else torch.cat(parts)).to(self.p.scores.device)
        assert q.shape == (is_sampled.sum(), self.p.scores.shape[1]), "q has a row for each drafted token, as wide as p"
        return is_sampled, q

    def q_of_drafted(self, is_sampled: BoolArray, q: Tensor | None) -> FloatArray:
        """q(x) [B, K], 1 for a token drafted without chance and behind a row's end."""
        values = np.ones(self.tokens.shape)
        if q is not None:
            tokens = self._index(self.tokens[is_sampled])
            values[is_sampled] = q.gather(1, tokens[:, None])[:, 0].double().cpu().numpy()
            assert (values > 0).all(), "a drafted token has a probability under the q that it was sampled from"
        return values

    def uniforms(self, purpose: Purpose, n: int) -> FloatArray:
        """Uniform numbers [B, n] keyed by the position at which the step began; column j is offset j."""
        return noise.uniforms_many(*self._keys(), [row.position for row in self.rows], purpose, n)

    def gumbel_tokens(self) -> Tensor:
        """argmax(log p + g) [n] at all positions of these rows."""
        seeds, indices = (
            [key for key, k in zip(keys, self.lengths, strict=True) for _ in range(k + 1)] for keys in self._keys()
        )
        absolute = [row.position + j for row, k in zip(self.rows, self.lengths, strict=True) for j in range(k + 1)]
        return noise.gumbel_argmax(self.probs(self.positions()), seeds, indices, absolute)

    def _keys(self) -> tuple[list[int], list[int]]:
        return [row.params.seed for row in self.rows], [row.params.index for row in self.rows]

    def _index(self, values: IntArray | FloatArray) -> Tensor:
        return torch.from_numpy(values).to(self.p.scores.device)

    def _spread(self, values: Tensor) -> FloatArray:
        spread = np.zeros(self.tokens.shape)
        spread[self.is_drafted] = values.double().cpu().numpy()
        return spread


Judged = tuple[IntArray, IntArray]


def _num_leading(accepted: BoolArray) -> IntArray:
    """Length [B] of the accepted prefix of accepted [B, K]."""
    leading: IntArray = np.cumprod(accepted, axis=1, dtype=np.int64).sum(axis=1)
    return leading


def _follow(tokens: Sequence[int], chosen: Sequence[int], start: int) -> Verdict:
    """Accept one row's tokens as long as they are what the target chose itself; `start` is its first place."""
    accepted = next((i for i, token in enumerate(tokens) if token != chosen[start + i]), len(tokens))
    return Verdict(accepted, chosen[start + accepted])


def _follow_all(group: _Group, chosen: list[int]) -> Judged:
    """The same of all rows, chosen [n] at all their positions."""
    starts = np.cumsum(group.lengths + 1) - group.lengths - 1
    pairs = zip(group.rows, starts.tolist(), strict=True)
    verdicts = [_follow(row.guesses.tokens, chosen, start) for row, start in pairs]
    return np.array([one.num_accepted for one in verdicts]), np.array([one.own for one in verdicts])


def _gumbel(group: _Group) -> Judged:
    return _follow_all(group, group.gumbel_tokens().tolist())


def _exact_match(group: _Group) -> Judged:
    uniforms = group.uniforms(Purpose.OWN, group.tokens.shape[1] + 1)
    used = np.arange(uniforms.shape[1]) <= group.lengths[:, None]
    return _follow_all(group, inverse_cdf(group.probs(group.positions()), uniforms[used]).tolist())


def _typical(group: _Group) -> Judged:
    p = group.probs(group.drafted_positions())
    entropy = group._spread(torch.special.entr(p).sum(dim=-1, dtype=torch.float64))
    threshold = np.minimum(TYPICAL_EPSILON, TYPICAL_DELTA * np.exp(-entropy))
    num_accepted = _num_leading((group.p_of_drafted() > threshold) & group.is_drafted)
    return num_accepted, _draw_own(group, num_accepted, group.probs(group.starts + num_accepted))


def _synthetic(group: _Group) -> Judged:
    """Chance alone decides, but a token that cannot occur (banned, or against a grammar) never stands."""
    rates = np.zeros(group.tokens.shape)
    for row, rate in zip(group.rows, rates, strict=True):
        num = min(len(rate), len(row.rates))
        rate[:num] = row.rates[:num]
    at, tokens = group._index(group.drafted_positions()), group._index(group.tokens[group.is_drafted])
    can_occur = group._spread(group.p.scores[at, tokens].isfinite()) > 0
    stands = (group.uniforms(Purpose.ACCEPT, group.tokens.shape[1]) < rates) & can_occur
    num_accepted = _num_leading(stands)
    places = group.starts + num_accepted
    own: IntArray = np.array(group.p.likeliest, dtype=np.int64)[places]
    if not group.p.one_hot[places].all():
        own = np.where(group.p.one_hot[places], own, _draw_own(group, num_accepted, group.probs(places)))
    return num_accepted, own


def _rejection(group: _Group) -> Judged:
    is_sampled, q = group.q()
    uniforms = group.uniforms(Purpose.ACCEPT, group.tokens.shape[1])
    stands = uniforms * group.q_of_drafted(is_sampled, q) < group.p_of_drafted()
    num_accepted = _num_leading(stands & group.is_drafted)
    weights = _residual(group, num_accepted, np.ones(len(group.rows)), is_sampled, q)
    return num_accepted, _draw_own(group, num_accepted, weights)


def _block(group: _Group) -> Judged:
    is_sampled, q = group.q()
    p_drafted = group.p_of_drafted()
    kept = _kept_mass(p_drafted / group.q_of_drafted(is_sampled, q))
    uniforms = group.uniforms(Purpose.ACCEPT, group.tokens.shape[1])
    stands = (uniforms < _block_acceptance(group, kept, p_drafted, is_sampled, q)) & group.is_drafted
    num_accepted = (stands * np.arange(1, stands.shape[1] + 1)).max(axis=1, initial=0)
    scale = np.take_along_axis(kept, num_accepted[:, None], axis=1)[:, 0]
    return num_accepted, _draw_own(group, num_accepted, _residual(group, num_accepted, scale, is_sampled, q))


def _kept_mass(ratio: FloatArray) -> FloatArray:
    """P [B, K+1]: P_0 = 1, P_i = min(1, P_{i-1} p(x_i)/q(x_i)), from ratio [B, K]."""
    kept = np.ones((ratio.shape[0], ratio.shape[1] + 1))
    for i in range(ratio.shape[1]):
        kept[:, i + 1] = np.minimum(1.0, kept[:, i] * ratio[:, i])
    return kept


def _block_acceptance(
    group: _Group, kept: FloatArray, p_drafted: FloatArray, is_sampled: BoolArray, q: Tensor | None
) -> FloatArray:
    """The h [B, K] of i tokens in column i-1: S_i/(S_i + 1 - P_i) with S_i = Σ(P_i p - q)+, and P_k for all k."""
    before = kept[:, :-1]
    # Without chance q is one-hot at x, so (P p - q)+ is P p everywhere but at x.
    gain = before * (1.0 - p_drafted)
    if q is not None:
        has_q = is_sampled[group.is_drafted]
        p = group.probs(group.drafted_positions()[has_q])
        scale = group._index(before[is_sampled]).float()
        gain[is_sampled] = _excess(p, q, scale).sum(dim=-1, dtype=torch.float64).cpu().numpy()
    # Column i of `gain` and `before` belongs to the prefix of i tokens, whose h stands in column i-1.
    gain, mass = gain[:, 1:], kept[:, 1:-1]
    h = kept[:, 1:].copy()
    total = gain + 1.0 - mass
    inner = np.divide(gain, total, out=np.ones_like(gain), where=total > 0)
    is_inner = group.is_drafted[:, 1:]
    h[:, :-1][is_inner] = inner[is_inner]
    return h


def _excess(p: Tensor, q: Tensor, scale: Tensor) -> Tensor:
    """(scale p - q)+ [n, V] from p, q [n, V] float32 and scale [n]."""
    return (p * scale[:, None]).sub_(q).clamp_(min=0)


def _residual(
    group: _Group, num_accepted: IntArray, scale: FloatArray, is_sampled: BoolArray, q: Tensor | None
) -> Tensor:
    """What own tokens are drawn from, [B, V] of any sum: (scale p - q)+ after a refusal, p after full acceptance."""
    p = group.probs(group.starts + num_accepted)
    refused = np.flatnonzero(num_accepted < group.lengths)
    if not len(refused):
        return p
    weights = p.clone()
    by_chance = is_sampled[refused, num_accepted[refused]]
    certain = refused[~by_chance]
    weights[group._index(certain), group._index(group.tokens[certain, num_accepted[certain]])] = 0.0
    if q is not None and by_chance.any():
        sampled = refused[by_chance]
        row_of_q = np.cumsum(is_sampled).reshape(is_sampled.shape) - 1
        q_refused = q[group._index(row_of_q[sampled, num_accepted[sampled]])]
        at = group._index(sampled)
        weights[at] = _excess(p[at], q_refused, group._index(scale[sampled]).float())
    # Where p equals q a refusal comes from the last bits alone, and nothing is left over: draw from p.
    empty = weights.sum(dim=-1, keepdim=True) <= 0
    return torch.where(empty, p, weights)


def _draw_own(group: _Group, num_accepted: IntArray, weights: Tensor) -> IntArray:
    """Own tokens [B] drawn from weights [B, V]."""
    uniforms = group.uniforms(Purpose.OWN, group.tokens.shape[1] + 1)
    drawn: IntArray = inverse_cdf(weights, uniforms[np.arange(len(uniforms)), num_accepted]).cpu().numpy()
    return drawn


_RULES: dict[str, Callable[[_Group], Judged]] = {
    "rejection": _rejection,
    "block": _block,
    "gumbel": _gumbel,
    "exact-match": _exact_match,
    "typical": _typical,
    SYNTHETIC: _synthetic,
}
