"""A server's counters of speculation: its Prometheus page before and after a run, and the difference.

Names that are known, each as its engine's source spells it (a trailing `_total` apart):

- vLLM, `vllm/v1/spec_decode/metrics.py` (0.32): counters `vllm:spec_decode_num_drafts`, `…_num_draft_tokens`,
  `…_num_accepted_tokens` and `…_num_accepted_tokens_per_pos{position}`, positions from 0.
- llama.cpp, `tools/server/README.md` since pull request 26389: the same four behind `llamacpp:`; before it, nothing.
- specdec's server: the same four behind `specdec:`; of trees also `…_num_draft_nodes`,
  `…_num_alternatives_per_rank{rank}` and `…_num_accepted_tokens_per_rank{rank}`, ranks from 1.
- TensorRT-LLM, `tensorrt_llm/metrics/collector.py`, on `/prometheus/metrics`: counters
  `trtllm_spec_decode_num_draft_tokens` and `…_num_accepted_tokens`; gauges `…_acceptance_length`, `…_draft_overhead`.
- SGLang, its metrics collector: gauges alone, `sglang:spec_accept_length`, `sglang:spec_accept_rate` and others.

A gauge speaks of the server's last moments, not of this run: it is shown as one, and never turned into a count.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specdec_cli.document import known
from specdec_cli.measure.endpoint.request_counts import AnswerCounts
from specdec_cli.measure.endpoint.server_counts import labelled, statistics

if TYPE_CHECKING:
    from prometheus_client.samples import Sample

PATHS = ("/metrics", "/prometheus/metrics")
PREFIXES = {
    "vllm:": "vllm",
    "sglang:": "sglang",
    "llamacpp:": "llama.cpp",
    "trtllm_": "tensorrt-llm",
    "trtllm:": "tensorrt-llm",
    "specdec:": "specdec",
}
_ABOUT_SPECULATION = ("spec", "draft")
_ABOUT_OUTPUT = ("generation_tokens", "tokens_predicted")
_STARTED = "process_start_time_seconds"
_SETTLE_SECONDS, _SETTLE_TRIES = 0.2, 10

Fetch = Callable[[str], Awaitable[str | None]]


@dataclass(frozen=True, slots=True)
class MetricsPage:
    """A server's metrics at one moment that count speculation or output tokens.

    Args:
        path: where they stand.
        engine: that serves them.
        counters: name without the engine's prefix and without `_total`, a position in braces, to the sum over labels.
        gauges: name, with labels if there are several, to value.
        prefix: the engine's.
        series: name and all labels of each sample of the counters, to its value.
        began: the same, to the time at which the server began to count, where it says so; also when it was started.
        models: that are counted.
        mixed: a sentence's end about why it is no page of one server at one moment; None where it may be.
    """

    path: str
    engine: str
    prefix: str
    counters: dict[str, float] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)
    series: dict[str, float] = field(default_factory=dict)
    began: dict[str, float] = field(default_factory=dict)
    models: tuple[str, ...] = ()
    mixed: str | None = None

    def restarted(self, earlier: MetricsPage) -> bool:
        """Whether it began to count after an earlier page; pages that do not say when are taken to be of one server."""
        return any(self.began.get(name, since) != since for name, since in earlier.began.items())


@dataclass(frozen=True, slots=True)
class Counters:
    """The increase of a server's counters during a run.

    Args:
        page: the server's metrics after the run; None where it has none that are known.
        added: counter to its difference; empty if the server reset its counters.
        notices: sentences about what is missing or odd.
    """

    page: MetricsPage | None
    added: dict[str, float]
    notices: tuple[str, ...]

    @property
    def counted(self) -> AnswerCounts:
        """Counts of all requests of the run together."""
        return AnswerCounts({name: round(value) for name, value in self.added.items()})

    def as_dict(self) -> dict[str, Any] | None:
        """The JSON form; `speculative` has the acceptance statistics, or is null where nothing was counted."""
        if self.page is None:
            return None
        return {
            "engine": self.page.engine,
            "source": self.page.path,
            "speculative": statistics(self.added),
            "gauges": {self.page.prefix + name: known(value) for name, value in self.page.gauges.items()},
            "raw": {self.page.prefix + name: value for name, value in self.added.items()},
        }


async def read_settled(fetch: Fetch, model: str) -> MetricsPage | None:
    """A server's metrics once they stand still: some engines count a moment after the answer is out.

    Args:
        fetch: the text at a path, or None where there is none.
        model: the one to read where a page has samples of several.
    """
    page = await read_page(fetch, model)
    for _ in range(_SETTLE_TRIES):
        if page is None:
            return None
        await asyncio.sleep(_SETTLE_SECONDS)
        last, page = page, await read_page(fetch, model)
        if page is not None and page.counters == last.counters:
            break
    return page


async def read_page(fetch: Fetch, model: str) -> MetricsPage | None:
    """A server's metrics now; None where it has none that are known."""
    for path in PATHS:
        text = await fetch(path)
        page = None if text is None else parse(text, path, model)
        if page is not None:
            return page
    return None


