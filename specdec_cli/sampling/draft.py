"""Choosing drafted tokens from q, with the noise that verification expects.

Letters: n positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

import torch
from torch import Tensor

from specdec_cli.likely_tree import likeliest
from specdec_cli.sampling import noise
from specdec_cli.sampling.chain import NEVER, Distribution, inverse_cdf
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.transfer import sent


@dataclass(frozen=True, slots=True)
class ChildrenWanted:
    """Tokens wanted at one position of q: the children of a drafted node, or of the context's end.

    Args:
        params: the request's sampling parameters; seed and index key the noise.
        num: how many are wanted; fewer are found where fewer tokens have a probability.
        step_position: length of the request's context when the step began.
        depth: drafted tokens before them.
        offset: which uniform number of the step the first of them is drawn with; the others take the next ones. No two
            nodes of a step share one.
        is_drawn: whether they are drawn by chance; else they are the likeliest.
        shares_noise: whether chance is the target's own noise (see `noise.gumbel_argmax`).
    """

    params: SamplingParams
    num: int
    step_position: int
    depth: int
    offset: int
    is_drawn: bool = True
    shares_noise: bool = False


def draft_children(q: Distribution, wanted: Sequence[ChildrenWanted]) -> list[list[int]]:
    """Choose the tokens wanted at every position of q.

    Args:
        q: the draft's distribution, [n, V].
        wanted: what is wanted at each position.

    Returns:
        Distinct tokens at each position. Likely ones come in descending order. Drawn ones come in the order in which
        they were drawn without replacement: each from q without those before it, normalized again. With the target's
        noise they come in descending order of log q + g. A one-hot position gives its likeliest tokens.
    """
    if q.probs is None and all(node.num <= 1 for node in wanted):
        return [[token][: node.num] for node, token in zip(wanted, q.likeliest, strict=True)]
    children: dict[int, list[int]] = {}
    for is_shared, choose in ((True, _ranked_by_noise), (False, _drawn)):
        places = [i for i, node in enumerate(wanted) if node.is_drawn and node.num and node.shares_noise == is_shared]
        places = [i for i in places if not q.one_hot[i]]
        if places:
            children |= zip(places, choose(_rows(q, places), [wanted[i] for i in places]), strict=True)
    if len(children) < len(wanted):
        likely = likely_children(q, [0 if i in children else node.num for i, node in enumerate(wanted)])
        children |= {i: [token for token, _ in best] for i, best in enumerate(likely) if i not in children}
    return [children[i] for i in range(len(wanted))]


def likely_children(q: Distribution, nums: Sequence[int]) -> list[list[tuple[int, float]]]:
    """The likeliest tokens at each position of q and their probabilities, in descending order.

    Args:
        q: the draft's distribution, [n, V].
        nums: how many are wanted at each position; fewer are found where fewer tokens have a probability.

    Returns:
        Pairs of token and probability, at a one-hot position the one at temperature 1.
    """
    return [
        list(zip(tokens, values, strict=True))[:num]
        for tokens, values, num in zip(*_best(_at_temperature(q), q.argmax, max(1, *nums)), nums, strict=True)
    ]


def ranks(q: Distribution, tokens: Tensor, most: int) -> Tensor:
    """The place of given tokens in the order of `likely_children`, counted from 0.

    Args:
        q: the draft's distribution, [n, V].
        tokens: [n] int64, one at each position.
        most: the result where at least so many tokens come first, or where the token has no probability.

    Returns:
        Ranks [n] int64 from 0 to `most`.
    """
    probs, first = _at_temperature(q), q.argmax
    own = probs.gather(1, tokens[:, None])
    is_smaller = torch.arange(probs.shape[1], device=probs.device) < tokens[:, None]
    comes_first = (probs > own) | ((probs == own) & is_smaller)
    comes_first.scatter_(1, first[:, None], True)  # of tokens that tie for the largest value, it leads
    places = torch.where(tokens == first, 0, comes_first.sum(dim=-1))
    return torch.where(own[:, 0] > 0, places, most).clamp(max=most)


def _at_temperature(q: Distribution) -> Tensor:
    """Probabilities [n, V]; those of one-hot positions at temperature 1."""
    if q.probs is not None and not q.one_hot.any():
        return q.probs
    plain = q.scores.softmax(dim=-1)
    if q.probs is None:
        return plain
    return torch.where(sent(q.one_hot, torch.bool, plain.device)[:, None], plain, q.probs)


def _best(values: Tensor, first: Tensor, num: int, least: float = 0.0) -> tuple[list[list[int]], list[list[float]]]:
    """The tokens of the largest values [n, V] above `least`, that of `first` [n] leading, and these values."""
    ids, largest = likeliest(values, first, num)
    pairs = torch.stack((ids.double(), largest.double())).tolist()  # a device is waited for once
    kept = [[value > least for value in row] for row in pairs[1]]
    tokens = [[int(token) for token in compress(row, its)] for row, its in zip(pairs[0], kept, strict=True)]
    return tokens, [list(compress(row, its)) for row, its in zip(pairs[1], kept, strict=True)]


def _ranked_by_noise(probs: Tensor, wanted: Sequence[ChildrenWanted]) -> list[list[int]]:
    """The tokens with the largest log q + g, of probs [n, V]."""
    keys = [node.params.seed for node in wanted], [node.params.index for node in wanted]
    values = noise.perturbed(probs, *keys, [node.step_position + node.depth for node in wanted])
    tokens, _ = _best(values, values.argmax(dim=-1), max(node.num for node in wanted), least=NEVER)
    return [best[: node.num] for best, node in zip(tokens, wanted, strict=True)]


def _drawn(probs: Tensor, wanted: Sequence[ChildrenWanted]) -> list[list[int]]:
    """Tokens drawn one after another without replacement from probs [n, V]."""
    most = max(node.offset + node.num for node in wanted)
    keys = [node.params.seed for node in wanted], [node.params.index for node in wanted]
    uniforms = noise.uniforms_many(*keys, [node.step_position for node in wanted], noise.Purpose.DRAFT, most)
    children: list[list[int]] = [[] for _ in wanted]
    places = list(range(len(wanted)))
    for drawn in range(max(node.num for node in wanted)):
        if drawn:
            if drawn == 1:
                probs = probs.clone()
            at, last = (
                sent(values, torch.int64, probs.device) for values in (places, [children[i][-1] for i in places])
            )
            probs[at, last] = 0.0
            left = probs.sum(dim=-1).tolist()
            places = [i for i in places if wanted[i].num > drawn and left[i] > 0]
        if not places:
            break
        weights = probs if len(places) == len(wanted) else probs[sent(places, torch.int64, probs.device)]
        tokens = inverse_cdf(weights, uniforms[places, [wanted[i].offset + drawn for i in places]])
        for i, token in zip(places, tokens.tolist(), strict=True):
            children[i].append(token)
    return children


def _rows(q: Distribution, places: Sequence[int]) -> Tensor:
    """Probabilities [len(places), V] at some positions, to be read only."""
    assert q.probs is not None, "positions that sample have a dense q"
    if len(places) == len(q.likeliest):
        return q.probs
    return q.probs[sent(places, torch.int64, q.probs.device)]
