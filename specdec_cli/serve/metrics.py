"""The server's counters: as Prometheus text under vLLM's names, and as plain values for the terminal's table.

The engine's thread adds to plain numbers and to prometheus_client's histograms; nothing is formatted before it is
requested. Names, labels and meanings are those of vLLM V1 ("Production Metrics" and `docs/design/metrics.md` in its
documentation, its reference Grafana dashboard), so that what reads them reads this too. What vLLM has no name for
(`step_seconds`, `draft_failures`, `requests_refused`, `spec_decode_num_draft_tokens_per_pos`, what counts trees) is
named in its manner.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from specdec_cli.engine.jobs.snapshot import Snapshot
from specdec_cli.events import SpeculativeCounts
from specdec_cli.serve.acceptance_watch import AcceptanceWatch

if TYPE_CHECKING:
    from specdec_cli.engine.jobs.records import JobRecord
    from specdec_cli.events import Stepped

logger = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FINISHED_REASONS = ("stop", "length", "abort", "error")
_TIMES = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0),
    *(30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_INTERVALS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0),
    *(7.5, 10.0, 20.0, 40.0, 80.0),
)
_COUNTS = tuple(float(mantissa * 10**exponent) for exponent in range(6) for mantissa in (1, 2, 5))
_STEP_TOKENS = (1.0, *(float(2**exponent) for exponent in range(3, 15)))

_HISTOGRAMS: Mapping[str, tuple[tuple[float, ...], str]] = {
    "time_to_first_token_seconds": (_TIMES, "Seconds from a request's arrival to its first token."),
    "inter_token_latency_seconds": (_INTERVALS, "Seconds between a request's outputs; one may be several tokens."),
    "request_time_per_output_token_seconds": (_INTERVALS, "A finished request's seconds per token after its first."),
    "e2e_request_latency_seconds": (_TIMES, "Seconds from a request's arrival to its end."),
    "request_queue_time_seconds": (_TIMES, "Seconds that a request waited to be scheduled."),
    "request_inference_time_seconds": (_TIMES, "Seconds from a request's scheduling to its last token."),
    "request_prefill_time_seconds": (_TIMES, "Seconds from a request's scheduling to its first token."),
    "request_decode_time_seconds": (_TIMES, "Seconds from a request's first token to its last."),
    "request_prompt_tokens": (_COUNTS, "Prompt tokens of a finished request."),
    "request_generation_tokens": (_COUNTS, "Generated tokens of a finished request."),
    "iteration_tokens_total": (_STEP_TOKENS, "Tokens of a step: prompt tokens fed and tokens generated."),
}


class Metrics:
    """The numbers of one model's engine; an `Observer`. Every method may be called from any thread.

    Args:
        model_name: the label `model_name` of every series.
        prefix: stands before each name with a colon; `vllm` serves dashboards that were made for vLLM.

    Attributes:
        draft_failures: gives how many steps each drafter failed in; the engine counts those itself.
    """

    def __init__(self, model_name: str, prefix: str = "specdec") -> None:
        self.model_name = model_name
        self.prefix = prefix
        self.lock = threading.Lock()
        self.speculative = SpeculativeCounts()
        self.acceptance = AcceptanceWatch()
        self.histogram_families = [
            Histogram(f"{prefix}:{name}", text, ("model_name",), buckets=bounds, registry=None)
            for name, (bounds, text) in _HISTOGRAMS.items()
        ]
        children = (family.labels(model_name) for family in self.histogram_families)
        self.histograms = dict(zip(_HISTOGRAMS, children, strict=True))
        self.num_finished = Counter(dict.fromkeys(FINISHED_REASONS, 0))
        self.num_refused: Counter[int] = Counter()
        self.draft_failures: Callable[[], Mapping[str, int]] = dict
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.num_generation_tokens = 0
        self.num_running = 0
        self.num_queued = 0
        self.num_engine_waiting = 0
        self.num_blocks_used = 0
        self.num_blocks = 0
        self._num_open = 0

    @property
    def num_waiting(self) -> int:
        """Requests that wait, in the bridge or in the engine."""
        return self.num_queued + self.num_engine_waiting

    @property
    def kv_cache_usage(self) -> float:
        """Share of the KV blocks that are taken, 0 to 1."""
        return self.num_blocks_used / self.num_blocks if self.num_blocks else 0.0

    def queued(self, num_waiting: int) -> None:
        """A job waits; `num_waiting` with it."""
        with self.lock:
            self._num_open += 1
            self.num_queued = num_waiting

    def stepped(self, event: Stepped, num_queued: int) -> None:
        """Count a step's tokens and drafts, and take over the engine's state."""
        with self.lock:
            num_tokens, unusual = 0, None
            for emitted in event.emitted:
                self.speculative.add(emitted)
                num_tokens += len(emitted.tokens)
                unusual = self.acceptance.add(emitted.num_drafted, emitted.num_accepted) or unusual
            self.speculative.add_seconds(event)
            self.num_generation_tokens += num_tokens
            self.num_preemptions += event.num_preemptions
            self.histograms["iteration_tokens_total"].observe(event.num_prefill_tokens + num_tokens)
            self.num_running, self.num_engine_waiting = event.num_running, event.num_waiting
            self.num_queued = num_queued
            self.num_blocks_used, self.num_blocks = event.num_blocks_used, event.num_blocks
        if unusual is not None:
            logger.warning("%s", unusual, extra={"model": self.model_name})

    def emitted(self, record: JobRecord, num_tokens: int, seconds_since_last: float | None) -> None:
        """A job got tokens: its first ones, which its prompt counts with, or more after an interval."""
        del num_tokens  # counted with the step
        with self.lock:
            if seconds_since_last is not None:
                self.histograms["inter_token_latency_seconds"].observe(seconds_since_last)
                return
            self.num_prompt_tokens += record.num_prompt_tokens
            self.num_cached_tokens += record.num_cached_tokens
            if record.first_token is not None:
                self.histograms["time_to_first_token_seconds"].observe(record.first_token - record.arrived)

    def ended(self, record: JobRecord) -> None:
        """A job finished, was aborted or failed: its times and sizes."""
        with self.lock:
            self.num_finished[record.finish_reason or "error"] += 1
            for name, value in intervals(record).items():
                self.histograms[name].observe(value)
            self.histograms["request_prompt_tokens"].observe(record.num_prompt_tokens)
            self.histograms["request_generation_tokens"].observe(record.num_output_tokens)
            self._close(record)

    def refused(self, status: int) -> None:
        """A request was answered with an error status instead of being queued."""
        with self.lock:
            self.num_refused[status] += 1

    def snapshot(self) -> Snapshot:
        """The numbers of this moment, for the terminal's table."""
        with self.lock:
            counts = self.speculative
            return Snapshot(
                num_running=self.num_running,
                num_waiting=self.num_waiting,
                kv_cache_usage=self.kv_cache_usage,
                num_finished=self.num_finished["stop"] + self.num_finished["length"],
                num_aborted=self.num_finished["abort"],
                num_failed=self.num_finished["error"],
                num_refused=self.num_refused.total(),
                num_prompt_tokens=self.num_prompt_tokens,
                num_generation_tokens=self.num_generation_tokens,
                num_drafts=counts.num_drafts,
                num_draft_tokens=counts.num_draft_tokens,
                num_draft_nodes=counts.num_draft_nodes,
                num_accepted_tokens=counts.num_accepted_tokens,
                num_draft_failures=sum(self.draft_failures().values()),
            )

    def render(self, others: Sequence[Metrics] = ()) -> tuple[bytes, str]:
        """The page that Prometheus scrapes, and its content type.

        Args:
            others: of further models in this process, under the same prefix.
        """
        registry = CollectorRegistry()
        registry.register(_Models([self, *others]))
        return generate_latest(registry), CONTENT_TYPE

    def series(self) -> Iterator[Series]:
        """Gauges and counters, and what they count now."""
        counts, of_drafts = self.speculative, "spec_decode_num_"
        yield _gauge("num_requests_running", "Requests in the running batch.", self.num_running)
        yield _gauge("num_requests_waiting", "Requests that wait to be scheduled.", self.num_waiting)
        yield _gauge("kv_cache_usage_perc", "Share of the KV blocks in use; 1 is all.", self.kv_cache_usage)
        text = "Times that a request gave its KV blocks back and computed them again later."
        yield _count("num_preemptions", text, self.num_preemptions)
        yield _counts("request_success", "Requests that ended, by why.", "finished_reason", self.num_finished)
        text = "Requests answered with an error status instead of being queued."
        yield _counts("requests_refused", text, "status", dict(sorted(self.num_refused.items())))
        yield _count("prompt_tokens", "Prompt tokens of requests that began decoding.", self.num_prompt_tokens)
        yield _count("prefix_cache_queries", "Prompt tokens looked up in the cache.", self.num_prompt_tokens)
        yield _count("prefix_cache_hits", "Prompt tokens whose KV was there already.", self.num_cached_tokens)
        yield _count("generation_tokens", "Tokens that reached an output.", self.num_generation_tokens)
        yield _count(f"{of_drafts}drafts", "Verifications that had a drafted token.", counts.num_drafts)
        yield _count(f"{of_drafts}draft_tokens", "Tokens drafted and verified.", counts.num_draft_tokens)
        text = "Tokens drafted and verified, siblings in trees counted."
        yield _count(f"{of_drafts}draft_nodes", text, counts.num_draft_nodes)
        yield _count(f"{of_drafts}accepted_tokens", "Drafted tokens that were kept.", counts.num_accepted_tokens)
        text = "Drafted tokens that were kept, by their place in the draft from 0."
        kept = dict(enumerate(counts.accepted_at_least))
        yield _counts(f"{of_drafts}accepted_tokens_per_pos", text, "position", kept)
        text = "Tokens drafted and verified, by their place in the draft from 0."
        drafted = dict(enumerate(counts.drafted_at_least))
        yield _counts(f"{of_drafts}draft_tokens_per_pos", text, "position", drafted)
        text = "Places of drafted trees with so many alternatives that the accepted tokens reached."
        tried = {rank: num for rank, (num, _) in enumerate(counts.by_rank, start=1)}
        yield _counts(f"{of_drafts}alternatives_per_rank", text, "rank", tried)
        text = "Tokens of drafted trees that were kept, by their rank among the alternatives from 1."
        accepted = {rank: num for rank, (_, num) in enumerate(counts.by_rank, start=1)}
        yield _counts(f"{of_drafts}accepted_tokens_per_rank", text, "rank", accepted)
        rates = {"recent": self.acceptance.recent, "usual": self.acceptance.usual}
        known = {name: rate for name, rate in rates.items() if rate is not None and self.acceptance.usual is not None}
        text = "Accepted share of drafted tokens, of the last window and on average before it."
        yield GaugeMetricFamily, "spec_decode_acceptance_rate", text, "window", known
        text = "Windows of drafted tokens with an acceptance far below or above the server's own history."
        yield _counts("spec_decode_acceptance_alarms", text, "direction", self.acceptance.num_alarms)
        yield _counts("draft_failures", "Steps in which a drafter failed.", "draft", self.draft_failures())
        seconds = {part: getattr(counts, f"{part}_seconds") for part in ("draft", "verify", "overhead")}
        yield _counts("step_seconds", "Seconds that steps took, by part.", "part", seconds)

    def _close(self, record: JobRecord) -> None:
        """Take a job that ended out of the running and waiting ones; the next step says how many there are."""
        self._num_open = max(0, self._num_open - 1)
        if not self._num_open:
            self.num_running = self.num_queued = self.num_engine_waiting = self.num_blocks_used = 0
        elif record.first_token is not None:
            self.num_running = max(0, self.num_running - 1)