def parse(text: str, path: str, model: str) -> MetricsPage | None:
    """The metrics of a known engine in Prometheus text; None where there are none, or the text is something else."""
    from prometheus_client.parser import text_string_to_metric_families

    try:
        families = list(text_string_to_metric_families(text))
    except (ValueError, KeyError, IndexError):
        return None
    samples = [(family.type, sample) for family in families for sample in family.samples]
    prefix = next((prefix for prefix in PREFIXES for _, sample in samples if sample.name.startswith(prefix)), None)
    if prefix is None:
        return None
    ours = [(kind, sample) for kind, sample in samples if sample.name.startswith(prefix)]
    if any(sample.labels.get("model_name") == model for _, sample in ours):
        ours = [(kind, sample) for kind, sample in ours if sample.labels.get("model_name", model) == model]
    models = {sample.labels["model_name"]: None for _, sample in ours if "model_name" in sample.labels}
    page = MetricsPage(path, PREFIXES[prefix], prefix, models=tuple(models), mixed=_mixed(samples))
    for kind, sample in ours:
        _keep(page, kind, sample, [other for _, other in ours if other.name == sample.name])
    for _, sample in samples:
        if sample.name == _STARTED:
            page.began[f"{_STARTED}{_labelled(sample)}"] = sample.value
    return page


def _mixed(samples: Sequence[tuple[str, Sample]]) -> str | None:
    """End of a sentence about samples of several engines or of several moments; None without any."""
    ours = [sample for _, sample in samples if sample.name.startswith(tuple(PREFIXES))]
    engines = {engine for prefix, engine in PREFIXES.items() for sample in ours if sample.name.startswith(prefix)}
    if len(engines) > 1:
        return f"metrics of several engines: {', '.join(sorted(engines))}"
    names = [f"{sample.name}{_labelled(sample)}" for sample in ours if _is_of_interest(sample.name)]
    twice = next((name for name, num in Counter(names).items() if num > 1), None)
    return None if twice is None else f"`{twice}` several times, as a file of several dumps does"


def _keep(page: MetricsPage, kind: str, sample: Sample, alike: Sequence[Sample]) -> None:
    """Add a sample to a page if it counts speculation or output tokens."""
    name = sample.name.removeprefix(page.prefix).removesuffix("_total")
    if not _is_of_interest(name) or name.endswith("_info"):
        return
    labels = _labelled(sample)
    if name.endswith("_created"):
        page.began[f"{name.removesuffix('_created')}{labels}"] = sample.value
    elif kind == "counter" or (kind == "unknown" and sample.name.endswith("_total")):  # a dump without its comments
        label = next((label for label in ("position", "rank") if label in sample.labels), None)
        key = name if label is None else labelled(name, sample.labels[label], label)
        page.counters[key] = page.counters.get(key, 0.0) + sample.value
        page.series[f"{name}{labels}"] = sample.value
    elif kind in ("gauge", "unknown"):
        page.gauges[name if len(alike) == 1 else f"{name}{labels}"] = sample.value


def _is_of_interest(name: str) -> bool:
    return any(word in name for word in (*_ABOUT_SPECULATION, *_ABOUT_OUTPUT))


def _labelled(sample: Sample) -> str:
    """The labels of a sample in braces, always in one order."""
    return "{" + ",".join(f'{label}="{value}"' for label, value in sorted(sample.labels.items())) + "}"


def difference(before: MetricsPage | None, after: MetricsPage | None, num_tokens: int | None) -> Counters:
    """The increase of a server's counters during a run.

    Args:
        before: the metrics before it.
        after: those after it.
        num_tokens: output tokens of the run's requests, or None where they are not known.
    """
    if before is None or after is None:
        words = "says nothing about speculation" if before is None else "went away during the run"
        return Counters(None, {}, (f"the server's {PATHS[0]} {words}: acceptance is unknown",))
    keys = [*after.counters, *(key for key in before.counters if key not in after.counters)]
    added = {key: after.counters.get(key, 0.0) - before.counters.get(key, 0.0) for key in keys}
    if any(value < 0 for value in added.values()) or after.restarted(before):
        return Counters(after, {}, ("the server reset its counters during the run: acceptance is unknown",))
    return Counters(after, added, (*silence(after, added), *_strangers(added, num_tokens)))


def silence(page: MetricsPage, added: Mapping[str, float]) -> list[str]:
    """A sentence where counters tell nothing about speculation; none where they do."""
    if statistics(added) is not None:
        return []
    gauges = [name for name in page.gauges if any(word in name for word in _ABOUT_SPECULATION)]
    if gauges:
        return [f"{page.engine} has gauges of speculation alone: they speak of its last moments, not of this run"]
    return [f"the server's {page.path} says nothing about speculation: acceptance is unknown"]


def _strangers(added: Mapping[str, float], num_tokens: int | None) -> list[str]:
    counted = next((added[name] for name in _ABOUT_OUTPUT if name in added), None)
    if counted is None or num_tokens is None or counted == num_tokens:
        return []
    return [
        f"the server counted {counted:.0f} output tokens while this run's answers had {num_tokens}: "
        "its counters may include other clients"
    ]
