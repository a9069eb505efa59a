"""The one chain from logits to p and q, position by position, drafted tokens included.

Its order is logit bias, repetition, presence and frequency penalties, banned tokens, temperature, top-k, top-p, min-p,
softmax in float32. Temperature 0 is a one-hot row and is held as an index; a batch of such rows makes nothing dense.
A row's result never depends on the other rows of a call.

Letters: B rows (requests), n positions over all rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf, isfinite

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specdec_cli.drafted import Drafted
from specdec_cli.errors import RunError
from specdec_cli.events import TokenLogprob
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.transfer import sent

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
NEVER = float("-inf")


class LogitsError(RunError):
    """No distribution can be built for a row; `row` is its place in the call, so that its request can end alone."""

    def __init__(self, message: str, row: int, hint: str | None = None) -> None:
        super().__init__(message, hint)
        self.row = row


class NoTokenLeftError(LogitsError):
    """The request's settings ban every token."""


@dataclass(slots=True)
class ChainRow:
    """One request's part of a call: a next-token position at each place, the context's end and every drafted node.

    Args:
        params: its sampling parameters.
        context: tokens before the first place, prompt and output.
        num_prompt_tokens: how many of them are the prompt.
        drafted: nodes after the context; place i + 1 sees the path to node i.
        stop_ids: tokens banned while fewer than `params.min_tokens` are emitted, drafted ones counted.
        allowed: [len(drafted) + 1, V] bool, what a grammar allows at each place; None allows everything.
    """

    params: SamplingParams
    context: Sequence[int]
    num_prompt_tokens: int
    drafted: Drafted
    stop_ids: frozenset[int]
    allowed: BoolArray | None = None


@dataclass(frozen=True, slots=True)
class LargestLogits:
    """All that greedy rows need of logits where nothing edits them, as a device has found it.

    Args:
        tokens: the likeliest at each of n positions; 0 where its logit is no finite number.
        values: the logits of these, or that which is no finite number.
    """

    tokens: list[int]
    values: list[float]

    def __getitem__(self, positions: slice) -> LargestLogits:
        """Those of some positions."""
        return LargestLogits(self.tokens[positions], self.values[positions])


