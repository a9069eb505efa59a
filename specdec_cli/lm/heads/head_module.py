"""One module of a draft head with its keys and values: slots of its text, and drafted nodes behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec_cli.lm.heads.head import Head
from specdec_cli.lm.heads.head_cache import HeadCache, HeadContext, Path
from specdec_cli.lm.heads.head_layer import LayerFeed
from specdec_cli.transfer import sent


@dataclass(frozen=True, slots=True)
class NewNodes:
    """Drafted nodes of one sequence that a module is to run.

    Args:
        sequence: as the module has it.
        paths: of the nodes.
        begin: position of a node of depth 1.
    """

    sequence: HeadContext
    paths: list[Path]
    begin: int


class HeadModule:
    """A module.

    Args:
        head: its forward.
        cache: its keys and values.

    Attributes:
        head: its forward.
        cache: its keys and values.
    """

    def __init__(self, head: Head, cache: HeadCache) -> None:
        self.head, self.cache = head, cache

    def extend(self, sequence: HeadContext, text: Sequence[int], features: Tensor) -> Tensor:
        """Take further kept slots, and run masks behind them in the same pass, as a drafted path.

        Args:
            sequence: with room for them.
            text: what the module reads, to the token behind the last new slot.
            features: of the new slots [n, hidden].

        Returns:
            The layer's outputs [n or n + 1, hidden]: of the last slot before them, if there was one, and of them.
        """
        first, end = sequence.num_kept, sequence.num_kept + len(features)
        outputs = [sequence.outputs[()][None]] if () in sequence.outputs else []
        if end > first:
            num_masks = sequence.num_masks
            masks, most = self.masks(num_masks), end + num_masks
            shift, given = (0 if self.head.reads_before else 1), features
            if self.head.reads_before:
                before = sequence.outputs.get((), torch.zeros_like(features[0]))
                features = torch.cat([before[None], features[:-1]])
            if masks:
                features = torch.cat([features, self.head.recycled(features[:1]).expand(num_masks, -1)])
            feed = LayerFeed(self.cache.keys, self.cache.values, sequence.slots, range(first, most), most)
            positions = torch.arange(first, most, device=features.device)
            tokens = [*text[first + shift : end + shift], *masks]
            states = self.head.run(self.head.embed(tokens), features, positions, [feed])
            outputs.append(states[: end - first])
            sequence.outputs[()] = given[-1] if self.head.reads_before else outputs[-1][-1]
            sequence.tokens += text[len(sequence.tokens) : end + 1]
            paths = [masks[: i + 1] for i in range(num_masks)]
            sequence.outputs |= dict(zip(paths, states[end - first :], strict=True))
            sequence.nodes |= {path: end + i for i, path in enumerate(paths)}
        return torch.cat(outputs) if outputs else features

    def masks(self, num: int) -> Path:
        """A path of so many mask tokens; empty for a head without one."""
        return () if self.head.mask_token is None else (self.head.mask_token,) * num

    def run(self, news: Sequence[NewNodes], features: Tensor) -> None:
        """Run drafted nodes, whose keys, values and outputs are kept.

        Args:
            news: of each sequence.
            features: of all of them [n, hidden].

        Raises:
            RunError: too few blocks are free.
        """
        feeds, positions = [], []
        for new in news:
            sequence, paths = new.sequence, new.paths
            places = sequence.new_places(paths)
            sequence.nodes |= dict(zip(paths, places, strict=True))
            end = 1 + max(sequence.nodes.values())
            self.cache.reserve(sequence, end)
            visible = _visible(sequence, paths, end, features.device)
            feeds.append(LayerFeed(self.cache.keys, self.cache.values, sequence.slots, places, end, visible))
            positions += [new.begin + len(path) - 1 for path in paths]
        tokens = [path[-1] for new in news for path in new.paths]
        at = sent(positions, torch.int64, features.device)
        output = iter(self.head.run(self.head.embed(tokens), features, at, feeds))
        for new in news:
            new.sequence.outputs |= {path: next(output) for path in new.paths}


def _visible(sequence: HeadContext, paths: Sequence[Path], end: int, device: torch.device) -> Tensor | None:
    """The places that each new node attends to: the kept ones, those of the nodes on its path, and its own."""
    depth = max(len(path) for path in sequence.nodes) - min(len(path) for path in sequence.nodes) + 1
    if depth == len(sequence.nodes) and sequence.nodes[paths[-1]] == end - 1 and len(paths) <= depth:
        return None  # along a chain each sees all there is
    visible = torch.zeros(len(paths), end, dtype=torch.bool)
    visible[:, : sequence.num_kept] = True
    for row, path in zip(visible, paths, strict=True):
        ways = (path[: depth + 1] for depth in range(len(path)))
        row[[sequence.nodes[way] for way in ways if way in sequence.nodes]] = True
    return sent(visible, torch.bool, device)
