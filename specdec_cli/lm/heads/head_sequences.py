"""The sequences of a draft head: slots that come from the target's states, and drafted nodes behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec_cli.drafted import Drafted
from specdec_cli.lm.heads.head import Head
from specdec_cli.lm.heads.head_layer import LayerFeed

_CHUNK = 512  # slots of a prompt that attend at once, so that a long prompt's mask stays small
_ROOM = 128  # slots for which room is made at first

_Path = tuple[int, ...]


@dataclass(slots=True)
class HeadRow:
    """One sequence whose drafted nodes want logits.

    Args:
        handle: names the sequence, which was fed before.
        drafted: its nodes so far.
        ends: the nodes after which logits are wanted; -1 is the context's end.
    """

    handle: int
    drafted: Drafted
    ends: Sequence[int]


@dataclass(slots=True)
class _HeadSequence:
    """The slots of one sequence.

    Args:
        keys: [kv heads, room, head size].
        values: the same.
        num_kept: slots behind which the target's own states stand.
        outputs: the layer's output [hidden] of the last kept slot, by the empty path, and of each node by its path.
        slots: each node's slot by its path.
    """

    keys: Tensor
    values: Tensor
    num_kept: int = 0
    outputs: dict[_Path, Tensor] = field(default_factory=dict)
    slots: dict[_Path, int] = field(default_factory=dict)

    def make_room(self, num: int) -> None:
        """Room for so many slots."""
        room = self.keys.shape[1]
        if num <= room:
            return
        more = max(num, 2 * room) - room
        self.keys, self.values = (torch.nn.functional.pad(one, (0, 0, 0, more)) for one in (self.keys, self.values))


class HeadSequences:
    """Runs a head over sequences.

    Args:
        head: loaded.
        dtype: it computes in.
        device: it runs on.
    """

    def __init__(self, head: Head, dtype: torch.dtype, device: torch.device) -> None:
        self._head, self._dtype, self._device = head, dtype, device
        self._held: dict[int, _HeadSequence] = {}

    @property
    def sizes(self) -> tuple[int, int]:
        """Parameters of the head, and bytes of these and of the keys and values now."""
        weights = self._head.weights.values()
        slots = (one for held in self._held.values() for one in (held.keys, held.values))
        return sum(one.numel() for one in weights), sum(one.nbytes for one in (*weights, *slots))

    def num_kept(self, handle: int) -> int:
        """Positions of a sequence whose states it was fed."""
        held = self._held.get(handle)
        return held.num_kept if held else 0

    def release(self, handle: int) -> None:
        """Forget a sequence; unknown ones are fine."""
        self._held.pop(handle, None)

    @torch.inference_mode()
    def feed(self, new: Sequence[tuple[int, Sequence[int], Tensor]]) -> None:
        """Take the target's states of positions that were kept; what was drafted in their place is forgotten.

        Args:
            new: of each sequence its handle, the tokens that follow these positions, and the states
                [len(tokens), taps, target hidden].
        """
        for handle, tokens, features in new:
            held = self._held.get(handle) or self._new_sequence()
            self._held[handle] = held
            held.outputs.clear()
            held.slots.clear()
            held.make_room(held.num_kept + len(tokens))
            for begin in range(0, len(tokens), _CHUNK):
                part = slice(begin, begin + _CHUNK)
                output = self._extend(held, tokens[part], self._head.mix(features[part]))
            held.outputs[()] = output[-1]

    def _extend(self, held: _HeadSequence, tokens: Sequence[int], mixed: Tensor) -> Tensor:
        """The layer's output of further kept slots."""
        first, num = held.num_kept, len(tokens)
        feed = LayerFeed(held.keys, held.values, first, num)
        positions = torch.arange(first, first + num, device=self._device)
        held.num_kept += num
        return self._head.run(self._head.embed(tokens), mixed, positions, [feed])

    def _new_sequence(self) -> _HeadSequence:
        shapes = self._head.key_shape, self._head.value_shape
        keys, values = (torch.zeros(n, _ROOM, size, dtype=self._dtype, device=self._device) for n, size in shapes)
        return _HeadSequence(keys, values)

    @torch.inference_mode()
    def logits(self, rows: Sequence[HeadRow]) -> Tensor:
        """Logits [sum of ends, V] float32 after every end, row after row.

        A node that was not run before is run now, with its parent's output as its feature.
        """
        news = [self._new_nodes(row) for row in rows]
        if any(news):
            self._run_nodes([(self._held[row.handle], paths) for row, paths in zip(rows, news, strict=True) if paths])
        outputs = [self._held[row.handle].outputs[row.drafted.tokens_to(end)] for row in rows for end in row.ends]
        return self._head.logits(torch.stack(outputs))

    def _new_nodes(self, row: HeadRow) -> list[_Path]:
        known = self._held[row.handle].outputs
        return [path for path in map(row.drafted.tokens_to, row.ends) if path not in known]

    def _run_nodes(self, news: Sequence[tuple[_HeadSequence, list[_Path]]]) -> None:
        feeds, features, positions = [], [], []
        for held, paths in news:
            first = held.num_kept + len(held.slots)
            held.make_room(first + len(paths))
            held.slots |= {path: first + i for i, path in enumerate(paths)}
            feeds.append(LayerFeed(held.keys, held.values, first, len(paths), self._visible(held, paths)))
            features += [held.outputs[path[:-1]] for path in paths]
            positions += [held.num_kept + len(path) - 1 for path in paths]
        tokens = [path[-1] for _, paths in news for path in paths]
        feature = self._head.recycled(torch.stack(features))
        at = torch.tensor(positions, dtype=torch.long, device=self._device)
        output = iter(self._head.run(self._head.embed(tokens), feature, at, feeds))
        for held, paths in news:
            held.outputs |= {path: next(output) for path in paths}

    def _visible(self, held: _HeadSequence, paths: Sequence[_Path]) -> Tensor | None:
        """The slots that each new node attends to: the kept ones, those of the nodes on its path, and its own."""
        num_nodes = len(held.slots)
        if len(paths) == 1 and len(paths[0]) == num_nodes:
            return None  # a chain's next node sees all there is
        visible = torch.zeros(len(paths), held.num_kept + num_nodes, dtype=torch.bool)
        visible[:, : held.num_kept] = True
        for i, path in enumerate(paths):
            visible[i, [held.slots[path[: end + 1]] for end in range(len(path))]] = True
        return visible.to(self._device)
