"""Latents of multi-head latent attention (MLA) in one layer, read as keys and values of all heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from specdec_cli.lm.cache.cache import LayerStore
from specdec_cli.lm.cache.layout import Span

Expand = Callable[[Any, Any], tuple[Any, Any]]


@dataclass(frozen=True, slots=True)
class ExpandedStore:
    """One layer's latents, read as the keys and values of all heads.

    Args:
        latents: compressed vectors as keys [1, 1, slots, rank], rotated keys as values [1, 1, slots, dim].
        expand: makes keys [1, H, T, D] and values [1, H, T, D_v] of them.
    """

    latents: LayerStore
    expand: Expand

    def read(self, span: Span) -> tuple[Tensor, Tensor]:
        """Keys and values [1, H, T, dim] that a span's queries see."""
        keys, values = self.expand(*self.latents.read(span))
        return keys, values
