"""A measurement as one page of HTML, made from its document alone: no script, nothing fetched, all text escaped."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from importlib.resources import files
from typing import Any

from specdec_cli.measure.documents.audit import AuditDocument
from specdec_cli.quantities import counted
from specdec_cli.report.audit import audit_facts, audit_tables, verdict_words
from specdec_cli.report.bench import bench_tables, lossless_words
from specdec_cli.report.columns import PageTable, origin
from specdec_cli.report.compare_drafts import compare_tables
from specdec_cli.report.endpoint import endpoint_facts, endpoint_findings, endpoint_tables
from specdec_cli.report.plot import inline_svgs, panels_of, subject
from specdec_cli.report.recommendation import recommendation_words, size_name
from specdec_cli.report.sweep_k import sweep_tables
from specdec_cli.report.train import evaluations_table, train_facts, train_findings
from specdec_cli.text.printable import printable
from specdec_cli.train.documents import TrainDocument

Document = Mapping[str, Any]
AUDIT, TRAIN = AuditDocument.schema_name, TrainDocument.schema_name


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
    return [recommendation_words(at_size["recommended"], size_name(at_size, len(by_size) > 1)) for at_size in by_size]


def facts(document: Document) -> list[tuple[str, str]]:
    """How it was measured, each with its name."""
    if "endpoint" in document:
        return endpoint_facts(document)
    if document["schema"] == AUDIT:
        return audit_facts(document)
    if document["schema"] == TRAIN:
        return train_facts(document)
    workload, plan = document["workload"], document["plan"]
    sizes = ", ".join(map(str, plan.get("batch_sizes", [plan["batch_size"]])))
    passes = f"{plan['passes']} passes, {counted(plan['repeats'], 'repeat')}, batch {sizes}, order {plan['order']}"
    return [
        ("workload", f"{counted(workload['num_prompts'], 'prompt')} of {workload['dataset']}"),
        ("plan", f"{passes}{', interrupted' if plan['interrupted'] else ''}"),
        ("load", _load(document["machine"])),
        *origin(document),
    ]


def _load(machine: Mapping[str, Any]) -> str:
    """The load before and after, and what other processes did to the passes."""
    cores = counted(machine["num_cores"], "core")
    load = f"{machine['load_before']:.1f} before, {machine['load_after']:.1f} after, {cores}"
    if machine.get("lost_share") is None:
        return load
    interrupted = f"{machine['num_interrupted_passes']} interrupted, {machine['num_discarded_passes']} discarded"
    return f"{load}; passes: {interrupted}, {machine['lost_share']:.1%} of their time lost to other processes"


_TABLES: Mapping[str, Callable[[Document], Iterator[PageTable]]] = {
    AUDIT: lambda document: iter(audit_tables(document)),
    "specdec.bench/1": bench_tables,
    "specdec.sweep-k/1": sweep_tables,
    "specdec.compare-drafts/1": compare_tables,
    "specdec.bench-endpoint/1": endpoint_tables,
    TRAIN: lambda document: iter([evaluations_table(document)]),
}
