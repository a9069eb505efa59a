"""Which sequences run in the next step, how much of a prompt each is fed, and how many tokens are drafted for it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specdec_cli.drafters.contract import Guesses
from specdec_cli.engine.depth.depth import DecodingRow, DepthPolicy, Fixed, KSchedule
from specdec_cli.engine.sequence import Sequence
from specdec_cli.errors import UsageError

if TYPE_CHECKING:
    from specdec_cli.engine.options import EngineOptions
    from specdec_cli.engine.verify import Verdict
    from specdec_cli.events import Emitted, TokenLogprob
    from specdec_cli.lm.door import LM, Tap
    from specdec_cli.sampling.chain import BoolArray, Distribution


@dataclass(slots=True)
class Limits:
    """Bounds of a step.

    Args:
        max_num_seqs: most sequences that run together.
        max_num_batched_tokens: most prompt tokens fed in one step (one chunk always may).
        prefill_chunk: prompts are cut at multiples of this, whatever else runs, so that results do not depend on it.
        k_by_batch: k by how many sequences run.
        k_by_context: the most k by the length of a sequence's context.
        max_context: the target's context limit.
        num_blocks: blocks of the target's cache.
        block_size: tokens of a block.
        goes_ahead: a round may be launched before the tokens of the one before it are known.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_chunk: int
    k_by_batch: KSchedule
    k_by_context: KSchedule
    max_context: int
    num_blocks: int
    block_size: int
    goes_ahead: bool = False

    @classmethod
    def of(cls, target: LM, options: EngineOptions, *, goes_ahead: bool) -> Limits:
        """The bounds that a target and an engine's options set."""
        return cls(
            options.max_num_seqs,
            options.max_num_batched_tokens,
            options.prefill_chunk,
            options.depths(),
            options.depths_by_context(),
            target.max_context,
            target.num_blocks,
            target.block_size,
            goes_ahead,
        )


@dataclass(slots=True)
class StepRow:
    """A sequence's part in a step: the tokens fed and drafted for it, and what the target decides.

    Args:
        sequence: the sequence.
        num_fed: `tokens[:num_fed]` are in the cache after the step; logits are wanted only once all are.
        k: most tokens to draft.
        num_prefill_tokens: tokens of its prompt that the step feeds.
        taps: the target's hidden states that its drafter reads.
        guesses: the drafted tokens.
        allowed: [places, V] bool, the tokens that its grammar allows at each verified place; None allows everything.
        p: distributions of all rows verified with it.
        first_place: the row's first place in p.
        verdict: the accepted nodes and the own token; None for a chunk of a prompt.
        logprobs: of the accepted tokens and the own one, if they are wanted.
        error: why the request ends in this step, if it does.
    """

    sequence: Sequence
    num_fed: int
    k: int
    num_prefill_tokens: int = 0
    taps: Items[Tap] = ()
    guesses: Guesses = field(default_factory=Guesses)
    allowed: BoolArray | None = None
    p: Distribution | None = None
    first_place: int = 0
    verdict: Verdict | None = None
    logprobs: Items[TokenLogprob] = ()
    error: Exception | None = None

    @property
    def is_decided(self) -> bool:
        """Whether this step decides a token: all of the sequence's tokens are fed, not a chunk of its prompt alone."""
        return self.num_fed == len(self.sequence.tokens)

    def take(self) -> Emitted:
        """Give the sequence its accepted tokens and the target's own one.

        Raises:
            LogitsError: the target had no distribution at a position that the output reached.
        """
        p, verdict, drafted = self.p, self.verdict, self.guesses.drafted
        assert p is not None, "a row is verified before its sequence takes tokens"
        assert verdict is not None, "a verified row has a verdict"
        if p.broken:
            for place, _, _ in self.logprobs_wanted(verdict):
                if place in p.broken:
                    raise p.broken[place]
        return self.sequence.extend(drafted, verdict.path, verdict.own, self.logprobs)

    def logprobs_wanted(self, verdict: Verdict) -> list[tuple[int, int, int]]:
        """Place, token and number of alternatives of what the target accepts and adds, as `Distribution.logprobs`."""
        places = [self.first_place, *(self.first_place + node + 1 for node in verdict.path)]
        tokens = [*(self.guesses.drafted.tokens[node] for node in verdict.path), verdict.own]
        num = self.sequence.params.logprobs or 0
        return [(place, token, num) for place, token in zip(places, tokens, strict=True)]


