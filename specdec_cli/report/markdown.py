"""A measurement as Markdown, for a CI job's summary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec_cli.report.audit import LEGEND as AUDIT_LEGEND
from specdec_cli.report.bench import LEGEND, lossless_words
from specdec_cli.report.columns import PageTable, markdown_text
from specdec_cli.report.endpoint import LEGEND as ENDPOINT_LEGEND
from specdec_cli.report.html import facts, findings, tables
from specdec_cli.report.plot import heading

LEGENDS = {"audit": AUDIT_LEGEND, "bench": LEGEND, "bench-endpoint": ENDPOINT_LEGEND}


def markdown(document: Mapping[str, Any]) -> str:
    """The findings, the tables, the gates and the notes."""
    name, recipe = str(document["schema"]).partition("/")[0].removeprefix("specdec."), document["recipe"]
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
