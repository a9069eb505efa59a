"""Rows that one rule judges together, and what it looks up for them.

Letters: B rows, n places of rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import torch
from torch import Tensor

from specdec_cli.drafted import CONTEXT_END, Drafted
from specdec_cli.drafters.contract import Guesses
from specdec_cli.sampling import noise
from specdec_cli.sampling.chain import Distribution, inverse_cdf
from specdec_cli.sampling.noise import Purpose
from specdec_cli.sampling.params import SamplingParams


@dataclass(slots=True)
class VerifyRow:
    """One sequence's step.

    Args:
        mode: a name in RULES.
        params: its sampling parameters; seed and index key the noise.
        position: length of its context when the step began.
        guesses: what was drafted; may be empty.
        rates: for a rule that needs them, the chance of each drafted token when all before it stand; none is 0.
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
        """Values of each row's drafted tokens, from `values` [n, V] of the same places as p."""
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
            q = together([guesses.q for guesses in drawn if guesses.q is not None])
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
        """Uniform numbers of each row's drafted tokens; a node's offset is its number."""
        most = max(map(len, self.tokens))
        drawn = self.uniforms(Purpose.ACCEPT, most) if most else [[] for _ in self.rows]
        return [row[: len(tokens)] for row, tokens in zip(drawn, self.tokens, strict=True)]

    def own_tokens(self, offsets: Sequence[int], weights: Tensor) -> list[int]:
        """Each row's own token, drawn from weights [B, V] by the uniform number of its offset."""
        uniforms = self.uniforms(Purpose.OWN, max(offsets) + 1)
        drawn: list[int] = inverse_cdf(weights, [u[i] for u, i in zip(uniforms, offsets, strict=True)]).tolist()
        return drawn

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


def together(parts: Sequence[Tensor]) -> Tensor:
    """Parts [n_i, V] one after another; one alone is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
