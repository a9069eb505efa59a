"""Speed-up of every k and of static trees from measured survival and measured costs, and which to take.

S(k) = (1 + Σ s_i) t_AR / (k t_draft + t_verify(k+1) + t_overhead), s_i the share of steps that accept at least i. Here
every step is priced with what it really drafts and verifies (fewer tokens near the end, none where an n-gram draft
finds nothing) and with its own context, over the prompts' whole outputs; with full steps only it is that formula. A
tree's step is priced by its nodes and by the draft model's passes (see `tree_costs`).

Beside it stands the textbook's: one acceptance α for every drafted token, S = (1 - α^(k+1)) / (1 - α) / (1 + c k) with
c = t_draft/t_AR (Leviathan, Kalman, Matias 2022), which knows neither that acceptance comes in runs nor what rows cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specdec_cli.document import Interval
from specdec_cli.draft_shape import DraftShape, shape_words
from specdec_cli.engine.synthetic import iid_length, solve_alpha
from specdec_cli.measure.predict.cost import Costs
from specdec_cli.measure.predict.evidence import Evidence, Recommendation, needs, side, times
from specdec_cli.measure.predict.replay import Replay
from specdec_cli.measure.predict.tree_costs import CostShares
from specdec_cli.measure.stats import FloatArray, joint_median, joint_ratio
from specdec_cli.quantities import counted
from specdec_cli.tree_shape import TreeShape

PUBLISHED_K = (2, 6)
_DEAR, _SHORT = 0.35, 1.5  # a draft's share of a step, and tokens of a drafting step, that explain a loss


@dataclass(frozen=True, slots=True, eq=False)
class Predicted:
    """One k, or one tree.

    Args:
        shape: what a step drafts.
        acceptance_length: 1 + accepted tokens per drafting step.
        speedup: of decoding, over all prompts' decode time together; the interval is one bootstrap over prompts and
            over the rounds of the costs.
        median_speedup: the median prompt's, which is what `bench` reports as `speedup.decode`.
        plain_seconds: [B] decode time of each prompt without a draft.
        draft_seconds: [B] with one: the time of its steps' parts, here the draft,
        verify_seconds: [B] the target,
        overhead_seconds: [B] and the engine.
        iid_speedup: the textbook's figure; None for a tree and with a p-min.
        replayed: what it rests on: acceptance by depth, by task and along the text.
    """

    shape: DraftShape
    acceptance_length: Interval
    speedup: Interval
    median_speedup: Interval
    plain_seconds: FloatArray
    draft_seconds: FloatArray
    verify_seconds: FloatArray
    overhead_seconds: FloatArray
    iid_speedup: float | None
    replayed: Replay

    @property
    def k(self) -> int:
        """Most tokens drafted one after another."""
        return self.shape.k

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of decoding, of all prompts together; not a number where nothing is decoded."""
        return _ratio(self.replayed.num_emitted, self.seconds)

    @property
    def seconds(self) -> FloatArray:
        """Decode time [B] of each prompt with the draft."""
        return self.draft_seconds + self.verify_seconds + self.overhead_seconds

    @property
    def speedup_by_prompt(self) -> FloatArray:
        """Speed-up [B] of each prompt that decodes at all, for paired comparisons."""
        decodes = self.plain_seconds > 0
        return self.plain_seconds[decodes] / self.seconds[decodes]

    def shares(self) -> dict[str, float] | None:
        """Shares of a step's time by part; None where there is no step."""
        total = self.seconds.sum()
        parts = {"draft": self.draft_seconds, "verify": self.verify_seconds, "overhead": self.overhead_seconds}
        return {name: float(part.sum() / total) for name, part in parts.items()} if total else None


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """Every k, and what would have to change.

    Args:
        rows: k = 1…k_max, then each with p-mins, and then trees.
        alpha: the textbook's α: mean acceptance of one drafted token, over all positions alike; None when none was.
        break_even_alpha: smallest α at which some k is no slower than no draft, at these costs; None when none is.
        draft_seconds_for_2x: seconds per drafted token at which the best k would give 2×; None when a free draft
            would not.
        ceiling: speed-up of the best k if the draft cost nothing.
        cost_ratio: c, seconds of a drafted token over those of a plain step.
        recommended: the k, with or without a p-min, or the tree to take.
    """

    rows: list[Predicted]
    alpha: float | None
    break_even_alpha: float | None
    draft_seconds_for_2x: float | None
    ceiling: float
    cost_ratio: float
    recommended: Recommendation

    @property
    def chains(self) -> list[Predicted]:
        """The rows of every k without a p-min."""
        return [row for row in self.rows if row.shape.is_full_chain]

    @property
    def fastest_k(self) -> int:
        """The k of the largest predicted speed-up, the smaller of equals; 0 where none is faster than no draft."""
        faster = {row.k: row.speedup.median for row in self.chains if row.speedup.median > 1}
        return max(faster, key=lambda k: (faster[k], -k), default=0)

    @property
    def unsure(self) -> list[Predicted]:
        """The rows with p-mins."""
        return [row for row in self.rows if row.shape.p_min]

    @property
    def trees(self) -> list[Predicted]:
        """The rows of trees."""
        return [row for row in self.rows if row.shape.tree is not None]

    def row(self, shape: DraftShape) -> Predicted | None:
        """The row of a shape; None where it was not predicted."""
        return next((row for row in self.rows if row.shape == shape), None)