@dataclass(slots=True)
class Distribution:
    """Distributions of the next token at n positions.

    Args:
        scores: [n, V] float32, logits after bias, penalties and bans, before the temperature.
        likeliest: [n], each position's likeliest token, the first one of equals.
        one_hot: [n] bool on the host, positions whose whole probability is on the likeliest token (temperature 0).
        probs: [n, V] float32, or None when every position is one-hot.
        may_ban: whether any score may be infinite, that of a token that cannot occur; False where none is.
        broken: positions behind drafted tokens that have no distribution; what stands there means nothing, and is
            needed only where the output gets so far.
    """

    scores: Tensor
    likeliest: list[int]
    one_hot: BoolArray
    probs: Tensor | None
    may_ban: bool = True
    broken: Mapping[int, LogitsError] = field(default_factory=dict)

    @property
    def argmax(self) -> Tensor:
        """The likeliest tokens [n] int64, where the scores are."""
        return sent(self.likeliest, torch.int64, self.scores.device)

    def dense(self) -> Tensor:
        """Probabilities [n, V] float32 of all positions."""
        if self.probs is not None:
            return self.probs
        return torch.zeros_like(self.scores).scatter_(1, self.argmax[:, None], 1.0)

    def sample(self, uniforms: Tensor | npt.NDArray[np.float64]) -> Tensor:
        """Tokens [n] int64 by inverse CDF from uniform numbers [n] in [0, 1)."""
        return self.argmax if self.probs is None else inverse_cdf(self.probs, uniforms)

    def confidence(self) -> Tensor:
        """Largest probability [n] of each position; of a one-hot one, what temperature 1 would give its token."""
        greedy = self.scores.softmax(dim=-1).amax(dim=-1)
        if self.probs is None:
            return greedy
        return torch.where(sent(self.one_hot, torch.bool, greedy.device), greedy, self.probs.amax(dim=-1))

    def logprobs(self, wanted: Sequence[tuple[int, int, int]]) -> list[TokenLogprob]:
        """Log-probabilities (nats) of tokens and of the likeliest ones that can occur; a GPU is waited for once.

        They are taken from p; at a one-hot position, where p says nothing, from the scores at temperature 1.

        Args:
            wanted: position, token, and number of likeliest ones of each.
        """
        sizes = sorted({min(num, self.scores.shape[1]) for _, _, num in wanted})
        alike = [
            [i for i, (_, _, num) in enumerate(wanted) if min(num, self.scores.shape[1]) == size] for size in sizes
        ]
        parts = [self._likeliest([wanted[i] for i in its], size) for its, size in zip(alike, sizes, strict=True)]
        numbers = iter(torch.cat(parts).tolist() if parts else [])
        found: dict[int, TokenLogprob] = {}
        for i, size in ((i, size) for its, size in zip(alike, sizes, strict=True) for i in its):
            own, tokens, values = next(numbers), [*islice(numbers, size)], [*islice(numbers, size)]
            pairs = zip(map(int, tokens), values, strict=True)
            found[i] = TokenLogprob(wanted[i][1], own, tuple((token, value) for token, value in pairs if value > NEVER))
        return [found[i] for i in range(len(wanted))]

    def _likeliest(self, wanted: Sequence[tuple[int, int, int]], size: int) -> Tensor:
        """Of each position the log-probability of its token, the `size` likeliest tokens, and theirs; flat, float64."""
        device = self.scores.device
        places, tokens = (sent(values, torch.int64, device) for values in list(zip(*wanted, strict=True))[:2])
        logprobs = self.scores[places].log_softmax(dim=-1)
        if self.probs is not None:
            is_one_hot = sent(self.one_hot[[place for place, _, _ in wanted]], torch.bool, device)
            logprobs = torch.where(is_one_hot[:, None], logprobs, self.probs[places].log())
        best, own = logprobs.topk(size), logprobs.gather(1, tokens[:, None])
        return torch.cat((own.double(), best.indices.double(), best.values.double()), 1).flatten()


def inverse_cdf(weights: Tensor, uniforms: Tensor | npt.NDArray[np.float64] | Sequence[float]) -> Tensor:
    """Tokens [n] int64 drawn in proportion to weights [n, V] >= 0 (of any sum) by uniform numbers [n] in [0, 1)."""
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    point = sent(uniforms, torch.float64, weights.device)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, point, right=True)[:, 0]


def distribution(logits: Tensor | LargestLogits, rows: Sequence[ChainRow], num_tokens: int) -> Distribution:
    """Run the chain over every position of every row.

    Args:
        logits: [n, V_model] float32, the rows' positions one after another; left unchanged. Of greedy rows that edit
            none, the largest ones will do; then there are no scores.
        rows: the requests, n = sum of len(drafted) + 1.
        num_tokens: V, the real vocabulary; logits beyond it are padding and cut.

    Returns:
        The distribution at n positions.

    Raises:
        LogitsError: a row's first position has logits that are NaN or infinite, or every token is banned there.
    """
    lengths = [len(row.drafted) + 1 for row in rows]
    num_positions = sum(lengths)
    if isinstance(logits, LargestLogits):
        broken, one_hot = _check(logits.values, rows, lengths), np.array([True] * num_positions)
        return Distribution(torch.empty(num_positions, 0), logits.tokens, one_hot, None, True, broken)
    assert logits.shape[0] == num_positions, "logits have one position for each drafted token and one more per row"
    assert logits.shape[1] >= num_tokens, "logits cover the real vocabulary"
    # A call into torch that cuts nothing off is felt behind a small model: its weights have filled the caches.
    scores = _edit(logits if logits.shape[1] == num_tokens else logits[:, :num_tokens], rows, lengths)
    likeliest, largest, may_ban = _largest(scores)
    broken = _check(largest, rows, lengths)
    if broken:
        scores = scores.clone()
        scores[[*broken]] = 0.0
        likeliest, largest, may_ban = _largest(scores)
    params = [row.params for row in rows]
    if not any(each.temperature for each in params):
        return Distribution(scores, likeliest, np.array([True] * num_positions), None, may_ban, broken)
    of_position = [
        position_params for position_params, length in zip(params, lengths, strict=True) for _ in range(length)
    ]
    one_hot = np.array([position_params.temperature == 0 for position_params in of_position])
    probs = _cut(_divide(scores, largest, of_position), of_position).softmax(dim=-1)
    distributions = Distribution(scores, likeliest, one_hot, probs, may_ban, broken)
    if one_hot.any():
        greedy = sent(np.flatnonzero(one_hot), torch.int64, probs.device)
        probs[greedy] = 0.0
        probs[greedy, distributions.argmax[greedy]] = 1.0
    return distributions


