"""JSON reports and responses with counts of speculation, by tool."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isfinite
from typing import Any

from specdec_cli.measure.endpoint.request_counts import LLAMA, SGLANG, TRTLLM, VLLM, CountNames, step_outcomes
from specdec_cli.measure.endpoint.server_counts import ACCEPTED, DRAFTED, DRAFTS
from specdec_cli.measure.imported.record import ImportedRun, amount, summed

_BENCH_FIGURES = (
    *("output_throughput", "request_throughput", "mean_ttft_ms", "mean_tpot_ms"),
    *("spec_decode_acceptance_rate", "spec_decode_acceptance_length"),
)
_AIPERF_LENGTHS = {
    "spec_decode_acceptance_length": "mean of the requests' lengths, each counted once, however many steps it took",
    "spec_decode_draft_acceptance_rate": "mean of the requests' rates, in percent",
    "spec_decode_token_weighted_acceptance_length": "1 + accepted tokens per step of all requests",
}
_WARM_UP = "warmup"
_SGLANG_RATE = "accepted tokens over verifications times (draft tokens - 1)"
_SGLANG_LENGTH = "completion tokens for each verification"


def read_vllm_bench(value: Any) -> ImportedRun | None:
    """Results of `vllm bench serve`, whose counts are its server's, before and after each run.

    With `--append-result` one file has several, a line each.
    """
    results = [item for item in _items(value) if "spec_decode_num_drafts" in item]
    if not results:
        return None
    run = summed(map(_of_vllm_bench, results))
    if len(results) > 1:
        run.form = f"{len(results)} results of vllm bench serve"
    return run


def _of_vllm_bench(result: Mapping[str, Any]) -> ImportedRun:
    run = ImportedRun("vllm", "result of vllm bench serve")
    drafts = amount(result["spec_decode_num_drafts"])
    run.counts = {
        DRAFTS: drafts,
        DRAFTED: amount(result["spec_decode_draft_tokens"]),
        ACCEPTED: amount(result["spec_decode_accepted_tokens"]),
    }
    rates = [amount(rate) for rate in result.get("spec_decode_per_position_acceptance_rates") or ()]
    run.add_rates(rates, drafts)
    if drafts:
        run.check_shares(rates, run.counts[ACCEPTED] / drafts)
    run.reported = _numbers(result, _BENCH_FIGURES)
    run.definitions = {"acceptance_rate": "accepted drafted tokens over drafted tokens, in percent"}
    return run


def read_sglang_responses(value: Any) -> ImportedRun | None:
    """Responses of SGLang's /generate with `meta_info`, or of its OpenAI routes with `spec_tokens_details`."""
    requests = _Requests(
        value,
        lambda request: SGLANG.steps in request and ("completion_tokens" in request or "spec_accept_length" in request),
    )
    details = requests.figures
    if not details:
        return None
    run = ImportedRun("sglang", f"{_counted(len(details), 'response')} of SGLang", requests=requests.ids)
    for request in details:
        steps = amount(request[SGLANG.steps])
        kept, offered = request.get(SGLANG.accepted), request.get(SGLANG.drafted)
        if kept is None and "completion_tokens" in request:
            kept = amount(request["completion_tokens"]) - steps if steps else 0.0
        run.add({DRAFTS: steps, DRAFTED: _known(offered), ACCEPTED: _known(kept)})
        run.add_histogram(_histogram(request.get(SGLANG.histogram)))
    run.definitions = {"acceptance_length": _SGLANG_LENGTH, "acceptance_rate": _SGLANG_RATE}
    if len(details) == 1:
        run.reported = _numbers(details[0], ("spec_accept_rate", "spec_accept_length"))
    return run


def read_trtllm_stats(value: Any) -> ImportedRun | None:
    """TensorRT-LLM's iteration statistics with `specDecodingStats`."""
    steps = [item["specDecodingStats"] for item in _walk(value) if isinstance(item.get("specDecodingStats"), Mapping)]
    if not steps:
        return None
    run = ImportedRun("tensorrt-llm", f"{len(steps)} iterations of TensorRT-LLM")
    names = {DRAFTS: "numRequestsWithDraftTokens", DRAFTED: "numDraftTokens", ACCEPTED: "numAcceptedTokens"}
    for step in steps:
        run.add({ours: _known(step.get(theirs)) for ours, theirs in names.items()})
    return run


