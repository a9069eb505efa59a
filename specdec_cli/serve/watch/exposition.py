"""The Prometheus text of the server's numbers.

Names, labels and meanings are those of vLLM V1 ("Production Metrics" and `docs/design/metrics.md` in its
documentation, its reference Grafana dashboard), so that what reads them reads this too. What vLLM has no name for
(`step_seconds`, `draft_failures`, `requests_refused`, `spec_decode_num_draft_tokens_per_pos`, what counts trees) is
named in its manner.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from specdec_cli.serve.watch.histogram import HISTOGRAMS

if TYPE_CHECKING:
    from specdec_cli.serve.watch.metrics import Metrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def exposition(models: Sequence[Metrics], prefix: str) -> tuple[bytes, str]:
    """The text of these models' numbers, and its content type."""
    registry = CollectorRegistry()
    registry.register(_Models(models, prefix))
    return generate_latest(registry), CONTENT_TYPE


class _Models(Collector):
    """Makes families of the models' plain numbers when the registry asks."""

    def __init__(self, models: Sequence[Metrics], prefix: str) -> None:
        self._models = models
        self._prefix = prefix
        self._families: dict[str, Metric] = {}

    def collect(self) -> Iterator[Metric]:
        self._families = {}
        for model in self._models:
            with model.lock:
                self._state(model)
                self._tokens(model)
                self._speculation(model)
                self._histograms(model)
        yield from self._families.values()

    def _state(self, model: Metrics) -> None:
        self._gauge(model, "num_requests_running", model.num_running, "Requests in the running batch.")
        self._gauge(model, "num_requests_waiting", model.num_waiting, "Requests that wait to be scheduled.")
        self._gauge(model, "kv_cache_usage_perc", model.kv_cache_usage, "Share of the KV blocks in use; 1 is all.")
        help_text = "Times that a request gave its KV blocks back and computed them again later."
        self._count(model, "num_preemptions", model.num_preemptions, help_text)
        for reason, count in model.num_finished.items():
            self._count(model, "request_success", count, "Requests that ended, by why.", finished_reason=reason)
        for status, count in sorted(model.num_refused.items()):
            help_text = "Requests answered with an error status instead of being queued."
            self._count(model, "requests_refused", count, help_text, status=str(status))

    def _tokens(self, model: Metrics) -> None:
        self._count(model, "prompt_tokens", model.num_prompt_tokens, "Prompt tokens of requests that began decoding.")
        self._count(model, "prefix_cache_queries", model.num_prompt_tokens, "Prompt tokens looked up in the cache.")
        self._count(model, "prefix_cache_hits", model.num_cached_tokens, "Prompt tokens whose KV was there already.")
        self._count(model, "generation_tokens", model.num_generation_tokens, "Tokens that reached an output.")

    def _speculation(self, model: Metrics) -> None:
        counts = model.speculative
        name = "spec_decode_num_"
        self._count(model, f"{name}drafts", counts.num_drafts, "Verifications that had a drafted token.")
        self._count(model, f"{name}draft_tokens", counts.num_draft_tokens, "Tokens drafted and verified.")
        nodes_text = "Tokens drafted and verified, siblings in trees counted."
        self._count(model, f"{name}draft_nodes", counts.num_draft_nodes, nodes_text)
        self._count(model, f"{name}accepted_tokens", counts.num_accepted_tokens, "Drafted tokens that were kept.")
        for position, count in enumerate(counts.accepted_at_least):
            help_text = "Drafted tokens that were kept, by their place in the draft from 0."
            self._count(model, f"{name}accepted_tokens_per_pos", count, help_text, position=str(position))
        for position, count in enumerate(counts.drafted_at_least):
            help_text = "Tokens drafted and verified, by their place in the draft from 0."
            self._count(model, f"{name}draft_tokens_per_pos", count, help_text, position=str(position))
        for rank, (tried, accepted) in enumerate(counts.by_rank, start=1):
            help_text = "Places of drafted trees with so many alternatives that the accepted tokens reached."
            self._count(model, f"{name}alternatives_per_rank", tried, help_text, rank=str(rank))
            help_text = "Tokens of drafted trees that were kept, by their rank among the alternatives from 1."
            self._count(model, f"{name}accepted_tokens_per_rank", accepted, help_text, rank=str(rank))
        for draft, count in model.draft_failures().items():
            self._count(model, "draft_failures", count, "Steps in which a drafter failed.", draft=draft)
        for part in ("draft", "verify", "overhead"):
            seconds = getattr(counts, f"{part}_seconds")
            self._count(model, "step_seconds", seconds, "Seconds that steps took, by part.", part=part)

    def _histograms(self, model: Metrics) -> None:
        for name, (_, help_text) in HISTOGRAMS.items():
            full, labels = f"{self._prefix}:{name}", ("model_name",)
            family = self._families.setdefault(full, HistogramMetricFamily(full, help_text, labels=labels))
            assert isinstance(family, HistogramMetricFamily), "a name has one kind"
            histogram = model.histograms[name]
            family.add_metric((model.model_name,), histogram.cumulative(), histogram.sum)

    def _gauge(self, model: Metrics, name: str, value: float, help_text: str) -> None:
        full = f"{self._prefix}:{name}"
        family = self._families.setdefault(full, GaugeMetricFamily(full, help_text, labels=("model_name",)))
        assert isinstance(family, GaugeMetricFamily), "a name has one kind"
        family.add_metric((model.model_name,), value)

    def _count(self, model: Metrics, name: str, value: float, help_text: str, **label: str) -> None:
        full, labels = f"{self._prefix}:{name}", ("model_name", *label)
        family = self._families.setdefault(full, CounterMetricFamily(full, help_text, labels=labels))
        assert isinstance(family, CounterMetricFamily), "a name has one kind"
        family.add_metric((model.model_name, *label.values()), value)
