"""A measurement in other files: Markdown for a CI job's summary, CSV for tables, JUnit XML for test reports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from specdec_cli.document import SpeculativeResult, as_json
from specdec_cli.measure.workload.workload import task_of
from specdec_cli.report.audit import LEGEND as AUDIT_LEGEND
from specdec_cli.report.audit import audit_cases
from specdec_cli.report.bench import LEGEND, lossless_words
from specdec_cli.report.columns import PageTable, csv_text, interval_paths, markdown_text
from specdec_cli.report.endpoint import LEGEND as ENDPOINT_LEGEND
from specdec_cli.report.endpoint import endpoint_csv, requests_words
from specdec_cli.report.html import facts, findings, tables
from specdec_cli.report.plot import heading
from specdec_cli.report.recommendation import INCONCLUSIVE, RECOMMENDED, depth_mark, recommendation_words, size_name
from specdec_cli.text.printable import printable

if TYPE_CHECKING:
    from specdec_cli.measure.bench.bench import Bench

_ACCEPTANCE = {name: name for name in ("acceptance_rate", "acceptance_length")}
_BENCH_COLUMNS = {
    **{name: name for name in ("task", "arm", "num_passes")},
    **{name: f"timing.{name}" for name in ("decode_tokens_per_second", "ttft_s", "decode_s", "total_s")},
    **{name: f"speculative.{name}" for name in _ACCEPTANCE},
    **interval_paths("speedup_decode", "speedup"),
    **interval_paths("draft_over_arm", "draft_over_arm"),
}
_SWEEP_COLUMNS = {
    "batch_size": "at.batch_size",
    **{name: name for name in ("k", "acceptance_length")},
    **interval_paths("predicted_speedup", "predicted", "speedup", "predicted"),
    **interval_paths("measured_speedup", "measured", "speedup", "measured"),
    "recommended": "recommended",
    "verdict": "at.recommended.verdict",
    **{name: name for name in ("tree", "nodes", "p_min")},
}
_COMPARE_COLUMNS = {
    **{name: name for name in ("task", "draft", "method", "best_k", "cost_ratio", "memory_bytes")},
    **_ACCEPTANCE,
    **interval_paths("speedup_decode", "speedup"),
}

LEGENDS = {"audit": AUDIT_LEGEND, "bench": LEGEND, "bench-endpoint": ENDPOINT_LEGEND}


def markdown(document: Mapping[str, Any]) -> str:
    """The findings, the tables, the gates and the notes."""
    name, recipe = _command(document), document["recipe"]
    k = f", k = {recipe['speculation']['num_speculative_tokens']}" if name == "bench" else ""
    lines = [f"## {markdown_text(heading(document))}{k}", ""]
    for place, finding in enumerate(findings(document)):
        bold = "**" if place == 0 else ""
        lines += [f"{bold}{markdown_text(finding)}{bold}", ""]
    for place, table in enumerate(tables(document)):
        lines += [f"### {markdown_text(table.title)}", ""] if place else []
        lines += table.markdown()
        lines += [LEGENDS.get(name, "In brackets: 95 % intervals."), ""] if place == 0 else []
    if "lossless" in document and name != "audit":
        lines += [lossless_words(document["lossless"]), ""]
    busy = document.get("machine", {}).get("busy")
    for notice in [*([busy] if busy else []), *document["notices"]]:
        lines += [f"Note: {markdown_text(notice)}", ""]
    if document.get("gates"):
        rows = [["passed" if g["passed"] else "**failed**", g["expression"], g["reason"]] for g in document["gates"]]
        lines += PageTable("Gates", ("gate", "fail if", "found"), rows).markdown()
    lines.append("; ".join(f"{title}: {markdown_text(text)}" for title, text in facts(document)) + ".")
    return "\n".join(lines) + "\n"


def _command(document: Mapping[str, Any]) -> str:
    """`bench` of `specdec.bench/1`."""
    return str(document["schema"]).partition("/")[0].removeprefix("specdec.")


def bench_csv(bench: Bench) -> str:
    """One row per task and arm, all tasks together first; the speed-up over plain decoding is in the draft's row."""
    return csv_text(_BENCH_COLUMNS, _bench_rows(bench))


