"""A measurement as one page of HTML, made from its document alone: no script, nothing fetched, all text escaped."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from importlib.resources import files
from typing import Any

from specdec_cli.report.audit import SCHEMA as AUDIT
from specdec_cli.report.audit import audit_facts, audit_tables, verdict_words
from specdec_cli.report.bench import AGAINST_HEADS, ARM_HEADS, TASK_HEADS, lossless_words, tree_arms
from specdec_cli.report.compare_drafts import draft_words, tree_drafts, winner_words
from specdec_cli.report.endpoint_pages import endpoint_facts, endpoint_findings, endpoint_tables
from specdec_cli.report.plot import inline_svgs, panels_of, subject
from specdec_cli.report.recommendation import depth_mark, recommendation_words, size_name
from specdec_cli.report.sweep_k import SIZE_HEADS, size_rows
from specdec_cli.report.sweep_trees import TREE_HEADS, tree_rows
from specdec_cli.report.table import NOTHING, PageTable, number, percent
from specdec_cli.report.train_pages import SCHEMA as TRAIN
from specdec_cli.report.train_pages import train_facts, train_findings, train_tables
from specdec_cli.report.trees import tree_table
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


def _interval(found: Mapping[str, Any] | None, key: str = "median") -> str:
    """`1.42× (1.31–1.55)`, or a dash."""
    if found is None or found[key] is None:
        return NOTHING
    ends = "" if found["ci95"] is None else f" ({found['ci95'][0]:.2f}–{found['ci95'][1]:.2f})"
    return f"{found[key]:.2f}×{ends}"


def _arm(name: str, totals: Mapping[str, Any], speedup: Mapping[str, Any] | None) -> list[str]:
    timing, counts = totals["timing"], totals.get("speculative") or {}
    return [
        name,
        number(timing["decode_tokens_per_second"], 1),
        NOTHING if timing["ttft_s"] is None else f"{1000 * timing['ttft_s']:.1f}",
        percent(counts.get("acceptance_rate")),
        number(counts.get("acceptance_length")),
        _shares(counts),
        _interval(speedup and speedup["decode"]),
        _interval(speedup and speedup["latency"]),
    ]


def _shares(counts: Mapping[str, Any]) -> str:
    """`20/70/10`: drafting, verification and the rest in per cent of the steps' time."""
    seconds = [counts.get(f"{part}_seconds") or 0.0 for part in ("draft", "verify", "overhead")]
    return "/".join(f"{100 * one / sum(seconds):.0f}" for one in seconds) if sum(seconds) > 0 else NOTHING


def _bench_tables(document: Document) -> Iterator[PageTable]:
    draft = "with the draft" + " (synthetic)" * (document["recipe"]["speculation"]["verify"] == "synthetic")
    rows = [
        _arm("without a draft", document["plain"], None),
        _arm(draft, document["draft"], document["speedup"]),
        *(_arm(name, found, None) for name, found in document["against"].items()),
    ]
    yield PageTable("Arms", ARM_HEADS, rows)
    if (trees := tree_table("arm", tree_arms(document))) is not None:
        yield trees
    if document["against"]:
        others = [
            [name, _interval(found["speedup"]["decode"]), _interval(found["speedup"]["latency"])]
            for name, found in document["against"].items()
        ]
        yield PageTable("The draft beside other engines", AGAINST_HEADS, others)
    if document["by_task"]:
        tasks = [
            [
                task,
                str(found["num_prompts"]),
                number(found["plain"]["timing"]["decode_tokens_per_second"], 1),
                number(found["draft"]["timing"]["decode_tokens_per_second"], 1),
                percent(found["draft"]["speculative"]["acceptance_rate"]),
                number(found["draft"]["speculative"]["acceptance_length"]),
                _interval(found["speedup"]["decode"]),
            ]
            for task, found in document["by_task"].items()
        ]
        yield PageTable("Tasks", TASK_HEADS, tasks)


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
    rows = []
    for row in found["rows"]:
        predicted, textbook = row["predicted"], iid.get(str(row["k"]))
        shares = [] if predicted is None else [f"{100 * share:.0f}" for share in predicted["shares"].values()]
        rows.append(
            [
                str(row["k"]),
                number(row["acceptance_length"]),
                _interval(predicted, "speedup"),
                _interval(row["measured"], "speedup"),
                NOTHING if textbook is None else f"{textbook:.2f}×",
                "/".join(shares) or NOTHING,
                depth_mark(row["k"], found["recommended"]),
            ]
        )
    heads = ("k", "tokens a step", "predicted (95 %)", "measured (95 %)", "textbook", "draft/verify/rest %", "")
    yield PageTable(f"Every k{at}", heads, rows)
    if trees := list(tree_rows(found)):
        yield PageTable(f"Trees{at}", TREE_HEADS, trees)
    costs = found["costs"]
    seconds = [("draft, a token", costs["draft_seconds_per_token"]), ("engine, a step", costs["overhead_seconds"])]
    seconds += [
        (f"target, {n + 1} row{'s' if n else ''}", one) for n, one in enumerate(costs["target_seconds_by_rows"])
    ]
    yield PageTable(f"Costs{at}", ("what", "milliseconds"), [[name, f"{1000 * one:.3f}"] for name, one in seconds])


def _compare_tables(document: Document) -> Iterator[PageTable]:
    rows = []
    for row in document["rows"]:
        rows.append(
            [
                draft_words(row["draft"]),
                str(row["best_k"]) if row["best_k"] else NOTHING,
                _interval(row["speedup"]),
                _interval(row["latency_speedup"]),
                percent(row["acceptance_rate"]),
                number(row["acceptance_length"]),
                number(row["cost_ratio"], 3),
                NOTHING if row["memory_bytes"] is None else f"{row['memory_bytes'] / 1e6:.1f} MB",
            ]
        )
    heads = ("draft", "best k", "speed-up (95 %)", "end to end", "accepted", "length", "cost", "memory")
    yield PageTable("Drafts, each at its best k", heads, rows)
    if (trees := tree_table("draft", tree_drafts(document))) is not None:
        yield trees
    if document["task_winners"]:
        won = [
            [task, winner_words(one["draft"]), _interval(one["speedup"])]
            for task, one in document["task_winners"].items()
        ]
        yield PageTable("Tasks", ("task", "winner", "speed-up (95 %)"), won)
    if document["pairwise"]:
        pairs = [
            [
                draft_words(one["a"]),
                draft_words(one["b"]),
                _interval({"median": one["speedup_ratio"], "ci95": one["ci95"]}),
                number(one["p_a_faster"], 3),
            ]
            for one in document["pairwise"]
        ]
        yield PageTable("Pairs", ("A", "B", "A over B (95 %)", "P(A is faster)"), pairs)


_TABLES: Mapping[str, Callable[[Document], Iterator[PageTable]]] = {
    AUDIT: lambda document: iter(audit_tables(document)),
    "specdec.bench/1": _bench_tables,
    "specdec.sweep-k/1": _sweep_tables,
    "specdec.compare-drafts/1": _compare_tables,
    "specdec.bench-endpoint/1": endpoint_tables,
    TRAIN: train_tables,
}
