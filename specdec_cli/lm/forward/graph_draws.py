"""The tokens of a recorded draft, chosen on the device: the likeliest, or drawn as the sampling chain draws them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

import torch
from torch import Tensor
from torch.nn import functional

from specdec_cli.likely_tree import likeliest
from specdec_cli.lm.door import Draw
from specdec_cli.lm.forward.graph_inputs import NOTHING, fill
from specdec_cli.tree_shape import TreeShape

NUM_SETTINGS = 5
"""Temperature, top-k, top-p, min-p, and 1 where noise chooses."""
LIKELIEST = (0.0, 1.0, 1.0, 0.0, 0.0)
"""Settings that take the likeliest token."""


@dataclass(frozen=True, slots=True)
class ChoiceKind:
    """How the tokens of a recorded draft are chosen, which decides what is recorded.

    Args:
        is_drawn: some may be drawn by chance.
        is_cut: top-k, top-p or min-p may leave some tokens out.
        has_noise: noise may choose some.
    """

    is_drawn: bool = False
    is_cut: bool = False
    has_noise: bool = False

    @classmethod
    def of(cls, draws: Sequence[Draw | None], num_tokens: int) -> ChoiceKind:
        """The kind that serves rows with these draws from the first `num_tokens` tokens."""
        drawn = [draw for draw in draws if draw is not None]
        cut = any((draw.top_k or num_tokens) < num_tokens or draw.top_p < 1 or draw.min_p > 0 for draw in drawn)
        return cls(bool(drawn), cut, any(draw.noise is not None for draw in drawn))


@dataclass(slots=True)
class ChoiceInputs:
    """Numbers on the device that say how the tokens of a recorded draft are chosen.

    Args:
        kind: of the choice.
        num_tokens: V, the real vocabulary; no token is beyond it.
        numbers: [B, 5 + nodes] float64: temperature (0 takes the likeliest), top-k, top-p and min-p of each row,
            whether noise chooses, and a uniform number for each of its tokens. Empty where nothing is drawn.
        noise: [B, depth, V] float64; empty where none chooses.
    """

    kind: ChoiceKind
    num_tokens: int
    numbers: Tensor
    noise: Tensor

    @classmethod
    def sized(
        cls, kind: ChoiceKind, num_tokens: int, num_rows: int, shape: TreeShape, depth: int, device: torch.device
    ) -> ChoiceInputs:
        """Room for so many rows of a shape of this depth; nothing is drawn yet."""
        width = NUM_SETTINGS + shape.num_nodes(depth) if kind.is_drawn else 0
        numbers = torch.zeros(num_rows, width, dtype=torch.float64, device=device)
        inputs = cls(kind, num_tokens, numbers, numbers.new_zeros(num_rows, depth, num_tokens * kind.has_noise))
        inputs.fill([])
        return inputs

    def fill(self, draws: Sequence[Draw | None]) -> None:
        """Send each row's settings and uniform numbers to the device, without waiting for it."""
        num_rows, width = self.numbers.shape
        if not width:
            return
        values: list[float] = []
        for draw in draws:
            settings = LIKELIEST if draw is None else settings_of(draw, self.num_tokens)
            uniforms = () if draw is None else draw.uniforms
            values += [*settings, *uniforms, *[0.0] * (width - NUM_SETTINGS - len(uniforms))]
        values += [*LIKELIEST, *[0.0] * (width - NUM_SETTINGS)] * (num_rows - len(draws))
        fill(self.numbers.view(-1), values)
        for own, draw in zip(self.noise, draws, strict=False):
            if draw is not None and draw.noise is not None:
                own[: len(draw.noise)].copy_(draw.noise, non_blocking=True)