def _bench_rows(bench: Bench) -> Iterator[dict[str, Any]]:
    for task in (None, *bench.tasks()):
        for track in bench.tracks:
            counts = track.counts(task) if task is None or task in track.task_counts else None
            tasks_of_passes = [{task_of(request.row) for request in pass_.group.requests} for pass_ in track.passes]
            row = {
                "task": task or "",
                "arm": track.name,
                "num_passes": sum(task is None or task in tasks for tasks in tasks_of_passes),
                "timing": track.timing(task).as_dict(),
                "speculative": None if counts is None else SpeculativeResult.of(counts),
            }
            if track is bench.draft:
                yield row | {"speedup": as_json(bench.speedup("decode", task))}
            else:
                is_other = track in bench.against.values()
                yield row | {"draft_over_arm": as_json(bench.speedup("decode", task, track)) if is_other else None}


def sweep_csv(document: Mapping[str, Any]) -> str:
    """One row per batch size and k, with each p-min and without, and one per tree."""
    rows = (
        {"nodes": k, "tree": None, "p_min": None, **row, "k": k, "at": at_size}
        | {"recommended": int(depth_mark(k, at_size["recommended"], row.get("tree"), row.get("p_min")) == RECOMMENDED)}
        for at_size in document["by_batch_size"]
        for row in (*at_size["rows"], *at_size.get("by_p_min", ()), *at_size["trees"])
        for k in [row.get("k", row.get("depth"))]
    )
    return csv_text(_SWEEP_COLUMNS, rows)


def compare_csv(document: Mapping[str, Any]) -> str:
    """One row per draft, and one for each of its tasks."""
    rows = (
        row | {"task": task, **part} for row in document["rows"] for task, part in {"": {}, **row["by_task"]}.items()
    )
    return csv_text(_COMPARE_COLUMNS, rows)


def server_csv(document: Mapping[str, Any]) -> str:
    """One row of all requests, and one for each task and turn."""
    return csv_text(*endpoint_csv(document))


def junit(document: Mapping[str, Any]) -> str:
    """A test case for every gate, one for the tokens where they were compared, and one for each verdict.

    An inconclusive verdict is a skipped test.
    """
    name = _command(document)
    cases = list(_cases(document))
    suite = ElementTree.Element(
        "testsuite",
        name=f"specdec {name}",
        tests=str(len(cases)),
        failures=str(sum(passed is False for _, passed, _ in cases)),
        skipped=str(sum(passed is None for _, passed, _ in cases)),
        timestamp=document["created"],
    )
    for case_name, passed, reason in cases:
        case = ElementTree.SubElement(suite, "testcase", classname=f"specdec.{name}", name=printable(case_name))
        if passed is None:
            ElementTree.SubElement(case, "skipped", message=printable(reason))
        elif passed:
            ElementTree.SubElement(case, "system-out").text = printable(reason)
        else:
            ElementTree.SubElement(case, "failure", message=printable(reason))
    ElementTree.indent(suite)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(suite, encoding="unicode") + "\n"


def _cases(document: Mapping[str, Any]) -> Iterator[tuple[str, bool | None, str]]:
    """Name, whether it passed (None: unknown), and why."""
    if _command(document) == "audit":
        yield from audit_cases(document)
        return
    for gate in document["gates"]:
        yield f"fail if {gate['expression']}", gate["passed"], gate["reason"]
    lossless = document.get("lossless")
    if lossless is not None and lossless["checked_tokens"] is not None:
        yield "lossless", not lossless["mismatches"], lossless_words(lossless)
    if "requests" in document:
        yield "requests answered", not document["requests"]["failed"], requests_words(document)
    if "verdict" in document:
        yield "verdict", _is_known(document["verdict"]), document["recommendation"]
    by_size = document.get("by_batch_size", ())
    for at_size in by_size:
        at, recommended = size_name(at_size, len(by_size) > 1), at_size["recommended"]
        yield f"verdict{at}", _is_known(recommended["verdict"]), recommendation_words(recommended)


def _is_known(verdict: str) -> bool | None:
    return None if verdict == INCONCLUSIVE else True
