"""How an engine speculates and batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from specdec_cli.call_checks import checked_fields
from specdec_cli.drafted import MOST_DEPTH
from specdec_cli.engine.depth.adaptive import Adaptive
from specdec_cli.engine.depth.depth import CHANGING, DepthPolicy, Fixed, Heuristic, KSchedule
from specdec_cli.errors import UsageError
from specdec_cli.recipe.keys import check_ranges
from specdec_cli.recipe.schema import EngineSection, Speculation
from specdec_cli.tree_shape import TreeShape
from specdec_cli.verification import AUTO, RULES


@checked_fields
@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How the engine speculates and batches.

    Args:
        num_speculative_tokens: k, the most tokens drafted in one step; a request may set its own.
        verify: how drafted tokens are judged: auto, or a rule that `--verify` lists.
        synthetic_acceptance_rates: for verify `synthetic`, the probability that the first i drafted tokens of a step
            are all accepted, for i = 1…k.
        depth_policy: fixed and confidence draft k tokens (see p_min); adaptive chooses the depth by measured cost;
            heuristic drafts two tokens more after a fully accepted draft and one less after any other.
        tree: shape of the drafted tree, for example 4,2,1 (children per depth) or dynamic:32 (the most likely nodes); k
            limits its depth. None drafts chains. A request may set its own.
        p_min: stop drafting at a position whose largest draft probability is below this.
        k_by_batch: pairs (number of sequences, k) in ascending order: k from that many concurrent sequences on.
        k_by_context: pairs (tokens of a sequence's context, k) in ascending order: at most k from that length on.
        disable_by_batch_size: no drafting while more sequences than this run together.
        max_num_seqs: most sequences that run together.
        max_num_batched_tokens: most prompt tokens processed in one step.
        prefill_chunk: prompts are processed in pieces cut at multiples of this many tokens.
        prefix_caching: requests with the same cache_salt share the KV blocks of a common prefix.
    """

    num_speculative_tokens: int = 4
    verify: str = "auto"
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    depth_policy: str = "fixed"
    tree: str | None = None
    p_min: float = 0.0
    k_by_batch: tuple[tuple[int, int], ...] = ()
    k_by_context: tuple[tuple[int, int], ...] = ()
    disable_by_batch_size: int | None = None
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 2048
    prefill_chunk: int = 512
    prefix_caching: bool = False

    def __post_init__(self) -> None:
        """Refuse values out of range, each by its name."""
        if self.verify not in (AUTO, *RULES):
            raise UsageError(f"verify is out of range: `{self.verify}`", f"one of {AUTO}, {', '.join(RULES)}")
        check_ranges(self, Speculation, EngineSection, without="verify")
        if (self.synthetic_acceptance_rates is not None) != self._needs_rates:
            message = (
                f"verify `{self.verify}` {'needs' if self._needs_rates else 'takes no'} synthetic_acceptance_rates"
            )
            raise UsageError(message, 'give them with verify="synthetic", from 0 to 1, none above the one before it')
        for name, what in (("k_by_batch", "sequences"), ("k_by_context", "tokens")):
            if not _is_schedule(getattr(self, name)):
                hint = f"pairs of ascending numbers of {what}, from 1, and k, from 0 to {MOST_DEPTH}"
                raise UsageError(f"{name} is out of range: `{getattr(self, name)}`", hint)
        if self.prefill_chunk < 1:
            raise UsageError(f"prefill_chunk is out of range: `{self.prefill_chunk}`", "it must be at least 1")
        shape = self.shape_of(self.tree)
        if shape is not None and not shape.is_chain and self.verify != AUTO and not RULES[self.verify].judges_trees:
            raise UsageError(
                f"verification mode `{self.verify}` judges chains alone, and the tree is `{self.tree}`",
                "use --verify auto, or leave --tree out",
            )

    @property
    def _needs_rates(self) -> bool:
        return self.verify in RULES and RULES[self.verify].needs_rates

    def depths(self) -> KSchedule:
        """k by how many sequences run together."""
        return KSchedule.by_batch(self.num_speculative_tokens, self.k_by_batch, self.disable_by_batch_size)

    def depths_by_context(self) -> KSchedule:
        """The most k by the length of a sequence's context."""
        return KSchedule(MOST_DEPTH, self.k_by_context)

    def shape_of(self, tree: str | None, k: int | None = None) -> TreeShape | None:
        """The shape of a tree for this engine; None without one.

        Args:
            tree: children per depth or a node budget, as `--tree` takes them.
            k: most tokens drafted one after another; None takes this engine's.

        Raises:
            UsageError: no shape, one deeper than k, or one beside a depth policy that changes k.
        """
        if tree is None:
            return None
        shape = TreeShape.parse(tree)
        k = self.depths().most if k is None else k
        if not shape.is_dynamic and 0 < k < shape.depth:
            raise UsageError(
                f"the tree `{tree}` is `{shape.depth}` deep, and num_speculative_tokens is `{k}`",
                f"set num_speculative_tokens to {shape.depth} (-k), or shorten the tree",
            )
        if self.depth_policy in CHANGING:
            raise UsageError(
                f"the depth policy `{self.depth_policy}` does not fit the tree `{tree}`: it changes a chain's length",
                "use --depth-policy fixed or confidence, or leave --tree out",
            )
        return shape

    @property
    def most_nodes(self) -> int:
        """Most drafted tokens of a sequence in one step."""
        shape, k = self.shape_of(self.tree), self.depths().most
        return k if shape is None else shape.num_nodes(k)

    def at_depth(self, k: int) -> EngineOptions:
        """The same at one k whatever the batch and the context; a static tree is cut to that depth."""
        shape = self.shape_of(self.tree)
        tree = None if shape is None or k == 0 else str(shape.cut(k))
        fixed: dict[str, Any] = {"depth_policy": "fixed", "disable_by_batch_size": None}
        return replace(self, num_speculative_tokens=k, tree=tree, k_by_batch=(), k_by_context=(), **fixed)

    def policy(self) -> DepthPolicy:
        """A new depth policy."""
        made: dict[str, type[DepthPolicy]] = {"adaptive": Adaptive, "heuristic": Heuristic}
        return made.get(self.depth_policy, Fixed)()


def _is_schedule(entries: Sequence[tuple[int, int]]) -> bool:
    """Whether numbers ascend from 1 or more, each with a k."""
    numbers = [number for number, _ in entries]
    return numbers == sorted(set(numbers)) and all(number >= 1 and 0 <= k <= MOST_DEPTH for number, k in entries)
