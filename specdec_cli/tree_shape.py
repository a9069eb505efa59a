"""The shape of drafted trees: how many children each node has, or how many nodes the whole tree may have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from specdec_cli.drafted import CONTEXT_END, MOST_NODES
from specdec_cli.errors import UsageError

AUTO = "auto"
"""Stands for the best trees, where one looks for them."""
_DYNAMIC = "dynamic"
_HINT = (
    "write children per depth such as `4,2,1`, with `+` between the counts of single nodes as in `3,2+1`, or "
    "`dynamic:N` for the N most likely nodes"
)


@dataclass(frozen=True, slots=True)
class TreeShape:
    """The shape of a step's drafted tree, for example `4,2,1`, `3,2+1,1` or `dynamic:32`.

    A static tree has a fixed number of children at each node. In its text every depth has one number for all nodes
    above it, or a number for each, of which zeros at the end may be left out: in `3,2+1` the first child of the
    context's end has two children, the second has one and the third has none. A dynamic tree has the nodes with the
    highest cumulative draft probability, as in EAGLE-2 (Li et al. 2024) and OPT-Tree (Wang et al. 2024). k limits the
    depth of both.

    Args:
        levels: for each depth the number of children of every node one depth above, in their order; empty for a dynamic
            tree. The context's end alone stands above the first depth.
        budget: most nodes of a dynamic tree; None for a static one.
    """

    levels: tuple[tuple[int, ...], ...] = ()
    budget: int | None = None

    @classmethod
    def parse(cls, text: str) -> TreeShape:
        """The shape that `--tree` names.

        Raises:
            UsageError: neither form, a number out of range, or a tree with more than MOST_NODES nodes.
        """
        if text.strip() == AUTO:
            message = f"the tree `{AUTO}` is for `sweep-k`, which looks for the best shape"
            raise UsageError(message, "give the shape that it finds, such as `4,2,1`")
        kind, colon, number = text.strip().partition(":")
        levels = [[part.strip() for part in level.split("+")] for level in (number if colon else kind).split(",")]
        if (colon and (kind != _DYNAMIC or levels != [levels[0][:1]])) or not all(map(_are_counts, levels)):
            raise UsageError(f"the tree `{text}` is not a shape", _HINT)
        counts = [[int(part) for part in level] for level in levels]
        num = counts[0][0] if colon else _num_nodes(text, counts)
        if len(counts) > MOST_NODES or num > MOST_NODES:
            raise UsageError(f"the tree `{text}` has `{num}` nodes, and `{MOST_NODES}` are possible", _HINT)
        return cls(budget=num) if colon else cls(_filled(counts))

    @classmethod
    def of(cls, parents: Sequence[int]) -> TreeShape:
        """The static shape with these parents of nodes, which come depth by depth with siblings together."""
        num_children, levels, above = Counter(parents), list[tuple[int, ...]](), [CONTEXT_END]
        while any(num_children[node] for node in above):
            levels.append(tuple(num_children[node] for node in above))
            begin = above[-1] + 1
            above = list(range(begin, begin + sum(levels[-1])))
        shape = cls(tuple(levels))
        assert shape.parents == tuple(parents), "nodes come depth by depth, and siblings together"
        return shape

    def __str__(self) -> str:
        """The shape as `parse` takes it."""
        return f"{_DYNAMIC}:{self.budget}" if self.is_dynamic else ",".join(map(_level_words, self.levels))

    @property
    def is_dynamic(self) -> bool:
        """Whether the draft's probabilities decide where the tree branches."""
        return self.budget is not None

    @property
    def is_chain(self) -> bool:
        """Whether it is static and no node has a sibling."""
        return not self.is_dynamic and self.num_nodes(self.depth) == self.depth

    @property
    def depth(self) -> int:
        """Nodes on the longest path, where k does not cut it."""
        return len(self.levels) if self.budget is None else self.budget

    @property
    def parents(self) -> tuple[int, ...]:
        """The node before each node of a static tree, -1 for the context's end.

        Nodes come depth by depth, and siblings stand next to each other, the likeliest first.
        """
        assert not self.is_dynamic, "the nodes of a dynamic tree depend on the draft's probabilities"
        return tuple(node for node, children in enumerate(_children(self.levels), CONTEXT_END) for _ in children)

    def children(self, node: int) -> range:
        """The children of a node of a static tree, or of the context's end: the likeliest first."""
        assert not self.is_dynamic, "the nodes of a dynamic tree depend on the draft's probabilities"
        return _children(self.levels)[node + 1]

    def cut(self, k: int) -> TreeShape:
        """The first k depths of a static tree; a dynamic one stays as it is."""
        return self if self.is_dynamic else TreeShape(self.levels[: max(k, 1)])

    def num_nodes(self, k: int) -> int:
        """Most nodes of a tree that is at most k deep."""
        if self.budget is not None:
            return self.budget if k else 0
        return sum(map(sum, self.levels[:k]))


@lru_cache(maxsize=256)
def _children(levels: tuple[tuple[int, ...], ...]) -> tuple[range, ...]:
    """The children of the context's end, and then of every node."""
    children, num = list[range](), 0
    for level in levels:
        for count in level:
            children.append(range(num, num + count))
            num += count
    last = num - sum(levels[-1])
    return (*children, *(range(num, num) for _ in range(last, num)))


def _num_nodes(text: str, levels: Sequence[Sequence[int]]) -> int:
    """Nodes of a static tree.

    Raises:
        UsageError: a depth has more counts than there are nodes above it.
    """
    above, num = 1, 0
    for depth, level in enumerate(levels, 1):
        if len(level) > above:
            message = (
                f"the tree `{text}` has `{len(level)}` counts at depth {depth}, and `{above}` nodes stand above it"
            )
            raise UsageError(message, _HINT)
        above = above * level[0] if len(level) == 1 else sum(level)
        num += above
    return num


def _filled(levels: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """A count for every node."""
    counts, above = list[tuple[int, ...]](), 1
    for level in levels:
        counts.append(tuple(level) * above if len(level) == 1 else (*level, *[0] * (above - len(level))))
        above = sum(counts[-1])
    return tuple(counts)


def _level_words(level: Sequence[int]) -> str:
    """One count where all nodes have as many children; else that of each node up to the last one with a child."""
    if len(set(level)) == 1:
        return str(level[0])
    last = max(i for i, count in enumerate(level) if count)
    return "+".join(map(str, level[: max(last + 1, 2)]))


def _are_counts(level: Sequence[str]) -> bool:
    """Whether these are whole numbers, short enough to be numbers of nodes, and one of them is above 0."""
    return all(number.isascii() and number.isdigit() and len(number) <= 6 for number in level) and any(map(int, level))
