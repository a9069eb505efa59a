"""`specdec import`: logs, metrics and reports of other tools as a document."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specdec_cli.cli.options import GATE_OPTIONS, OPTIONS, RUN, Shared, with_shared_options
from specdec_cli.cli.output import deliver_with_report, envelope
from specdec_cli.report.imported import SCHEMA, imported_body, json_schema, print_imported

_KEPT = {"json", "output", "force", "quiet"}
_WITHOUT = [one.path for one in OPTIONS if one.path not in _KEPT]
_GATES = [one for one in GATE_OPTIONS if one.path == "gates.fail_if"]


@with_shared_options(without=_WITHOUT, beside=_GATES)
def import_(
    files: Annotated[
        list[Path], typer.Argument(help="Logs, dumps of /metrics, reports or responses.", metavar="FILE...")
    ],
    before: Annotated[
        Path | None,
        typer.Option(
            "--before",
            help="Metrics from before the run, to subtract from those of FILE.",
            metavar="FILE",
            rich_help_panel=RUN,
        ),
    ] = None,
    *,
    shared: Shared,
) -> None:
    """Read the speculation of a run that another tool made. Exits with 3 if a gate is crossed."""
    from specdec_cli.measure.gates import check_paths, judge, parse_all, raise_if_crossed
    from specdec_cli.measure.imported.reading import read_runs

    shared.loads_models = False
    gates = parse_all(shared.resolve().recipe.gates.fail_if)
    check_paths(gates, json_schema(), {})
    run = read_runs(files, before)
    document = envelope(SCHEMA, None, imported_body(run, files))
    judged = judge(gates, document)
    document["gates"] = [one.as_dict() for one in judged]
    deliver_with_report(document, shared, lambda page: print_imported(page, document))
    raise_if_crossed(judged)
