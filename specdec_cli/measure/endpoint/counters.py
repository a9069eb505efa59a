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
from math import isfinite
from typing import TYPE_CHECKING, Any

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
_PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"
_STARTED = "process_start_time_seconds"
_SETTLE_SECONDS, _SETTLE_TRIES = 0.2, 10

Fetch = Callable[[str], Awaitable[str | None]]


@dataclass(frozen=True, slots=True)
class MetricsPage:
    """A server's metrics at one moment, of those that speak of speculation or of the number of output tokens.

    Args:
        path: where they stand.
        engine: whose they are.
        counters: name without the engine's prefix and without `_total`, a position in braces, to the sum over labels.
        gauges: name, with labels if there are several, to value.
        prefix: the engine's.
        series: name and all labels of each sample of the counters, to its value.
        began: the same, to the time at which the server began to count, where it says so; also when it was started.
        models: whose counters they are.
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

    def as_dict(self) -> dict[str, Any] | None:
        """The JSON form; `speculative` has the acceptance statistics, or is null where nothing was counted."""
        if self.page is None:
            return None
        return {
            "engine": self.page.engine,
            "source": self.page.path,
            "speculative": statistics(self.added),
            "gauges": {self.page.prefix + name: _number(value) for name, value in self.page.gauges.items()},
            "raw": {self.page.prefix + name: value for name, value in self.added.items()},
        }


async def read_settled(fetch: Fetch, model: str) -> MetricsPage | None:
    """A server's metrics once they stand still: some engines count a moment after the answer is out.

    Args:
        fetch: the text at a path, or None where there is none.
        model: whose samples count where a page has those of several models.
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
    found = [(family.type, sample) for family in families for sample in family.samples]
    prefix = next((prefix for prefix in PREFIXES for _, sample in found if sample.name.startswith(prefix)), None)
    if prefix is None:
        return None
    ours = [(kind, sample) for kind, sample in found if sample.name.startswith(prefix)]
    if any(sample.labels.get("model_name") == model for _, sample in ours):
        ours = [(kind, sample) for kind, sample in ours if sample.labels.get("model_name", model) == model]
    models = {sample.labels["model_name"]: None for _, sample in ours if "model_name" in sample.labels}
    page = MetricsPage(path, PREFIXES[prefix], prefix, models=tuple(models), mixed=_mixed(found))
    for kind, sample in ours:
        _keep(page, kind, sample, [other for _, other in ours if other.name == sample.name])
    for _, sample in found:
        if sample.name == _STARTED:
            page.began[f"{_STARTED}{_labelled(sample)}"] = sample.value
    return page


def _mixed(found: Sequence[tuple[str, Sample]]) -> str | None:
    """A sentence's end about samples of several engines, or of several moments; None where there are none."""
    known = [sample for _, sample in found if sample.name.startswith(tuple(PREFIXES))]
    engines = {engine for prefix, engine in PREFIXES.items() for sample in known if sample.name.startswith(prefix)}
    if len(engines) > 1:
        return f"metrics of several engines: {', '.join(sorted(engines))}"
    names = [f"{sample.name}{_labelled(sample)}" for sample in known if _is_of_interest(sample.name)]
    twice = next((name for name, num in Counter(names).items() if num > 1), None)
    return None if twice is None else f"`{twice}` several times, as a file of several dumps does"


def _number(value: float) -> float | None:
    """A gauge's value; a server that counted nothing yet may say NaN."""
    return value if isfinite(value) else None


def _keep(page: MetricsPage, kind: str, sample: Sample, alike: Sequence[Sample]) -> None:
    """Add a sample to a page, if it says anything of interest here."""
    name = sample.name.removeprefix(page.prefix).removesuffix("_total")
    if not _is_of_interest(name) or name.endswith("_info"):
        return
    labels = _labelled(sample)
    if name.endswith("_created"):
        page.began[f"{name.removesuffix('_created')}{labels}"] = sample.value
    elif kind == "counter" or (kind == "unknown" and sample.name.endswith("_total")):  # a dump without its comments
        label = next((label for label in ("position", "rank") if label in sample.labels), None)
        key = name if label is None else _at(name, sample.labels[label], label)
        page.counters[key] = page.counters.get(key, 0.0) + sample.value
        page.series[f"{name}{labels}"] = sample.value
    elif kind in ("gauge", "unknown"):
        page.gauges[name if len(alike) == 1 else f"{name}{labels}"] = sample.value


