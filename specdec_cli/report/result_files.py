"""A measurement in other files: Markdown for a CI job's summary, CSV for tables, JUnit XML for test reports."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from specdec_cli.measure.workload.workload import task_of
from specdec_cli.report import endpoint_words
from specdec_cli.report.audit import LEGEND as AUDIT_LEGEND
from specdec_cli.report.audit import audit_cases
from specdec_cli.report.bench import LEGEND, lossless_words
from specdec_cli.report.endpoint_pages import endpoint_csv
from specdec_cli.report.endpoint_words import requests_words
from specdec_cli.report.html import facts, findings, tables
from specdec_cli.report.plot import heading
from specdec_cli.report.recommendation import INCONCLUSIVE, depth_mark, recommendation_words, size_name
from specdec_cli.text.printable import printable

if TYPE_CHECKING:
    from specdec_cli.measure.bench.bench import Bench

_BENCH_HEADS = (
    "task", "arm", "num_passes", "decode_tokens_per_second", "ttft_s", "decode_s", "total_s", "acceptance_rate",
    "acceptance_length", "speedup_decode", "speedup_decode_low", "speedup_decode_high",
    "draft_over_arm", "draft_over_arm_low", "draft_over_arm_high",
)  # fmt: skip
_SWEEP_HEADS = (
    "batch_size", "k", "acceptance_length", "predicted_speedup", "predicted_low", "predicted_high",
    "measured_speedup", "measured_low", "measured_high", "recommended", "verdict",
    "tree", "nodes",
)  # fmt: skip
_COMPARE_HEADS = (
    "task", "draft", "method", "best_k", "cost_ratio", "memory_bytes", "acceptance_rate", "acceptance_length",
    "speedup_decode", "speedup_decode_low", "speedup_decode_high",
)  # fmt: skip

LEGENDS = {"audit": AUDIT_LEGEND, "bench": LEGEND, "bench-endpoint": endpoint_words.LEGEND}


def markdown(document: Mapping[str, Any]) -> str:
    """The findings, the tables, the gates and the notes."""
    name, recipe = _command(document), document["recipe"]
    k = f", k = {recipe['speculation']['num_speculative_tokens']}" if name == "bench" else ""
    lines = [f"## {_cell(heading(document))}{k}", ""]
    for place, found in enumerate(findings(document)):
        bold = "**" if place == 0 else ""
        lines += [f"{bold}{_cell(found)}{bold}", ""]
    for place, table in enumerate(tables(document)):
        lines += [f"### {_cell(table.title)}", ""] if place else []
        lines += _markdown_table(table.heads, table.rows)
        lines += [LEGENDS.get(name, "In brackets: 95 % intervals."), ""] if place == 0 else []
    if "lossless" in document and name != "audit":
        lines += [lossless_words(document["lossless"]), ""]
    busy = document.get("machine", {}).get("busy")
    for notice in [*([busy] if busy else []), *document["notices"]]:
        lines += [f"Note: {_cell(notice)}", ""]
    if document.get("gates"):
        rows = [["passed" if g["passed"] else "**failed**", g["expression"], g["reason"]] for g in document["gates"]]
        lines += _markdown_table(("gate", "fail if", "found"), rows)
    lines.append("; ".join(f"{title}: {_cell(text)}" for title, text in facts(document)) + ".")
    return "\n".join(lines) + "\n"


def _command(document: Mapping[str, Any]) -> str:
    """`bench` of `specdec.bench/1`."""
    return str(document["schema"]).partition("/")[0].removeprefix("specdec.")


def _markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [heads, ["---"] * len(heads), *rows]
    return [*(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines), ""]


def _cell(text: object) -> str:
    """Text that stays in its cell and is no markup."""
    safe = printable(str(text)).replace("\n", " ")
    return safe.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("`", "\\`")


def bench_csv(bench: Bench) -> str:
    """One row per task and arm, all tasks together first; the speed-up over plain decoding is in the draft's row."""
    return _csv(_BENCH_HEADS, _bench_rows(bench))


def _bench_rows(bench: Bench) -> Iterator[Sequence[object]]:
    for task in (None, *bench.tasks()):
        for track in bench.tracks:
            timing = track.timing(task)
            counts = track.counts(task) if task is None or task in track.task_counts else None
            speedup = bench.speedup("decode", task) if track is bench.draft else None
            over_it = bench.speedup("decode", task, track) if track in bench.against.values() else None
            groups = [one.group.requests for one in track.passes]
            yield (
                task or "",
                track.name,
                sum(task is None or any(task_of(one.row) == task for one in group) for group in groups),
                timing.decode_tokens_per_second,
                timing.ttft_s,
                timing.decode_s,
                timing.total_s,
                counts.acceptance_rate if counts else None,
                counts.acceptance_length if counts else None,
                *_three(None if speedup is None else speedup.as_dict()),
                *_three(None if over_it is None else over_it.as_dict()),
            )


def sweep_csv(document: Mapping[str, Any]) -> str:
    """One row per batch size and k, and one per tree."""
    rows = (
        (
            found["batch_size"],
            k,
            row["acceptance_length"],
            *_three(row["predicted"], "speedup"),
            *_three(row["measured"], "speedup"),
            int(depth_mark(k, found["recommended"], row.get("tree")) == "recommended"),
            found["recommended"]["verdict"],
            row.get("tree"),
            row.get("nodes", k),
        )
        for found in document["by_batch_size"]
        for row in (*found["rows"], *found["trees"])
        for k in [row.get("k", row.get("depth"))]
    )
    return _csv(_SWEEP_HEADS, rows)


def compare_csv(document: Mapping[str, Any]) -> str:
    """One row per draft, and one for each of its tasks."""
    rows = (
        (
            task,
            *(row[name] for name in ("draft", "method", "best_k", "cost_ratio", "memory_bytes")),
            found["acceptance_rate"],
            found["acceptance_length"],
            *_three(found["speedup"]),
        )
        for row in document["rows"]
        for task, found in {"": row, **row["by_task"]}.items()
    )
    return _csv(_COMPARE_HEADS, rows)


def server_csv(document: Mapping[str, Any]) -> str:
    """One row of all requests, and one for each task."""
    return _csv(*endpoint_csv(document))


def _three(found: Mapping[str, Any] | None, key: str = "median") -> tuple[float | None, ...]:
    """A figure and the ends of its interval."""
    if found is None:
        return None, None, None
    low, high = found["ci95"] or (None, None)
    return found[key], low, high


def _csv(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([heads, *rows])
    return file.getvalue()


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
    for one in document["gates"]:
        yield f"fail if {one['expression']}", one["passed"], one["reason"]
    lossless = document.get("lossless")
    if lossless is not None and lossless["checked_tokens"] is not None:
        yield "lossless", not lossless["mismatches"], lossless_words(lossless)
    if "requests" in document:
        yield "requests answered", not document["requests"]["failed"], requests_words(document)
    if "verdict" in document:
        yield "verdict", _is_known(document["verdict"]), document["recommendation"]
    by_size = document.get("by_batch_size", ())
    for found in by_size:
        at, recommended = size_name(found, len(by_size) > 1), found["recommended"]
        yield f"verdict{at}", _is_known(recommended["verdict"]), recommendation_words(recommended)


def _is_known(verdict: str) -> bool | None:
    return None if verdict == INCONCLUSIVE else True