def predict(
    replays: Sequence[Replay],
    costs: Costs,
    trees: Mapping[TreeShape, Replay] | None = None,
    unsure: Mapping[DraftShape, Replay] | None = None,
) -> Prediction:
    """Predict the speed-up of every replayed k and tree.

    Args:
        replays: of one draft and rule, k ascending.
        costs: of the same pair, for at least the largest k; with `probe_trees` where there are trees.
        trees: counts by depth of decoding with each tree.
        unsure: counts with p-mins, by shape.
    """
    assert replays, "a prediction needs a replay"
    assert replays[-1].k <= costs.k_max, "costs reach the largest k"
    accepted, num = replays[0].first.sum(axis=0)
    alpha = float(accepted / num) if num else None
    context = float(np.average(replays[0].mean_context, weights=np.maximum(replays[0].num_steps, 1e-12)))
    plain = float(costs.plain(context))
    ratio = costs.draft_seconds_per_token(context) / plain
    drawn = costs.drawn()
    iid = [
        None if alpha is None else iid_speedup(alpha, replay.k, float(costs.draft(replay.k, context)) / plain)
        for replay in replays
    ]
    rows = [_predict(DraftShape(replay.k), replay, costs, drawn, its) for replay, its in zip(replays, iid, strict=True)]
    others = dict(unsure or {}) | {DraftShape.of(tree): replay for tree, replay in (trees or {}).items()}
    further = [_predict(shape, replay, costs, drawn, None) for shape, replay in others.items()]
    return Prediction(
        rows=[*rows, *further],
        alpha=alpha,
        break_even_alpha=_break_even(costs, context, [row.k for row in rows]),
        draft_seconds_for_2x=_draft_seconds_for(2.0, rows, replays),
        ceiling=max(_ratio(row.plain_seconds, row.verify_seconds + row.overhead_seconds) for row in rows),
        cost_ratio=ratio,
        recommended=choose([*rows, *further]),
    )


def _predict(shape: DraftShape, replay: Replay, costs: Costs, drawn: FloatArray, iid: float | None) -> Predicted:
    """One k or tree; drawn [S, M] are the costs of every resample."""
    bills = _bills(shape, replay, costs)
    plain, draft, verify, overhead = (bill @ costs.flat for bill in bills)
    seconds = draft + verify + overhead
    decodes = plain > 0
    speedup = median = Interval(float("nan"), None, 0)
    if decodes.any():
        drawn_plain = drawn @ bills[0][decodes].T
        drawn_seconds = drawn @ (bills[1] + bills[2] + bills[3])[decodes].T
        speedup = joint_ratio((plain[decodes], seconds[decodes]), (drawn_plain, drawn_seconds))
        median = joint_median(plain[decodes] / seconds[decodes], drawn_plain / drawn_seconds)
    return Predicted(
        shape=shape,
        acceptance_length=replay.acceptance_length(),
        speedup=speedup,
        median_speedup=median,
        plain_seconds=plain,
        draft_seconds=draft,
        verify_seconds=verify,
        overhead_seconds=overhead,
        iid_speedup=iid,
        replayed=replay,
    )


def _bills(shape: DraftShape, replay: Replay, costs: Costs) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """How often each prompt pays each of the M costs [B, M], in the order of `Costs.flat`.

    Without a draft; then, of steps with one: drafting, verifying, the engine's own work.
    """
    at, of = costs.context_shares(replay.mean_context), CostShares.of(shape, costs.k_max, costs.trees)
    first = np.eye(costs.num_columns)[:1] * replay.num_emitted[:, None]
    none = np.zeros_like(first)

    def bill(target: FloatArray, draft: FloatArray, overhead: FloatArray) -> FloatArray:
        flat = [(at[:, :, None] * by[:, None, :]).reshape(len(first), -1) for by in (target, draft)]
        return np.concatenate([*flat, overhead], axis=1)

    return (
        bill(first, none, first),
        bill(none, replay.steps_by_asked @ of.draft, none),
        bill(replay.steps_by_drafted @ of.verify, none, none),
        bill(none, none, replay.steps_by_asked @ of.overhead),
    )


