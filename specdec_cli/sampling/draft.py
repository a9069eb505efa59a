"""Choosing drafted tokens from q, with the noise that verification expects."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from specdec_cli.sampling import noise
from specdec_cli.sampling.chain import Distribution, inverse_cdf
from specdec_cli.sampling.params import SamplingParams


def draft_tokens(
    q: Distribution,
    params: Sequence[SamplingParams],
    shares_noise: Sequence[bool],
    step_positions: Sequence[int],
    offset: int,
) -> list[int]:
    """Draft one token for each row of q.

    Args:
        q: the draft's distribution, one position per row.
        params: each row's sampling parameters (its seed and index key the noise).
        shares_noise: whether each row chooses by the target's noise; others draw their own.
        step_positions: length of each row's context when the step began.
        offset: how many tokens of this step are drafted already.

    Returns:
        One token per row; a one-hot row gives its likeliest token, whatever the noise.
    """
    if q.probs is None:
        return q.likeliest
    tokens = q.argmax.clone()
    is_shared = np.array(shares_noise, dtype=np.bool_)
    for shared in (True, False):
        rows = np.flatnonzero(~q.one_hot & (is_shared == shared)).tolist()
        if not rows:
            continue
        seeds, indices = [params[i].seed for i in rows], [params[i].index for i in rows]
        positions = [step_positions[i] for i in rows]
        index = torch.tensor(rows, device=tokens.device)
        probs = q.probs if len(rows) == len(params) else q.probs[index]
        if shared:
            tokens[index] = noise.gumbel_argmax(probs, seeds, indices, [p + offset for p in positions])
        else:
            drawn = noise.uniforms_many(seeds, indices, positions, noise.Purpose.DRAFT, offset + 1)
            tokens[index] = inverse_cdf(probs, drawn[:, offset])
    return tokens.tolist()
