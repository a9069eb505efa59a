"""The drafted trees of a step under one numbering: which nodes are judged together, and what that takes of their forms.

Letters: B rows, n nodes, N nodes and context ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, chain, groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec_cli.drafted import CONTEXT_END
from specdec_cli.transfer import sent

NOT_DRAWN = -1
_NOTHING = -1
Forms = tuple[tuple[Sequence[int], bool], ...]
"""Of trees their nodes' parents, and whether these were drawn by chance."""


@dataclass(frozen=True, slots=True)
class Wave:
    """Nodes that are judged together, by depth.

    Args:
        nodes: their numbers.
        at: the same as indices.
        above: indices of their parents.
        runs: where in these each depth begins and ends.
        drawn: of them those to be refused that were drawn by chance; the ones that a sibling comes after are the first.
        certain: the others to be refused, in the same order.
    """

    nodes: list[int]
    at: Any
    above: Any
    runs: list[tuple[int, int]]
    drawn: list[int]
    certain: list[int]


class Forest:
    """The drafted trees of a group's rows under one numbering, and what depends on their forms alone.

    Nodes are numbered row after row; behind all of them stand the rows' context ends.

    Args:
        forms: of the trees.
        is_joint: whether what follows a node weighs it (traversal).
        device: where indices are; None leaves them on the host, in arrays of numpy.
        is_recorded: whether the device keeps all indices, as a recorded graph reads them again.

    Attributes:
        num: n, nodes.
        begins: each row's first node.
        parents: of each node.
        children: of each node and context end.
        next: the sibling that comes after each node, if any.
        q_places: places of nodes that were drawn by chance among all of these.
        waves: nodes, judged by what the waves before have left.
        depths: drafted tokens on the path to each node [N].
        most_depth: the largest of these.
        last_q: place of q of each parent's last child [N].
        order: each row's nodes, each after those below it and siblings in their order, then its context's end.
        rows: numbers of the rows [B].
    """

    def __init__(self, forms: Forms, is_joint: bool, device: torch.device | None, *, is_recorded: bool = False) -> None:
        self._device, self._is_joint = device, is_joint
        self._kept: dict[tuple[int, ...], Tensor] | None = {} if is_recorded else None
        self.begins = [*accumulate((len(parents) for parents, _ in forms), initial=0)]
        self.num = num = self.begins.pop()
        self.parents, self.q_places, self.next = list[int](), list[int](), [_NOTHING] * num
        self.children: list[list[int]] = [[] for _ in range(num + len(forms))]
        self._depths, waves, num_q = [0] * len(self.children), [0] * len(self.children), 0
        for row, ((parents, is_drawn), begin) in enumerate(zip(forms, self.begins, strict=True)):
            for node, parent in enumerate(parents, begin):
                above = num + row if parent == CONTEXT_END else begin + parent
                siblings = self.children[above]
                # On a CPU rejection refuses nothing before the path has come to a node.
                waves[node] = (waves[above] if is_joint or device is None else 0) + len(siblings)
                if siblings:
                    self.next[siblings[-1]] = node
                siblings.append(node)
                self.parents.append(above)
                self._depths[node] = self._depths[above] + 1
                self.q_places.append(num_q + node - begin if is_drawn else NOT_DRAWN)
            num_q += len(parents) if is_drawn else 0
        by_wave: list[list[int]] = [[] for _ in range(max(waves) + 1)]
        for node in sorted(range(num), key=self._depths.__getitem__):
            by_wave[waves[node]].append(node)
        self.waves = [self._wave(nodes) for nodes in by_wave]
        self.depths, self.last_q, self.rows = self.at(
            self._depths,
            [self.q_places[its[-1]] if its else NOT_DRAWN for its in self.children],
            range(len(forms)),
        )
        self.most_depth = max(self._depths)
        self.order = self.table([self._post_order(end) for end in range(num, len(self.children))])

    def _wave(self, nodes: list[int]) -> Wave:
        at, above = self.at(nodes, [self.parents[node] for node in nodes])
        ends = [*accumulate(len([*its]) for _, its in groupby(nodes, self._depths.__getitem__))]
        # Where a node may stand alone once its children are refused, its last child is refused as well.
        refused = [
            node for node in nodes if self.is_followed(node) or (self._is_joint and self.parents[node] < self.num)
        ]
        refused.sort(key=self.is_followed, reverse=True)
        drawn = [node for node in refused if self.q_places[node] != NOT_DRAWN]
        certain = [node for node in refused if self.q_places[node] == NOT_DRAWN]
        return Wave(nodes, at, above, [*zip([0, *ends], ends, strict=False)], drawn, certain)

    def is_followed(self, node: int) -> bool:
        """Whether a sibling comes after a node."""
        return self.next[node] != _NOTHING

    def _post_order(self, end: int) -> list[int]:
        # The reverse of a walk that visits parents before children and siblings from the last to the first.
        visited, open_nodes = list[int](), [end]
        while open_nodes:
            visited.append(open_nodes.pop())
            open_nodes += self.children[visited[-1]]
        return visited[::-1]

    @cached_property
    def paths(self) -> Any:
        """The nodes on the path to each node, itself included [n, most]."""
        paths = list[list[int]]()
        for node, parent in enumerate(self.parents):
            paths.append([*(paths[parent] if parent < self.num else ()), node])
        return self.table(paths)

    @cached_property
    def earlier(self) -> Any:
        """The siblings before each node, and behind these the context's end of some row [n, most]."""
        siblings = (self.children[parent] for parent in self.parents)
        return self.table([[*its[: its.index(node)], self.num] for node, its in enumerate(siblings)])

    @cached_property
    def first_children(self) -> Any:
        """The first child of each node and context end [N]; of one without, some node."""
        return self.at([its[0] if its else 0 for its in self.children])[0]

    @cached_property
    def certain(self) -> tuple[Any, Any]:
        """How many children of each node and context end were drafted without chance [N], and which [N, most]."""
        its = [[node for node in nodes if self.q_places[node] == NOT_DRAWN] for nodes in self.children]
        return self.at([*map(len, its)])[0], self.table([nodes or [0] for nodes in its])

    def table(self, lists: Sequence[Sequence[int]]) -> Any:
        """Lists as rows of indices; shorter ones end with their last index several times."""
        most = max(map(len, lists))
        filled = [[*its, *[its[-1]] * (most - len(its))] for its in lists]
        return self.at([*chain.from_iterable(filled)])[0].reshape(len(lists), most)

    @property
    def is_host(self) -> bool:
        """Whether indices are on the host, in arrays of numpy."""
        return self._device is None

    def rows_of(self, values: Tensor, places: Sequence[int]) -> Tensor:
        """Some rows of values [..., V], to be read only."""
        if len(places) and [*places] == [*range(places[0], places[0] + len(places))]:  # no copy
            return values[places[0] : places[0] + len(places)]
        return values[torch.as_tensor(self.at(places)[0])]

    def at(self, *lists: Sequence[int]) -> Sequence[Any]:
        """Lists as indices, in one copy to a device."""
        if self._device is None:
            return [np.array(its, dtype=np.int64) for its in lists]
        every, sizes = tuple(chain.from_iterable(lists)), [*map(len, lists)]
        if self._kept is None:
            return torch.split(sent(every, torch.int64, self._device), sizes)
        if every not in self._kept:
            self._kept[every] = sent(every, torch.int64, self._device)
        return torch.split(self._kept[every], sizes)


forest_of = lru_cache(maxsize=64)(Forest)
"""The same, kept for the next steps, whose trees have the same forms."""