def iid_speedup(alpha: float, k: int, draft_share: float) -> float:
    """The textbook's speed-up E / (1 + c k) (Leviathan, Kalman, Matias 2022, theorem 3.8).

    Args:
        alpha: the chance of every drafted token.
        k: drafted tokens.
        draft_share: seconds of guessing k tokens over those of a plain step: c k where every token takes a pass.
    """
    return iid_length(alpha, k) / (1 + draft_share)


def choose(rows: Sequence[Predicted]) -> Recommendation:
    """The k or tree of the largest speed-up, the smaller of equals; k = 0 where none pays, or where that is unknown."""
    ordered = sorted(rows, key=lambda row: row.shape)
    best = max(ordered, key=lambda row: row.speedup.median)
    surely = [row for row in ordered if row.speedup.is_above(1.0)]
    if not surely and all(side(row.speedup) is False for row in rows):
        why = f"do not speculate: even the best {_short(best)}: {_reason(best)}"
        return Recommendation(0, None, None, why, "do-not-speculate")
    if not surely:
        return _open(best)
    best = max(surely, key=lambda row: row.speedup.median)
    near = [row.shape for row in rows if row is not best and row.speedup.overlaps(best.speedup)]
    also = f"; its interval overlaps that of {shape_words(near)}" if near else ""
    is_usual = best.shape.tree is not None or PUBLISHED_K[0] <= best.k <= PUBLISHED_K[1]
    outside = "" if is_usual else ", outside the published guidance of 2 to 6"
    why = (
        f"{best.shape}{outside} gives the largest predicted speed-up, {times(best.speedup)}, "
        f"at {best.acceptance_length.median:.2f} tokens a step{also}"
    )
    return Recommendation.of(best.shape, best.speedup, why, "speculate")


def _open(best: Predicted) -> Recommendation:
    """The recommendation where no k is known to pay, and some k may."""
    if not np.isfinite(best.speedup.median):
        why = "nothing was decoded after the first tokens, so there is nothing to speed up"
        return Recommendation(0, None, None, why, "inconclusive", ("prompts whose outputs are longer than one token",))
    are = "is" if best.speedup.pairs == 1 else "are"
    too_few = f" ({counted(best.speedup.pairs, 'prompt')} {are} too few to be certain)"
    few = "" if best.speedup.ci95 is not None else too_few
    why = f"the best {_short(best)}, not certainly above 1{few}: {_reason(best)}"
    wanted = needs(Evidence(best.speedup), None) or ("a measurement",)
    return Recommendation(0, None, best.speedup, why, "inconclusive", wanted)


def _short(best: Predicted) -> str:
    return f"{best.shape} gives {best.speedup.median:.2f}×"


def _reason(best: Predicted) -> str:
    """The largest part of the cost."""
    shares = best.shares()
    assert shares is not None, "what has a speed-up has steps"
    length = best.acceptance_length.median
    if not np.isfinite(length):
        return "the draft proposed nothing"
    if shares["draft"] >= _DEAR:
        return f"the draft takes {shares['draft']:.0%} of a step"
    if length < _SHORT:
        return f"a step accepts only {length - 1:.2f} drafted tokens"
    return f"verifying {best.shape.num_nodes + 1} rows takes {shares['verify']:.0%} of a step"


def _break_even(costs: Costs, context: float, ks: Sequence[int]) -> float | None:
    """Smallest α whose i.i.d. tokens per step pay for a step of some k, costs of rows included."""
    alphas = []
    for k in ks:
        step = costs.draft(k, context) + costs.target(k + 1, context) + costs.overhead_seconds[k]
        wanted = float(step / costs.plain(context))
        if wanted <= k + 1:
            alphas.append(solve_alpha(wanted, k))
    return min(alphas) if alphas else None


def _draft_seconds_for(speedup: float, rows: Sequence[Predicted], replays: Sequence[Replay]) -> float | None:
    """Seconds of a drafted token, the largest of any k, at which the predicted speed-up is this much."""
    seconds = []
    for row, replay in zip(rows, replays, strict=True):
        left = row.plain_seconds.sum() / speedup - (row.verify_seconds + row.overhead_seconds).sum()
        asked = (replay.steps_by_asked * np.arange(replay.k + 1)).sum()
        if asked and left > 0:
            seconds.append(float(left / asked))
    return max(seconds) if seconds else None


def _ratio(numerators: FloatArray, denominators: FloatArray) -> float:
    total = float(denominators.sum())
    return float(numerators.sum()) / total if total else float("nan")
