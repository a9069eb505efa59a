"""The document of `bench --endpoint`, `specdec.bench-endpoint/1`."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from specdec_cli.document import Count, Result, ResultDocument, Seconds, SpeculativeResult, absent
from specdec_cli.measure.documents.parts import AcceptanceSource, GateResult
from specdec_cli.measure.endpoint.endpoint_bench import (
    Answered,
    AnsweredAcceptance,
    Percentiles,
    acceptance,
    num_tokens,
    percentiles,
)
from specdec_cli.measure.machine.load import LoadResult
from specdec_cli.quantities import counted
from specdec_cli.text.printable import printable

if TYPE_CHECKING:
    from specdec_cli.measure.endpoint.endpoint_bench import EndpointBench


class PromptsResult(Result):
    """The prompts that were sent."""

    dataset: str
    num_prompts: Count
    tasks: dict[str, Count]


class RequestPlan(Result):
    """Pace and fields of the requests. A null request rate sends the next request when one has ended."""

    concurrency: Count | None = Field(description="Null is no limit.")
    request_rate: float | None = Field(description="Arrivals per second of a Poisson process.")
    arrival_seed: int | None
    repeats: Count
    chat: bool
    fields: dict[str, Any] = Field(description="Sampling fields of every request.")
    extra_body: dict[str, Any] = Field(description="Fields of every request that --extra-body gave.")
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"]
    timeout_s: Seconds
    interrupted: bool
    by: str | None = absent("The column that groups the prompts, where `--by` names one.")


class EndpointFacts(Result):
    """The server: `server` is its HTTP header, `version` the answer of /version, `proxy` what stands between."""

    url: str
    model: str
    model_from: Literal["--endpoint-model", "the recipe's target", "/v1/models"]
    server: str | None
    version: str | None
    proxy: str | None


class RequestCounts(Result):
    """Numbers of requests by outcome."""

    planned: Count
    answered: Count
    failed: Count
    not_sent: Count = Field(description="Turns behind one that failed or called a tool.")
    sent_again: Count
    most_at_a_time: Count
    most_waiting: Count = Field(description="Requests that had arrived and waited because so many were open.")


class OutputCounts(Result):
    """Output of all answers. Chunks are never counted as tokens."""

    tokens: Count | None
    counted_by: Literal["the server's usage"] | None
    prompt_tokens: Count | None
    chunks: Count
    finish_reasons: dict[str, Count]


class RequestTiming(Result):
    """Times of requests; those from a request's arrival are of an open loop alone."""

    ttft_s: Percentiles = Field(description="From sending the request to its first text, reasoning or tool call.")
    tpot_s: Percentiles = Field(description="For each output token after the first.")
    itl_s: Percentiles = Field(description="Between chunks, which may hold several tokens.")
    latency_s: Percentiles = Field(description="From sending the request to the stream's end.")
    queue_s: Percentiles | None = absent("From a request's arrival to its sending.")
    arrival_ttft_s: Percentiles | None = absent("From its arrival to its first output.")
    arrival_latency_s: Percentiles | None = absent("From its arrival to the stream's end.")


class ThroughputResult(Result):
    """Rates over the time in which a request was open; at a rate of arrivals, over all until the last answer."""

    seconds: Seconds
    output_tokens_per_second: Seconds | None
    requests_per_second: Seconds | None
    client_cpu_share: Seconds | None


class PartResult(Result):
    """A task, or a turn of conversations."""

    num_prompts: Count
    output_tokens: Count | None
    timing: RequestTiming
    acceptance: AnsweredAcceptance | None


class CountersResult(Result):
    """Increase during the run of the server's counters; gauges tell of the server's last moments."""

    engine: Literal["vllm", "sglang", "llama.cpp", "tensorrt-llm", "specdec"]
    source: str
    speculative: SpeculativeResult | None
    gauges: dict[str, float | None]
    raw: dict[str, float]


class RequestError(Result):
    """A request that failed."""

    index: Count
    id: str | int | None
    turn: Count
    repeat: Count
    status: int | None
    message: str


class EndpointDocument(ResultDocument):
    """A server measured over HTTP."""

    schema_name: ClassVar[str] = "specdec.bench-endpoint/1"

    workload: PromptsResult
    plan: RequestPlan
    endpoint: EndpointFacts
    machine: LoadResult
    requests: RequestCounts
    output: OutputCounts
    timing: RequestTiming
    throughput: ThroughputResult
    by_task: dict[str, PartResult]
    by_turn: dict[str, PartResult] = Field(description="From 1; empty where every prompt is one turn.")
    acceptance: AnsweredAcceptance | None
    acceptance_from: AcceptanceSource
    counters: CountersResult | None
    errors: list[RequestError]
    notices: list[str]
    gates: list[GateResult] = Field(default_factory=list)


def endpoint_schema(has_arrivals: bool) -> dict[str, Any]:
    """The JSON Schema of the document; without arrivals at a rate it lacks the times from a request's arrival."""
    schema = EndpointDocument.json_schema()
    timing = schema["$defs"][RequestTiming.__name__]
    timing["properties"] = {
        name: field for name, field in timing["properties"].items() if has_arrivals or name in timing["required"]
    }
    return schema


