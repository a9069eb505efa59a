"""A benchmark in other files: Markdown for a CI job's summary, CSV for tables, JUnit XML for test reports."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from specdec_cli.report.bench import ARM_HEADS, LEGEND, TASK_HEADS, arm_rows, lossless_words, task_rows
from specdec_cli.text.printable import printable

if TYPE_CHECKING:
    from specdec_cli.measure.bench import Bench

_CSV_HEADS = (
    "task", "arm", "num_passes", "decode_tokens_per_second", "ttft_s", "decode_s", "total_s", "acceptance_rate",
    "acceptance_length", "speedup_decode", "speedup_decode_low", "speedup_decode_high",
)  # fmt: skip


def markdown(bench: Bench, document: Mapping[str, Any]) -> str:
    """The tables, what was found and the gates."""
    recipe = document["recipe"]
    draft = recipe["draft"].get("model") or recipe["draft"]["method"]
    k = recipe["speculation"]["num_speculative_tokens"]
    lines = [f"## specdec bench: {_cell(recipe['target']['model'])} with {_cell(draft)}, k = {k}", ""]
    lines += [f"{'**' if place == 0 else ''}{_cell(one)}{'**' if place == 0 else ''}" + "\n"
              for place, one in enumerate(document["findings"])]  # fmt: skip
    lines += _markdown_table(ARM_HEADS, arm_rows(bench))
    lines += [LEGEND, ""]
    if bench.tasks():
        lines += _markdown_table(TASK_HEADS, task_rows(bench))
    lines += [lossless_words(document["lossless"]), ""]
    if document["gates"]:
        rows = [["passed" if g["passed"] else "**failed**", g["expression"], g["reason"]] for g in document["gates"]]
        lines += _markdown_table(("gate", "fail if", "found"), rows)
    workload, environment = document["workload"], document["environment"]
    lines.append(
        f"{workload['num_prompts']} prompts of {_cell(workload['dataset'])}, {document['plan']['repeats']} repeats, "
        f"batch {document['plan']['batch_size']}; {environment['device']}, {environment['dtype']}, "
        f"{environment['threads']} threads, torch {environment['torch']}, specdec {document['specdec_version']}; "
        f"load {document['machine']['load_before']:.1f} before, {document['machine']['load_after']:.1f} after."
    )
    return "\n".join(lines) + "\n"


def _markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [heads, ["---"] * len(heads), *rows]
    return [*(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines), ""]


def _cell(text: object) -> str:
    """Text that stays in its cell and is no markup."""
    safe = printable(str(text)).replace("\n", " ")
    return safe.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("`", "\\`")


def csv_text(bench: Bench) -> str:
    """One row per task and arm, and first all tasks together; the draft's speed-up stands beside the arm it is over."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(_CSV_HEADS)
    for task in (None, *bench.tasks()):
        for track in (bench.draft, bench.plain, *bench.against.values()):
            timing = track.timing(task)
            counts = track.counts(task) if task is None or task in track.meters else None
            speedup = None if track is bench.draft else bench.speedup("decode", task, track)
            low, high = (speedup.ci95 if speedup else None) or (None, None)
            num = sum(task in (None, one.group.task) for one in track.passes)
            writer.writerow(
                [
                    task or "",
                    track.name,
                    num,
                    timing.decode_tokens_per_second,
                    timing.ttft_s,
                    timing.decode_s,
                    timing.total_s,
                    counts.acceptance_rate if counts else None,
                    counts.acceptance_length if counts else None,
                    speedup.median if speedup else None,
                    low,
                    high,
                ]
            )
    return file.getvalue()


def junit(document: Mapping[str, Any]) -> str:
    """A test case for every gate, and one for the tokens where they were compared."""
    cases = [(f"fail if {one['expression']}", one["passed"], one["reason"]) for one in document["gates"]]
    lossless = document["lossless"]
    if lossless["checked_tokens"] is not None:
        cases.append(("lossless", not lossless["mismatches"], lossless_words(lossless)))
    num_failed = sum(not passed for _, passed, _ in cases)
    suite = ElementTree.Element(
        "testsuite",
        name="specdec bench",
        tests=str(len(cases)),
        failures=str(num_failed),
        timestamp=document["created"],
    )
    for name, passed, reason in cases:
        case = ElementTree.SubElement(suite, "testcase", classname="specdec.bench", name=printable(name))
        if passed:
            ElementTree.SubElement(case, "system-out").text = printable(reason)
        else:
            ElementTree.SubElement(case, "failure", message=printable(reason))
    ElementTree.indent(suite)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(suite, encoding="unicode") + "\n"