def intervals(record: JobRecord) -> dict[str, float]:
    """A job's times in seconds by their series' names; what it did not come to is left out."""
    times: dict[str, float] = {}
    if record.finished is not None:
        times["e2e_request_latency_seconds"] = record.finished - record.arrived
    if record.scheduled is None:
        return times
    times["request_queue_time_seconds"] = record.scheduled - record.arrived
    if record.first_token is None or record.last_token is None:
        return times
    decode = record.last_token - record.first_token
    times["request_prefill_time_seconds"] = record.first_token - record.scheduled
    times["request_decode_time_seconds"] = decode
    times["request_inference_time_seconds"] = record.last_token - record.scheduled
    if record.num_output_tokens > 1:
        times["request_time_per_output_token_seconds"] = decode / (record.num_output_tokens - 1)
    return times


Series = tuple[type[CounterMetricFamily] | type[GaugeMetricFamily], str, str, str, Mapping[Any, float]]
"""Kind, name, help, a label beside the model's name (or none, ""), and the value by that label's values."""


def _gauge(name: str, text: str, value: float) -> Series:
    return GaugeMetricFamily, name, text, "", {"": value}


def _count(name: str, text: str, value: float) -> Series:
    return CounterMetricFamily, name, text, "", {"": value}


def _counts(name: str, text: str, label: str, values: Mapping[Any, float]) -> Series:
    return CounterMetricFamily, name, text, label, values


class _Models(Collector):
    """Makes Prometheus' families of the models' numbers when the registry asks.

    Args:
        models: at least one; all have the same prefix.
    """

    def __init__(self, models: Sequence[Metrics]) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Any] = {}
        for model in self._models:
            with model.lock:
                for kind, name, text, label, values in model.series():
                    full, labels = f"{model.prefix}:{name}", ("model_name", label) if label else ("model_name",)
                    if values:
                        family = families.setdefault(full, kind(full, text, labels=labels))
                    for key, value in values.items():
                        family.add_metric((model.model_name, str(key))[: len(labels)], value)
                for histogram in model.histogram_families:
                    (family,) = histogram.collect()
                    samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
                    family.samples = []
                    families.setdefault(family.name, family).samples += samples
        yield from families.values()
