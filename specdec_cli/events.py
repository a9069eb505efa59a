"""Events that the engine yields, and the counts from which every statistic follows.

The engine yields events and prints nothing; commands, meters and the server consume the same ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from specdec_cli.drafted import Drafted

FinishReason = Literal["stop", "length", "abort"]


IMPOSSIBLE = -9999.0
"""Stands for the logarithm of zero in documents, as in OpenAI's, because JSON has no number for it."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of an emitted token under the target, and those of the best alternatives.

    Args:
        token_id: the emitted token.
        logprob: its log-probability in nats.
        top: pairs (token id, log-probability) of the likeliest tokens, the likeliest first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Emitted:
    """The result of one step for one sequence.

    Args:
        sequence_id: the sequence, as `Engine.add` returns it.
        tokens: the tokens it received. `tokens[:num_accepted]` were drafted and accepted; a token after them is the
            target's own. Tokens cut by a stop or a length are left out.
        text: their text, as far as it is certain: text that may begin a stop string is held back.
        num_drafted: tokens drafted and verified one after another, cut or not; the depth of a tree.
        num_accepted: drafted tokens that were accepted.
        from_prefill: whether the tokens are the first ones, which the prompt's forward pass gives.
        logprobs: one for each token, where the sampling parameters ask for them.
        num_cached_tokens: with the first tokens, prompt tokens that were in the cache already.
        num_nodes: drafted tokens that were verified, siblings counted.
        ranks: a pair for each place of the tree that the accepted path reached: the accepted child's place among its
            siblings from 1 (0: none was accepted), and the number of siblings.
        tree: the drafted tree; None for a chain.
    """

    sequence_id: int
    tokens: tuple[int, ...]
    text: str
    num_drafted: int
    num_accepted: int
    from_prefill: bool
    logprobs: tuple[TokenLogprob, ...] = ()
    num_cached_tokens: int = 0
    num_nodes: int = 0
    ranks: tuple[tuple[int, int], ...] = ()
    tree: Drafted | None = None


@dataclass(frozen=True, slots=True)
class Stepped:
    """One step of the engine: a forward over all running sequences, and where its time went.

    Args:
        emitted: what each sequence received; none for a sequence whose prompt is still being processed.
        num_running: sequences in this step.
        num_waiting: sequences that wait for room.
        num_prefill_tokens: prompt tokens processed in it.
        draft_seconds: time spent drafting.
        verify_seconds: time of the target's forward pass and of the verification.
        overhead_seconds: the rest of the step's time.
        num_blocks_used: blocks of the KV cache in use after it.
        num_blocks: all blocks of the KV cache.
        num_preemptions: sequences that gave their blocks back to let it run, and will compute them again.
    """

    emitted: tuple[Emitted, ...]
    num_running: int
    num_waiting: int
    num_prefill_tokens: int
    draft_seconds: float
    verify_seconds: float
    overhead_seconds: float
    num_blocks_used: int
    num_blocks: int
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """A sequence ended.

    Args:
        sequence_id: the sequence.
        finish_reason: stop, length or abort.
        stop_reason: the stop string or token that ended it, if one did.
        text: the last piece of its text, which streaming had held back, cropped at a stop string.
        is_incomplete: whether the length cut it before its output matched its grammar.
    """

    sequence_id: int
    finish_reason: FinishReason
    stop_reason: int | str | None
    text: str = ""
    is_incomplete: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """A sequence ended by an error of its own; the others go on as if it had never been there.

    `Engine.generate` and `Engine.stream` raise the error; `Engine.step` yields this event.

    Args:
        sequence_id: the sequence.
        error: the error that ended it.
    """

    sequence_id: int
    error: Exception


@dataclass(frozen=True, slots=True)
class Noticed:
    """A notice for the user, given once: for example that the draft's context limit was exceeded.

    Args:
        sequence_id: the sequence that it is about; None for all of them.
        message: the notice.
    """

    sequence_id: int | None
    message: str


Event = Stepped | Finished | Failed | Noticed


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


