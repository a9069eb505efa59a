"""Which sequences run in the next step, how much of a prompt each is fed, and how many tokens are drafted for it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specdec_cli.engine.depth import DepthPolicy, Fixed, KByBatch, Wish
from specdec_cli.engine.sequence import Sequence

if TYPE_CHECKING:
    from specdec_cli.sampling.grammar import BoolArray


@dataclass(slots=True)
class Limits:
    """Bounds of a step.

    Args:
        max_num_seqs: most sequences that run together.
        max_num_batched_tokens: most prompt tokens fed in one step (one chunk always may).
        prefill_chunk: prompts are cut at multiples of this, whatever else runs, so that results do not depend on it.
        k_by_batch: k by how many sequences run.
        max_context: the target's context limit.
        num_blocks: blocks of the target's cache.
        block_size: tokens of a block.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_chunk: int
    k_by_batch: KByBatch
    max_context: int
    num_blocks: int
    block_size: int


@dataclass(slots=True)
class Scheduled:
    """A sequence's part in a step: feed `tokens[:num_fed]`, draft `k` tokens; logits only once all is fed.

    `allowed` [positions verified, V] bool is what its grammar allows there, known once the tokens are drafted.
    """

    sequence: Sequence
    num_fed: int
    k: int
    num_prefill_tokens: int = 0
    allowed: BoolArray | None = None

    @property
    def is_decided(self) -> bool:
        """Whether this step gives the sequence a next token (it is not a prompt's middle chunk)."""
        return self.num_fed == len(self.sequence.tokens)


@dataclass(slots=True)
class Scheduler:
    """First come, first served; a sequence is admitted when its longest possible context fits the cache."""

    limits: Limits
    policy: DepthPolicy = field(default_factory=Fixed)
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, running or waiting."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)

    def next(self) -> list[Scheduled]:
        """The next step's rows, admitting what fits."""
        self._admit()
        budget = self.limits.max_num_batched_tokens
        rows: list[Scheduled] = []
        for sequence in self.running:
            missing = len(sequence.tokens) - sequence.num_computed
            if missing == 1 and not sequence.is_prefilling:
                rows.append(Scheduled(sequence, len(sequence.tokens), self._k(sequence)))
                continue
            num_fed = self._chunks(sequence, budget, is_first=budget == self.limits.max_num_batched_tokens)
            if num_fed > sequence.num_computed:
                num_prefill = num_fed - sequence.num_computed
                budget -= num_prefill
                rows.append(Scheduled(sequence, num_fed, 0, num_prefill))
        self._choose(rows)
        return rows

    def _choose(self, rows: list[Scheduled]) -> None:
        """Have the policy choose k for the rows that decode."""
        decoding = [row for row in rows if not row.num_prefill_tokens]
        wishes = [Wish(row.sequence.id, row.sequence.draft, row.k) for row in decoding]
        for row, k in zip(decoding, self.policy.choose(wishes, len(decoding) == len(rows)), strict=True):
            assert 0 <= k <= row.k, "a policy never drafts more than a row may"
            row.k = k

    def num_blocks_needed(self, sequence: Sequence) -> int:
        """Blocks for the longest context it can reach, drafted tokens included."""
        longest = min(sequence.max_tokens + sequence.k, self.limits.max_context)
        return -(-longest // self.limits.block_size)

    def has_room(self, num_tokens: int) -> bool:
        """Whether a context of so many tokens fits beside the longest that those which run can reach."""
        reserved = sum(self.num_blocks_needed(s) for s in self.running)
        return reserved + -(-num_tokens // self.limits.block_size) <= self.limits.num_blocks

    def _admit(self) -> None:
        reserved = sum(self.num_blocks_needed(s) for s in self.running)
        while self.waiting and len(self.running) < self.limits.max_num_seqs:
            needed = self.num_blocks_needed(self.waiting[0])
            if reserved + needed > self.limits.num_blocks:
                return
            reserved += needed
            self.running.append(self.waiting.popleft())

    def _k(self, sequence: Sequence) -> int:
        """Most tokens to draft: the request's wish within the table, what it may still emit, both context limits."""
        length = len(sequence.tokens)
        k = min(sequence.k, self.limits.k_by_batch.k(len(self.running), sequence.wish))
        k = min(k, sequence.room - 1, self.limits.max_context - length)
        if sequence.draft_max_context is not None:
            k = min(k, sequence.draft_max_context - length + 1)
        return max(k, 0)

    def is_past_draft(self, sequence: Sequence) -> bool:
        """Whether its context has outgrown the draft's."""
        limit = sequence.draft_max_context
        return limit is not None and sequence.k > 0 and len(sequence.tokens) > limit

    def _chunks(self, sequence: Sequence, budget: int, is_first: bool) -> int:
        """How far to feed a prompt: whole chunks within the budget, one at least for the first of a step."""
        chunk, fed, end = self.limits.prefill_chunk, sequence.num_computed, len(sequence.tokens)
        while fed < end:
            step = min(chunk - fed % chunk, end - fed)
            if step > budget and not is_first:
                break
            fed += step
            budget -= step
            is_first = False
        return fed
