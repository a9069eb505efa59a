"""The tokens of a recorded chain, chosen on the device: the likeliest, or drawn as the sampling chain draws them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

import torch
from torch import Tensor

from specdec_cli.likely_tree import likeliest
from specdec_cli.lm.door import Draw
from specdec_cli.lm.forward.graph_inputs import NOTHING, fill

_NUM_SETTINGS = 5  # temperature, top-k, top-p, min-p, and 1 where noise chooses
_LIKELIEST = (0.0, 1.0, 1.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class ChoiceKind:
    """How the tokens of a recorded chain are chosen, which decides what is recorded.

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
    """Numbers on the device that say how the tokens of a recorded chain are chosen.

    Args:
        kind: of the choice.
        num_tokens: V, the real vocabulary; no token is beyond it.
        numbers: [B, 5 + most] float64: temperature (0 takes the likeliest), top-k, top-p and min-p of each row, whether
            noise chooses, and a uniform number for each of its tokens. Empty where nothing is drawn.
        noise: [B, most, V] float64; empty where none chooses.
    """

    kind: ChoiceKind
    num_tokens: int
    numbers: Tensor
    noise: Tensor

    @classmethod
    def sized(cls, kind: ChoiceKind, num_tokens: int, num_rows: int, most: int, device: torch.device) -> ChoiceInputs:
        """Room for so many rows of so many tokens at most; nothing is drawn yet."""
        width = _NUM_SETTINGS + most if kind.is_drawn else 0
        numbers = torch.zeros(num_rows, width, dtype=torch.float64, device=device)
        inputs = cls(kind, num_tokens, numbers, numbers.new_zeros(num_rows, most, num_tokens * kind.has_noise))
        inputs.fill([])
        return inputs

    def fill(self, draws: Sequence[Draw | None]) -> None:
        """Send each row's settings and uniform numbers to the device, without waiting for it."""
        num_rows, width = self.numbers.shape
        if not width:
            return
        values: list[float] = []
        for draw in draws:
            settings = _LIKELIEST if draw is None else _settings(draw, self.num_tokens)
            uniforms = () if draw is None else draw.uniforms
            values += [*settings, *uniforms, *[0.0] * (width - _NUM_SETTINGS - len(uniforms))]
        values += [*_LIKELIEST, *[0.0] * (width - _NUM_SETTINGS)] * (num_rows - len(draws))
        fill(self.numbers.view(-1), values)
        for own, draw in zip(self.noise, draws, strict=False):
            if draw is not None and draw.noise is not None:
                own[: len(draw.noise)].copy_(draw.noise, non_blocking=True)


@dataclass(slots=True)
class Choices:
    """Chooses a recorded chain's tokens one after another.

    Args:
        inputs: temperature, cuts and uniform numbers of each row.
    """

    inputs: ChoiceInputs
    _tokens: list[Tensor] = field(default_factory=list)
    _q: list[Tensor] = field(default_factory=list)

    def take(self, logits: Tensor) -> Tensor:
        """The next token of each row [B, 1] int64, by logits [B, V_model]; `NOTHING` where the largest is not finite.

        A token is drawn by the inverse of the cumulative probabilities, as `sampling.chain.inverse_cdf` draws it.
        """
        scores, best, tokens = self._scores(logits)
        is_number = best.isfinite()
        if self.inputs.kind.is_drawn:
            temperature = self.inputs.numbers[:, :1]
            q = self._distribution(scores, best)
            cumulative = q.cumsum(-1, dtype=torch.float64)
            place = _NUM_SETTINGS + len(self._tokens)
            point = self.inputs.numbers[:, place : place + 1] * cumulative[:, -1:]
            drawn = torch.searchsorted(cumulative, point, right=True).clamp(max=q.shape[1] - 1)
            if self.inputs.kind.has_noise:
                by_noise = (self.inputs.noise[:, len(self._tokens)] + q.log()).argmax(-1, keepdim=True)
                drawn = torch.where(self.inputs.numbers[:, _NUM_SETTINGS - 1 : _NUM_SETTINGS] > 0, by_noise, drawn)
            tokens = torch.where(temperature > 0, drawn, tokens)
            self._q.append(q)
        self._tokens.append(torch.where(is_number, tokens, NOTHING))
        return self._tokens[-1]

    def take_likeliest(self, logits: Tensor, most: int, children: Tensor) -> Tensor:
        """The tokens of a depth of a tree [B, C] int64: the likeliest children of each node before it.

        Args:
            logits: of the nodes before [B, F, V_model].
            most: children of one node.
            children: which are taken of all nodes' `most` likeliest ones [C] int64.
        """
        best, tokens = logits[:, :, : self.inputs.num_tokens].topk(most, -1)
        tokens = torch.where(best[:, :, :1].isfinite(), tokens, NOTHING)
        self._tokens.append(tokens.flatten(1).index_select(1, children))
        return self._tokens[-1]

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
    def q(self) -> tuple[Tensor, ...]:
        """Distributions of the tokens so far [B, n, V] float32, alone; nothing where none was drawn."""
        return (torch.stack(self._q, 1),) if self._q else ()

    def _scores(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of tokens that exist [n, V], the largest ones and their tokens [n, 1]."""
        scores = logits[:, : self.inputs.num_tokens]
        return scores, *scores.max(-1, keepdim=True)

    def _distribution(self, scores: Tensor, best: Tensor) -> Tensor:
        """Probabilities [n, V] of scores [n, V], as many of each row, whose largest are [n, 1]; never a NaN."""
        settings = self.inputs.numbers[:, :_NUM_SETTINGS].repeat_interleave(len(scores) // len(self.inputs.numbers), 0)
        temperature, top_k, top_p, min_p = (settings[:, i : i + 1] for i in range(4))
        smallest = torch.finfo(torch.float32).tiny
        safe = torch.where(temperature > 0, temperature.clamp(min=smallest), 1.0).float()
        scaled = (scores.float() - best.float()) / safe
        if self.inputs.kind.is_cut:
            ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
            keep, weight = top_k.long(), ordered.exp()
            held = weight.cumsum(-1, dtype=torch.float64)
            enough = torch.where(top_p < 1, top_p, inf) * held.gather(1, keep - 1)
            keep = torch.minimum(keep, torch.searchsorted(held, enough) + 1)
            likely = weight.double() >= min_p * weight[:, :1]
            keep = torch.minimum(keep, likely.sum(-1, keepdim=True)).clamp(min=1)
            is_kept = torch.arange(scores.shape[1], device=scores.device) < keep
            scaled = scaled.masked_fill(~torch.empty_like(is_kept).scatter_(1, order, is_kept), -inf)
        # Without a number it is never used, but no kernel that reads it may meet a NaN.
        return torch.where(best.isfinite(), scaled.softmax(-1), 1 / scores.shape[1])


def drawn_q(draws: Sequence[Draw | None], counts: Sequence[int], q: Sequence[Tensor]) -> dict[int, Tensor]:
    """Distributions that the tokens of each drawn row were drawn from, copies [its tokens, V] by its place.

    Args:
        draws: of each row.
        counts: tokens of each row.
        q: as `Choices.q` gives it; empty where no token was drawn.
    """
    wanted = [i for i, draw in enumerate(draws) if draw is not None and q]
    return {i: q[0][i, : counts[i]].clone() for i in wanted}


def _settings(draw: Draw, num_tokens: int) -> tuple[float, ...]:
    top_k = float(min(draw.top_k or num_tokens, num_tokens))
    return draw.temperature, top_k, draw.top_p, draw.min_p, float(draw.noise is not None)
