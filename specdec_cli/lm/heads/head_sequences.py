"""The sequences of a draft head: slots that come from the target's states, and drafted nodes behind them.

A head may have several modules, one for each further token. Module m, counted from 0, pairs the state of module m - 1
at position t, for the first one the target's, with the token at t + m + 1: it is a head on a text that begins m tokens
later. The last module goes on for all tokens that have no module of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdec_cli.errors import RunError
from specdec_cli.lm.cache.budget import count_in
from specdec_cli.lm.cache.cache_plan import CacheNeed, draft_blocks_wanted
from specdec_cli.lm.forward.device_drafts import DraftedTokens
from specdec_cli.lm.forward.forward import on_its_device
from specdec_cli.lm.forward.graph_inputs import MOST_READ
from specdec_cli.lm.forward.recorded_rounds import num_slots_of
from specdec_cli.lm.heads.draft_sequences import Ahead, DraftSequences, HeadRow
from specdec_cli.lm.heads.head import Head
from specdec_cli.lm.heads.head_cache import HeadCache, Path
from specdec_cli.lm.heads.head_graphs import HeadDraftRow, HeadGraphs
from specdec_cli.lm.heads.head_layer import LayerFeed
from specdec_cli.lm.heads.head_module import HeadModule, NewNodes
from specdec_cli.lm.heads.head_rounds import HeadOnDevice

if TYPE_CHECKING:
    from specdec_cli.lm.door import LM, Continuations
    from specdec_cli.tree_shape import TreeShape

_CHUNK = 512  # slots of a prompt that attend at once, so that a long prompt's mask stays small


class HeadSequences(DraftSequences):
    """Runs a head over sequences: their keys and values, and the head's own way of drafting behind them.

    A head that drafts from its own outputs gives `logits` of drafted nodes, or whole drafts by `guess` where these are
    recorded as CUDA graphs, as the target's own steps are. One that drafts all tokens in a pass has `ahead`.

    Args:
        heads: its modules, loaded.
        target: the loaded target, whose dtype, device, context limit and blocks are the head's.
        name: of the draft, for messages.
        recorded_taps: the target's states at each position, for recording chains; 0 records none.

    Attributes:
        modules: each with its cache.
        device: where it runs.
        block_size: slots in a block.
        num_blocks: blocks of each module.
        vocab_size: V, the width of its logits.
    """

    def __init__(self, heads: Sequence[Head], target: LM, name: str, recorded_taps: int = 0) -> None:
        where = target.dtype, target.device, target.block_size
        self._graphs: HeadGraphs | None = None
        self.modules = [HeadModule(head, HeadCache(head.key_shape, head.value_shape, *where)) for head in heads]
        self.cache = self.modules[0].cache
        self.device, self.block_size, self.vocab_size = target.device, target.block_size, heads[0].vocab_size
        self._name, self._max_context = name, target.max_context
        self.hold(target.num_blocks)
        count_in(self)
        if recorded_taps and target.recording != "none":
            self._record(target, recorded_taps)

    @on_its_device
    def _record(self, target: LM, num_taps: int) -> None:
        """Record a chain on trial.

        Raises:
            RunError: graphs were asked for, and this head cannot be recorded.
        """
        like = target.embed([0])
        graphs = HeadGraphs(self.modules, self._name, (num_taps, like.shape[-1]), like)
        try:
            graphs.try_out()
        except RunError as error:
            if target.recording == "required":
                raise
            self.graphs_obstacle = error.message
            return
        graphs.drop()
        self._graphs = graphs

    @property
    def planned_cache(self) -> HeadSequences | None:
        """All modules' keys and values; None where they keep none."""
        return self if self._block_bytes else None

    @property
    def is_recorded(self) -> bool:
        """Whether `guess` drafts."""
        return self._graphs is not None

    @property
    def records_trees(self) -> bool:
        """Whether `guess` drafts trees: not where a token changes the logits behind it that came from one pass."""
        return self.is_recorded and self.modules[0].head.records_trees

    @property
    def most_tokens(self) -> int | None:
        """Tokens that it drafts one after another; None drafts as many as are wanted."""
        return self.modules[0].head.most_tokens

    @property
    def sizes(self) -> tuple[int, int]:
        """Parameters of the head, and bytes of these and of the keys and values."""
        return sum(weight.numel() for weight in self._weights), self.weight_bytes + self._cache_bytes

    @property
    def weight_bytes(self) -> int:
        """Memory of its own weights."""
        return sum(weight.nbytes for weight in self._weights)

    @property
    def promised_bytes(self) -> int:
        """Memory that its caches have still to take: a CPU's as they are written, or all."""
        return self._cache_bytes if self.device.type == "cpu" else 0

    @property
    def _weights(self) -> list[Tensor]:
        """Its tensors, those that modules share once."""
        return list({id(weight): weight for module in self.modules for weight in module.head.weights.values()}.values())

    @property
    def _block_bytes(self) -> int:
        return self.block_size * sum(module.cache.bytes_per_slot for module in self.modules)

    @property
    def _cache_bytes(self) -> int:
        return self.num_blocks * self._block_bytes

    def draft_cache_need(self, num_seqs: int, num_drafted: int, target_context: int) -> CacheNeed:
        """Caches for so many sequences, each with room for a whole context and drafted nodes, as the target's."""
        rows = max(num_drafted, self.modules[0].head.num_rows(num_drafted))
        sizes = num_seqs, self._max_context, target_context, rows, self.block_size
        return CacheNeed(self._name, self._block_bytes, draft_blocks_wanted(*sizes))

    def hold(
        self,
        num_blocks: int,
        num_seqs: int | None = None,
        extra_tokens: int | None = None,
        num_prefix_states: int | None = None,
    ) -> None:
        """Recreate the caches with so many blocks, which any number of sequences share; graphs hold the old ones."""
        if self._graphs is not None:
            self._graphs.drop()
        self.num_blocks = num_blocks
        for module in self.modules:
            module.cache.hold(num_blocks)

    def num_kept(self, handle: int) -> int:
        """Positions of a sequence whose states it was fed, or adopted."""
        sequence = self.cache.find(handle)
        return sequence.num_kept if sequence else 0

    def can_draft(self, handle: int) -> bool:
        """Whether the output is there that a first guess follows from."""
        sequence = self.cache.find(handle)
        return sequence is not None and () in sequence.outputs

    def adopt(self, handle: int, context: Sequence[int], salt: str) -> int:
        """Begin a sequence with the longest prefix of its context that all modules have; how many positions that is.

        A head that reads the states before a token has none: its next row would need those of a position not fed.
        """
        if self.modules[0].head.reads_before:
            return 0
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
    def feed(self, new: Sequence[tuple[int, Sequence[int], Tensor]], depths: Sequence[int]) -> None:
        """Take the target's states of positions that were kept; masks for wanted tokens run in the same pass.

        Raises:
            RunError: too few blocks are free.
        """
        has_masks = self.modules[0].head.mask_token is not None
        for (handle, context, features), depth in zip(new, depths, strict=True):
            num_masks = depth - 1 if has_masks else 0
            first = len(context) - 1 - len(features)
            if self.num_kept(handle) == len(context) - 1:
                continue  # it is asked again in the same step, after another row had no distribution
            assert first == self.num_kept(handle), "each kept position's features come once"
            for m, module in enumerate(self.modules):
                sequence = module.cache.of(handle)
                sequence.forget_nodes()
                module.cache.reserve(sequence, len(context) - 1 - m + num_masks)
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
    def ahead(self, ends: Sequence[tuple[int, int, int]]) -> Ahead:
        """All next tokens' logits from one pass, of a head that drafts so; see `Head.ahead`."""
        return self.modules[0].head.ahead(self, ends)

    def masked_logits(self, ends: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Logits [depth, V] float32 of each sequence's last kept position and of the masks behind it.

        Args:
            ends: of each sequence its handle, and how many tokens are wanted.
        """
        masks, depths = self.modules[0].masks, [depth for _, depth in ends]
        return list(
            torch.split(self._logits_of([(handle, masks(i)) for handle, num in ends for i in range(num)]), depths)
        )

    def new_rows(self, handle: int, num: int) -> LayerFeed:
        """So many new slots of a sequence, behind its kept ones.

        Raises:
            RunError: too few blocks are free.
        """
        sequence = self.cache.of(handle)
        first, end = sequence.num_kept, sequence.num_kept + num
        self.cache.reserve(sequence, end)
        return LayerFeed(self.cache.keys, self.cache.values, sequence.slots, range(first, end), end)

    @on_its_device
    @torch.inference_mode()
    def guess(self, rows: Sequence[HeadDraftRow], num_tokens: int, tree: TreeShape | None = None) -> Continuations:
        """Draft behind each sequence in one graph. The states of a prompt are taken before it.

        Raises:
            RunError: too few blocks are free, or the head cannot be recorded.
        """
        assert self._graphs is not None, "a head drafts in graphs once it was recorded"
        news = [self._only_new(row) for row in rows]
        for row in news:
            for m, module in enumerate(self.modules):
                sequence = module.cache.of(row.handle)
                sequence.forget_nodes()
                module.cache.publish(sequence)
                module.cache.reserve(sequence, len(row.context) - 1 - m + self._num_slots(row.num_tokens, tree))
        continuations, ends = self._graphs.guess(news, num_tokens, tree)
        if self._graphs.guessed is not None and continuations.unread is not None:
            depth, handles = max(row.num_tokens for row in news), [row.handle for row in news]
            first = DraftedTokens(continuations.unread, ends)
            slots = self._num_slots(depth, tree)
            continuations.on_device = HeadOnDevice(self._graphs.guessed, self.modules, handles, slots, first)
        for i, row in enumerate(news):
            for m, (module, its) in enumerate(zip(self.modules, ends, strict=True)):
                module.cache.of(row.handle).extend(row.context[m:], its[i])
        return continuations

    def _num_slots(self, depth: int, tree: TreeShape | None) -> int:
        """Slots behind a text for the nodes of a draft."""
        num_run = 0 if tree is None else num_slots_of(tree, depth)
        return max(num_run, *(module.head.num_rows(depth) for module in self.modules))

    def _only_new(self, row: HeadDraftRow) -> HeadDraftRow:
        """A row with the states that its sequence lacks; those of a prompt are taken at once."""
        if row.features is None or self.num_kept(row.handle) == len(row.context) - 1:
            return replace(row, features=None)
        first = len(row.context) - 1 - len(row.features)
        assert first == self.num_kept(row.handle), "each kept position's features come once"
        if len(row.features) <= max(row.num_tokens + 1, MOST_READ):
            return row
        self.feed([(row.handle, row.context, row.features)], [1])
        return replace(row, features=None)

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
        missing: dict[int, list[Path]] = {}
        for handle, path in wanted:
            known, begin = self.modules[m].cache.of(handle).outputs, self.num_kept(handle) - m
            depths = range(1, min(len(path), m) + 1) if source < m else range(m + 1, len(path) + 1)
            ways = [path[:depth] for depth in depths if begin + depth > 0]
            news = missing.setdefault(handle, [])
            news += [way for way in ways if way not in known and way not in news]
        return {handle: paths for handle, paths in missing.items() if paths}
