"""The shape of drafted trees: how many children each depth has, or how many nodes the whole tree may have."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from specdec_cli.drafted import CONTEXT_END, MOST_NODES
from specdec_cli.errors import UsageError

_DYNAMIC = "dynamic"
_HINT = "write children per depth such as `4,2,1`, or `dynamic:N` for the N most likely nodes"


@dataclass(frozen=True, slots=True)
class TreeShape:
    """The shape of a step's drafted tree, for example `4,2,1` or `dynamic:32`.

    A static tree has a fixed number of children at each depth. A dynamic tree has the nodes with the highest cumulative
    draft probability, as in EAGLE-2 (Li et al. 2024) and OPT-Tree (Wang et al. 2024). k limits the depth of both.

    Args:
        children: of each node, by the depth of the children; empty for a dynamic tree.
        budget: most nodes of a dynamic tree; None for a static one.
    """

    children: tuple[int, ...] = ()
    budget: int | None = None

    @classmethod
    def parse(cls, text: str) -> TreeShape:
        """The shape that `--tree` names.

        Raises:
            UsageError: neither form, a number below 1, or a tree with more than MOST_NODES nodes.
        """
        kind, colon, number = text.strip().partition(":")
        numbers = number.split(",") if colon else kind.split(",")
        if (colon and (kind != _DYNAMIC or len(numbers) > 1)) or not all(_is_count(one) for one in numbers):
            raise UsageError(f"the tree `{text}` is not a shape", _HINT)
        counts = tuple(int(one) for one in numbers)
        shape = cls(budget=counts[0]) if colon else cls(counts)
        num = shape.num_nodes(MOST_NODES)
        if len(counts) > MOST_NODES or num > MOST_NODES:
            raise UsageError(f"the tree `{text}` has `{num}` nodes, and `{MOST_NODES}` are possible", _HINT)
        return shape

    def __str__(self) -> str:
        """The shape as `parse` takes it."""
        return f"{_DYNAMIC}:{self.budget}" if self.is_dynamic else ",".join(map(str, self.children))

    @property
    def is_dynamic(self) -> bool:
        """Whether the draft's probabilities decide where the tree branches."""
        return self.budget is not None

    @property
    def is_chain(self) -> bool:
        """Whether it is static and no node has a sibling."""
        return not self.is_dynamic and max(self.children) == 1

    @property
    def depth(self) -> int:
        """Nodes on the longest path, where k does not cut it."""
        return len(self.children) if self.budget is None else self.budget

    @property
    def parents(self) -> tuple[int, ...]:
        """The node before each node of a static tree, -1 for the context's end.

        Nodes come depth by depth, and siblings stand next to each other, the likeliest first.
        """
        assert not self.is_dynamic, "the nodes of a dynamic tree depend on the draft's probabilities"
        parents: list[int] = []
        ends = range(CONTEXT_END, CONTEXT_END + 1)
        for num in self.children:
            begin = len(parents)
            parents += [end for end in ends for _ in range(num)]
            ends = range(begin, len(parents))
        return tuple(parents)

    def cut(self, k: int) -> TreeShape:
        """The first k depths of a static tree; a dynamic one stays as it is."""
        return self if self.is_dynamic else TreeShape(self.children[: max(k, 1)])

    def width(self, depth: int) -> int:
        """Most children of a node one level above `depth`; the first level is 1, and there is none below the last."""
        if self.budget is not None:
            return self.budget
        return self.children[depth - 1] if depth <= len(self.children) else 0

    def num_nodes(self, k: int) -> int:
        """Most nodes of a tree that is at most k deep."""
        if self.budget is not None:
            return self.budget if k else 0
        return sum(accumulate(self.children[:k], mul))


def _is_count(text: str) -> bool:
    """Whether text is a whole number from 1, short enough to be a number of nodes."""
    text = text.strip()
    return text.isascii() and text.isdigit() and len(text) <= 6 and int(text) > 0
