"""How an engine speculates and batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec_cli.engine.adaptive import Adaptive
from specdec_cli.engine.depth import POLICIES, DepthPolicy, Fixed, KByBatch
from specdec_cli.engine.verify import MODES, SYNTHETIC
from specdec_cli.errors import UsageError


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How the engine speculates and batches.

    Args:
        num_speculative_tokens: k, most tokens drafted in one step; a request may ask for fewer or more.
        verify: auto, greedy, rejection, block, gumbel, exact-match, typical (lossy) or synthetic (lossy).
        synthetic_acceptance_rates: for each drafted token of a step the rate at which it and all before it are to
            stand (verify synthetic); what is drafted beyond them is refused.
        depth_policy: fixed and confidence draft k tokens (but see p_min), adaptive as many as pay by its clock.
        p_min: stop drafting before a position whose largest q is below this.
        k_by_batch: (number of sequences, k) ascending: from so many that run together on, this k in place of
            num_speculative_tokens, and no request more.
        disable_by_batch_size: no drafting while more sequences than this run together; one more entry of the table.
        max_num_seqs: most sequences that run together.
        max_num_batched_tokens: most prompt tokens fed in one step.
        prefill_chunk: prompts are fed in pieces cut at multiples of this.
        prefix_caching: what requests of one cache_salt begin with alike is fed once, as long as its blocks last.
    """

    num_speculative_tokens: int = 4
    verify: str = "auto"
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    depth_policy: str = "fixed"
    p_min: float = 0.0
    k_by_batch: tuple[tuple[int, int], ...] = ()
    disable_by_batch_size: int | None = None
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 2048
    prefill_chunk: int = 512
    prefix_caching: bool = False

    def __post_init__(self) -> None:
        """Refuse values out of range, each by its name."""
        ranges = {
            "num_speculative_tokens": self.num_speculative_tokens >= 0,
            "verify": self.verify in (*MODES, SYNTHETIC, "auto"),
            "synthetic_acceptance_rates": (self.synthetic_acceptance_rates is None) == (self.verify != SYNTHETIC),
            "depth_policy": self.depth_policy in POLICIES,
            "k_by_batch": _is_table(self.k_by_batch),
            "p_min": 0 <= self.p_min <= 1,
            "disable_by_batch_size": self.disable_by_batch_size is None or self.disable_by_batch_size >= 1,
            "max_num_seqs": self.max_num_seqs >= 1,
            "max_num_batched_tokens": self.max_num_batched_tokens >= 1,
            "prefill_chunk": self.prefill_chunk >= 1,
        }
        for name, fine in ranges.items():
            if not fine:
                raise UsageError(f"{name} is out of range: `{getattr(self, name)}`")

    def depths(self) -> KByBatch:
        """k by how many sequences run together."""
        return KByBatch.of(self.num_speculative_tokens, self.k_by_batch, self.disable_by_batch_size)

    def policy(self) -> DepthPolicy:
        """A new depth policy."""
        return Adaptive() if self.depth_policy == "adaptive" else Fixed()


def _is_table(table: Sequence[tuple[int, int]]) -> bool:
    """Whether numbers of sequences ascend from 1 or more, each with a k."""
    sizes = [size for size, _ in table]
    return sizes == sorted(set(sizes)) and all(size >= 1 and k >= 0 for size, k in table)
