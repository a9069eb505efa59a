"""Where steps can begin along a trace's text, what each accepts there, and how often each is visited.

A step that begins before output token s (s ≥ 1, as prefill gives the first) accepts at least i tokens with probability
S_i(s), given the text. EXACTNESS.md, "Traces", says which:

| rule | S_i(s), products over j = s…s+i-1 |
|---|---|
| greedy, one-hot | Π 1[argmax q = x_j] |
| rejection | Π min(1, q(x_j)/p(x_j)) |
| exact-match | Π q(x_j) |
| gumbel | Π 1[argmax(log q + g_j) = x_j] |
| block, traversal | P_i Π q(x_j)/p(x_j), P_i = min(1, P_{i-1} p(x_i)/q(x_i)): the least of 1 and the prefixes' Π q/p |
| a draft without chance | 1[its first i guesses are the text's], under every rule |

m accepted tokens lead to the start s + m + 1, so the probability that a step begins at s is a forward pass over starts,
exact for rules of chance; where every S is 0 or 1 it is the walk itself. Averaging over all positions alike is
wrong: steps do not begin everywhere alike, and what a step accepts decides where the next begins.

With p-min a step drafts only while the draft is sure of its next token. Behind the first token that the target refuses
the trace has not what the draft would say: it is taken to be as sure there as at the text's own tokens. What is
accepted does not rest on that; only the number of tokens drafted in vain does.

Letters: B prompts, n the longest output, N positions of all outputs, k drafted tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from specdec_cli.errors import UsageError
from specdec_cli.measure.predict.draft_trace import DepthTrace, GuessTrace, ModelTrace, ReadTrace
from specdec_cli.measure.predict.trace import Trace
from specdec_cli.measure.stats import FloatArray
from specdec_cli.verification import AUTO, RULES

IntArray = npt.NDArray[np.int64]


def _by_ratio(draft: ModelTrace, log_p: FloatArray, log_q: FloatArray) -> FloatArray:
    return np.exp(np.minimum(log_q - log_p, 0.0))


def _by_argmax(draft: ModelTrace, log_p: FloatArray, log_q: FloatArray) -> FloatArray:
    return draft.is_argmax.astype(np.float64)


_REPLAYED: dict[str, Callable[[ModelTrace, FloatArray, FloatArray], FloatArray]] = {
    "greedy": _by_argmax,
    "rejection": _by_ratio,
    "block": _by_ratio,
    "traversal": _by_ratio,
    "exact-match": lambda draft, log_p, log_q: np.exp(log_q),
    "gumbel": lambda draft, log_p, log_q: draft.is_gumbel.astype(np.float64),
    "one-hot": _by_argmax,
}
"""By rule, the chance that a trace gives each emitted token [N] to be accepted, from a draft, log p and log q [N]."""
REPLAYABLE = tuple(_REPLAYED)


def check_knowable(rule: str, p_min: float = 0.0) -> None:
    """Refuse what no trace can know, saying why.

    Raises:
        UsageError: a rule or schedule that has to be measured.
    """
    if rule not in (AUTO, *REPLAYABLE) and rule in RULES:
        why = "its acceptance has no formula here"
        if not RULES[rule].is_lossless:
            why = "it changes the text on which it would be replayed"
        raise UsageError(f"a trace cannot replay the rule `{rule}`: {why}", "measure it with bench")
    if rule not in (AUTO, *REPLAYABLE):
        raise UsageError(f"unknown verification rule `{rule}`", f"one of auto, {', '.join(REPLAYABLE)}")
    if p_min > 0:
        raise UsageError(
            f"a trace cannot replay p_min `{p_min:g}`: it does not contain tokens drafted after the first rejection",
            "measure it with bench, or predict without p_min",
        )


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """Steps of one k at every start: asked and drafted tokens [B, n], and survival [B, n, k+1] with S_0 = 1."""

    asked: IntArray
    drafted: IntArray
    survival: FloatArray


class Starts:
    """A trace laid out by prompt and start, for one draft and rule.

    Args:
        trace: a target's text with this draft.
        draft: its name in the trace.
        rule: one of REPLAYABLE, or auto: greedy at temperature 0, block above it.
        k_max: largest k.

    Attributes:
        draft: the draft's trace.
        lengths: [B] tokens of the texts.
        num_emitted: [B] of them, those that an engine emits.
        contexts: [B, n] tokens before each start.
        room: [B, n] most drafted tokens there.
        survival: [B, n, k_max+1] of a model draft, cut for each k; None of guesses.
        first: [B, 2] sum of the acceptance of one drafted token over all positions alike, and how many there are.

    Raises:
        UsageError: a rule that a trace cannot replay, a draft that is not in it or was asked for fewer tokens.
    """

    def __init__(self, trace: Trace, draft: str, rule: str, k_max: int) -> None:
        check_knowable(rule)
        if rule == "greedy" and not trace.is_greedy:
            raise UsageError(
                "the trace was sampled, and rule `greedy` is for temperature 0", "use auto, or trace again"
            )
        self.trace, self.draft, self.k_max = trace, trace.draft(draft), k_max
        self.rule = rule if rule != "auto" else "greedy" if trace.is_greedy else "block"
        asked = self.draft.most_depth
        if asked is not None and asked < k_max:
            raise UsageError(
                f"the draft `{draft}` was traced for at most `{asked}` tokens, not `{k_max}`", "trace again"
            )
        self.lengths = np.array([len(prompt.output) for prompt in trace.prompts], dtype=np.int64)
        self.num_emitted = np.array([prompt.num_emitted for prompt in trace.prompts], dtype=np.int64)
        size = np.array([len(prompt.token_ids) for prompt in trace.prompts], dtype=np.int64)
        self.contexts = size[:, None] + np.arange(max(self.lengths.max(initial=0), 2))
        longest = np.array([prompt.max_tokens for prompt in trace.prompts], dtype=np.int64)
        room = longest[:, None] - self.contexts - 1
        if self.draft.max_context is not None:
            room = np.minimum(room, self.draft.max_context - self.contexts + 1)
        self.room = np.maximum(room, 0)
        self.survival: FloatArray | None = None
        self.first = np.zeros((len(size), 2))
        self._fill()

    def _fill(self) -> None:
        """Survival of a model's guesses, and the acceptance of one token over all positions alike."""
        starts = np.arange(self.contexts.shape[1])
        is_start = (starts >= 1) & (starts < self.lengths[:, None])
        if isinstance(self.draft, GuessTrace):
            guessed, matching = (self.padded(a[:, 0], 0) for a in (self.draft.num_guessed, self.draft.num_matching))
            self.first = np.stack([(values * is_start).sum(axis=1) for values in (matching, guessed)], axis=1)
            return
        readable = is_start & (self.room >= 1)
        ratio, windows = np.ones(readable.shape), np.ones((*readable.shape, self.k_max + 1))
        for i in range(self.k_max):
            each, gain = self._chances(self.draft, i)
            if not i:
                self.first = np.stack([(each * readable).sum(axis=1), readable.sum(axis=1)], axis=1)
            ratio = ratio * gain
            windows[..., i + 1] = np.minimum(windows[..., i], ratio)
        self.survival = windows

    def _chances(self, draft: ModelTrace | DepthTrace, depth: int) -> tuple[FloatArray, FloatArray]:
        """Chance [B, n] that the token at a depth behind every start is accepted, and its factor in joint rules."""
        is_own = isinstance(draft, DepthTrace)
        there = draft.at(depth) if isinstance(draft, DepthTrace) else draft
        log_p, log_q = self.trace.log_p.astype(np.float64), there.log_q.astype(np.float64)
        if is_own:  # what stands at a start is of the token behind it
            log_p = _shifted(self.padded(log_p, 0.0), depth)[self._is_output]
        each = self.padded(_REPLAYED[self.rule](there, log_p, log_q), 0.0)
        gain = (
            self.padded(np.exp(log_q - log_p), 0.0)
            if (self.rule in RULES and RULES[self.rule].judges_jointly)
            else each
        )
        return (each, gain) if is_own else (_shifted(each, depth), _shifted(gain, depth))

    def padded(self, flat: npt.NDArray[Any], fill: float) -> FloatArray:
        """Values of all positions [N] as [B, n], with `fill` behind each output's end."""
        padded = np.full((len(self.lengths), self.contexts.shape[1]), fill)
        padded[self._is_output] = flat
        return padded

    @property
    def _is_output(self) -> npt.NDArray[np.bool_]:
        """Mask [B, n] of the positions of outputs."""
        return np.arange(self.contexts.shape[1]) < self.lengths[:, None]

    def steps(self, k: int, survival: FloatArray | None = None, p_min: float = 0.0) -> Steps:
        """The outcome of a step with k at every start.

        Args:
            k: most tokens drafted one after another.
            survival: [B, n, k+1] of a tree's paths, which is cut to the drafted depth; None for a chain's.
            p_min: a chain ends before a token of which the draft is less sure, having been asked for it.
        """
        asked = np.minimum(self.room, k)
        if self.survival is not None:
            limit = self.draft.limit if isinstance(self.draft, DepthTrace) else None
            drafted = asked if limit is None else np.minimum(asked, limit)
            survival = self.survival[..., : k + 1].copy() if survival is None else survival
            if p_min:
                num_sure = self._num_sure(k, p_min)
                drafted = np.minimum(drafted, num_sure)
                asked = np.minimum(asked, drafted + 1)
        else:
            assert isinstance(self.draft, GuessTrace), "a model's survival is filled in"
            drafted, matching = (
                self.padded(_of_asked(values, asked[self._is_output]), 0).astype(np.int64)
                for values in (self.draft.num_guessed, self.draft.num_matching)
            )
            survival = (np.arange(k + 1) <= matching[..., None]).astype(np.float64)
        survival[np.arange(k + 1) > drafted[..., None]] = 0.0
        return Steps(asked, drafted, survival)

    def _num_sure(self, k: int, p_min: float) -> IntArray:
        """Tokens [B, n] behind every start, up to k, before the first of which the draft is less sure."""
        assert not isinstance(self.draft, GuessTrace), "a draft without a distribution has no confidence"
        num, goes_on = np.zeros(self.contexts.shape, np.int64), np.ones(self.contexts.shape, np.bool_)
        for depth in range(k):
            goes_on &= ~self._is_unsure(self.draft, depth, p_min)
            num += goes_on
        return num

    def _is_unsure(self, draft: ReadTrace, depth: int, p_min: float) -> npt.NDArray[np.bool_]:
        """Whether [B, n] the draft is less sure of its token at a depth behind every start."""
        there = draft.at(depth) if isinstance(draft, DepthTrace) else draft
        assert there.confidence is not None, "only a trace with confidences is replayed with p_min"
        unsure = self.padded(there.confidence < p_min, 0.0)
        return (unsure if isinstance(draft, DepthTrace) else _shifted(unsure, depth)) > 0

    def visits(self, steps: Steps) -> FloatArray:
        """Probability [B, n] that a step begins at each start: the forward pass."""
        n, width = steps.survival.shape[1], steps.survival.shape[2]
        exactly = -np.diff(steps.survival, axis=2, append=0.0)
        visits = np.zeros((len(steps.survival), n + width + 1))
        visits[:, 1] = 1.0
        for start in range(1, n):
            visits[start >= self.num_emitted, start] = 0.0
            visits[:, start + 1 : start + width + 1] += visits[:, start, None] * exactly[:, start]
        return visits[:, :n] * (np.arange(n) < self.num_emitted[:, None])

    def draw(self, steps: Steps, place: int, start: int, generator: np.random.Generator) -> int:
        """How many tokens one step accepts, drawn."""
        return int((generator.random() < steps.survival[place, start, 1:]).sum())


def _shifted(values: FloatArray, by: int) -> FloatArray:
    """values [B, n] moved left, zeros coming in."""
    if not by:
        return values
    moved = np.zeros_like(values)
    moved[:, :-by] = values[:, by:]
    return moved


def _of_asked(values: npt.NDArray[np.int16], asked: IntArray) -> IntArray:
    """values [N, K] at column asked - 1, 0 where nothing was asked."""
    chosen = values[np.arange(len(asked)), np.maximum(asked - 1, 0)]
    return np.where(asked > 0, chosen, 0).astype(np.int64)
