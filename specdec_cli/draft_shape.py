"""The shape of a step's draft: a chain of up to k tokens, or a tree; k = 0 drafts nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import total_ordering
from typing import Any

from specdec_cli.tree_shape import TreeShape


@total_ordering
@dataclass(frozen=True, slots=True)
class DraftShape:
    """The shape of every step's draft; smaller ones come first, and chains before trees.

    Args:
        k: most tokens drafted one after another; a tree's depth.
        tree: a static tree; None for a chain.
        p_min: a chain ends before a token whose probability is below this; 0 always drafts k tokens.
    """

    k: int
    tree: TreeShape | None = None
    p_min: float = 0.0

    @classmethod
    def recommended(cls, recommendation: Mapping[str, Any]) -> DraftShape:
        """The shape of a recommendation in a document."""
        tree = recommendation.get("tree")
        shape = None if tree is None else TreeShape.parse(tree)
        return cls(recommendation["k"], shape, recommendation.get("p_min") or 0.0)

    @classmethod
    def of(cls, tree: TreeShape) -> DraftShape:
        """Shape of a static tree."""
        return cls(tree.depth, tree)

    def __str__(self) -> str:
        """`k = 5`, `k = 5 with p-min 0.6` or `tree 4,2,1`."""
        chain = f"k = {self.k}{f' with p-min {self.p_min:g}' if self.p_min else ''}"
        return chain if self.tree is None else f"tree {self.tree}"

    @property
    def is_full_chain(self) -> bool:
        """Whether it always drafts k tokens one after another."""
        return self.tree is None and not self.p_min

    def __lt__(self, other: DraftShape) -> bool:
        """Whether it is smaller, a chain being smaller than any tree."""
        return self._order < other._order

    @property
    def num_nodes(self) -> int:
        """Most drafted tokens of a step."""
        return self.k if self.tree is None else self.tree.num_nodes(self.k)

    @property
    def asked_tree(self) -> str:
        """The tree that a request asks for: `none` is a chain, whatever the engine's own tree."""
        return "none" if self.tree is None else str(self.tree)

    @property
    def _order(self) -> tuple[bool, int, int, str]:
        return self.tree is not None, self.num_nodes, self.k, str(self)


PLAIN = DraftShape(0)
"""Plain decoding."""


def shape_words(shapes: Sequence[DraftShape]) -> str:
    """Several shapes in words: `k = 4, 5, tree 3,1 and tree 4,2`."""
    chains = ", ".join(str(shape.k) for shape in shapes if shape.is_full_chain)
    names = ([f"k = {chains}"] if chains else []) + [str(shape) for shape in shapes if not shape.is_full_chain]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
