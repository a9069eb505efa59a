"""The sequences of a draft head: slots that come from the target's states, and drafted nodes behind them.

A head may have several modules, one for each further token. Module m, counted from 0, pairs the state of module m - 1
at position t, for the first one the target's, with the token at t + m + 1: it is a head on a text that begins m tokens
later. The last module goes on for all tokens that have no module of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdec_cli.drafted import Drafted
from specdec_cli.lm.cache.budget import count_in
from specdec_cli.lm.cache.cache_plan import CacheNeed, draft_blocks_wanted
from specdec_cli.lm.heads.head import Head
from specdec_cli.lm.heads.head_cache import HeadCache, Path
from specdec_cli.lm.heads.head_module import HeadModule, NewNodes

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
        heads: its modules, loaded.
        target: the loaded target, whose dtype, device, context limit and blocks are the head's.
        name: of the draft, for messages.

    Attributes:
        modules: each with its cache.
        device: where it runs.
        block_size: slots in a block.
        num_blocks: blocks of each module.
        vocab_size: V, the width of its logits.
    """

    def __init__(self, heads: Sequence[Head], target: LM, name: str) -> None:
        where = target.dtype, target.device, target.block_size
        self.modules = [HeadModule(one, HeadCache(one.key_shape, one.value_shape, *where)) for one in heads]
        self.cache = self.modules[0].cache
        self.device, self.block_size, self.vocab_size = target.device, target.block_size, target.vocab_size
        self._name, self._max_context = name, target.max_context
        self.hold(target.num_blocks)
        count_in(self)

    @property
    def most_tokens(self) -> int | None:
        """Tokens that it drafts one after another: as many as are wanted."""
        return None

    @property
    def sizes(self) -> tuple[int, int]:
        """Parameters of the head, and bytes of these and of the keys and values."""
        return sum(one.numel() for one in self._weights), self.weight_bytes + self._cache_bytes

    @property
    def weight_bytes(self) -> int:
        """Memory of its own weights."""
        return sum(one.nbytes for one in self._weights)

    @property
    def promised_bytes(self) -> int:
        """Memory that its caches have still to take: a CPU's as they are written, or all."""
        return self._cache_bytes if self.device.type == "cpu" else 0

    @property
    def _weights(self) -> list[Tensor]:
        """Its tensors, those that modules share once."""
        return list({id(one): one for module in self.modules for one in module.head.weights.values()}.values())

    @property
    def _block_bytes(self) -> int:
        return self.block_size * sum(module.cache.bytes_per_slot for module in self.modules)

    @property
    def _cache_bytes(self) -> int:
        return self.num_blocks * self._block_bytes

    def draft_cache_need(self, num_seqs: int, num_drafted: int, target_context: int) -> CacheNeed:
        """Caches for so many sequences, each with room for a whole context and drafted nodes, as the target's."""
        sizes = num_seqs, self._max_context, target_context, num_drafted, self.block_size
        return CacheNeed(self._name, self._block_bytes, draft_blocks_wanted(*sizes))

    def hold(
        self,
        num_blocks: int,
        num_seqs: int | None = None,
        extra_tokens: int | None = None,
        num_prefix_states: int | None = None,
    ) -> None:
        """Recreate the caches with so many blocks, which any number of sequences share."""
        self.num_blocks = num_blocks
        for module in self.modules:
            module.cache.hold(num_blocks)

    def num_kept(self, handle: int) -> int:
        """Positions of a sequence whose states it was fed, or adopted."""
        held = self.cache.find(handle)
        return held.num_kept if held else 0

    def can_draft(self, handle: int) -> bool:
        """Whether the output is there that a first guess follows from."""
        held = self.cache.find(handle)
        return held is not None and () in held.outputs

    def adopt(self, handle: int, context: Sequence[int], salt: str) -> int:
        """Begin a sequence with the longest prefix of its context that all modules have; how many positions that is."""
        caches = [module.cache for module in self.modules]
        num = min(cache.adopt(handle, context, salt, m) for m, cache in enumerate(caches))
        for cache in caches:
            cache.cut(handle, num)
        return num

    def release(self, handle: int) -> None:
        """Forget a sequence; unknown ones are fine."""
        for module in self.modules:
            module.cache.release(handle)

    @torch.inference_mode()
    def feed(self, new: Sequence[tuple[int, Sequence[int], Tensor]], masks: Sequence[int] | None = None) -> None:
        """Take the target's states of positions that were kept; what was drafted in their place is forgotten.

        Args:
            new: of each sequence its handle, its context, and the states [n, taps, target hidden] of the last n
                positions that a token follows.
            masks: for each, how many masks to run in the same pass; None runs none.

        Raises:
            RunError: too few blocks are free.
        """
        for (handle, context, features), num_masks in zip(new, masks or [0] * len(new), strict=True):
            first = len(context) - 1 - len(features)
            if self.num_kept(handle) == len(context) - 1:
                continue  # it is asked again in the same step, after another row had no distribution
            assert first == self.num_kept(handle), "each kept position's features come once"
            for m, module in enumerate(self.modules):
                held = module.cache.of(handle)
                held.forget_nodes()
                module.cache.reserve(held, len(context) - 1 - m + num_masks)
            for begin in range(0, len(features), _CHUNK):
                end = min(begin + _CHUNK, len(features))
                self.cache.of(handle).num_masks = num_masks if end == len(features) else 0
                self._extend(handle, context[: first + end + 1], features[begin:end])
            for module in self.modules:
                module.cache.publish(module.cache.of(handle))

    def _extend(self, handle: int, context: Sequence[int], features: Tensor) -> None:
        """Take further kept slots, module after module: each reads the states that the one before it has at them."""
        states = self.modules[0].head.mix(features)
        for m, module in enumerate(self.modules):
            outputs = module.extend(module.cache.of(handle), context[m:], states)
            if module is not self.modules[-1]:
                states = module.head.recycled(outputs[:-1])

    @torch.inference_mode()
    def logits(self, rows: Sequence[HeadRow]) -> Tensor:
        """Logits [sum of ends, V] float32 after every end, row after row.

        A node that was not run before is run now, with its parent's output as its feature.

        Raises:
            RunError: too few blocks are free.
        """
        for row in rows:
            if row.is_pruned:
                self._prune(row)
        return self._logits_of([(row.handle, row.drafted.tokens_to(end)) for row in rows for end in row.ends])

    @torch.inference_mode()
    def depth_logits(self, handles: Sequence[int], depths: Sequence[int]) -> Tensor:
        """Logits [sum of depths, V] float32 of each sequence's next tokens, of a head that drafts from masks.

        Args:
            handles: the sequences.
            depths: of each, how many tokens.

        Raises:
            RunError: too few blocks are free.
        """
        masks = self.modules[0].masks
        return self._logits_of([(one, masks(i)) for one, num in zip(handles, depths, strict=True) for i in range(num)])

    def _logits_of(self, wanted: Sequence[tuple[int, Path]]) -> Tensor:
        outputs: dict[int, list[Tensor]] = {}
        for m in sorted({self._module_of(path) for _, path in wanted}):
            its = [(handle, path) for handle, path in wanted if self._module_of(path) == m]
            self._run_missing(m, its)
            outputs[m] = [self.modules[m].cache.of(handle).outputs[path] for handle, path in its]
        logits = {m: self.modules[m].head.logits(torch.stack(its)) for m, its in outputs.items()}
        if len(logits) == 1:
            return next(iter(logits.values()))
        each = {m: iter(its) for m, its in logits.items()}
        return torch.stack([next(each[self._module_of(path)]) for _, path in wanted])

    def _module_of(self, path: Path) -> int:
        """The module whose output a path's continuation follows from."""
        return min(len(path), len(self.modules) - 1)

    def _prune(self, row: HeadRow) -> None:
        """Nodes that have left the tree give their slots back."""
        stay = {row.drafted.tokens_to(node) for node in range(len(row.drafted))}
        for module in self.modules:
            module.cache.of(row.handle).keep_nodes(stay)

    def _run_missing(self, m: int, wanted: Iterable[tuple[int, Path]]) -> None:
        """Run what a module has not run of some paths: nodes that read the module before it, then those that do not."""
        for source in (m - 1, m) if m else (m,):
            news, features = [], []
            for handle, paths in self._missing(m, source, wanted).items():
                begin = self.num_kept(handle) - m
                news.append(NewNodes(self.modules[m].cache.of(handle), paths, begin))
                outputs = self.modules[source].cache.of(handle).outputs
                is_masked = self.modules[m].head.mask_token is not None  # its feature follows from no output
                features += [outputs[() if is_masked else path[:-1]] for path in paths]
            if news:
                self.modules[m].run(news, self.modules[source].head.recycled(torch.stack(features)))

    def _missing(self, m: int, source: int, wanted: Iterable[tuple[int, Path]]) -> dict[int, list[Path]]:
        """Of each sequence the nodes on the wanted paths that a module has not run and that read `source`.

        A node up to depth m reads the module before it, at a slot that the text may be too short to have.
        """
        found: dict[int, list[Path]] = {}
        for handle, path in wanted:
            known, begin = self.modules[m].cache.of(handle).outputs, self.num_kept(handle) - m
            depths = range(1, min(len(path), m) + 1) if source < m else range(m + 1, len(path) + 1)
            ways = [path[:depth] for depth in depths if begin + depth > 0]
            news = found.setdefault(handle, [])
            news += [way for way in ways if way not in known and way not in news]
        return {handle: paths for handle, paths in found.items() if paths}
