"""A transformers model behind the LM's door: packed forwards over a block cache that follows the contexts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from time import perf_counter
from typing import Any, TypeVar, cast
from weakref import WeakSet

import torch
from torch import Tensor

from specdec_cli.errors import SpecdecError
from specdec_cli.lm.cache.cache import KEY_GRAIN, BlockCache, Layout, Span
from specdec_cli.lm.cache.cache_plan import CacheNeed, KVCacheBytes, Room, plan_blocks
from specdec_cli.lm.cache.contexts import Contexts, Feed, Held
from specdec_cli.lm.door import Continuations, Row
from specdec_cli.lm.files.checkpoint import quiet
from specdec_cli.lm.files.generation import Generation
from specdec_cli.lm.files.origin import Origin
from specdec_cli.lm.forward.compiled import CompiledCache, compile_error, compile_layers
from specdec_cli.lm.forward.forward import CacheShape, PackedForward
from specdec_cli.lm.forward.graphs import Graphs
from specdec_cli.lm.invariance import MOST_ROWS, rows_together, same_bits_on_one_thread
from specdec_cli.lm.kernels.kinds import Kind
from specdec_cli.lm.kernels.packing import leave_files, pack_model, weights_of
from specdec_cli.lm.llama.llama import LlamaDecoder
from specdec_cli.lm.llama.llama_weights import kept_as, obstacle
from specdec_cli.lm.machine.device_memory import device_memory
from specdec_cli.lm.machine.threads import fixed_threads, most_threads, watched_forward

DECODERS = (AUTO, TRANSFORMERS, COMPILED, GRAPHS, COMPILED_GRAPHS) = (
    "auto", "transformers", "compiled", "graphs", "compiled graphs",
)  # fmt: skip
RECORDED = (GRAPHS, COMPILED_GRAPHS)
OBSTACLES = {
    TRANSFORMERS: "it is switched off",
    COMPILED: "torch compiles this one, and not our own",
    GRAPHS: "graphs record this one",
    COMPILED_GRAPHS: "torch compiles this one for graphs",
}


def decoder_when(decoder: str, is_compiled: bool) -> str:
    """The entry of DECODERS for a recipe's decoder and its compile setting."""
    return {GRAPHS: COMPILED_GRAPHS}.get(decoder, COMPILED) if is_compiled else decoder


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _on_its_device(method: _Method) -> _Method:
    """A method that may launch Triton's kernels or record events, which belong to whatever GPU is the current one."""

    @wraps(method)
    def run(self: Any, *arguments: Any, **named: Any) -> Any:
        if self.device.type != "cuda":
            return method(self, *arguments, **named)
        with torch.cuda.device(self.device):
            return method(self, *arguments, **named)

    return cast("_Method", run)