def read_trtllm_requests(value: Any) -> ImportedRun | None:
    """TensorRT-LLM's and Triton's figures of single requests."""
    names = (TRTLLM.accepted, TRTLLM.drafted)
    requests = _Requests(value, lambda item: all(isinstance(item.get(name), int | float) for name in names))
    if not requests.figures:
        return None
    num = len(requests.figures)
    run = ImportedRun("tensorrt-llm", f"{_counted(num, 'request')} of TensorRT-LLM", requests=requests.ids)
    _add_requests(run, requests.figures, TRTLLM)
    if DRAFTS in run.partial:
        run.notices.append("TensorRT-LLM counts no steps of a request here: the acceptance length is unknown")
        run.partial.discard(DRAFTS)
        run.counts.pop(DRAFTS, None)
    return run


def read_request_metrics(value: Any) -> ImportedRun | None:
    """Responses with vLLM's `metrics.speculative_decoding`: vLLM's own, specdec's, in guidellm's report or AIPerf's.

    AIPerf's records of failed requests and of its warm-up are left out.
    """
    requests = _Requests(_aiperf_records(value), lambda request: VLLM.steps in request and VLLM.accepted in request)
    details = requests.figures
    if not details:
        return None
    tool = "guidellm" if isinstance(value, Mapping) and "benchmarks" in value else "vllm"
    tool = "aiperf" if any(_RECORD in item for item in _items(value)) else tool
    run = ImportedRun(tool, f"{_counted(len(details), 'response')} with metrics", requests=requests.ids)
    _add_requests(run, details, VLLM)
    return run


_RECORD = "spec_decode_acceptance"


def _aiperf_records(value: Any) -> Any:
    """A file's value without AIPerf's records of failed and warm-up requests."""
    records = _items(value)
    if not any(_RECORD in record for record in records):
        return value
    return [
        record
        for record in records
        if not record.get("error") and (record.get("metadata") or {}).get("benchmark_phase") != _WARM_UP
    ]


def _add_requests(run: ImportedRun, requests: Sequence[Mapping[str, Any]], names: CountNames) -> None:
    """Count requests by their own figures."""
    for request in requests:
        columns = {DRAFTS: names.steps, DRAFTED: names.drafted, ACCEPTED: names.accepted}
        run.add({ours: _known(request.get(theirs)) for ours, theirs in columns.items()})
        run.add_histogram(_histogram(request.get(names.histogram)))
        run.outcomes.update(step_outcomes(request, names))


def read_llama_responses(value: Any) -> ImportedRun | None:
    """llama-server's responses: `timings` of requests for which it drafted."""
    requests = _Requests(value, lambda item: LLAMA.drafted in item and LLAMA.accepted in item)
    if not requests.figures:
        return None
    num = len(requests.figures)
    run = ImportedRun("llama.cpp", f"{_counted(num, 'response')} of llama-server", requests=requests.ids)
    for ours, theirs in ((DRAFTED, LLAMA.drafted), (ACCEPTED, LLAMA.accepted)):
        run.counts[ours] = sum(amount(figure[theirs]) for figure in requests.figures)
    run.notices.append("llama-server's responses count no steps: the acceptance length is unknown")
    return run


def read_aiperf(value: Any) -> ImportedRun | None:
    """AIPerf's aggregates, each with its pooled histogram of accepted drafted tokens."""
    name = "pooled_spec_decode_acceptance_histogram"
    reports = [next((report for report in _walk(item) if name in report), None) for item in _items(value)]
    known = [report for report in reports if report is not None]
    if not known:
        return None
    run = ImportedRun("aiperf", "report of AIPerf" if len(known) == 1 else f"{len(known)} reports of AIPerf")
    for report in known:
        histogram = _histogram(report[name])
        drafted = (report.get("total_draft_tokens") or {}).get("avg")
        accepted = sum(kept * num for kept, num in histogram.items())
        run.add({DRAFTS: sum(histogram.values()), DRAFTED: _known(drafted), ACCEPTED: accepted})
        run.add_histogram(histogram)
    if DRAFTED in run.partial:
        run.partial.discard(DRAFTED)
        run.counts.pop(DRAFTED, None)
        run.notices.append("AIPerf's histogram counts no drafted tokens: the acceptance rate is unknown")
    if len(known) == 1:
        averages = {figure: known[0][figure].get("avg") for figure in _AIPERF_LENGTHS if figure in known[0]}
        run.reported = _numbers(averages, tuple(averages))
        run.definitions = {figure: _AIPERF_LENGTHS[figure] for figure in run.reported}
    return run