def _largest(scores: Tensor) -> tuple[list[int], list[float], bool]:
    """Of each position the first of the largest scores, or of NaNs: its token and itself; and `may_ban`."""
    if not scores.is_cpu:
        argmax = scores.argmax(dim=-1)
        top = scores.gather(1, argmax[:, None])[:, 0]
        smallest = scores.amin(dim=-1)
        # One copy, so that a GPU is waited for once; a float64 holds any token.
        tokens, largest, least = torch.stack((argmax.double(), top.double(), smallest.double())).tolist()
        return [int(token) for token in tokens], largest, not all(map(isfinite, least))
    # numpy's vectorised search takes a tenth of torch's time on a CPU.
    values = scores.numpy()
    best = values.argmax(axis=-1).tolist()
    return best, [float(row[token]) for row, token in zip(values, best, strict=True)], True


def _check(values: Sequence[float], rows: Sequence[ChainRow], lengths: Sequence[int]) -> dict[int, LogitsError]:
    """Errors for positions whose largest score is not finite; raised if it is a row's first position."""
    errors: dict[int, LogitsError] = {}
    if all(map(isfinite, values)):
        return errors
    ends = np.cumsum(lengths)
    for position, value in enumerate(values):
        if isfinite(value):
            continue
        row = int(np.searchsorted(ends, position, side="right"))
        offset = position - int(ends[row]) + lengths[row]
        errors[position] = _error(value, row, len(rows[row].context) + rows[row].drafted.depth(offset - 1))
        if not offset:
            raise errors[position]
    return errors


def _error(value: float, row: int, num_before: int) -> LogitsError:
    """The error for a position's largest score, after `num_before` tokens."""
    if value == NEVER:
        return NoTokenLeftError(
            "every token is banned", row, "lower min_tokens, or relax logit_bias, stop_token_ids or the grammar"
        )
    return LogitsError(
        f"the model gave `{value}` as its largest logit after `{num_before}` tokens",
        row,
        "try --dtype float32, or another checkpoint if it is float32 already",
    )


def _divide(scores: Tensor, largest: Sequence[float], params: Sequence[SamplingParams]) -> Tensor:
    """(scores - largest) / temperature [n, V]; the largest becomes 0, so that no temperature is too small."""
    smallest = torch.finfo(torch.float32).tiny
    safe = [max(each.temperature, smallest) if each.temperature else 1.0 for each in params]
    top, temperature = (sent(values, scores.dtype, scores.device) for values in (largest, safe))
    return (scores - top[:, None]).div_(temperature[:, None])


