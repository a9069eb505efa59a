"""Losses between a draft's distribution q and the target's p, position by position.

Forward KL and cross-entropy are those of EAGLE-3 (Li et al. 2025, arXiv 2503.01840), total variation is one minus the
acceptance rate of speculative sampling (Leviathan et al. 2023, arXiv 2211.17192). The LK losses (arXiv 2602.23881) are
the negative logarithm of that rate, and a hybrid that weighs KL and TV by how much is accepted already.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

_HYBRID_RATE = 3.0


def cross_entropy(q: Tensor, p: Tensor) -> Tensor:
    """Cross-entropy -sum p log q of log-probabilities [n, V]: [n]."""
    return -(p.exp() * q).sum(-1)


def forward_kl(q: Tensor, p: Tensor) -> Tensor:
    """Divergence KL(p || q) of log-probabilities [n, V]: [n]. Tokens with p = 0 add nothing."""
    divergence: Tensor = _ForwardKL.apply(q, p)  # type: ignore[no-untyped-call]  # so is torch's own class
    return divergence


class _ForwardKL(torch.autograd.Function):
    """KL(p || q) that keeps nothing but p for its gradient in q, which is -p: large vocabularies are read least."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, p: Tensor) -> Tensor:
        """[n] of log-probabilities [n, V]."""
        probabilities = p.exp()
        ctx.save_for_backward(probabilities)
        return (p - q).mul_(probabilities).nan_to_num_(0.0).sum(-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """The gradient [n, V] in q."""
        [probabilities] = ctx.saved_tensors
        return probabilities * -gradients[0][:, None], None


def total_variation(q: Tensor, p: Tensor) -> Tensor:
    """Half the sum of |p - q| of log-probabilities [n, V]: [n], one minus the acceptance rate."""
    return (p.exp() - q.exp()).abs().sum(-1) / 2


def negative_log_acceptance(q: Tensor, p: Tensor) -> Tensor:
    """-log of the acceptance rate sum min(p, q) of log-probabilities [n, V]: [n]."""
    return -torch.minimum(p, q).logsumexp(-1)


def entropy_and_variation(q: Tensor, p: Tensor) -> Tensor:
    """0.1 of cross-entropy and 0.9 of the sum of |p - q|, as DSpark's authors weigh them (arXiv 2607.05147): [n]."""
    return 0.1 * cross_entropy(q, p) + 1.8 * total_variation(q, p)


def hybrid(q: Tensor, p: Tensor, mean: Callable[[Tensor], Tensor] = torch.mean) -> Tensor:
    """λ KL + (1 - λ) TV with λ = exp(-3 α), α the mean acceptance, without gradient: [n].

    The source is arXiv 2602.23881: KL leads while little is accepted, total variation afterwards.

    Args:
        q: log-probabilities of the draft [n, V].
        p: of the target [n, V].
        mean: over all positions that α is taken over, of values [n].
    """
    variation = total_variation(q, p)
    weight = torch.exp(-_HYBRID_RATE * (1 - mean(variation.detach())))
    return weight * forward_kl(q, p) + (1 - weight) * variation


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kl": forward_kl,
    "ce": cross_entropy,
    "tv": total_variation,
    "nla": negative_log_acceptance,
    "ce-tv": entropy_and_variation,
    "hybrid": hybrid,
}
"""By their names in recipes; each takes log-probabilities of the draft, then of the target."""


class MeanLoss:
    """The mean of a loss over a batch's positions, those of the other processes' shares included.

    Attributes:
        total: sums a tensor over all processes, without gradient; one process has the tensor itself.
    """

    def __init__(self, name: str) -> None:
        each = LOSSES[name]
        self._each = partial(each, mean=self._mean) if each is hybrid else each
        self.total: Callable[[Tensor], Tensor] = lambda tensor: tensor

    def __call__(self, q: Tensor, p: Tensor, weights: Tensor | None = None) -> Tensor:
        """This process's part of the mean, a scalar: the parts of all processes add up to it.

        Args:
            q: log-probabilities of the draft [n, V].
            p: of the target [n, V].
            weights: of the positions [n]; None weighs all alike.
        """
        return self.mean(self._each(q, p), weights)

    def mean(self, losses: Tensor, weights: Tensor | None = None) -> Tensor:
        """The same of positions' losses [n]."""
        return (losses if weights is None else weights * losses).sum() / self._num(losses)

    def _mean(self, values: Tensor) -> Tensor:
        return self.total(values.sum()) / self._num(values)

    def _num(self, values: Tensor) -> Tensor:
        """How many positions all processes have, at least 1."""
        return self.total(values.new_tensor(float(len(values)))).clamp(min=1)