@dataclass(slots=True, repr=False)
class SpeculativeCounts:
    """Counts over decode steps, from which every acceptance statistic follows.

    Args:
        num_steps: steps that gave tokens.
        num_emitted_tokens: which they gave.
        draft_seconds: time spent drafting; the other fields accordingly.
        num_draft_nodes: drafted tokens that were verified, siblings counted.
        ranks: of the places that accepted paths reached, how many there were for each rank of the accepted child (0:
            none was accepted) and number of children.
        outcomes: of the steps that verified drafted tokens, how many there were for each number drafted and accepted.
    """

    num_steps: int = 0
    num_emitted_tokens: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    overhead_seconds: float = 0.0
    outcomes: Counter[tuple[int, int]] = field(default_factory=Counter)
    num_draft_nodes: int = 0
    ranks: Counter[tuple[int, int]] = field(default_factory=Counter)

    def __repr__(self) -> str:
        """Counts and the rates that follow from them."""
        rate, length = self.acceptance_rate, self.acceptance_length
        return (
            f"SpeculativeCounts(num_steps={self.num_steps}, num_emitted_tokens={self.num_emitted_tokens}, "
            f"num_draft_tokens={self.num_draft_tokens}, num_accepted_tokens={self.num_accepted_tokens}, "
            f"acceptance_rate={None if rate is None else round(rate, 3)}, "
            f"acceptance_length={None if length is None else round(length, 2)})"
        )

    def add(self, emitted: Emitted) -> None:
        """Count what a step gave a sequence; the first token, which prefill gives, belongs to no step."""
        if emitted.from_prefill:
            return
        self.num_draft_nodes += emitted.num_nodes
        self.ranks.update(emitted.ranks)
        self.num_steps += 1
        self.num_emitted_tokens += len(emitted.tokens)
        if emitted.num_drafted:
            self.outcomes[emitted.num_drafted, emitted.num_accepted] += 1

    def add_seconds(self, stepped: Stepped, share: float = 1.0) -> None:
        """Add a step's time, or a sequence's share of it."""
        self.draft_seconds += stepped.draft_seconds * share
        self.verify_seconds += stepped.verify_seconds * share
        self.overhead_seconds += stepped.overhead_seconds * share

    @property
    def num_drafts(self) -> int:
        """Steps that verified drafted tokens."""
        return self.outcomes.total()

    @property
    def num_draft_tokens(self) -> int:
        """Drafted tokens that were verified."""
        return sum(drafted * count for (drafted, _), count in self.outcomes.items())

    @property
    def num_accepted_tokens(self) -> int:
        """Drafted tokens that stood."""
        return sum(accepted * count for (_, accepted), count in self.outcomes.items())

    @property
    def drafted_at_least(self) -> list[int]:
        """Steps that verified at least i drafted tokens, i = 1..k."""
        return self._steps(lambda i, drafted, accepted: drafted >= i)

    @property
    def accepted_at_least(self) -> list[int]:
        """Steps that accepted at least i of them, i = 1..k."""
        return self._steps(lambda i, drafted, accepted: accepted >= i)

    @property
    def reached(self) -> list[int]:
        """Steps that verified at least i and accepted all before it, i = 1..k."""
        return self._steps(lambda i, drafted, accepted: drafted >= i and accepted >= i - 1)

    @property
    def acceptance_histogram(self) -> list[int]:
        """Steps that accepted exactly 0..k of at least one drafted token."""
        most = max((drafted for drafted, _ in self.outcomes), default=-1)
        return [sum(n for (_, accepted), n in self.outcomes.items() if accepted == i) for i in range(most + 1)]

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens; None when nothing was drafted."""
        return _ratio(self.num_accepted_tokens, self.num_draft_tokens)

    @property
    def acceptance_length(self) -> float | None:
        """1 + accepted tokens per drafting step; None when nothing was drafted."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None

    @property
    def per_position_acceptance_rates(self) -> list[float | None]:
        """P(accepted >= i | drafted >= i) for i = 1..k."""
        return [_ratio(a, d) for a, d in zip(self.accepted_at_least, self.drafted_at_least, strict=True)]

    @property
    def conditional_acceptance_rates(self) -> list[float | None]:
        """P(accepted >= i | accepted >= i-1, drafted >= i) for i = 1..k."""
        return [_ratio(a, r) for a, r in zip(self.accepted_at_least, self.reached, strict=True)]

    @property
    def drafted_trees(self) -> bool:
        """Whether any drafted token had a sibling."""
        return self.num_draft_nodes > self.num_draft_tokens

    @property
    def by_rank(self) -> list[tuple[int, int]]:
        """For r = 1, 2, …: reached places with at least r children, and at how many of them the r-th was accepted."""
        most = max((num for _, num in self.ranks), default=0)
        return [
            (
                sum(count for (_, num), count in self.ranks.items() if num >= rank),
                sum(count for (accepted_rank, _), count in self.ranks.items() if accepted_rank == rank),
            )
            for rank in range(1, most + 1)
        ]

    @property
    def acceptance_by_rank(self) -> list[float | None]:
        """Fraction of reached places with at least r children at which the r-th child was accepted, r = 1, 2, …."""
        return [_ratio(accepted, tried) for tried, accepted in self.by_rank]

    def tree_figures(self) -> dict[str, Any]:
        """The figures that only trees have, by their keys in JSON results; empty where chains were drafted."""
        if not self.drafted_trees:
            return {}
        return {"num_draft_nodes": self.num_draft_nodes, "acceptance_by_rank": self.acceptance_by_rank}

    def _steps(self, holds: Callable[[int, int, int], bool]) -> list[int]:
        """Of how many steps something holds, for i = 1..k."""
        most = max((drafted for drafted, _ in self.outcomes), default=0)
        return [sum(n for pair, n in self.outcomes.items() if holds(i, *pair)) for i in range(1, most + 1)]

    def as_dict(self) -> dict[str, Any]:
        """The JSON form: counts, rates and seconds; two keys more where trees were drafted."""
        from specdec_cli.document import SpeculativeResult

        return SpeculativeResult.of(self)
