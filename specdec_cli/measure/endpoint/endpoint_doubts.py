"""Notices about figures that the answers contradict."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING

from specdec_cli.measure.endpoint.answer import Answer
from specdec_cli.measure.endpoint.endpoint_plan import Visit
from specdec_cli.quantities import counted
from specdec_cli.text.printable import printable

if TYPE_CHECKING:
    from specdec_cli.measure.endpoint.endpoint_bench import Answered, EndpointBench

_BUSY_SHARE = 0.5
_AT_ONCE_SHARE, _AT_ONCE_TOKENS = 0.01, 8
_MIN_TREND, _GROWTH = 20, 2.0


def doubts(bench: EndpointBench) -> list[str]:
    """Notices about a run's odd figures."""
    answered = bench.answered()
    notices = [
        *_models(bench, answered),
        *_counts(bench, answered),
        *_lengths(bench, answered),
        *_streams(answered),
        *_client(bench, answered),
    ]
    return [*notices, *_arrivals(bench, answered)] if bench.plan.has_arrivals else notices


def _of(answered: Answered, is_odd: Callable[[Visit, Answer], bool], predicate: str) -> list[str]:
    """A sentence about the answers that are odd, beginning with their number; none without any."""
    num = sum(is_odd(visit, answer) for visit, answer in answered)
    return [f"{num} of {len(answered)} answers {predicate}"] if num else []


def _models(bench: EndpointBench, answered: Answered) -> list[str]:
    """Notice that another model answered: many servers have one model, whichever is requested."""
    others = {answer.model for _, answer in answered if answer.model not in (None, bench.arm.model)}
    named = ", ".join(f"`{printable(name or '')[:80]}`" for name in sorted(filter(None, others))[:3])
    asked = printable(bench.arm.model)
    return [f"the answers come from the model {named}, but `{asked}` was requested"] if others else []


def _counts(bench: EndpointBench, answered: Answered) -> list[str]:
    """Notices about the server's counts of tokens."""
    notices = []
    invalid = [answer.invalid_usage for _, answer in answered if answer.invalid_usage is not None]
    if not invalid and not any(answer.completion_tokens is not None for _, answer in answered):
        notices.append("the server sends no usage with its streams: tokens were not counted, and chunks are not tokens")
    else:
        notices += _of(
            answered,
            lambda _, answer: answer.completion_tokens is None and answer.invalid_usage is None,
            "came without usage: output tokens and throughput are unknown",
        )
    if invalid:
        notices.append(
            f"{len(invalid)} of {len(answered)} answers came with an invalid usage, such as `completion_tokens: "
            f"{invalid[0]}`: output tokens and throughput are unknown"
        )
    notices += _of(
        answered,
        lambda _, answer: answer.completion_tokens == 0 and bool(answer.arrivals),
        "have output, but no token by the server's usage: tokens and throughput are unknown",
    )
    notices += _of(
        answered,
        lambda _, answer: 0 < (answer.num_tokens or 0) < len(answer.arrivals),
        "came in more chunks than they have tokens by the server's usage: it may leave out some, of reasoning for "
        "example, and time per token and throughput would then be wrong",
    )
    prompt, cached = (
        sum(getattr(answer, name) or 0 for _, answer in answered) for name in ("prompt_tokens", "cached_tokens")
    )
    if 0 < cached <= prompt:
        notices.append(
            f"{cached / prompt:.0%} of the prompt tokens were in the server's cache: times to first text are shorter "
            "for it"
        )
    return notices


def _lengths(bench: EndpointBench, answered: Answered) -> list[str]:
    """Notices that answers are longer or shorter than requested."""
    name = bench.plan.max_tokens_field
    notices = _of(
        answered,
        lambda visit, answer: (answer.num_tokens or 0) > visit.max_tokens,
        f"have more tokens than `{name}` allows: the server does not read that field; try --max-tokens-field",
    )
    notices += _of(
        answered,
        lambda visit, answer: answer.finish_reason == "length" and _is_short(visit, answer),
        f"were cut before `{name}` tokens: the server has a limit of its own, or does not read that field",
    )
    if bench.arm.fields.get("ignore_eos"):
        notices += _of(
            answered,
            lambda visit, answer: answer.finish_reason == "stop" and _is_short(visit, answer),
            "ended early although `ignore_eos` was sent: the server does not read it",
        )
    return notices


def _is_short(visit: Visit, answer: Answer) -> bool:
    """Whether an answer has fewer tokens than it might have had, by the server's usage."""
    return answer.num_tokens is not None and answer.num_tokens < visit.max_tokens


def _streams(answered: Answered) -> list[str]:
    """Notices about answers that are empty, incomplete or not streamed."""
    notices = _of(answered, lambda _, answer: not answer.arrivals, "are empty: they have no time to first text")
    notices += _of(
        answered,
        lambda _, answer: answer.finish_reason is None,
        "have no finish_reason: they may be incomplete",
    )
    if 2 * sum(_came_at_once(answer) for _, answer in answered) <= len(answered):
        return notices
    return notices + _of(
        answered,
        lambda _, answer: _came_at_once(answer),
        "came all at once: the server, or a proxy before it, holds its streams back, and the time to first text is the "
        "whole answer's",
    )


def _came_at_once(answer: Answer) -> bool:
    if not answer.arrivals or (answer.num_tokens or len(answer.arrivals)) < _AT_ONCE_TOKENS:
        return False
    return answer.arrivals[-1] - answer.arrivals[0] < _AT_ONCE_SHARE * answer.arrivals[-1]


def _client(bench: EndpointBench, answered: Answered) -> list[str]:
    """Notices about this client's effect on the figures."""
    notices, sender, plan = [], bench.sender, bench.plan
    share = sender.cpu_seconds / sender.seconds if sender.seconds else 0.0
    if share > _BUSY_SHARE and sender.most_open > 1:
        notices.append(
            f"this client computed for {share:.0%} of the time: the figures include its own work; lower --concurrency"
        )
    if plan.concurrency is not None and not plan.has_arrivals and sender.most_open < plan.concurrency:
        most = f"{counted(sender.most_open, 'request')} {'was' if sender.most_open == 1 else 'were'}"
        notices.append(f"never more than {most} open at a time, fewer than --concurrency")
    num_opened = sum(answer.opened_connection for _, answer in answered)
    if num_opened > sender.most_open:
        notices.append(
            f"{num_opened} requests had to open a connection, as the server closes them: their times hold that"
        )
    return notices


def _arrivals(bench: EndpointBench, answered: Answered) -> list[str]:
    """Notices that the server does not keep up with the arrivals."""
    plan, notices = bench.plan, []
    if bench.sender.most_waiting:
        are_open = f"{plan.concurrency} {'was' if plan.concurrency == 1 else 'were'} open"
        notices.append(
            f"up to {counted(bench.sender.most_waiting, 'request')} waited because {are_open}: times from sending "
            "leave that wait out, times from arrival hold it"
        )
    ordered = sorted(answered, key=lambda pair: pair[1].sent - pair[0].wait_s)
    quarter = len(ordered) // 4
    if len(ordered) < _MIN_TREND:
        return notices
    first, last = (
        median(visit.wait_s + answer.end_s for visit, answer in part)
        for part in (ordered[:quarter], ordered[-quarter:])
    )
    if last > _GROWTH * first:
        notices.append(
            f"the server seems not to keep up with {plan.request_rate:g} requests/s: from arrival, the first quarter "
            f"of the answers took {first:.3g} s, the last {last:.3g} s (medians); a longer run would show longer times"
        )
    return notices
