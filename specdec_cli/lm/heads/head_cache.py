"""Keys and values of a draft head, in blocks: sequences whose texts begin alike share them, and outlive their ends.

Slot t comes from the target's hidden states at position t and from the token at t + 1, so that a block's key covers one
token more than the block has slots; slots of module m (`head_sequences`) have read m tokens more. Only whole blocks
behind which the target's own states stand can be found; they are never written again. Drafted nodes stand in slots
behind these, which are their sequence's alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from specdec_cli.errors import RunError
from specdec_cli.lm.cache.blocks import BlockPool
from specdec_cli.lm.cache.contexts import block_key, root_key
from specdec_cli.lm.cache.memory import zeros
from specdec_cli.transfer import sent

_SLOTS_GRAIN = 16  # whose keys a compiled layer reads together
Path = tuple[int, ...]
"""The tokens from the end of a context to a drafted node, this one included."""


@dataclass(slots=True)
class HeadContext:
    """The slots of one sequence.

    Args:
        root: the key before the first block; None shares no blocks.
        tokens: of the text that its slots have read: one more than there are slots.
        blocks: of its slots, in order.
        keys: of its first whole blocks, those that can be found.
        outputs: of the last layer [hidden]: that of the last kept slot by the empty path, and each node's by its path.
        nodes: the place among the slots of each node, by its path.
        num_masks: masks to run behind the slots that come next.
        slots: of all places that its blocks have room for: a slice where they lie in one piece, or [places] int64.
    """

    root: bytes | None = None
    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    outputs: dict[Path, Tensor] = field(default_factory=dict)
    nodes: dict[Path, int] = field(default_factory=dict)
    num_masks: int = 0
    slots: slice | Tensor = field(default_factory=lambda: slice(0, 0))

    @property
    def num_kept(self) -> int:
        """Slots behind which the target's own states stand."""
        return max(0, len(self.tokens) - 1)

    def extend(self, text: Sequence[int], output: Tensor) -> None:
        """Take what a pass has filed of all of a text, and its last slot's output [hidden]."""
        if len(text) - 1 > self.num_kept:
            self.tokens += text[len(self.tokens) :]
            self.outputs[()] = output

    def forget_nodes(self) -> None:
        """Forget what was drafted."""
        self.keep_nodes(frozenset())

    def keep_nodes(self, paths: Set[Path]) -> None:
        """Forget all nodes but some, which give their slots back."""
        self.nodes = {path: place for path, place in self.nodes.items() if path in paths}
        self.outputs = {path: output for path, output in self.outputs.items() if not path or path in paths}

    def new_places(self, paths: Sequence[Path]) -> list[int]:
        """Places for further nodes; of nodes that are not in `nodes` any more, they are taken again."""
        taken, first = set(self.nodes.values()), self.num_kept
        free = (first + i for i in range(len(taken) + len(paths)))
        return [place for place in free if place not in taken][: len(paths)]