def _is_of_interest(name: str) -> bool:
    return any(word in name for word in (*_ABOUT_SPECULATION, *_ABOUT_OUTPUT))


def _labelled(sample: Sample) -> str:
    """The labels of a sample in braces, always in one order."""
    return "{" + ",".join(f'{label}="{value}"' for label, value in sorted(sample.labels.items())) + "}"


def _at(name: str, value: object, label: str = "position") -> str:
    return f'{name}{{{label}="{value}"}}'


def difference(before: MetricsPage | None, after: MetricsPage | None, num_tokens: int | None) -> Counters:
    """The increase during a run.

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
        anew = "the server reset its counters during the run: acceptance is unknown"
        return Counters(after, {}, (anew,))
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


def statistics(added: Mapping[str, float]) -> dict[str, Any] | None:
    """Acceptance statistics from counters' differences; None without counters, null where one is missing.

    Rates by position need the number of steps that drafted so far, which engines do not count; they follow only
    where every step drafted as much as there are positions. The histogram needs no such thing.
    """
    drafts, drafted, accepted = (
        _count(added, f"spec_decode_num_{name}") for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    if drafts is None and drafted is None and accepted is None:
        return None
    return {
        "num_drafts": drafts,
        "num_draft_tokens": drafted,
        "num_accepted_tokens": accepted,
        "num_emitted_tokens": None,
        "acceptance_rate": accepted / drafted if drafted and accepted is not None else None,
        "acceptance_length": 1 + accepted / drafts if drafts and accepted is not None else None,
        **_positions(drafts, drafted, _by_position(added, accepted)),
        **_trees(added, drafted),
        "draft_seconds": None,
        "verify_seconds": None,
        "overhead_seconds": None,
    }


def _trees(added: Mapping[str, float], drafted: int | None) -> dict[str, Any]:
    """The statistics that only trees have; none where no server counted any."""
    nodes = _count(added, "spec_decode_num_draft_nodes")
    if nodes is None or drafted is None or nodes <= drafted:
        return {}
    name = "spec_decode_num_alternatives_per_rank"
    rates: list[float | None] = []
    while (key := _at(name, len(rates) + 1, "rank")) in added:
        accepted = added.get(_at("spec_decode_num_accepted_tokens_per_rank", len(rates) + 1, "rank"), 0.0)
        rates.append(accepted / added[key] if added[key] else None)
    return {"num_draft_nodes": nodes, "acceptance_by_rank": rates}


def _positions(drafts: int | None, drafted: int | None, reached: Sequence[int] | None) -> dict[str, Any]:
    """The statistics by position, from how often at least 1, 2, … tokens were accepted."""
    names = ("per_position_acceptance_rates", "conditional_acceptance_rates", "acceptance_histogram")
    if drafts is None or reached is None:
        return dict.fromkeys(names)
    at_least = [drafts, *reached]
    histogram = [more - fewer for more, fewer in zip(at_least, [*reached, 0], strict=True)]
    if drafted != drafts * len(reached):
        return dict(zip(names, (None, None, histogram), strict=True))
    return dict(
        zip(names, (_ratios(reached, [drafts] * len(reached)), _ratios(reached, at_least[:-1]), histogram), strict=True)
    )


def _count(added: Mapping[str, float], name: str) -> int | None:
    return round(added[name]) if name in added else None


def _by_position(added: Mapping[str, float], accepted: int | None) -> list[int] | None:
    """How often at least 1, 2, … tokens were accepted; None where the server does not say, or contradicts itself."""
    num = sum(name.startswith(f"{_PER_POSITION}{{") for name in added)
    if not num or any(_at(_PER_POSITION, place) not in added for place in range(num)):
        return None
    reached = [round(added[_at(_PER_POSITION, place)]) for place in range(num)]
    return reached if sum(reached) == accepted else None


def _ratios(numerators: Sequence[int], denominators: Sequence[int]) -> list[float | None]:
    return [above / below if below else None for above, below in zip(numerators, denominators, strict=True)]
