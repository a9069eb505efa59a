"""A transformers model behind the LM's door: packed forwards over a block cache that follows the contexts."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self, TypedDict

import torch
from torch import Tensor

from specdec_cli.lm.cache.budget import count_in, device_room
from specdec_cli.lm.cache.cache_plan import (
    CacheNeed,
    CachePlan,
    KVCacheBytes,
    blocks_wanted,
    draft_blocks_wanted,
    plan_caches,
)
from specdec_cli.lm.cache.contexts import Contexts, ForwardInput
from specdec_cli.lm.cache.long_rope import both_sides
from specdec_cli.lm.cache.prefix_states import PrefixStates
from specdec_cli.lm.cache.snapshots import num_snapshots
from specdec_cli.lm.decoders import forward_for, own_obstacle, recording_of, self_draft_forward
from specdec_cli.lm.door import CHAIN, Continuations, DraftForm, Recording, Row, Tap
from specdec_cli.lm.files.generation import Generation
from specdec_cli.lm.files.lengths import long_rope_threshold, max_context
from specdec_cli.lm.files.origin import Origin
from specdec_cli.lm.files.quantization import stays_quantized
from specdec_cli.lm.first_layers import added_bytes, first_layers, weights_of_first_layers
from specdec_cli.lm.forward.recorded_rounds import num_slots_of
from specdec_cli.lm.forward.taps import check_taps
from specdec_cli.lm.kernels.kinds import QUANTIZED, Kind, is_quantized, takes_blocks
from specdec_cli.lm.kernels.packing import weights_of
from specdec_cli.lm.llama.families import kept_as
from specdec_cli.lm.self_draft import SelfDraft
from specdec_cli.lm.traffic import Traffic, model_traffic

if TYPE_CHECKING:
    from specdec_cli.lm.forward.device_rounds import TargetOnDevice


class CacheArguments(TypedDict, total=False):
    """The keyword arguments of TransformersLM that size its cache, for type checkers; a test compares both."""

    max_num_seqs: int
    max_model_len: int | None
    block_size: int
    kv_cache_bytes: KVCacheBytes
    num_blocks: int | None
    extra_tokens: int


class TransformersLM:
    """A causal LM of transformers, as `lm.door.LM` describes it.

    Args:
        model: a transformers causal LM, in evaluation mode, its attention set as `attention_for` says.
        name: as shown in reports and messages.
        eos_token_ids: tokens that end a text.
        max_num_seqs: sequences that the cache should have room for.
        max_model_len: a shorter context limit than the model's own, or None.
        block_size: tokens in a block.
        kv_cache_bytes: most memory for keys and values, as `plan_caches` takes it; None is half of what is free; a
            function is asked with the device's memory (on a CPU: what was free before loading) and the weights' bytes.
        num_blocks: blocks of the cache, for who plans them, each with a snapshot of the model's state; None leaves that
            to `kv_cache_bytes`.
        extra_tokens: room beyond the context limit for each sequence, for drafted tokens.
        decoder: one of `decoders.DECODERS`: auto (our own where it knows the shape, see lm.llama; on a GPU graphs where
            they can be recorded), transformers (its own forward), or graphs (the same, on a GPU, in recorded
            graphs of fixed shapes, see lm.forward.graphs).
        kind: what the linear layers become, from `linear.kind_for`.

    Attributes:
        weights: the weights as they lie in memory.
        weight_bytes: memory for them; a draft that is made of its target counts what it adds.
        decoder_obstacle: why transformers' forward runs; None when our own decoder does.
        graphs_obstacle: why `auto` records no graphs of a GPU's steps; None where it does, or where it does not apply.
        recording: whether a draft head on it runs in CUDA graphs, as its own steps do.
        taps: the hidden states that `score` gives to rows that want them.
        origin: where the weights are from, as `load_lm` found them.
        generation: the checkpoint's sampling defaults and end tokens.

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
        self.decoder_obstacle = own_obstacle(model, decoder)
        self.kind = kept_as(kind, self.decoder_obstacle)
        self.weights = weights_of(model, self.kind)
        self.weight_bytes = sum(weight.num_bytes for weight in self.weights)
        text_config = model.config.get_text_config()
        self.max_context = max_context(text_config, max_model_len)
        self._short_context = long_rope_threshold(text_config)
        self._num_seqs, self._num_snapshots, self._decoder = max_num_seqs, num_snapshots(extra_tokens), decoder
        self._forward = forward_for(
            model,
            name,
            decoder,
            self.kind,
            is_own=self.decoder_obstacle is None,
            weight_bytes=self.weight_bytes,
            block_size=block_size,
            max_context=self.max_context,
        )
        self.graphs_obstacle = self._forward.graphs_obstacle
        self.recording: Recording = recording_of(self._forward, decoder)
        self._scored: dict[int, int] = {}  # of each input to the latest call, by its id, the sequence
        self.taps: tuple[Tap, ...] = ()
        self.vocab_size = self._forward.shape.vocab_size
        self.kv_bytes_per_token = self._forward.shape.kv_bytes_per_token
        self.state_bytes = self._forward.shape.state_bytes
        if num_blocks is None:
            need, room = self.cache_need(max_num_seqs, extra_tokens), device_room(self.device, self.weight_bytes)
            (plan,) = plan_caches([need], room, max_num_seqs, kv_cache_bytes)
        else:
            plan = CachePlan(num_blocks, num_blocks if self.state_bytes else 0)
        self.num_prefix_states = plan.num_prefix_states
        self.hold(plan.num_blocks)
        count_in(self)

    @property
    def decoder(self) -> str:
        """Whose forward runs: `own`, `own, native`, `transformers`, or `transformers, graphs`."""
        return f"{self._forward.name}, native" if takes_blocks(self.kind) else self._forward.name

    @property
    def num_parameters(self) -> int:
        """Its weights, each counted once: of a tied embedding, the packed output has a copy."""
        # A multimodal model's text configuration may leave it to that of the whole model.
        configs = self.config, self.config.get_text_config()
        is_tied = any(getattr(config, "tie_word_embeddings", False) for config in configs)
        return sum(weight.num_numbers for weight in self.weights if not (is_tied and weight.is_looked_up))

    @property
    def num_bytes(self) -> int:
        """Memory for its weights and its cache."""
        return self.weight_bytes + self._cache_bytes

    @property
    def traffic(self) -> Traffic:
        """Sizes from which a forward's cost follows."""
        return model_traffic(self.config, self.weights, self.kv_bytes_per_token)

    def self_draft(self, draft: SelfDraft) -> Self:
        """A draft made of this model's weights; its cache, which has no room yet, is its own.

        Raises:
            UsageError: it would leave no layer out, the weights cannot be copied, or the first layers alone do not run.
        """
        draft.check(self.name, self.config.get_text_config().num_hidden_layers)
        quantized = self.kind if is_quantized(self.kind) else stays_quantized(self.config)
        draft.check_copy(self.name, self.decoder, quantized or "none")
        kept = weights_of_first_layers(self.weights, self.model, draft.layers)
        made = copy.copy(self)
        made.name, made.origin, made.taps = draft.spec, draft.origin(self.origin), ()
        made.model = first_layers(self.model, draft.layers)
        made.config = made.model.config
        made.kind = QUANTIZED.get(draft.quantize, self.kind)
        made.weights = kept if made.kind == self.kind else weights_of(made.model, made.kind)
        made.weight_bytes = added_bytes(made.weights, self.weights)
        made._forward = self_draft_forward(
            self._forward,
            made.model,
            draft,
            self._decoder,
            made.kind,
            weight_bytes=sum(weight.num_bytes for weight in made.weights),
            block_size=self.block_size,
            max_context=self.max_context,
        )
        made.graphs_obstacle = made._forward.graphs_obstacle
        made.kv_bytes_per_token = made._forward.shape.kv_bytes_per_token
        made.state_bytes = made._forward.shape.state_bytes
        made.hold(0)
        count_in(made)
        return made

    def cache_need(self, num_seqs: int, extra_tokens: int) -> CacheNeed:
        """A cache for so many sequences, each of a whole context and extra tokens."""
        num_blocks = blocks_wanted(num_seqs, self.max_context, extra_tokens, self.block_size)
        return self._need(num_blocks, num_seqs, extra_tokens)

    def draft_cache_need(
        self, num_seqs: int, num_drafted: int, target_context: int, tokens_per_token: float = 1.0
    ) -> CacheNeed:
        """The same of a draft beside a target of some context limit, with so many tokens for one of the target's."""
        sizes = num_seqs, self.max_context, target_context, num_drafted, self.block_size
        need = self._need(draft_blocks_wanted(*sizes, tokens_per_token), num_seqs, num_drafted)
        return replace(need, tokens_per_token=tokens_per_token)

    def _need(self, num_blocks: int, num_seqs: int, extra_tokens: int) -> CacheNeed:
        states, each = num_seqs * num_snapshots(extra_tokens) * self.state_bytes, self._forward.shape.prefix_state_bytes
        return CacheNeed(self.name, self.kv_bytes_per_token * self.block_size, num_blocks, states, each)

    def hold(
        self,
        num_blocks: int,
        num_seqs: int | None = None,
        extra_tokens: int | None = None,
        num_prefix_states: int | None = None,
    ) -> None:
        """Recreate the cache with so many blocks. The contents of the old one are lost.

        Args:
            num_blocks: of keys and values.
            num_seqs: sequences that it is planned for; None leaves it at as many as before.
            extra_tokens: tokens drafted for each, likewise.
            num_prefix_states: snapshots of states at the ends of cached prefixes, likewise.
        """
        self.num_blocks = num_blocks
        self._num_seqs = self._num_seqs if num_seqs is None else num_seqs
        self._num_snapshots = self._num_snapshots if extra_tokens is None else num_snapshots(extra_tokens)
        self.num_prefix_states = self.num_prefix_states if num_prefix_states is None else num_prefix_states
        tokens_apart = CachePlan(num_blocks, self.num_prefix_states).blocks_apart * self.block_size
        self._contexts = Contexts(
            self.name,
            num_blocks,
            self.block_size,
            self._forward,
            self._num_snapshots if self.state_bytes else 0,
            PrefixStates(self.num_prefix_states, tokens_apart),
        )
        self._forward.allocate(num_blocks, self.num_prefix_states)

    @property
    def promised_bytes(self) -> int:
        """Memory that its cache has still to take: of a GPU in its first forward; of a CPU as it is written, or all."""
        return 0 if self._forward.has_taken_cache else self._cache_bytes

    @property
    def _cache_bytes(self) -> int:
        if not self.num_blocks:
            return 0
        states = self._num_seqs * self._num_snapshots * self.state_bytes
        states += self.num_prefix_states * self._forward.shape.prefix_state_bytes
        return self.num_blocks * self.block_size * self.kv_bytes_per_token + states

    @property
    def scores_trees(self) -> bool:
        """Every node reads the context and its own path: keys are chosen so, and states go from parent to child."""
        return True

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

    def tap(self, taps: Sequence[Tap]) -> None:
        """Add hidden states to those that `score` gives.

        Raises:
            UsageError: there is no such layer, or what a position's states are depends on the text's length.
        """
        if not taps:
            return
        check_taps(self.name, taps, self.config.get_text_config(), self.max_context)
        self._forward.tap(taps)
        self.taps = tuple(dict.fromkeys([*self.taps, *taps]))

    def embed(self, tokens: Sequence[int] | Tensor) -> Tensor:
        """Input embeddings [n, hidden] in the model's dtype."""
        return self._forward.embed(torch.as_tensor(tokens, dtype=torch.int64))

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [n, V] float32 of hidden states behind the final norm [n, hidden], as `score` computes them."""
        return self._forward.head(hidden)

    def score(self, rows: Sequence[Row]) -> Tensor:
        """Logits [sum of num_logits, V] float32, rows one after another, each row's positions in order.

        Raises:
            RunError: the cache has too few free blocks.
        """
        assert len({row.handle for row in rows}) == len(rows), "a sequence stands in two rows of one forward"
        longest = max((row.longest for row in rows), default=0)
        assert longest <= self.max_context, "a context is longer than the model takes"
        threshold = self._short_context
        if threshold is None or longest <= threshold:
            return self._score(rows, is_long=False)
        return self._score_both_sides(rows, threshold)

    def guess(self, rows: Sequence[Row], num_tokens: int, form: DraftForm = CHAIN) -> Continuations | None:
        """Continuations of contexts, `num_logits` deep each; None without our own decoder or graphs.

        No guess crosses long rope's threshold. Of a tree, or of masks, the cache keeps nothing: what is accepted is fed
        with the next step.

        Raises:
            RunError: the cache has too few free blocks.
        """
        draws = [row.draw for row in rows]
        can_draw, can_guess = self._forward.can_draw or not any(draws), self._forward.can_guess
        if not (can_guess and can_draw and (form == CHAIN or self._forward.can_branch)):
            return None
        assert num_tokens <= self.vocab_size, "there are more tokens to choose from than are scored"
        # The cache reserves places for the tokens to come: any token stands in for them, but the last is never fed.
        depths = [row.num_logits for row in rows]
        nums = depths
        if form.tree is not None and form.mask is None:
            nums = [1 + num_slots_of(form.tree, depth) for depth in depths]
        fillers = [[form.mask or 0] * (num - 1) for num in nums]
        longer = [Row(row.handle, [*row.context, *its], num) for row, its, num in zip(rows, fillers, nums, strict=True)]
        longest = max(len(row.context) + depth - 1 for row, depth in zip(rows, depths, strict=True))
        assert longest <= self.max_context, "a context is longer than the model takes"
        if self._short_context is not None and longest > self._short_context:
            return None  # texts beyond the threshold take other frequencies
        feeds = self._contexts.feeds(longer, is_long=False)
        guessed = self._forward.guess(feeds, depths, draws, num_tokens, form)
        if guessed is not None:
            graph, unread = self._forward.guessed, guessed.unread
            if graph is not None and unread is not None and self._short_context is None:
                from specdec_cli.lm.forward.device_drafts import ModelOnDevice

                guessed.on_device = ModelOnDevice(graph, self._contexts, [row.handle for row in rows], unread)
            for feed, row, tokens in zip(feeds, rows, guessed.tokens, strict=True):
                found = tokens[: row.num_logits - 1] if form == CHAIN else []
                feed.sequence.record([*row.context, *found], guessed.unread if found else None)
        if guessed is None or form != CHAIN:  # give the reserved blocks back
            cached = [Row(row.handle, feed.sequence.tokens, 0) for row, feed in zip(rows, feeds, strict=True)]
            self._contexts.feeds(cached, is_long=False)
        return guessed

    def _score_both_sides(self, rows: Sequence[Row], threshold: int) -> Tensor:
        """Long rope: texts up to the threshold with the short frequencies, longer ones with the long."""
        sides = [both_sides(row, threshold) for row in rows]
        parts: dict[tuple[int, bool], Tensor] = {}
        for is_long in (False, True):
            some_rows = [side.rows[is_long] for side in sides if is_long in side.rows]
            if some_rows:
                split = torch.split(self._score(some_rows, is_long), [row.num_logits for row in some_rows])
                parts.update({(row.handle, is_long): part for row, part in zip(some_rows, split, strict=True)})
        logits = [
            parts[row.handle, is_long][i] for row, side in zip(rows, sides, strict=True) for is_long, i in side.wanted
        ]
        return torch.stack(logits) if logits else torch.empty(0, self.vocab_size, device=self.device)

    def _score(self, rows: Sequence[Row], is_long: bool) -> Tensor:
        feeds = self._contexts.feeds(rows, is_long)
        logits = self._forward.score(feeds)
        self._scored = {id(feed): row.handle for row, feed in zip(rows, feeds, strict=True)}
        for row, feed in zip(rows, feeds, strict=True):
            feed.sequence.record(feed.context, feed.unread, feed.tree)
            if row.tapped is not None:
                row.tapped.first, row.tapped.hidden = feed.keep, feed.states
        if self._forward.spreads_nan:
            self._leave_no_nan(feeds, logits)
        return logits

    def scored_on_device(self, taps: Sequence[Tap]) -> TargetOnDevice | None:
        """The graph that has scored rows of the latest call, as `ScoresOnDevice` gives it."""
        graph = self._forward.scored
        if graph is None or self._forward.spreads_nan or self._short_context is not None:
            return None
        feeds = graph.feeds
        if {feed.num_tokens for feed in feeds} != {feeds[0].num_logits} or len({feed.num_logits for feed in feeds}) > 1:
            return None
        handles = [self._scored[id(feed)] for feed in feeds]
        from specdec_cli.lm.forward.device_rounds import TargetOnDevice

        columns = [self.taps.index(tap) for tap in taps]
        return TargetOnDevice(graph, self._contexts, handles, feeds[0].num_logits - 1, columns)

    def _leave_no_nan(self, feeds: Sequence[ForwardInput], logits: Tensor) -> None:
        """Wipe the keys and values of rows without a distribution."""
        largest = logits.amax(1)
        if largest.isfinite().all():
            return
        for feed, its in zip(feeds, torch.split(largest, [feed.num_logits for feed in feeds]), strict=True):
            if not its.isfinite().all():
                self._forward.wipe(self._contexts.spoil(feed.sequence))