ROWS_BESIDE = 4
"""Rows that all other turns together have in a step, for each row of the smallest turn."""


@dataclass(slots=True)
class Scheduler:
    """First come, first served; a sequence is admitted when its tokens so far fit the cache beside the others'.

    Where they grow until they no longer do, the youngest is preempted: it gives its blocks back, waits in front of all
    others, and later computes again what it had computed. That emits nothing, so that its text stays what it was: it
    decides at the same positions, with as many drafted tokens.

    Turns share the batch: a waiting sequence whose turn has none running replaces the youngest of the largest turn.
    They share a step, too: the many choices of one request, all in one step, would make each token of a single choice
    beside them as dear as all of theirs, so they decode a few at a time.

    Blocks are counted as if none were shared, so that neither the target's cache nor a draft's can run out.
    """

    limits: Limits
    policy: DepthPolicy = field(default_factory=Fixed)
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)
    num_steps: int = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, running or waiting."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)

    def rows(self) -> list[StepRow]:
        """The step's rows of what runs: after `preempt` and `admit`."""
        budget = self.limits.max_num_batched_tokens
        rows: list[StepRow] = []
        resting = self._resting()
        for sequence in self.running:
            if sequence.is_decoding:
                if sequence not in resting:
                    rows.append(StepRow(sequence, len(sequence.tokens), self._k(sequence, len(sequence.tokens))))
                continue
            num_fed = self._chunks(sequence, budget, is_first=budget == self.limits.max_num_batched_tokens)
            if num_fed > sequence.num_computed:
                num_prefill = num_fed - sequence.num_computed
                budget -= num_prefill
                rows.append(StepRow(sequence, num_fed, 0, num_prefill))
        self._choose(rows)
        return rows

    def goes_on(self, rows: Items[StepRow]) -> bool:
        """Whether the same sequences decode in the next step with the same k, whatever this one decides.

        Some of them may end, and requests may come and go until then; prompts may be read beside them.
        """
        decoding = [row for row in rows if not row.num_prefill_tokens]
        is_joined = any(row.num_fed >= row.sequence.num_to_compute for row in rows if row.num_prefill_tokens)
        if is_joined or len(decoding) != sum(sequence.is_decoding for sequence in self.running):
            return False
        return isinstance(self.policy, Fixed) and all(map(self._keeps_k, decoding))

    def _keeps_k(self, row: StepRow) -> bool:
        sequence, first = row.sequence, len(row.sequence.tokens) + 1
        lengths = range(first, first + row.k + 1)
        return sequence.max_tokens > lengths[-1] and all(self._k(sequence, length) == row.k for length in lengths)

    def _resting(self) -> list[Sequence]:
        """The sequences that sit this step out, so that a turn with few rows does not wait for one with many."""
        self.num_steps += 1
        by_turn: dict[str, list[Sequence]] = {}
        for sequence in self.running:
            if sequence.is_decoding:
                by_turn.setdefault(sequence.turn, []).append(sequence)
        resting: list[Sequence] = []
        if len(by_turn) > 1:
            fewest = min(map(len, by_turn.values()))
            most = max(fewest, ROWS_BESIDE * fewest // (len(by_turn) - 1))
            for sequences in by_turn.values():
                resting += sorted(sequences, key=lambda sequence: sequence.last_step)[most:]
        for sequence in self.running:
            if sequence not in resting:
                sequence.last_step = self.num_steps
        return resting

    def _choose(self, rows: list[StepRow]) -> None:
        """Have the policy choose k for the rows that decode."""
        decoding = [row for row in rows if not row.num_prefill_tokens]
        of_policy = [
            DecodingRow(s.id, s.draft, row.k, len(s.tokens), s.room)
            for s, row in ((row.sequence, row) for row in decoding)
        ]
        chosen = self.policy.choose(of_policy, is_pure=len(decoding) == len(rows))
        for row, k in zip(decoding, chosen, strict=True):
            assert 0 <= k <= row.k, "a policy never drafts more than a row may"
            row.k = k

    def check_fits(self, sequence: Sequence) -> None:
        """Refuse a sequence that the cache could not hold even alone.

        Raises:
            UsageError: its longest context, drafted tokens included, takes more blocks than there are.
        """
        num_needed, size = self._num_blocks(sequence, sequence.max_tokens), self.limits.block_size
        if num_needed > self.limits.num_blocks:
            raise UsageError(
                f"the request needs {num_needed * size} tokens of KV cache, drafted ones included, and there are "
                f"`{self.limits.num_blocks * size}`",
                "lower max_new_tokens or raise kv_cache_memory",
            )

    def num_blocks_next(self, sequence: Sequence) -> int:
        """Blocks of a sequence's tokens after its next one, drafted tokens and those of a round ahead included."""
        num = sequence.k + 2 if self.limits.goes_ahead else 1
        return self._num_blocks(sequence, min(len(sequence.tokens) + num, sequence.max_tokens))

    def _num_blocks(self, sequence: Sequence, length: int) -> int:
        """Blocks for so many tokens and the drafted ones; siblings share a position, so a tree may pass the context."""
        most = self.limits.max_context
        longest = min(length, most) + sequence.most_nodes if sequence.tree else min(length + sequence.k, most)
        return -(-longest // self.limits.block_size)

    def has_room(self, num_tokens: int) -> bool:
        """Whether a context of so many tokens fits beside those that run."""
        return self._num_reserved() + -(-num_tokens // self.limits.block_size) <= self.limits.num_blocks

    def _num_reserved(self) -> int:
        return sum(self.num_blocks_next(sequence) for sequence in self.running)

    def preempt(self) -> list[Sequence]:
        """Send sequences back to the queue that no longer fit, or whose turn gives up a place.

        Returns:
            These; they must give their blocks back before any sequence is admitted.
        """
        preempted: list[Sequence] = []
        while self._num_reserved() > self.limits.num_blocks:
            assert len(self.running) > 1, "a request that cannot run alone is refused when it is added"
            preempted.append(self._send_back(self.running[-1]))
        return preempted + self._take_turns()

    def _take_turns(self) -> list[Sequence]:
        """Make room for the first waiting sequence whose turn has none running, if another turn has several."""
        preempted: list[Sequence] = []
        if not self.waiting:
            return preempted
        counts = Counter(sequence.turn for sequence in self.running)
        newcomer = next((sequence for sequence in self.waiting if sequence.turn not in counts), None)
        while newcomer is not None and self.running and not self._fits(newcomer, self._num_reserved()):
            turn, num_running = counts.most_common(1)[0]
            if num_running < 2:
                return preempted
            youngest = next(sequence for sequence in reversed(self.running) if sequence.turn == turn)
            preempted.append(self._send_back(youngest))
            counts[turn] -= 1
        if newcomer is not None:
            self.waiting.remove(newcomer)
            self.waiting.appendleft(newcomer)
        return preempted

    def _send_back(self, sequence: Sequence) -> Sequence:
        """Preempt a running sequence: it waits in front of all others."""
        self.running.remove(sequence)
        sequence.num_computed = 0
        self.waiting.appendleft(sequence)
        return sequence

    def _fits(self, sequence: Sequence, reserved: int) -> bool:
        """Whether a sequence can be admitted, with a block to spare for each that runs: they grow."""
        has_place = len(self.running) < self.limits.max_num_seqs
        return has_place and reserved + self.num_blocks_next(sequence) + len(self.running) <= self.limits.num_blocks

    def admit(self) -> Iterator[Sequence]:
        """Admit the waiting sequences that fit, one by one: few, as preemption is expensive.

        Yields:
            Each; the caller adopts its cached prefix and sets `num_computed`.
        """
        reserved = self._num_reserved()
        while self.waiting and self._fits(self.waiting[0], reserved):
            sequence = self.waiting.popleft()
            reserved += self.num_blocks_next(sequence)
            self.running.append(sequence)
            yield sequence

    def _k(self, sequence: Sequence, length: int) -> int:
        """Most tokens to draft behind so many: within both schedules, what it may still emit, and both contexts."""
        k = min(sequence.k, self.limits.k_by_batch.k(len(self.running), sequence.own_k))
        k = self.limits.k_by_context.k(length, k)
        k = min(k, sequence.max_tokens - length - 1, self.limits.max_context - length)
        if sequence.draft_max_context is not None:
            k = min(k, sequence.draft_max_context - length + 1)
        return max(k, 0)

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