@dataclass(slots=True)
class Choices:
    """Chooses a recorded draft's tokens depth by depth.

    Args:
        inputs: temperature, cuts and uniform numbers of each row.
    """

    inputs: ChoiceInputs
    _tokens: list[Tensor] = field(default_factory=list)
    _is_there: list[Tensor] = field(default_factory=list)
    _q: list[Tensor] = field(default_factory=list)

    def take(self, logits: Tensor, ends: Tensor, nums: Tensor, most: int, children: Tensor) -> None:
        """The tokens of a depth: the children of each node before it; `NOTHING` where a largest logit is not finite.

        Drawn ones are drawn one after another without replacement, as `sampling.draft.draft_children` draws them.

        Args:
            logits: after each node before the depth [B, F, V_model], or those of all of them [B, 1, V_model].
            ends: numbers of the nodes before the depth [F] int64; -1 is the context's end.
            nums: children of each [F] int64.
            most: the largest of these.
            children: which are taken of `most` children of each node [C] int64.
        """
        scores = logits[:, :, : self.inputs.num_tokens]
        best, tokens = scores.max(-1, keepdim=True) if most == 1 else scores.topk(most, -1)
        tokens, is_number = tokens.expand(-1, len(ends), -1), best[:, :, :1].isfinite()
        is_there = torch.ones_like(tokens, dtype=torch.bool)
        if self.inputs.kind.is_drawn:
            q = self._distribution(scores.flatten(0, 1), best[:, :, :1].flatten(0, 1)).view_as(scores)
            is_above = functional.pad(self.is_there, (1, 0), value=True).index_select(1, ends + 1)
            drawn, is_found = self._drawn(q, nums * is_above, most)
            is_drawn = self.inputs.numbers[:, :1, None] > 0
            tokens = torch.where(is_drawn, drawn, tokens)
            is_there = torch.where(is_drawn, is_found & is_above[:, :, None], is_there)
            self._q.append(q)
        tokens = torch.where(is_number, tokens, NOTHING)
        self._tokens.append(tokens.flatten(1).index_select(1, children))
        self._is_there.append(is_there.flatten(1).index_select(1, children))

    def _drawn(self, q: Tensor, nums: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """Tokens [B, F, most] drawn from q [B, F, V] or [B, 1, V], and whether there are so many with a probability.

        The numbers of children that are drawn [B, F] say which uniform number is the first of each node.
        """
        begin = NUM_SETTINGS + self.is_there.shape[1] + nums.cumsum(1) - nums
        weights, tokens, is_found = q.expand(-1, nums.shape[1], -1), list[Tensor](), list[Tensor]()
        for rank in range(most):
            cumulative = weights.cumsum(-1, dtype=torch.float64)
            column = (begin + rank).clamp(max=self.inputs.numbers.shape[1] - 1)
            point = self.inputs.numbers.gather(1, column)[:, :, None] * cumulative[:, :, -1:]
            tokens.append(torch.searchsorted(cumulative, point, right=True).clamp(max=q.shape[2] - 1))
            is_found.append(cumulative[:, :, -1:] > 0)
            if rank + 1 < most:
                weights = weights.scatter(2, tokens[-1], 0.0)
        drawn = torch.cat(tokens, 2), torch.cat(is_found, 2)
        if not self.inputs.kind.has_noise:
            return drawn
        values = self.inputs.noise[:, len(self._tokens), None] + q.log()
        ranked, largest = likeliest(values, values.argmax(-1), most)
        by_noise = self.inputs.numbers[:, NUM_SETTINGS - 1 : NUM_SETTINGS, None] > 0
        return torch.where(by_noise, ranked, drawn[0]), torch.where(by_noise, largest > -inf, drawn[1])

    def likely_children(self, logits: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
        """The likeliest children of n nodes, in the order of `sampling.draft.likely_children`; none is taken.

        Args:
            logits: of the nodes [n, V_model], as many of each row.
            most: children of one node.

        Returns:
            Their tokens and probabilities [n, most], and whether the largest logit is a finite number [n, 1].
        """
        scores, best, tokens = self._scores(logits)
        return *likeliest(self._distribution(scores, best), tokens[:, 0], most), best.isfinite()

    @property
    def tokens(self) -> Tensor:
        """All tokens so far [B, n] int64."""
        return torch.cat(self._tokens, 1)

    @property
    def is_there(self) -> Tensor:
        """Whether each of them is there [B, n]: of few tokens with a probability, fewer are drawn."""
        return torch.cat([self.inputs.numbers[:, :0].bool(), *self._is_there], 1)

    @property
    def q(self) -> tuple[Tensor, ...]:
        """Distributions that tokens were drawn from [B, F of all depths, V] float32; none where none was drawn."""
        return (torch.cat(self._q, 1),) if self._q else ()

    def _scores(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of tokens that exist [n, V], the largest ones and their tokens [n, 1]."""
        scores = logits[:, : self.inputs.num_tokens]
        return scores, *scores.max(-1, keepdim=True)

    def _distribution(self, scores: Tensor, best: Tensor) -> Tensor:
        """Probabilities [n, V] of scores [n, V], as many of each row, whose largest are [n, 1]; never a NaN."""
        settings = self.inputs.numbers[:, :NUM_SETTINGS].repeat_interleave(len(scores) // len(self.inputs.numbers), 0)
        return probabilities(scores, best, settings, is_cut=self.inputs.kind.is_cut)


def probabilities(scores: Tensor, best: Tensor, settings: Tensor, *, is_cut: bool) -> Tensor:
    """Probabilities as `sampling.chain.distribution` has them, of scores that nothing edits, by settings on the device.

    Args:
        scores: [n, V] float32.
        best: the largest of each [n, 1]; where it is no finite number, all scores are taken for equal.
        settings: as `settings_of` has them [n, 5] float64; temperature 0 is taken for 1.
        is_cut: whether top-k, top-p or min-p may leave some tokens out.

    Returns:
        Probabilities [n, V] float32, without a NaN.
    """
    temperature, top_k, top_p, min_p = (settings[:, i : i + 1] for i in range(4))
    smallest = torch.finfo(torch.float32).tiny
    safe = torch.where(temperature > 0, temperature.clamp(min=smallest), 1.0).float()
    scaled = torch.where(best.isfinite(), scores.float() - best.float(), 0.0) / safe
    if is_cut:
        ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
        keep, weight = top_k.long(), ordered.exp()
        held = weight.cumsum(-1, dtype=torch.float64)
        enough = torch.where(top_p < 1, top_p, inf) * held.gather(1, keep - 1)
        keep = torch.minimum(keep, torch.searchsorted(held, enough) + 1)
        likely = weight.double() >= min_p * weight[:, :1]
        keep = torch.minimum(keep, likely.sum(-1, keepdim=True)).clamp(min=1)
        is_kept = torch.arange(scores.shape[1], device=scores.device) < keep
        scaled = scaled.masked_fill(~torch.empty_like(is_kept).scatter_(1, order, is_kept), -inf)
    return scaled.softmax(-1)


def drawn_q(draws: Sequence[Draw | None], counts: Sequence[int], q: Sequence[Tensor]) -> dict[int, Tensor]:
    """Distributions that the tokens of each drawn row were drawn from, copies [its tokens, V] by its place.

    Args:
        draws: of each row.
        counts: tokens of each row.
        q: distributions of each row [B, n, V], and which of them each token was drawn from [B, tokens]; empty where no
            token was drawn.
    """
    wanted = [i for i, draw in enumerate(draws) if draw is not None and q]
    return {i: q[0][i].index_select(0, q[1][i, : counts[i]]) for i in wanted}


def settings_of(draw: Draw, num_tokens: int) -> tuple[float, ...]:
    """The settings of a row, of which V tokens have scores."""
    top_k = float(min(draw.top_k or num_tokens, num_tokens))
    return draw.temperature, top_k, draw.top_p, draw.min_p, float(draw.noise is not None)