class HeadCache:
    """The keys and values of all sequences of a head; of one without any, their last outputs, and no blocks.

    Args:
        key_shape: key heads, and numbers in each.
        value_shape: the same of values.
        dtype: of keys and values.
        device: where they are.
        block_size: slots in a block.

    Attributes:
        keys: [key heads, slots, head size].
        values: the same, behind the keys in memory.
        num_blocks: blocks in all.
    """

    def __init__(
        self,
        key_shape: tuple[int, int],
        value_shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        block_size: int,
    ) -> None:
        self.block_size = block_size
        self._shapes, self._dtype, self._device = (key_shape, value_shape), dtype, device
        self.hold(0)

    def hold(self, num_blocks: int) -> None:
        """Make room for so many blocks; what was there is lost."""
        self.num_blocks, self.pool = num_blocks, BlockPool(num_blocks)
        self._sequences: dict[int, HeadContext] = {}
        num_slots = (num_blocks * self.block_size // _SLOTS_GRAIN + 1) * _SLOTS_GRAIN
        shapes = [(num_heads, num_slots, size) for num_heads, size in self._shapes]
        num_keys = prod(shapes[0])
        self.keys = self.values = torch.empty(0)  # the old ones' memory may be needed
        both = self._zeros(num_keys + prod(shapes[1]))
        self.keys, self.values = both[:num_keys].view(shapes[0]), both[num_keys:].view(shapes[1])

    def _zeros(self, num: int) -> Tensor:
        """Zeros; of a CPU, memory is taken as it is written."""
        if self._device.type == "cpu":
            return zeros((num,), self._dtype, in_huge_pages=False)
        return torch.zeros(num, dtype=self._dtype, device=self._device)

    @property
    def nowhere(self) -> int:
        """A slot that no sequence has, behind all blocks."""
        return self.num_blocks * self.block_size

    @property
    def bytes_per_slot(self) -> int:
        """Memory of one slot's keys and values."""
        return sum(num_heads * size for num_heads, size in self._shapes) * self._dtype.itemsize

    def of(self, handle: int) -> HeadContext:
        """The slots of a sequence; a new one has none and shares none."""
        return self._sequences.setdefault(handle, HeadContext())

    def find(self, handle: int) -> HeadContext | None:
        """The slots of a sequence; None for an unknown one."""
        return self._sequences.get(handle)

    def adopt(self, handle: int, context: Sequence[int], salt: str, module: int = 0) -> int:
        """Begin a sequence with the longest prefix of its context that is cached under a salt.

        Args:
            handle: of a new sequence.
            context: its text, from the first token on.
            salt: shares blocks with sequences of the same salt.
            module: whose slots these are, counted from 0.

        Returns:
            How many slots it holds: whole blocks. At least that of the context's last token but one is left to feed, as
            the first guess follows from its output.
        """
        assert handle not in self._sequences, "a sequence adopts before it is fed"
        if not self.bytes_per_slot:
            num = max(0, len(context) - 2)
            self._sequences[handle] = HeadContext(tokens=list(context[: num + 1]))
            return num
        for other in self._sequences.values():
            self.publish(other)
        size, first = self.block_size, module + 1  # of the tokens behind slots
        before = block_key(root_key(salt), context[:first])
        sequence = self._sequences[handle] = HeadContext(before)
        for start in range(0, len(context) - max(module, 1) - size, size):
            before = block_key(before, context[first + start : first + start + size])
            block = self.pool.share(before)
            if block is None:
                break
            sequence.blocks.append(block)
            sequence.keys.append(before)
        num = len(sequence.blocks) * size
        sequence.tokens = list(context[module : first + num]) if num else []
        sequence.slots = self._slots(sequence.blocks)
        return num

    def cut(self, handle: int, num_slots: int) -> None:
        """Give back what a sequence has adopted behind so many slots, which are whole blocks."""
        sequence, num = self._sequences[handle], num_slots // self.block_size
        self.pool.free(sequence.blocks[num:])
        del sequence.blocks[num:], sequence.keys[num:]
        sequence.tokens = sequence.tokens[: num_slots + 1] if num_slots else []
        sequence.slots = self._slots(sequence.blocks)

    def has_room(self, num_slots: Mapping[int, int]) -> bool:
        """Whether so many slots of sequences, by their handles, could be reserved."""
        missing = (-(-num // self.block_size) - len(self.of(handle).blocks) for handle, num in num_slots.items())
        return not self.bytes_per_slot or sum(max(count, 0) for count in missing) <= self.pool.num_free

    def reserve(self, sequence: HeadContext, num_slots: int) -> None:
        """Make room for so many slots.

        Raises:
            RunError: too few blocks are free.
        """
        missing = -(-num_slots // self.block_size) - len(sequence.blocks)
        if missing <= 0 or not self.bytes_per_slot:
            return
        if missing > self.pool.num_free:
            message = f"the cache of the draft head is full: {missing} blocks wanted, "
            raise RunError(message + f"{self.pool.num_free} free", "run fewer sequences together")
        sequence.blocks += self.pool.allocate(missing, after=sequence.blocks[-1] if sequence.blocks else None)
        sequence.slots = self._slots(sequence.blocks)

    def publish(self, sequence: HeadContext) -> None:
        """Make its whole blocks findable, unless their keys or values are no numbers: then its output is none.

        On a GPU the host waits for that output. Blocks that a graph has filled are therefore published later: in the
        sequence's next step, when another sequence begins, or when this one ends.
        """
        size = self.block_size
        news = range(len(sequence.keys), sequence.num_kept // size)
        if sequence.root is None or not news or not sequence.outputs[()].isfinite().all():
            return
        for i in news:
            before = sequence.keys[-1] if sequence.keys else sequence.root
            sequence.keys.append(block_key(before, sequence.tokens[i * size + 1 : (i + 1) * size + 1]))
            self.pool.publish(sequence.blocks[i], sequence.keys[-1])

    def release(self, handle: int) -> None:
        """Forget a sequence and give its blocks back; unknown handles are fine."""
        sequence = self._sequences.pop(handle, None)
        if sequence is not None:
            self.publish(sequence)
            self.pool.free(sequence.blocks)

    def check(self) -> None:
        """Assert that the pool's books and the sequences' agree."""
        self.pool.check([block for sequence in self._sequences.values() for block in sequence.blocks])
        for handle, sequence in self._sequences.items():
            has_room = len(sequence.blocks) * self.block_size >= sequence.num_kept or not self.bytes_per_slot
            assert has_room, f"sequence {handle} lacks blocks"

    def _slots(self, blocks: Sequence[int]) -> slice | Tensor:
        size = self.block_size
        if not blocks or list(blocks) == list(range(blocks[0], blocks[0] + len(blocks))):
            first = blocks[0] * size if blocks else 0
            return slice(first, first + len(blocks) * size)
        starts = sent(blocks, torch.int64, self._device)[:, None] * size
        return (starts + torch.arange(size, device=self._device)).flatten()
