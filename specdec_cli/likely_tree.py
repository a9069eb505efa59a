"""The likeliest nodes of drafted trees, chosen on the device that has their probabilities.

A CUDA graph chooses them for all its sequences, and a draft outside graphs for one sequence at a time.

Letters: B sequences, N nodes at most, F nodes that get children in a round, C children of each, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor
from torch.nn import functional

from specdec_cli.drafted import CONTEXT_END


def likeliest(values: Tensor, first: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """The tokens of the largest values [..., V], and these values: descending, equals in the order of their ids.

    Args:
        values: finite.
        first: a token of the largest value [...] int64, which leads, whichever others equal it.
        num: how many; V where there are fewer.
    """
    top = values.topk(min(num, values.shape[-1]), -1)
    tokens, order = top.indices.sort(-1)
    largest, order = top.values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    tokens = tokens.gather(-1, order)
    # All but `first`; but the last where `first` is not among them, as many others equal it.
    others = (tokens == first[..., None]).to(torch.uint8).sort(dim=-1, stable=True).indices[..., :-1]
    tokens = torch.cat([first[..., None], tokens.gather(-1, others)], -1)
    return tokens, torch.cat([largest[..., :1], largest.gather(-1, others)], -1)


@dataclass(frozen=True, slots=True)
class LikelyTrees:
    """The N likeliest nodes so far of B trees, numbered as drafted tokens are; missing ones come last.

    A node is never likelier than its parent, so that a tree is the best one of its size whatever the order it grew in.

    Args:
        tokens: of each node [B, N] int64.
        parents: the number of each one's parent, -1 for the context's end [B, N] int64.
        scores: the logarithm of each path's probability, -inf where a node is missing [B, N] float64.
        num_old: nodes that have had their round of children [B, 1] int64; all others are new.
    """

    tokens: Tensor
    parents: Tensor
    scores: Tensor
    num_old: Tensor

    @classmethod
    def empty(cls, num_trees: int, num_nodes: int, device: torch.device) -> LikelyTrees:
        """Trees without a node, with room for some."""
        tokens = torch.zeros(num_trees, num_nodes, dtype=torch.int64, device=device)
        scores = torch.full(tokens.shape, -inf, dtype=torch.float64, device=device)
        return cls(tokens, torch.full_like(tokens, CONTEXT_END), scores, tokens.new_zeros(num_trees, 1))

    @property
    def is_there(self) -> Tensor:
        """Whether each node is there [B, N]."""
        return self.scores > -inf

    def new(self, most: int) -> Tensor:
        """The numbers of the first new nodes [B, most], N where there are fewer."""
        numbers = self.num_old + torch.arange(most, device=self.tokens.device)
        return torch.where(numbers < self.is_there.sum(1, keepdim=True), numbers, self.tokens.shape[1])

    def grown(self, ends: Tensor, tokens: Tensor, probabilities: Tensor) -> tuple[LikelyTrees, Tensor]:
        """The trees after a round in which some nodes were offered children, the likeliest of all nodes kept.

        Of equally likely nodes the older ones stay, and of new ones those of the first end.

        Args:
            ends: numbers of the nodes [B, F]; -1 is the context's end, and N is nothing.
            tokens: of the children [B, F, C], the likeliest first.
            probabilities: of the children behind their ends [B, F, C]; 0 where there is no child.

        Returns:
            The trees, and the number that each node had before [B, N]; N or more for those that are new or missing.
        """
        num = self.tokens.shape[1]
        above = functional.pad(functional.pad(self.scores, (0, 1), value=-inf), (1, 0)).gather(1, ends + 1)
        offered = above[:, :, None] + probabilities.double().clamp(max=1).log()
        scores = torch.cat([self.scores, offered.flatten(1)], 1)
        best = scores.sort(dim=1, descending=True, stable=True).indices[:, :num]
        is_there = scores.gather(1, best) > -inf
        before = torch.where(is_there, best, scores.shape[1]).sort(1).values
        scores, every_token, every_parent = (
            functional.pad(torch.cat([own, new.flatten(1)], 1), (0, 1), value=nothing).gather(1, before)
            for own, new, nothing in (
                (self.scores, offered, -inf),
                (self.tokens, tokens, 0),
                (self.parents, ends[:, :, None].expand_as(tokens), CONTEXT_END),
            )
        )
        parents = torch.where(every_parent >= 0, torch.searchsorted(before, every_parent), CONTEXT_END)
        num_old = (before < num).sum(1, keepdim=True)
        return LikelyTrees(every_token, parents, scores, num_old), before