def endpoint_body(bench: EndpointBench, dataset: str, machine: LoadResult, interrupted: bool) -> dict[str, Any]:
    """The document's own fields, after those that every document has. `gates` is empty until the gates are judged."""
    plan, arm, sender, whole = bench.plan, bench.arm, bench.sender, _part(bench, len(bench.rows), bench.answered())
    turns = bench.turns if len(bench.turns) > 1 else {}
    return EndpointDocument(
        workload=PromptsResult(dataset=dataset, num_prompts=len(bench.rows), tasks=bench.tasks),
        plan=RequestPlan(
            concurrency=plan.concurrency,
            request_rate=plan.request_rate if plan.has_arrivals else None,
            arrival_seed=plan.seed if plan.has_arrivals else None,
            repeats=plan.repeats,
            chat=plan.chat,
            fields=arm.fields,
            extra_body=plan.extra_body,
            max_tokens_field=plan.max_tokens_field,
            timeout_s=plan.timeout_s,
            interrupted=interrupted,
        ),
        endpoint=EndpointFacts(
            url=plan.address.root,
            model=arm.model,
            model_from=plan.model_from,
            server=arm.server,
            version=arm.version,
            proxy=None if arm.proxy is None else str(arm.proxy),
        ),
        machine=machine,
        requests=RequestCounts(
            planned=bench.total,
            answered=bench.num_answered,
            failed=bench.num_failed,
            not_sent=sender.num_unsent,
            sent_again=bench.num_sent_again,
            most_at_a_time=sender.most_open,
            most_waiting=sender.most_waiting,
        ),
        output=_output(bench, whole.output_tokens),
        timing=whole.timing,
        throughput=ThroughputResult(
            seconds=bench.seconds,
            output_tokens_per_second=_rate(whole.output_tokens, bench.seconds),
            requests_per_second=_rate(bench.num_answered, bench.seconds),
            client_cpu_share=_rate(sender.cpu_seconds, bench.seconds),
        ),
        by_task={task: _part(bench, num, bench.answered(task)) for task, num in bench.tasks.items()},
        by_turn={str(turn): _part(bench, num, bench.answered(turn=turn)) for turn, num in turns.items()},
        acceptance=whole.acceptance,
        acceptance_from=bench.acceptance_from,
        counters=bench.counters.as_dict(),
        errors=_errors(bench),
        notices=[*_notices(bench), *(() if bench.own_counts is not None else bench.counters.notices)],
    ).as_json()


def _rate(amount: float | None, seconds: float) -> float | None:
    return amount / seconds if amount is not None and seconds > 0 else None


def _part(bench: EndpointBench, num_prompts: int, answered: Answered) -> PartResult:
    return PartResult(
        num_prompts=num_prompts,
        output_tokens=num_tokens(answered),
        timing=RequestTiming(**{figure: percentiles(answered, figure) for figure in bench.figures}),
        acceptance=acceptance(answered),
    )


def _output(bench: EndpointBench, tokens: int | None) -> OutputCounts:
    answers = [answer for _, answer in bench.answered()]
    prompts = [answer.prompt_tokens for answer in answers if answer.prompt_tokens is not None]
    return OutputCounts(
        tokens=tokens,
        counted_by=None if tokens is None else "the server's usage",
        prompt_tokens=sum(prompts) if len(prompts) == len(answers) else None,
        chunks=sum(len(answer.arrivals) for answer in answers),
        finish_reasons=Counter(printable(answer.finish_reason or "none")[:40] for answer in answers),
    )


def _errors(bench: EndpointBench) -> list[RequestError]:
    return [
        RequestError(
            index=visit.row.index,
            id=visit.row.id,
            turn=visit.turn,
            repeat=visit.repeat,
            status=visit.error.status,
            message=visit.error.message,
        )
        for visit in bench.visits
        if visit.error is not None
    ]


def _notices(bench: EndpointBench) -> list[str]:
    from specdec_cli.measure.endpoint.endpoint_doubts import doubts

    notices = []
    if bench.arm.proxy is not None:
        notices.append(f"every request went through the {bench.arm.proxy}, and its time is in the figures")
    if bench.num_failed:
        notices.append(f"{bench.num_failed} of {len(bench.visits)} requests failed; the figures are of the others")
    if bench.sender.num_unsent:
        were = f"{counted(bench.sender.num_unsent, 'turn')} {'was' if bench.sender.num_unsent == 1 else 'were'}"
        notices.append(f"{were} not sent, because the turn before failed or called a tool")
    if bench.num_sent_again:
        notices.append(
            f"the server closed {counted(bench.num_sent_again, 'connection')} before it answered; requests that were "
            "sent again have times that include both attempts"
        )
    if bench.plan.repeats > 1:
        notices.append(
            "every prompt was sent several times: a server with prefix caching answers faster after the first time"
        )
    return [*notices, *doubts(bench)]
