"""Which sequences run in the next step, how much of a prompt each is fed, and how many tokens are drafted for it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specdec_cli.engine.depth.depth import DecodingRow, DepthPolicy, Fixed, KByBatch
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
        """Whether this step gives the sequence a next token (it is no chunk of what is fed before that)."""
        return self.num_fed == len(self.sequence.tokens)


@dataclass(slots=True)
class Scheduler:
    """First come, first served; a sequence is admitted when its tokens so far fit the cache beside the others'.

    Where they grow until they no longer do, the youngest is preempted: it gives its blocks back, waits in front of all
    others, and later computes again what it had computed. That emits nothing, so that its text stays what it was: it
    decides at the same positions, with as many drafted tokens.

    Turns share the batch: a waiting sequence whose turn has none running replaces the youngest of the largest turn.

    Blocks are counted as if none were shared, so that neither the target's cache nor a draft's can run out.

    Args:
        limits: bounds of a step.
        policy: chooses k.
        start: told of a sequence that is admitted; how many of its tokens are cached already.
        stop: told of a sequence that is preempted, which must give its blocks back.
    """

    limits: Limits
    policy: DepthPolicy = field(default_factory=Fixed)
    start: Callable[[Sequence], int] = lambda _: 0
    stop: Callable[[Sequence], None] = lambda _: None
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)
    num_preemptions: int = 0

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
        """The next step's rows; what no longer fits is preempted, what fits is admitted."""
        self._preempt()
        self._take_turns()
        self._admit()
        budget = self.limits.max_num_batched_tokens
        rows: list[Scheduled] = []
        for sequence in self.running:
            if sequence.num_computed == sequence.num_to_compute and not sequence.is_prefilling:
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
        wishes = [_wish(row.sequence, row.k) for row in decoding]
        for row, k in zip(decoding, self.policy.choose(wishes, len(decoding) == len(rows)), strict=True):
            assert 0 <= k <= row.k, "a policy never drafts more than a row may"
            row.k = k

    def num_blocks_needed(self, sequence: Sequence) -> int:
        """Blocks for the longest context it can reach, drafted tokens included."""
        return self._num_blocks(sequence, sequence.max_tokens)

    def num_blocks_next(self, sequence: Sequence) -> int:
        """Blocks for what it can hold after its next token, drafted tokens included."""
        return self._num_blocks(sequence, len(sequence.tokens) + 1)

    def _num_blocks(self, sequence: Sequence, length: int) -> int:
        """Blocks for so many tokens and the drafted ones; siblings share a position, so a tree may pass the context."""
        most = self.limits.max_context
        longest = min(length, most) + sequence.most_nodes if sequence.tree else min(length + sequence.k, most)
        return -(-longest // self.limits.block_size)

    def has_room(self, num_tokens: int) -> bool:
        """Whether a context of so many tokens fits beside those that run."""
        return self._num_reserved() + -(-num_tokens // self.limits.block_size) <= self.limits.num_blocks

    def take_preemptions(self) -> int:
        """How many sequences were preempted since this was last asked."""
        num, self.num_preemptions = self.num_preemptions, 0
        return num

    def _num_reserved(self) -> int:
        return sum(self.num_blocks_next(sequence) for sequence in self.running)

    def _preempt(self) -> None:
        """Send the youngest back to the queue until the others have blocks for their next step."""
        while self._num_reserved() > self.limits.num_blocks:
            assert len(self.running) > 1, "a request that cannot run alone is refused when it is added"
            self._send_back(self.running[-1])

    def _take_turns(self) -> None:
        """Make room for the first waiting sequence whose turn has none running, if another turn has several."""
        counts = Counter(sequence.turn for sequence in self.running)
        newcomer = next((one for one in self.waiting if one.turn not in counts), None)
        while newcomer is not None and self.running and not self._fits(newcomer, self._num_reserved()):
            turn, num_running = counts.most_common(1)[0]
            if num_running < 2:
                return
            self._send_back(next(one for one in reversed(self.running) if one.turn == turn))
            counts[turn] -= 1
        if newcomer is not None:
            self.waiting.remove(newcomer)
            self.waiting.appendleft(newcomer)

    def _send_back(self, sequence: Sequence) -> None:
        """Preempt a running sequence: it waits in front of all others."""
        self.running.remove(sequence)
        sequence.num_computed = 0
        self.stop(sequence)
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _fits(self, sequence: Sequence, reserved: int) -> bool:
        """Whether a sequence can be admitted, with a block to spare for each that runs: they grow."""
        has_place = len(self.running) < self.limits.max_num_seqs
        return has_place and reserved + self.num_blocks_next(sequence) + len(self.running) <= self.limits.num_blocks

    def _admit(self) -> None:
        """Admit what fits; to preempt is dear."""
        reserved = self._num_reserved()
        while self.waiting and self._fits(self.waiting[0], reserved):
            sequence = self.waiting.popleft()
            reserved += self.num_blocks_next(sequence)
            sequence.num_computed = self.start(sequence)
            self.running.append(sequence)

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
        chunk, fed, end = self.limits.prefill_chunk, sequence.num_computed, sequence.num_to_compute
        while fed < end:
            step = min(chunk - fed % chunk, end - fed)
            if step > budget and not is_first:
                break
            fed += step
            budget -= step
            is_first = False
        return fed


def _wish(sequence: Sequence, most: int) -> DecodingRow:
    return DecodingRow(sequence.id, sequence.draft, most, len(sequence.tokens), sequence.room)
