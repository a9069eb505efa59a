"""One pass over prompts on another engine's server: decode time from outside, steps from its own counters."""

from __future__ import annotations

from collections.abc import Sequence

from specdec_cli.engine.driver import never
from specdec_cli.engine.prompts import PromptRow
from specdec_cli.errors import RunError
from specdec_cli.measure.endpoint.answer import Answer
from specdec_cli.measure.endpoint.counters import statistics
from specdec_cli.measure.endpoint.endpoint_arm import EndpointArm
from specdec_cli.measure.endpoint.endpoint_bench import EndpointBench
from specdec_cli.measure.endpoint.endpoint_plan import EndpointPlan
from specdec_cli.measure.predict.engine_costs import PassTotals
from specdec_cli.recipe.schema import Sampling


def measured_pass(plan: EndpointPlan, sampling: Sampling, rows: Sequence[PromptRow], *, drafts: bool) -> PassTotals:
    """Send prompts and count the steps that the engine took for them.

    Args:
        plan: where the server is and how it is asked.
        sampling: of every request.
        rows: the prompts.
        drafts: whether it must have drafted.

    Raises:
        EndpointError: a request failed.
        RunError: the engine says nothing about its steps, or all answers have one token.
    """
    bench = EndpointBench(EndpointArm(plan, sampling), rows)
    bench.run(never, lambda: None)
    failed = next((visit.error for visit in bench.visits if visit.error is not None), None)
    if failed is not None:
        raise failed
    seconds, num_tokens = decode_totals([answer for _, answer in bench.answers()])
    found = statistics(bench.counters.added) or {}
    counts = [found.get(f"num_{name}") for name in ("drafts", "draft_tokens", "accepted_tokens")]
    if drafts and (None in counts or not counts[0]):
        raise RunError("the engine's counters show no drafted tokens", "check its log, and whether others use it")
    return PassTotals(seconds, num_tokens, *(count or 0 for count in counts) if drafts else ())


def decode_totals(answers: Sequence[Answer]) -> tuple[float, int]:
    """Seconds from first to last token and tokens after the first, summed over answers.

    Raises:
        RunError: the server does not count tokens, or no answer has two.
    """
    seconds, num = 0.0, 0
    for answer in answers:
        if answer.num_tokens is None:
            raise RunError("the server sends no usage with its streams, so its tokens cannot be counted", None)
        if answer.tpot_s is not None:
            seconds += answer.tpot_s * (answer.num_tokens - 1)
            num += answer.num_tokens - 1
    if not num:
        raise RunError("no answer has two tokens, so there is no step to time", "raise -n")
    return seconds, num
