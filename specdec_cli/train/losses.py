"""Losses between a draft's distribution q and the target's p, position by position.

Forward KL and cross-entropy are those of EAGLE-3 (Li et al. 2025, arXiv 2503.01840), total variation is one minus the
acceptance rate of speculative sampling (Leviathan et al. 2023, arXiv 2211.17192), and the hybrid weighs both by how
much is accepted already (arXiv 2602.23881).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_HYBRID_RATE = 3.0


def cross_entropy(q: Tensor, p: Tensor) -> Tensor:
    """Cross-entropy -sum p log q of log-probabilities [n, V]: [n]."""
    return -(p.exp() * q).sum(-1)


def forward_kl(q: Tensor, p: Tensor) -> Tensor:
    """Divergence KL(p || q) of log-probabilities [n, V]: [n]. Tokens with p = 0 add nothing."""
    return torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).nan_to_num(0.0).sum(-1)


def total_variation(q: Tensor, p: Tensor) -> Tensor:
    """Half the sum of |p - q| of log-probabilities [n, V]: [n], one minus the acceptance rate."""
    return (p.exp() - q.exp()).abs().sum(-1) / 2


def hybrid(q: Tensor, p: Tensor) -> Tensor:
    """λ KL + (1 - λ) TV with λ = exp(-3 α), α the mean acceptance of these positions, without gradient: [n].

    The source is arXiv 2602.23881: KL leads while little is accepted, total variation afterwards.
    """
    variation = total_variation(q, p)
    weight = torch.exp(-_HYBRID_RATE * (1 - variation.detach().mean()))
    return weight * forward_kl(q, p) + (1 - weight) * variation


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kl": forward_kl,
    "ce": cross_entropy,
    "tv": total_variation,
    "hybrid": hybrid,
}
"""By their names in recipes; each takes log-probabilities of the draft, then of the target."""
