"""A measurement as one page of HTML, made from its document alone: no script, nothing fetched, all text escaped."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from importlib.resources import files
from typing import Any

from specdec_cli.report.audit import SCHEMA as AUDIT
from specdec_cli.report.audit import audit_facts, audit_tables, verdict_words
from specdec_cli.report.bench import bench_tables, lossless_words
from specdec_cli.report.compare_drafts import compare_tables
from specdec_cli.report.endpoint_pages import endpoint_facts, endpoint_findings, endpoint_tables
from specdec_cli.report.plot import inline_svgs, panels_of, subject
from specdec_cli.report.recommendation import recommendation_words, size_name
from specdec_cli.report.sweep_k import HEADS, SIZE_HEADS, depth_rows, size_rows
from specdec_cli.report.sweep_trees import TREE_HEADS, tree_rows
from specdec_cli.report.table import PageTable
from specdec_cli.report.train_pages import SCHEMA as TRAIN
from specdec_cli.report.train_pages import train_facts, train_findings, train_tables
from specdec_cli.text.printable import printable

Document = Mapping[str, Any]


def html(document: Document) -> str:
    """The page.

    Raises:
        UsageError: no document of a measurement.
    """
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    panels_of(document)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.finalize = _shown
    source = files("specdec_cli.report").joinpath("templates", "report.html").read_text(encoding="utf-8")
    return environment.from_string(source).render(
        title=str(document["schema"]).partition("/")[0].replace(".", " "),
        subject=subject(document),
        document=document,
        findings=findings(document),
        lossless=lossless_words(document["lossless"]) if "lossless" in document else None,
        pictures=[(title, Markup(svg)) for title, svg in inline_svgs(document)],
        tables=tables(document),
        facts=facts(document),
        recipe=json.dumps(document["recipe"], indent=2, ensure_ascii=False),
    )


def _shown(value: object) -> object:
    """Text without control characters; markup that is one already stays."""
    return printable(value) if type(value) is str else value


def tables(document: Document) -> list[PageTable]:
    """The measurement's subject."""
    return list(_TABLES[document["schema"]](document))


def findings(document: Document) -> list[str]:
    """The findings, the most important first."""
    if "endpoint" in document:
        return endpoint_findings(document)
    if document["schema"] == AUDIT:
        return [verdict_words(document)]
    if document["schema"] == TRAIN:
        return train_findings(document)
    if "findings" in document:
        return list(document["findings"])
    if "recommendation" in document:
        return [document["recommendation"]]
    by_size = document["by_batch_size"]
    return [recommendation_words(one["recommended"], size_name(one, len(by_size) > 1)) for one in by_size]


def facts(document: Document) -> list[tuple[str, str]]:
    """How it was measured, each with its name."""
    if "endpoint" in document:
        return endpoint_facts(document)
    if document["schema"] == AUDIT:
        return audit_facts(document)
    if document["schema"] == TRAIN:
        return train_facts(document)
    workload, plan = document["workload"], document["plan"]
    machine, environment = document["machine"], document["environment"]
    sizes = ", ".join(map(str, plan.get("batch_sizes", [plan["batch_size"]])))
    repeats = "1 repeat" if plan["repeats"] == 1 else f"{plan['repeats']} repeats"
    passes = f"{plan['passes']} passes, {repeats}, batch {sizes}, order {plan['order']}"
    named = ("platform", "device", "dtype", "threads", "torch", "transformers", "python")
    return [
        ("workload", f"{workload['num_prompts']} prompts of {workload['dataset']}"),
        ("plan", f"{passes}{', interrupted' if plan['interrupted'] else ''}"),
        ("machine", ", ".join(f"{name} {environment[name]}" for name in named if environment.get(name) is not None)),
        ("load", _load(machine)),
        ("made", f"{document['created']} by specdec {document['specdec_version']}"),
    ]


def _load(machine: Mapping[str, Any]) -> str:
    """The load before and after, and what other processes did to the passes."""
    found = f"{machine['load_before']:.1f} before, {machine['load_after']:.1f} after, {machine['num_cores']} cores"
    if machine.get("lost_share") is None:
        return found
    interrupted = f"{machine['num_interrupted_passes']} interrupted, {machine['num_discarded_passes']} discarded"
    return f"{found}; passes: {interrupted}, {machine['lost_share']:.1%} of their time lost to other processes"


def _sweep_tables(document: Document) -> Iterator[PageTable]:
    by_size = document["by_batch_size"]
    several = len(by_size) > 1
    if several:
        title = f"Batch sizes (--k-by-batch {document['k_by_batch']})"
        yield PageTable(title, SIZE_HEADS, list(size_rows(by_size)))
    for place, found in enumerate(by_size):
        at = f", batch size {found['batch_size']}" if several else ""
        textbook = document["iid"]["speedup_by_k"] if place == 0 else {}
        yield from _depth_tables(found, textbook, at)


def _depth_tables(found: Mapping[str, Any], iid: Mapping[str, float | None], at: str) -> Iterator[PageTable]:
    """One batch size: every k, and what steps cost."""
    yield PageTable(f"Every k{at}", HEADS, list(depth_rows(found, iid)))
    if trees := list(tree_rows(found)):
        yield PageTable(f"Trees{at}", TREE_HEADS, trees)
    costs = found["costs"]
    seconds = [("draft, a token", costs["draft_seconds_per_token"]), ("engine, a step", costs["overhead_seconds"])]
    seconds += [
        (f"target, {n + 1} row{'s' if n else ''}", one) for n, one in enumerate(costs["target_seconds_by_rows"])
    ]
    yield PageTable(f"Costs{at}", ("what", "milliseconds"), [[name, f"{1000 * one:.3f}"] for name, one in seconds])


_TABLES: Mapping[str, Callable[[Document], Iterator[PageTable]]] = {
    AUDIT: lambda document: iter(audit_tables(document)),
    "specdec.bench/1": bench_tables,
    "specdec.sweep-k/1": _sweep_tables,
    "specdec.compare-drafts/1": compare_tables,
    "specdec.bench-endpoint/1": endpoint_tables,
    TRAIN: train_tables,
}