def _cut(scaled: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Apply top-k, top-p and min-p in place to scaled [n, V], whose largest is 0 in every row.

    Each keeps a prefix of the tokens in descending order, equals in their ids' order, so the shortest one decides. A
    draft's compiled guess does the same token by token (`lm/llama_step.cpp`).
    """
    num_tokens, device = scaled.shape[1], scaled.device
    wanted = [i for i, row_params in enumerate(params) if row_params.temperature and _is_cut(row_params, num_tokens)]
    if not wanted:
        return scaled
    every = len(wanted) == len(params)
    index = sent(wanted, torch.int64, device)
    some = scaled if every else scaled[index]
    top_k = [min(params[i].top_k or num_tokens, num_tokens) for i in wanted]
    ordered = _descending(some, max(top_k))
    keep = _num_kept(ordered, top_k, [params[i].top_p for i in wanted], [params[i].min_p for i in wanted])
    _keep_best(some, ordered.gather(1, keep - 1), keep)
    if not every:
        scaled[index] = some
    return scaled


def _is_cut(params: SamplingParams, num_tokens: int) -> bool:
    """Whether any of a vocabulary's tokens may be cut off."""
    return (params.top_k or num_tokens) < num_tokens or params.top_p < 1 or params.min_p > 0


def _descending(scaled: Tensor, num: int) -> Tensor:
    """The `num` largest values of each row in descending order, [n, num]."""
    if scaled.is_cpu:
        # numpy sorts plain float32 with vector instructions, 30 times faster than torch's sort with indices.
        negated = -scaled.numpy()
        if num < scaled.shape[1]:
            negated = np.partition(negated, num - 1, axis=-1)[:, :num]
        return torch.from_numpy(np.sort(negated, axis=-1)).neg()
    return scaled.sort(dim=-1, descending=True).values[:, :num]


def _num_kept(ordered: Tensor, top_k: Sequence[int], top_p: Sequence[float], min_p: Sequence[float]) -> Tensor:
    """How many of ordered [n, V'] stay, [n, 1]: at most top_k, of them the fewest that hold top_p, of them min_p's."""

    def column(values: Sequence[float], dtype: torch.dtype = torch.float64) -> Tensor:
        return sent(values, dtype, ordered.device)[:, None]

    weight, keep = ordered.exp(), column(top_k, torch.int64)
    if min(top_p) < 1:
        held = weight.cumsum(dim=-1, dtype=torch.float64)
        enough = column([share if share < 1 else inf for share in top_p]) * held.gather(1, keep - 1)
        keep = torch.minimum(keep, torch.searchsorted(held, enough) + 1)
    if max(min_p) > 0:
        likely = weight.double() >= column(min_p) * weight[:, :1]
        keep = torch.minimum(keep, likely.sum(dim=-1, keepdim=True))
    return keep.clamp(min=1)


def _keep_best(scaled: Tensor, threshold: Tensor, keep: Tensor) -> None:
    """Ban, in place, all but the `keep` [n, 1] best of scaled [n, V]; threshold [n, 1] is the last kept value."""
    banned = scaled < threshold
    surplus = (scaled.shape[1] - keep) - banned.sum(dim=-1, keepdim=True)
    if not scaled.is_cpu or bool((surplus > 0).any()):  # on a GPU, to look would be a wait
        equal = scaled == threshold
        room = equal.sum(dim=-1, keepdim=True) - surplus
        banned |= equal & (equal.cumsum(dim=-1) > room)
    scaled.masked_fill_(banned, NEVER)


def _edit(scores: Tensor, rows: Sequence[ChainRow], lengths: Sequence[int]) -> Tensor:
    """Logit bias, penalties and bans; a copy of scores [n, V] where any row wants one."""
    if not any(map(is_edited, rows)):
        return scores
    counts = np.array(lengths, dtype=np.int64)
    starts = np.cumsum(counts) - counts
    biased = [i for i, row in enumerate(rows) if row.params.logit_bias]
    penalised = [i for i, row in enumerate(rows) if _has_penalty(row.params)]
    banned = [i for i, row in enumerate(rows) if row.stop_ids and _num_emitted(row) < row.params.min_tokens]
    masked = [i for i, row in enumerate(rows) if row.allowed is not None]
    scores = scores.clone()
    for i in biased:
        bias = rows[i].params.logit_bias
        tokens = sent(list(bias), torch.int64, scores.device)
        values = sent(list(bias.values()), scores.dtype, scores.device)
        scores[starts[i] : starts[i] + len(rows[i].drafted) + 1, tokens] += values
    if penalised:
        _penalise(scores, [rows[i] for i in penalised], starts[penalised])
    for i in banned:
        early = rows[i].drafted.places_before(rows[i].params.min_tokens - _num_emitted(rows[i]))
        places = sent([starts[i] + place for place in early], torch.int64, scores.device)
        stops = [token for token in rows[i].stop_ids if token < scores.shape[1]]
        scores[places[:, None], sent(stops, torch.int64, scores.device)] = NEVER
    for i in masked:
        _mask(scores[starts[i] : starts[i] + len(rows[i].drafted) + 1], rows[i].allowed)
    return scores


def is_edited(row: ChainRow) -> bool:
    """Whether anything is done to a row's logits before the temperature."""
    params = row.params
    return (
        bool(params.logit_bias)
        or row.allowed is not None
        or _has_penalty(params)
        or (params.min_tokens > 0 and bool(row.stop_ids) and _num_emitted(row) < params.min_tokens)
    )


def _mask(scores: Tensor, allowed: BoolArray | None) -> None:
    """Ban, in place, what is not allowed."""
    assert allowed is not None, "only rows of a grammar are masked"
    assert allowed.shape == scores.shape, "a grammar's masks are as many and as wide as the row's positions"
    scores.masked_fill_(sent(~allowed, torch.bool, scores.device), NEVER)


def _has_penalty(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def _num_emitted(row: ChainRow) -> int:
    return len(row.context) - row.num_prompt_tokens


def _penalise(scores: Tensor, rows: Sequence[ChainRow], starts: IntArray) -> None:
    """Repetition, presence and frequency penalties in place; repetition looks at the prompt too."""
    lengths = np.array([len(row.drafted) + 1 for row in rows], dtype=np.int64)
    of_row = np.repeat(np.arange(len(rows)), lengths)
    offset = np.arange(len(of_row)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    index = sent(starts[of_row] + offset, torch.int64, scores.device)
    prompt = _occurrences([row.context[: row.num_prompt_tokens] for row in rows], scores)
    output = _occurrences([row.context[row.num_prompt_tokens :] for row in rows], scores)
    paths = [rows[r].drafted.tokens_to(j - 1) for r, j in zip(of_row.tolist(), offset.tolist(), strict=True)]
    drafted = _occurrences(paths, scores)
    of_row_index = sent(of_row, torch.int64, scores.device)
    count = output[of_row_index].add_(drafted)
    seen = (count > 0) | (prompt[of_row_index] > 0)

    def column(name: str) -> Tensor:
        values = np.array([getattr(row.params, name) for row in rows], dtype=np.float32)[of_row]
        return sent(values, torch.float32, scores.device)[:, None]

    some, repetition = scores[index], column("repetition_penalty")
    some = torch.where(seen, torch.where(some > 0, some / repetition, some * repetition), some)
    some -= column("presence_penalty") * (count > 0)
    some -= column("frequency_penalty") * count
    scores[index] = some


def _occurrences(contexts: Sequence[Sequence[int]], scores: Tensor) -> Tensor:
    """How often each token stands in each context: [len(contexts), V] float32."""
    num_tokens = scores.shape[1]
    lengths = [len(context) for context in contexts]
    tokens = np.fromiter((t for context in contexts for t in context), dtype=np.int64, count=sum(lengths))
    of_context = np.repeat(np.arange(len(contexts)), lengths)
    real = tokens < num_tokens
    flat = sent(of_context[real] * num_tokens + tokens[real], torch.int64, scores.device)
    counts = torch.zeros(len(contexts) * num_tokens, device=scores.device)
    return counts.index_add_(0, flat, torch.ones(len(flat), device=scores.device)).view(len(contexts), num_tokens)
