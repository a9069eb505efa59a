"""Drafted nodes as the target has scored them in a round, and a judge on the device that decides which stand.

Letters: B sequences, N drafted nodes of each, D their depth, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from specdec_cli.drafted import Drafted


@dataclass(frozen=True, slots=True)
class TreesOnDevice:
    """The drafted trees of B sequences, by numbers of nodes.

    Args:
        paths: whether each node is on the path to another, itself included [B, N, N] bool; of a missing node none is.
        is_there: whether each node is there [B, N].
        depths: drafted tokens before each place [B, N + 1]: before the context's end none, behind a node those to it.
        places: the place that decides each node [B, N].
        elders: whether one node comes before another as its sibling [B, N, N].
    """

    paths: Tensor
    is_there: Tensor
    depths: Tensor
    places: Tensor
    elders: Tensor

    @classmethod
    def of(cls, paths: Tensor) -> TreesOnDevice:
        """Trees by their paths; a node's number is above those of all on its path."""
        every, is_there = torch.arange(paths.shape[1], device=paths.device), paths.diagonal(dim1=1, dim2=2)
        is_before = every < every[:, None]
        places = functional.pad(torch.where(paths & is_before, every + 1, 0), (1, 0)).amax(2)
        elders = (places[:, :, None] == places[:, None]) & is_before & is_there[:, None]
        return cls(paths, is_there, functional.pad(paths.sum(2), (1, 0)), places, elders)

    @classmethod
    def alike(cls, drafted: Drafted, num_trees: int, device: torch.device) -> TreesOnDevice:
        """Trees of one shape that the host knows."""
        nodes = range(len(drafted))
        paths = [[other in drafted.path(node) for other in nodes] for node in nodes]
        table = torch.tensor(paths, dtype=torch.bool, device=device).view(len(nodes), len(nodes))
        return cls.of(table.expand(num_trees, -1, -1))

    @classmethod
    def chosen(cls, masks: Tensor) -> TreesOnDevice:
        """Trees by the paths of their nodes as bits of masks [B, N] int64."""
        return cls.of((masks[:, :, None] >> torch.arange(masks.shape[1], device=masks.device) & 1).bool())

    def whole_paths(self, stands: Tensor) -> Tensor:
        """Which nodes stand [B, N] with all before them, by whether each stands on its own [B, N]."""
        return ~(~stands[:, None] & self.paths).any(2) & self.is_there


@dataclass(frozen=True, slots=True)
class ScoredNodes:
    """Drafted nodes of a round, scored by the target.

    Args:
        trees: the nodes.
        tokens: of the nodes [B, N].
        order: their numbers in the shape that they were drawn in, of which some may be missing [B, N]; None where all
            are numbered as the host knows them, or without chance.
        q: distributions that they were drawn from [B, N, V]; None where none was drawn.
        scores: logits of tokens that exist, at the place behind the context and those behind the nodes [B, N + 1, V].
        likeliest: the likeliest token at each place [B, N + 1]; 0 where its logit is no finite number.
        largest: the logits of these [B, N + 1, 1].
    """

    trees: TreesOnDevice
    tokens: Tensor
    order: Tensor | None
    q: Tensor | None
    scores: Tensor
    likeliest: Tensor
    largest: Tensor

    def walk(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """The nodes that are, as all before them, what was chosen at their places [B, N + 1]; of siblings the first.

        Returns:
            Whether each stands [B, N], and what was chosen behind the last one [B].
        """
        is_same = (self.tokens[:, :, None] == self.tokens[:, None]) & self.trees.elders
        own = (self.tokens == chosen.gather(1, self.trees.places)) & ~is_same.any(2)
        stands = self.trees.whole_paths(own)
        return stands, chosen.gather(1, last_place(stands))[:, 0]


def last_place(stands: Tensor) -> Tensor:
    """The place behind the last node that stands [B, 1], of nodes [B, N]; a node's number is above its parent's."""
    places = torch.arange(1, stands.shape[1] + 1, device=stands.device)
    return functional.pad(torch.where(stands, places, 0), (1, 0)).amax(1, keepdim=True)


class DeviceJudge(ABC):
    """Decides which nodes stand.

    Args:
        num_rows: B.
        device: of the target.

    Attributes:
        needs_q: whether it asks what nodes were drawn from.
        draft_uniforms: by which the draft draws [B, N] float64; [B, 0] where it draws none by numbers.
        noise: by which draft and target draw, of each depth and the one behind the last [B, D + 1, V] float64; or
            empty.
    """

    needs_q = False

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.draft_uniforms = torch.empty(num_rows, 0, dtype=torch.float64, device=device)
        self.noise = self.draft_uniforms

    @abstractmethod
    def decide(self, scored: ScoredNodes) -> tuple[Tensor, Tensor, Tensor]:
        """Whether each node stands [B, N], the target's own token [B], and whether no fault was seen [B]; recorded."""

    @abstractmethod
    def go_on(self, lengths: Tensor) -> None:
        """Make ready, on the device alone, for the round behind texts of these lengths [B]; recorded."""

    @abstractmethod
    def prepare(self, begins: Sequence[int], lengths: Tensor) -> None:
        """Send what the next round needs of the host, without waiting.

        Args:
            begins: the shortest that each text may be before the round.
            lengths: what they are, on the device [B]; 0 where there is no sequence.
        """