class _Requests:
    """The figures of each request in a JSON document; a stream's chunks are one request, whose last figures count.

    Args:
        document: a file's JSON value.
        is_figures: whether a mapping holds the figures of a request.

    Attributes:
        figures: of each request, or each of its choices.
        ids: of the requests that have one.
    """

    def __init__(self, document: Any, is_figures: Callable[[Mapping[str, Any]], bool]) -> None:
        self.ids: set[str] = set()
        self._num_ended: dict[tuple[Any, Any], int] = {}
        last = dict[tuple[Any, ...], Mapping[str, Any]]()
        waiting: list[tuple[Any, tuple[Any, ...]]] = [(document, ())]
        while waiting:
            value, place = waiting.pop()
            if isinstance(value, Mapping):
                place = self._place(value, place)
                if is_figures(value):
                    last[place] = value
                    self.ids |= {place[1]} if place[:1] == ("id",) else set()
                waiting += reversed([(inner, (*place, key)) for key, inner in value.items()])
            elif isinstance(value, Sequence) and not isinstance(value, str):
                is_inside = place[:1] == ("id",)
                waiting += reversed(
                    [(inner, (*place, _index(inner, i) if is_inside else i)) for i, inner in enumerate(value)]
                )
        self.figures = list(last.values())

    def _place(self, value: Mapping[str, Any], place: tuple[Any, ...]) -> tuple[Any, ...]:
        """Place of a mapping: its request's id, else the place given.

        A chunk of llama-server's own API has no id, and `stop` is true in the last one.
        """
        request = _request_id(value)
        if request is not None:
            return ("id", request)
        if not isinstance(value.get("stop"), bool):
            return place
        slot = value.get("id_slot"), value.get("index")
        number = self._num_ended.get(slot, 0)
        self._num_ended[slot] = number + value["stop"]
        return ("chunk", *slot, number)


def request_ids(value: Any) -> set[str]:
    """Ids of the requests in a JSON value."""
    return {request for item in _walk(value) if (request := _request_id(item)) is not None}


def _request_id(item: Mapping[str, Any]) -> str | None:
    """A response's or request's own id."""
    ids = (item.get(name) for name in ("id", "request_id", "response_id"))
    return next((str(value) for value in ids if isinstance(value, str | int) and not isinstance(value, bool)), None)


def _index(choice: Any, place: int) -> Any:
    """The number of a choice, which may come in a chunk of its own, or the place in a list."""
    index = choice.get("index") if isinstance(choice, Mapping) else None
    return index if isinstance(index, int) else place


def _items(value: Any) -> list[Mapping[str, Any]]:
    """The mappings of a file: its one value, or those of its list or lines."""
    many = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    return [item for item in many if isinstance(item, Mapping)]


def _walk(value: Any) -> Iterator[Mapping[str, Any]]:
    """Every mapping in a JSON value, however deep."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, Mapping):
            yield item
            waiting += reversed(list(item.values()))
        elif isinstance(item, Sequence) and not isinstance(item, str):
            waiting += reversed(item)


def _counted(num: int, noun: str) -> str:
    return f"{num} {noun}" if num == 1 else f"{num} {noun}s"


def _known(value: Any) -> float | None:
    """Convert a count to a number; None stays None."""
    return None if value is None else amount(value)


def _histogram(steps: Any) -> dict[int, float]:
    """Steps by how many drafted tokens they accepted, from a list or a mapping with numbers as keys."""
    if isinstance(steps, Mapping):
        return {int(kept): amount(count) for kept, count in steps.items()}
    if isinstance(steps, Sequence) and not isinstance(steps, str):
        return {kept: amount(count) for kept, count in enumerate(steps)}
    return {}


def _numbers(result: Mapping[str, Any], names: Sequence[str]) -> dict[str, float]:
    """The tool's own figures; one that is no number, such as NaN, is left out."""
    figures = {name: float(result[name]) for name in names if isinstance(result.get(name), int | float)}
    return {name: figure for name, figure in figures.items() if isfinite(figure)}