class TransformersLM:
    """A causal LM of transformers, as `lm.door.LM` describes it.

    Args:
        model: a transformers causal LM, in evaluation mode, its attention set as `attention_for` says.
        name: what a person calls it.
        eos_token_ids: tokens that end a text.
        max_num_seqs: sequences that the cache should have room for.
        max_model_len: a shorter context limit than the model's own, or None.
        block_size: tokens in a block.
        kv_cache_bytes: most memory for keys and values, as `plan_blocks` takes it; None is half of what is free; a
            function is asked with the device's memory (on a CPU: what was free before loading) and the weights' bytes.
        num_blocks: blocks of the cache, for who plans them; None leaves that to `kv_cache_bytes`.
        extra_tokens: room beyond the context limit for each sequence, for drafted tokens.
        decoder: auto (our own where it knows the shape, see lm.llama), transformers (its own forward), compiled (the
            same, by torch once `compile` is called; until then it runs as it is), graphs (the same, on a GPU, in
            recorded graphs of fixed shapes, see lm.graphs), or compiled graphs.
        kind: what the linear layers become, from `linear.kind_for`.

    Attributes:
        weights: the weights as they lie in memory.
        decoder_obstacle: why transformers' forward runs; None when our own decoder does.
        compile_seconds: what `compile` took; None where it was not called.
        origin: where the weights are from, as `load_lm` found them.
        generation: how the checkpoint likes to be sampled, likewise.

    Raises:
        UsageError: the architecture cannot run on a block cache.
        RunError: there is no memory for one block per sequence.
    """

    def __init__(
        self,
        model: Any,
        name: str,
        *,
        eos_token_ids: tuple[int, ...] = (),
        max_num_seqs: int = 8,
        max_model_len: int | None = None,
        block_size: int = 16,
        kv_cache_bytes: KVCacheBytes = None,
        num_blocks: int | None = None,
        extra_tokens: int = 16,
        decoder: str = "auto",
        kind: Kind = "plain",
    ) -> None:
        self.name = name
        self.origin = Origin(name)
        self.generation = Generation()
        self.model = model
        self.config = model.config
        self.eos_token_ids = eos_token_ids
        self.block_size = block_size
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.decoder_obstacle = OBSTACLES.get(decoder) or obstacle(model)
        self.kind = kind = kept_as(kind, self.decoder_obstacle)
        self.weights = weights_of(model, kind)
        self.weight_bytes = sum(weight.num_bytes for weight in self.weights)
        text_config = model.config.get_text_config()
        self.max_context = _max_context(text_config, max_model_len)
        # Long rope has two sets of frequencies and switches at this length (Phi-3); keys of the one are of no use
        # to the other.
        self._short_context = _long_rope_threshold(text_config)
        # Our own decoder gives a row the same bits in any company as it is; torch's kernels take some care.
        is_own = self.decoder_obstacle is None
        self._bitwise = self.device.type == "cpu" and self.dtype != torch.float32 and not is_own
        self._packed = PackedForward(model, self._bitwise)
        self._packed_bitwise = self._bitwise and not self._packed.has_joined_keys
        is_bfloat16 = self._bitwise and self.dtype == torch.bfloat16
        self._rows_together = rows_together(self.dtype, kind) if is_bfloat16 else MOST_ROWS
        self._threads = self._forward_threads(decoder)
        # A graph for one token alone would be another one.
        self._has_company = self._bitwise or decoder == COMPILED
        self.compile_seconds: float | None = None
        self._is_compiled = False
        if kind != "plain" or is_own:
            leave_files(model)
        self._decoder = LlamaDecoder(model, kind) if is_own else None
        if self._decoder is None:
            pack_model(model, kind)
        kept = self._probe()
        self.vocab_size: int = kept.vocab_size
        self.kv_bytes_per_token: int = kept.kv_bytes_per_token
        self._is_to_compile = decoder in (COMPILED, COMPILED_GRAPHS)
        self._is_recorded = decoder in RECORDED
        if num_blocks is None:
            need, room = self.cache_need(max_num_seqs, extra_tokens), device_room(self.device, self.weight_bytes)
            (num_blocks,) = plan_blocks([need], room, max_num_seqs, kv_cache_bytes)
        self.hold(num_blocks)
        _LOADED.add(self)

    @property
    def decoder(self) -> str:
        """Whose forward runs: `own`, or `transformers`, and behind it `compiled`, `graphs` or both."""
        if self._decoder is not None:
            return "own"
        done = {COMPILED: self.compile_seconds is not None, GRAPHS: self._graphs is not None}
        return ", ".join([TRANSFORMERS, *(name for name, is_done in done.items() if is_done)])

    def _forward_threads(self, decoder: str) -> Callable[[], AbstractContextManager[None]]:
        """Threads of transformers' forward pass: as many as there are free cores, or a fixed number.

        torch compiles a forward for a number of threads, and bits that depend on it must not depend on the neighbours.
        """
        if self.device.type != "cpu" or self.decoder_obstacle is None:
            return nullcontext
        most = most_threads(self.weight_bytes)
        is_fixed = decoder in (COMPILED, COMPILED_GRAPHS) or (
            self._bitwise and not same_bits_on_one_thread(self.dtype, self.kind)
        )
        return partial(fixed_threads if is_fixed else watched_forward, most)

    def compile(self) -> None:
        """Compile transformers' forward and run it, so that no later step waits; a minute or so on a CPU.

        Raises:
            RunError: there is no C++ compiler, or torch cannot compile this forward.
        """
        assert self._is_to_compile, "what is to be compiled is loaded for it"
        began = perf_counter()
        compile_layers(self.model)
        self._is_compiled = True
        self.hold(self.num_blocks)
        try:
            with quiet(), self._threads():
                for num_tokens in (2, 5) if self._has_company else (1, 2, 5):
                    self._packed.attempt(CompiledCache(num_tokens + KEY_GRAIN), num_tokens)
        except (SpecdecError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise compile_error(self.name, error) from error
        self.compile_seconds = perf_counter() - began

    def cache_need(self, num_seqs: int, extra_tokens: int, max_context: int | None = None) -> CacheNeed:
        """A cache for so many sequences, each of a whole context (the model's or a shorter one) and extra tokens."""
        longest = min(self.max_context, max_context or self.max_context)
        num_blocks = num_seqs * -(-(longest + extra_tokens) // self.block_size)
        return CacheNeed(self.name, self.kv_bytes_per_token * self.block_size, num_blocks)

    def hold(self, num_blocks: int) -> None:
        """Make the cache anew, for so many blocks; what the old one held is lost."""
        self.num_blocks = num_blocks
        self._contexts = Contexts(self.name, num_blocks, self.block_size)
        num_slots = num_blocks * self.block_size + KEY_GRAIN
        joins = self._packed.has_joined_keys
        self._cache = CompiledCache(num_slots) if self._is_compiled else BlockCache(num_slots, joins)
        if self._decoder is not None:
            self._decoder.allocate(num_slots, self.block_size)
        is_recorded = self._is_recorded
        self._graphs = (
            Graphs(self.model, self._cache, num_blocks, self.block_size, self.max_context) if is_recorded else None
        )

    @property
    def promised_bytes(self) -> int:
        """Memory that its cache has still to take: of a GPU in its first forward; of a CPU as it is written, or all."""
        is_taken = self.device.type == "cuda" and bool(self._cache.stores)
        return 0 if is_taken else self.num_blocks * self.block_size * self.kv_bytes_per_token

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds, those of cached prefixes among them."""
        return self._contexts.pool.num_free

    def adopt(self, handle: int, context: Sequence[int], salt: str) -> int:
        """Begin a sequence with the longest prefix that is cached under a salt; how many tokens that is."""
        return self._contexts.adopt(handle, context, salt)

    def release(self, handle: int) -> None:
        """Forget a sequence and give its blocks back; unknown handles are fine."""
        self._contexts.release(handle)

    def check_integrity(self) -> None:
        """Assert that blocks free + used = total, and that each sequence holds what it needs."""
        self._contexts.check()

    @_on_its_device
    def score(self, rows: Sequence[Row]) -> Tensor:
        """Logits [sum of num_logits, V] float32, rows one after another, each row's positions in order.

        Raises:
            RunError: the cache has too few free blocks.
        """
        assert len({row.handle for row in rows}) == len(rows), "a sequence stands in two rows of one forward"
        for row in rows:
            assert 0 <= row.num_logits <= row.num_tokens, "more logits wanted than there are tokens"
            assert row.longest <= self.max_context, "a context is longer than the model takes"
        threshold = self._short_context
        if threshold is None or all(row.longest <= threshold for row in rows):
            return self._score(rows, is_long=False)
        return self._score_both_sides(rows, threshold)

    @_on_its_device
    def guess(self, rows: Sequence[Row], num_tokens: int) -> Continuations | None:
        """Continuations of contexts, `num_logits` tokens of each; None without our own decoder or graphs.

        Graphs know no drawn ones.

        Raises:
            RunError: the cache has too few free blocks.
        """
        draws = [row.draw for row in rows]
        if self._decoder is None and (self._graphs is None or any(draws)):
            return None
        assert num_tokens <= self.vocab_size, "more tokens are to be chosen from than are scored"
        # What follows a context stands in for itself until it is found.
        longer = [Row(row.handle, [*row.context, *[0] * (row.num_logits - 1)], row.num_logits) for row in rows]
        assert all(len(row.context) <= self.max_context for row in longer), "a context is longer than the model takes"
        feeds, counts = self._contexts.feeds(longer, is_long=False), [row.num_logits for row in rows]
        if self._decoder is not None:
            found = self._decoder.guess(*self._lay_out(feeds), counts, draws, num_tokens)
        else:
            assert self._graphs is not None
            in_graph = self._graphs.guess(feeds, counts, num_tokens)
            if in_graph is None:  # what was reserved is given back
                kept = [Row(row.handle, feed.held.tokens, 0) for row, feed in zip(rows, feeds, strict=True)]
                self._contexts.feeds(kept, is_long=False)
                return None
            found = in_graph
        for feed, row, guessed in zip(feeds, rows, found.tokens, strict=True):
            feed.held.hold([*row.context, *guessed[: row.num_logits - 1]], found.unread)
        return found

    def _score_both_sides(self, rows: Sequence[Row], threshold: int) -> Tensor:
        """Long rope: positions up to the threshold with the short frequencies, later ones with the long."""
        rows = [Row(row.handle, row.as_chain(), row.num_logits) for row in rows]
        num_short = [max(0, threshold - (len(row.context) - row.num_logits)) for row in rows]
        num_short = [min(short, row.num_logits) for short, row in zip(num_short, rows, strict=True)]
        short_rows = [
            Row(row.handle, row.context[:threshold], short)
            for row, short in zip(rows, num_short, strict=True)
            if short or len(row.context) <= threshold
        ]
        long_rows = [
            Row(row.handle, row.context, row.num_logits - short)
            for row, short in zip(rows, num_short, strict=True)
            if len(row.context) > threshold
        ]
        parts = {}
        for is_long, some_rows in ((False, short_rows), (True, long_rows)):
            if some_rows:
                logits = torch.split(self._score(some_rows, is_long), [row.num_logits for row in some_rows])
                parts.update({(row.handle, is_long): part for row, part in zip(some_rows, logits, strict=True)})
        return torch.cat(
            [parts[key] for row in rows for key in ((row.handle, False), (row.handle, True)) if key in parts]
        )

    def _score(self, rows: Sequence[Row], is_long: bool) -> Tensor:
        feeds = self._contexts.feeds(rows, is_long)
        logits = self._graphs.score(feeds) if self._graphs is not None else None
        if logits is None:
            for feed in feeds:
                feed.settle()
            parts = [self._forward(self._cache, *self._lay_out(turn)) for turn in self._turns(feeds)]
            if not parts:
                return torch.empty(0, self.vocab_size, device=self.device)
            logits = parts[0] if len(parts) == 1 else torch.cat(parts)
        for feed in feeds:
            feed.held.hold(feed.context, feed.unread)
        if self._bitwise:
            self._leave_no_nan(feeds, logits)
        return logits

    def _leave_no_nan(self, feeds: Sequence[Feed], logits: Tensor) -> None:
        """Wipe what rows without a distribution have filed: others read it, masked, and nothing times NaN is NaN."""
        largest = logits.amax(1)
        if largest.isfinite().all():
            return
        for feed, its in zip(feeds, torch.split(largest, [feed.num_logits for feed in feeds]), strict=True):
            for block in () if its.isfinite().all() else self._contexts.spoil(feed.held):
                for store in self._cache.stores.values():
                    store.wipe(block * self.block_size, self.block_size)

    def _turns(self, feeds: Sequence[Feed]) -> Iterator[list[Feed]]:
        """Feed the rows in as many forward passes as keep every row's bits; in one if no bits are promised."""
        left = [feed for feed in feeds if feed.num_tokens]
        total = sum(feed.num_tokens for feed in left)
        most = total
        if self._rows_together < total <= MOST_ROWS:
            most = -(-total // -(-total // self._rows_together))
        while left:
            turn, room = [], most
            while left and room:
                first, *rest = left.pop(0).cut(room)
                turn.append(first)
                room -= first.num_tokens
                left[:0] = rest
            yield turn

    def _lay_out(self, feeds: Sequence[Feed]) -> tuple[list[int], Layout, list[int]]:
        """Tokens of the forward, their layout, and the places among them whose logits are wanted."""
        tokens: list[int] = []
        positions: list[int] = []
        wanted: list[int] = []
        spans: list[Span] = []
        pieces: list[tuple[int, int, int]] = []
        for feed in feeds:
            length = len(feed.context)
            start = len(tokens)
            tokens += feed.context[feed.keep :]
            positions += range(feed.keep, length)
            wanted += range(len(tokens) - feed.num_logits, len(tokens))
            spans += self._spans(feed, start)
            pieces += self._pieces(feed, start)
        num_written = len(tokens)
        if self._has_company and num_written == 1:
            # One row alone takes another kernel than two or more: a copy of it rides along, and is not written.
            tokens, positions = tokens * 2, positions * 2
            spans[0].stop += 1
        layout = Layout(positions, spans, pieces, num_written, self._packed_bitwise, self.device)
        return tokens, layout, wanted

    def _spans(self, feed: Feed, start: int) -> Iterator[Span]:
        """A row's queries; where bits matter, cut wherever the number of keys that they read grows by a grain."""
        length, keep = len(feed.context), feed.keep
        grain = KEY_GRAIN if self._packed_bitwise else length
        held = feed.held
        slots = None if held.in_one_piece else self._slots(held, -(-length // grain) * grain)
        first_slot = held.blocks[0] * self.block_size
        while keep < length:
            num_keys = (keep // grain + 1) * grain
            stop = min(length, num_keys)
            offset = start - feed.keep
            seen = None if slots is None else slots[:num_keys]
            yield Span(offset + keep, offset + stop, num_keys, first_slot, seen, keep)
            keep = stop

    def _slots(self, held: Held, num_keys: int) -> Tensor:
        """Slots of a scattered sequence's first `num_keys` positions [num_keys] int64; any slot beyond its end."""
        blocks = torch.tensor(held.blocks, device=self.device)
        slots = (blocks[:, None] * self.block_size + torch.arange(self.block_size, device=self.device)).flatten()
        slots = slots[:num_keys]
        return torch.cat((slots, slots[:1].expand(num_keys - len(slots))))

    def _pieces(self, feed: Feed, start: int) -> Iterator[tuple[int, int, int]]:
        """Where a row's new keys go, as (start, stop, slot) over the forward's tokens."""
        size, length, blocks = self.block_size, len(feed.context), feed.held.blocks
        offset = start - feed.keep
        if feed.held.in_one_piece:
            yield start, offset + length, blocks[0] * size + feed.keep
            return
        position = feed.keep
        while position < length:
            stop = min(length, (position // size + 1) * size)
            yield offset + position, offset + stop, blocks[position // size] * size + position % size
            position = stop

    def _forward(self, cache: BlockCache, tokens: list[int], layout: Layout, wanted: list[int]) -> Tensor:
        """One forward; logits [len(wanted), V] float32."""
        if self._decoder is not None:
            return self._decoder.forward(tokens, layout, wanted)
        with self._threads():
            return self._packed.run(cache, tokens, layout, wanted)

    @_on_its_device
    def _probe(self) -> CacheShape:
        """Bytes that the model caches per token, found by feeding two.

        Raises:
            UsageError: the forward does not run on a block cache, or leaves it untouched.
        """
        if self._decoder is not None:
            return CacheShape(self._decoder.kv_bytes_per_token, self._decoder.vocab_size)
        return self._packed.probe(self.name)


def device_room(device: torch.device, weight_bytes: int) -> Room:
    """Memory of a device that loaded models leave free, after what their caches will still take.

    Args:
        device: where.
        weight_bytes: of the models that are planned, loaded already.
    """
    found = device_memory(device)
    promised = sum(lm.promised_bytes for lm in _LOADED if lm.device == device)
    whole = found.total_bytes if device.type == "cuda" else found.free_bytes + weight_bytes
    return Room(found.free_bytes - promised, whole, weight_bytes)


def _max_context(config: Any, max_model_len: int | None) -> int:
    """The context limit: the smaller of the configuration's and the caller's."""
    limit = own_context(config)
    if limit is None:
        limit = max_model_len or 2048
    return min(limit, max_model_len or limit)


def own_context(config: Any) -> int | None:
    """The context limit that a configuration names, in tokens; None where it names none."""
    names = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
    limits = [getattr(config, name, None) for name in names]
    return next((int(limit) for limit in limits if limit), None)


def _long_rope_threshold(config: Any) -> int | None:
    """The length up to which long rope uses its short frequencies; None without long rope."""
    parameters = getattr(config, "rope_parameters", None) or {}
    for entry in (parameters, *parameters.values()):
        if isinstance(entry, dict) and entry.get("rope_type") == "longrope":
            return int(entry["original_max_position_embeddings"])
    return None


_LOADED: WeakSet[TransformersLM] = WeakSet()  # models whose caches may still have to take their memory
