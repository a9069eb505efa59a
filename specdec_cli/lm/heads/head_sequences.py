"""The sequences of a draft head: slots that come from the target's states, and drafted nodes behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdec_cli.drafted import Drafted
from specdec_cli.lm.heads.head import Head
from specdec_cli.lm.heads.head_cache import HeadCache, HeadContext, Path
from specdec_cli.lm.heads.head_layer import LayerFeed

if TYPE_CHECKING:
    from specdec_cli.lm.door import LM

_CHUNK = 512  # slots of a prompt that attend at once, so that a long prompt's mask stays small


@dataclass(slots=True)
class HeadRow:
    """One sequence whose drafted nodes want logits.

    Args:
        handle: names the sequence, which was fed before.
        drafted: its nodes so far.
        ends: the nodes after which logits are wanted; -1 is the context's end.
        is_pruned: nodes may have left the tree since the last call.
    """

    handle: int
    drafted: Drafted
    ends: Sequence[int]
    is_pruned: bool = False


class HeadSequences:
    """Runs a head over sequences.

    Args:
        head: loaded.
        target: the loaded target, whose dtype, device and blocks are the head's.
    """

    def __init__(self, head: Head, target: LM) -> None:
        self._head, self._device = head, target.device
        self.cache = HeadCache(head.key_shape, head.value_shape, target.dtype, target.device, target.block_size)
        self.cache.hold(target.num_blocks)

    @property
    def sizes(self) -> tuple[int, int]:
        """Parameters of the head, and bytes of these and of the keys and values."""
        weights = self._head.weights.values()
        held = self.cache.num_blocks * self.cache.block_size * self.cache.bytes_per_slot
        return sum(one.numel() for one in weights), sum(one.nbytes for one in weights) + held

    def num_kept(self, handle: int) -> int:
        """Positions of a sequence whose states it was fed, or adopted."""
        held = self.cache.find(handle)
        return held.num_kept if held else 0

    def can_draft(self, handle: int) -> bool:
        """Whether the output is there that a first guess follows from."""
        held = self.cache.find(handle)
        return held is not None and () in held.outputs

    def adopt(self, handle: int, context: Sequence[int], salt: str) -> int:
        """Begin a sequence with the longest cached prefix of its context; how many positions' states it has."""
        return self.cache.adopt(handle, context, salt)

    def release(self, handle: int) -> None:
        """Forget a sequence; unknown ones are fine."""
        self.cache.release(handle)

    @torch.inference_mode()
    def feed(self, new: Sequence[tuple[int, Sequence[int], Tensor]]) -> None:
        """Take the target's states of positions that were kept; what was drafted in their place is forgotten.

        Args:
            new: of each sequence its handle, its context, and the states [n, taps, target hidden] of the last n
                positions that a token follows.

        Raises:
            RunError: too few blocks are free.
        """
        for handle, context, features in new:
            held = self.cache.of(handle)
            held.outputs.clear()
            held.nodes.clear()
            first = len(context) - 1 - len(features)
            assert first == held.num_kept, "each kept position's features come once"
            self.cache.reserve(held, len(context) - 1)
            for begin in range(0, len(features), _CHUNK):
                end = min(begin + _CHUNK, len(features))
                output = self._extend(held, context[: first + end + 1], self._head.mix(features[begin:end]))
            held.outputs[()] = output[-1]
            self.cache.publish(held)

    def _extend(self, held: HeadContext, context: Sequence[int], mixed: Tensor) -> Tensor:
        """The layer's output of further kept slots."""
        first, end = held.num_kept, len(context) - 1
        feed = LayerFeed(self.cache.keys, self.cache.values, held.slots, range(first, end), end)
        positions = torch.arange(first, end, device=self._device)
        output = self._head.run(self._head.embed(context[first + 1 :]), mixed, positions, [feed])
        held.tokens += context[len(held.tokens) :]
        return output

    @torch.inference_mode()
    def logits(self, rows: Sequence[HeadRow]) -> Tensor:
        """Logits [sum of ends, V] float32 after every end, row after row.

        A node that was not run before is run now, with its parent's output as its feature.

        Raises:
            RunError: too few blocks are free.
        """
        news = [self._new_nodes(row) for row in rows]
        if any(news):
            self._run_nodes(
                [(self.cache.of(row.handle), paths) for row, paths in zip(rows, news, strict=True) if paths]
            )
        outputs = [self.cache.of(row.handle).outputs[row.drafted.tokens_to(end)] for row in rows for end in row.ends]
        return self._head.logits(torch.stack(outputs))

    def _new_nodes(self, row: HeadRow) -> list[Path]:
        """The ends that were not run before; nodes that have left the tree give their slots back."""
        held = self.cache.of(row.handle)
        if row.is_pruned:
            stay = {row.drafted.tokens_to(node) for node in range(len(row.drafted))}
            held.nodes = {path: place for path, place in held.nodes.items() if path in stay}
            held.outputs = {path: output for path, output in held.outputs.items() if not path or path in stay}
        return [path for path in map(row.drafted.tokens_to, row.ends) if path not in held.outputs]

    def _run_nodes(self, news: Sequence[tuple[HeadContext, list[Path]]]) -> None:
        feeds, features, positions = [], [], []
        for held, paths in news:
            places = held.new_places(paths)
            held.nodes |= dict(zip(paths, places, strict=True))
            end = 1 + max(held.nodes.values())
            self.cache.reserve(held, end)
            visible = self._visible(held, paths, end)
            feeds.append(LayerFeed(self.cache.keys, self.cache.values, held.slots, places, end, visible))
            features += [held.outputs[path[:-1]] for path in paths]
            positions += [held.num_kept + len(path) - 1 for path in paths]
        tokens = [path[-1] for _, paths in news for path in paths]
        feature = self._head.recycled(torch.stack(features))
        at = torch.tensor(positions, dtype=torch.long, device=self._device)
        output = iter(self._head.run(self._head.embed(tokens), feature, at, feeds))
        for held, paths in news:
            held.outputs |= {path: next(output) for path in paths}

    def _visible(self, held: HeadContext, paths: Sequence[Path], end: int) -> Tensor | None:
        """The places that each new node attends to: the kept ones, those of the nodes on its path, and its own."""
        if len(paths) == 1 and len(paths[0]) == len(held.nodes):
            return None  # a chain's next node sees all there is
        visible = torch.zeros(len(paths), end, dtype=torch.bool)
        visible[:, : held.num_kept] = True
        for row, path in zip(visible, paths, strict=True):
            row[[held.nodes[path[: depth + 1]] for depth in range(len(path))]] = True
        return visible.to(self._device)
