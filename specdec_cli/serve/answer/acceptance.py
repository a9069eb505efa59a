"""A request's acceptance as vLLM and SGLang report it in their responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec_cli.serve.answer.choice import Choice


def vllm_metrics(choice: Choice, k: int, *, is_detailed: bool) -> dict[str, Any]:
    """vLLM's `metrics.speculative_decoding`; trees, which vLLM does not report, add `tree_figures`.

    Args:
        choice: the only one of its request.
        k: most tokens of a draft.
        is_detailed: whether each step's counts are listed, too.
    """
    counts = choice.counts
    histogram = counts.acceptance_histogram
    figures = {
        "mean_acceptance_length": counts.acceptance_length or 1.0,
        "draft_acceptance_rate": counts.acceptance_rate or 0.0,
        "acceptance_histogram": histogram + [0] * (k + 1 - len(histogram)),
        "num_spec_steps": counts.num_drafts,
        "num_accepted_draft_tokens": counts.num_accepted_tokens,
        "num_draft_tokens": counts.num_draft_tokens,
        "num_spec_tokens": k,
    }
    if is_detailed:
        figures["per_step_accepted"] = [accepted for _, accepted in choice.draft_steps]
        figures["per_step_drafted"] = [drafted for drafted, _ in choice.draft_steps]
    return figures | counts.tree_figures()


def sglang_details(choices: Sequence[Choice], ks: Sequence[int]) -> dict[str, Any]:
    """SGLang's `sglext`: an object for one choice, a list for several, null where nothing is drafted.

    Args:
        choices: of the request.
        ks: most tokens of a draft, for each of them.
    """
    details = [_details(choice, k) if k else None for choice, k in zip(choices, ks, strict=True)]
    return {"spec_tokens_details": details if len(details) > 1 else details[0]}


def _details(choice: Choice, k: int) -> dict[str, Any]:
    """Counts as in SGLang: every decode step verifies, and proposes k tokens even where it drafts fewer."""
    counts = choice.counts
    num_steps, num_accepted = counts.num_steps, counts.num_accepted_tokens
    histogram = [*counts.acceptance_histogram] or [0] * bool(num_steps)
    if num_steps:
        histogram[0] += num_steps - counts.num_drafts
    while histogram and not histogram[-1]:
        histogram.pop()
    return {
        "spec_accept_rate": num_accepted / (num_steps * k) if num_steps else 0.0,
        "spec_accept_length": len(choice.token_ids) / num_steps if num_steps else 0.0,
        "spec_cap_length": 0.0,
        "spec_block_accept_length": 0.0,
        "spec_num_correct_drafts": num_accepted,
        "spec_num_proposed_drafts": num_steps * k,
        "spec_verify_ct": num_steps,
        "spec_correct_drafts_histogram": histogram,
        "spec_cap_lens_histogram": [],
    }
