"""Intervals by bootstrap over prompts: medians, ratios of totals, and paired comparisons.

The percentile bootstrap (Efron 1979): prompts are drawn with replacement, the statistic is taken of each draw, and the
middle 95 % of what comes out is the interval. One seed gives the same draws for every statistic over the same prompts,
so that configurations which share prompts are compared on the same resamples.

Few pairs bound a median loosely: whatever the distribution, the smallest and the largest of n values hold it between
them with chance 1 - 2^(1-n), which reaches 95 % at six. So up to _RANGE_PAIRS the interval of a median is that range,
for no narrower pair of values covers 95 % (the bootstrap's covers 85 % at 7); below ENOUGH_PAIRS even the range covers
less, which reports must say (TOO_FEW). One pair has no interval.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from specdec_cli.document import Interval

FloatArray = npt.NDArray[np.float64]
Statistic = Callable[[FloatArray], FloatArray]

NUM_RESAMPLES = 2000
_SEED = 0
MIN_PAIRS = 2
ENOUGH_PAIRS = 6
FIGURES = ("median", "speedup", "speedup_ratio")
"""The key of a figure with an interval in documents."""
TOO_FEW = (
    f"intervals of fewer than {ENOUGH_PAIRS} prompts or pairs are their range, which covers less than 95 % "
    "(2: 50 %, 3: 75 %); one has none"
)
_RANGE_PAIRS = 8
_BLOCK = 1 << 22  # numbers of one block of resamples, so that memory stays small


@dataclass(frozen=True, slots=True)
class Paired:
    """A against B on the same prompts.

    Args:
        ratio: median of the pairs' A/B.
        p_a_faster: share of resamples in which that median is above 1, ties counted half; None where the ratio has no
            interval.
    """

    ratio: Interval
    p_a_faster: float | None

    @property
    def is_significant(self) -> bool:
        """Whether the interval leaves 1 out."""
        return self.ratio.is_above(1.0) or self.ratio.is_below(1.0)


def bootstrap_totals(statistic: Statistic, by_prompt: FloatArray) -> Interval:
    """A function of totals over prompts, such as a ratio of sums.

    Args:
        statistic: from the totals [R, m] of R resamples to values [R].
        by_prompt: [B, m] what each prompt adds to the totals.
    """
    num = by_prompt.shape[0]
    resamples = _counts(num) if num >= MIN_PAIRS else ()
    draws = [statistic(counts @ by_prompt) for counts in resamples]
    return _interval(float(statistic(by_prompt.sum(axis=0)[None])[0]), draws, num)


def ratio_of_totals(numerators: FloatArray, denominators: FloatArray) -> Interval:
    """Sum of numerators [B] over sum of denominators [B]; NaN where nothing is under it."""
    return bootstrap_totals(_ratio, np.stack((numerators, denominators), axis=1).astype(np.float64))


def bootstrap_median(values: FloatArray) -> Interval:
    """The median of values [B], one for each prompt."""
    assert len(values), "a median needs a value"
    if MIN_PAIRS <= len(values) <= _RANGE_PAIRS:
        return _interval(float(np.median(values)), [values], len(values), ends=(0.0, 1.0))
    draws = _medians(values) if len(values) >= MIN_PAIRS else []
    return _interval(float(np.median(values)), draws, len(values))


def bootstrap_pooled_median(groups: Sequence[FloatArray]) -> Interval:
    """The median of all values of several prompts; a prompt's values [m], m of its own, are drawn together."""
    values = np.concatenate(groups)
    assert len(values), "a median needs a value"
    if len(groups) < MIN_PAIRS:
        return _interval(float(np.median(values)), [], len(groups))
    if len(groups) <= _RANGE_PAIRS:
        each = np.array([np.median(group) for group in groups])
        return _interval(float(np.median(values)), [each], len(groups), ends=(0.0, 1.0))
    order = np.argsort(values, kind="stable")
    owners = np.repeat(np.arange(len(groups)), [len(group) for group in groups])[order]
    weights = (row[owners] for block in _counts(len(groups)) for row in block)
    draws = np.array([_weighted_median(values[order], weight) for weight in weights])
    return _interval(float(np.median(values)), [draws], len(groups))


def _weighted_median(values: FloatArray, weights: FloatArray) -> float:
    """The median of ascending values [m], each there as often as its weight [m] says."""
    upto = np.cumsum(weights)
    middle = np.searchsorted(upto, upto[-1] / 2, side="left"), np.searchsorted(upto, upto[-1] / 2, side="right")
    return float((values[middle[0]] + values[min(middle[1], len(values) - 1)]) / 2) if upto[-1] else float("nan")


