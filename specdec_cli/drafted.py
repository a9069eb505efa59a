"""Drafted tokens: a tree of continuations of a context. A chain is the tree in which every node has one child.

A node's number is its place in `tokens`, and a parent comes before its children; -1 stands for the end of the context.
The target's results are laid out in *places*: place 0 follows the context, place i + 1 follows node i, so node i itself
is decided at place `parents[i] + 1`. A place is not a position: the text position of node i is
`len(context) + depth(i) - 1`, and siblings share it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from specdec_cli.errors import RunError

CONTEXT_END = -1
"""The parent of the nodes that follow the context directly."""
MOST_NODES = 64
"""Nodes of a tree at most, so that a node's ancestors fit a 64-bit mask; a chain may be longer."""
MOST_DEPTH = 64
"""Largest k: tokens drafted one after another in a step."""


@dataclass(frozen=True, slots=True)
class Drafted:
    """Drafted tokens of one sequence and how they follow each other.

    Args:
        tokens: of each node.
        parents: the node before each node, -1 for the context's end; a range where the nodes are a chain.

    Attributes:
        is_chain: whether every node follows the one before it.

    Raises:
        RunError: the parents describe no tree: one is missing or comes after its child, two siblings have the same
            token, or there are more than MOST_NODES nodes.
    """

    tokens: tuple[int, ...] = ()
    parents: Sequence[int] = range(-1, -1)
    is_chain: bool = field(default=True, init=False, repr=False, compare=False)
    _paths: tuple[tuple[int, ...], ...] | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the tree; parents that are a chain's become a range, whatever sequence they came in."""
        chain = range(-1, len(self.tokens) - 1)
        if self.parents == chain:
            return
        parents = tuple(self.parents)
        is_chain = parents == tuple(chain)
        object.__setattr__(self, "parents", chain if is_chain else parents)
        if not is_chain:
            object.__setattr__(self, "is_chain", False)
            self._check()

    @classmethod
    def chain(cls, tokens: Iterable[int]) -> Drafted:
        """Tokens that follow one another."""
        tokens = tuple(tokens)
        return cls(tokens, range(-1, len(tokens) - 1))

    def __len__(self) -> int:
        """The number of nodes."""
        return len(self.tokens)

    @property
    def max_depth(self) -> int:
        """Nodes on the longest path; 0 where nothing was drafted."""
        return len(self.tokens) if self.is_chain else max(map(len, self._all_paths()))

    def depth(self, node: int) -> int:
        """Nodes on the path to a node, itself included; 0 for the context's end."""
        return node + 1 if self.is_chain else len(self.path(node))

    def path(self, node: int) -> tuple[int, ...]:
        """The nodes from the first drafted token to a node, itself included; none for the context's end."""
        if self.is_chain:
            return tuple(range(node + 1))
        return () if node == CONTEXT_END else self._all_paths()[node]

    def tokens_to(self, node: int) -> tuple[int, ...]:
        """The tokens on the path to a node, its own included."""
        return self.tokens[: node + 1] if self.is_chain else tuple(self.tokens[i] for i in self.path(node))

    def ancestors(self, node: int) -> int:
        """The path to a node as a mask: bit i is set if node i is on it, the node itself included."""
        if self.is_chain:
            return (1 << node + 1) - 1
        return sum(1 << i for i in self.path(node))

    def children(self, node: int) -> list[int]:
        """The nodes that follow a node, in their order."""
        if self.is_chain:
            return [node + 1] if node + 1 < len(self.tokens) else []
        return [i for i, parent in enumerate(self.parents) if parent == node]

    def child(self, node: int, token: int) -> int | None:
        """The child of a node that has a token; None where no child has it."""
        if self.is_chain:
            return node + 1 if node + 1 < len(self.tokens) and self.tokens[node + 1] == token else None
        return next((i for i in self.children(node) if self.tokens[i] == token), None)

    def walk(self, chosen: Sequence[int]) -> tuple[int, ...]:
        """The path on which every node's token is the one chosen at its place; `chosen` has a token for each place."""
        if self.is_chain:
            num = 0
            for token, choice in zip(self.tokens, chosen, strict=False):
                if token != choice:
                    break
                num += 1
            return tuple(range(num))
        path, node = [], self.child(CONTEXT_END, chosen[0])
        while node is not None:
            path.append(node)
            node = self.child(node, chosen[node + 1])
        return tuple(path)

    def follow(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """The longest path whose tokens are the first of these."""
        path, node = [], CONTEXT_END
        for token in tokens:
            child = self.child(node, token)
            if child is None:
                break
            path.append(child)
            node = child
        return tuple(path)

    def places_before(self, depth: int) -> Sequence[int]:
        """The places that fewer than `depth` drafted tokens stand before, in ascending order."""
        if self.is_chain:
            return range(max(0, min(depth, len(self.tokens) + 1)))
        return [node + 1 for node in range(CONTEXT_END, len(self.tokens)) if self.depth(node) < depth]

    def first(self, num: int) -> Drafted:
        """The first nodes alone; parents come before children, so they are a tree as well."""
        return self if num >= len(self.tokens) else Drafted(self.tokens[:num], self.parents[:num])

    def keep(self, nodes: Iterable[int]) -> Drafted:
        """Some nodes alone, in their order and with new numbers; the parent of each is among them."""
        kept = sorted(set(nodes))
        if kept == list(range(len(kept))):
            return self.first(len(kept))
        number = {CONTEXT_END: CONTEXT_END} | {node: i for i, node in enumerate(kept)}
        assert all(self.parents[node] in number for node in kept), "a node is kept together with its parent"
        return Drafted(tuple(self.tokens[node] for node in kept), tuple(number[self.parents[node]] for node in kept))

    def with_tokens(self, tokens: Iterable[int]) -> Drafted:
        """The same nodes with other tokens; siblings may have the same one, as those that are no tokens do."""
        nodes = copy.copy(self)
        object.__setattr__(nodes, "tokens", tuple(tokens))
        assert len(nodes.tokens) == len(self.tokens), "each node has a token"
        return nodes

    def _all_paths(self) -> tuple[tuple[int, ...], ...]:
        """Every node's path, computed when the first one is asked for."""
        if self._paths is None:
            paths: list[tuple[int, ...]] = []
            for node, parent in enumerate(self.parents):
                paths.append((*(paths[parent] if parent >= 0 else ()), node))
            object.__setattr__(self, "_paths", tuple(paths))
        assert self._paths is not None, "the paths were just computed"
        return self._paths

    def _check(self) -> None:
        num = len(self.tokens)
        if len(self.parents) != num:
            raise RunError(f"a drafted tree has `{num}` tokens and `{len(self.parents)}` parents")
        if num > MOST_NODES:
            raise RunError(f"a drafted tree has `{num}` nodes, and `{MOST_NODES}` are possible")
        for node, parent in enumerate(self.parents):
            if not CONTEXT_END <= parent < node:
                raise RunError(f"node `{node}` of a drafted tree has the parent `{parent}`, which is not before it")
        if len(set(zip(self.parents, self.tokens, strict=True))) < num:
            raise RunError("two siblings of a drafted tree have the same token")


NOTHING = Drafted()
"""No drafted tokens."""
