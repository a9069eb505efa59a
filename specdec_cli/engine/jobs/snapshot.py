"""Numbers of a serving engine at one moment, and the difference between two moments."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

_STATE = ("num_running", "num_waiting", "kv_cache_usage")
"""Fields that say how things stand; the others count."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A server's numbers at one moment; all but the first three only grow.

    Args:
        num_running: requests in the running batch.
        num_waiting: requests that wait.
        kv_cache_usage: share of the KV blocks in use, 0 to 1.
        num_finished: requests that ended by themselves.
        num_aborted: requests whose client went away.
        num_failed: requests that an error ended.
        num_refused: requests that were not let in.
        num_prompt_tokens: of requests that began decoding.
        num_generation_tokens: that reached an output.
        num_drafts: verifications that had a drafted token.
        num_draft_tokens: drafted and verified.
        num_draft_nodes: drafted and verified, siblings in trees counted.
        num_accepted_tokens: of those, kept.
        num_draft_failures: steps in which the draft raised.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    num_finished: int = 0
    num_aborted: int = 0
    num_failed: int = 0
    num_refused: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_draft_nodes: int = 0
    num_accepted_tokens: int = 0
    num_draft_failures: int = 0

    def since(self, earlier: Snapshot) -> Snapshot:
        """The same moment, with the counts since an earlier one."""
        counts = [count.name for count in fields(self) if count.name not in _STATE]
        return replace(self, **{name: getattr(self, name) - getattr(earlier, name) for name in counts})

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens; None when nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def acceptance_length(self) -> float | None:
        """1 + accepted tokens per drafting step; None when nothing was drafted."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None

    @property
    def drafted_per_step(self) -> float | None:
        """Mean number of drafted tokens per drafting step; None when nothing was drafted."""
        return self.num_draft_tokens / self.num_drafts if self.num_drafts else None

    @property
    def nodes_per_step(self) -> float | None:
        """Mean number of nodes per drafting step; None when no trees were drafted."""
        return self.num_draft_nodes / self.num_drafts if self.num_draft_nodes > self.num_draft_tokens else None