def joint_median(values: FloatArray, drawn: FloatArray) -> Interval:
    """The median of values [B], one for each prompt, that themselves rest on something uncertain.

    Args:
        values: [B] as they are best known.
        drawn: [S, B], resampled; the prompts of each row are drawn once.
    """
    num = len(values)
    if num < MIN_PAIRS:
        return _interval(float(np.median(values)), [], num)
    if num <= _RANGE_PAIRS:
        low, high = np.quantile(drawn.min(axis=1), 0.025), np.quantile(drawn.max(axis=1), 0.975)
        return Interval(float(np.median(values)), (float(low), float(high)), num)
    prompts = np.random.default_rng(_SEED).integers(0, num, size=drawn.shape)
    return _interval(float(np.median(values)), [np.median(np.take_along_axis(drawn, prompts, axis=1), axis=1)], num)


def joint_ratio(values: tuple[FloatArray, FloatArray], drawn: tuple[FloatArray, FloatArray]) -> Interval:
    """The ratio of two sums over prompts, as `joint_median`: values [B] and drawn [S, B] are numerator, denominator."""
    num = len(values[0])
    point = float(_ratio(np.array([[value.sum() for value in values]]))[0])
    if num < MIN_PAIRS:
        return _interval(point, [], num)
    counts = np.concatenate(list(_counts(num)))
    return _interval(point, [_ratio(np.stack([(counts * part).sum(axis=1) for part in drawn], axis=1))], num)


def paired(a: FloatArray, b: FloatArray) -> Paired:
    """Compare speeds (more is faster) of A and B, a, b [B], prompt by prompt."""
    assert a.shape == b.shape, "pairs need both sides"
    ratios = a / b
    ratio = bootstrap_median(ratios)
    if ratio.ci95 is None:
        return Paired(ratio, None)
    drawn = np.concatenate(list(_medians(ratios)))
    return Paired(ratio, float((drawn > 1).mean() + 0.5 * (drawn == 1).mean()))


def lacks_interval(document: object) -> bool:
    """Whether a document, or a part of one, holds a figure whose interval is missing or of fewer than ENOUGH_PAIRS."""
    if isinstance(document, Mapping):
        figure = next((document[key] for key in FIGURES if document.get(key) is not None), None)
        is_loose = document.get("ci95") is None or document.get("pairs", ENOUGH_PAIRS) < ENOUGH_PAIRS
        is_bare = "ci95" in document and is_loose and figure is not None
        return is_bare or any(map(lacks_interval, document.values()))
    return isinstance(document, list) and any(map(lacks_interval, document))


def _interval(
    point: float, draws: Iterable[FloatArray], num: int, ends: tuple[float, float] = (0.025, 0.975)
) -> Interval:
    parts = list(draws)
    if not parts:
        return Interval(point, None, num)
    values = np.concatenate(parts)
    values = values[np.isfinite(values)]
    if not len(values):
        return Interval(point, None, num)
    low, high = np.quantile(values, ends)
    return Interval(point, (float(low), float(high)), num)


def _ratio(totals: FloatArray) -> FloatArray:
    nothing = np.full(len(totals), np.nan)
    ratio: FloatArray = np.divide(totals[:, 0], totals[:, 1], out=nothing, where=totals[:, 1] != 0)
    return ratio


def _counts(num: int) -> Iterator[FloatArray]:
    """How often each resample holds each of `num` prompts: blocks [r, num] of all the resamples."""
    if num * NUM_RESAMPLES <= _BLOCK // 2:
        yield _kept_counts(num)
        return
    generator = np.random.default_rng(_SEED)
    for size in _block_sizes(num):
        yield _draw_counts(generator, num, size)


@lru_cache(maxsize=2)
def _kept_counts(num: int) -> FloatArray:
    """The same resamples serve every figure over the same prompts; at most 16 MB are kept."""
    return _draw_counts(np.random.default_rng(_SEED), num, NUM_RESAMPLES)


def _draw_counts(generator: np.random.Generator, num: int, size: int) -> FloatArray:
    drawn = generator.integers(0, num, size=(size, num)) + np.arange(size)[:, None] * num
    return np.bincount(drawn.ravel(), minlength=size * num).reshape(size, num).astype(np.float64)


def _medians(values: FloatArray) -> Iterator[FloatArray]:
    generator = np.random.default_rng(_SEED)
    for size in _block_sizes(len(values)):
        yield np.median(values[generator.integers(0, len(values), size=(size, len(values)))], axis=1)


def _block_sizes(num: int) -> Iterator[int]:
    block = max(1, _BLOCK // num)
    for begin in range(0, NUM_RESAMPLES, block):
        yield min(block, NUM_RESAMPLES - begin)
