"""`specdec import`: logs, metrics and reports of other tools as a document."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specdec_cli.cli.options import GATE_OPTIONS, RESULT, RUN
from specdec_cli.cli.output import deliver_with_report, envelope
from specdec_cli.cli.shared import Shared, with_shared_options
from specdec_cli.measure.imported.record import ImportDocument
from specdec_cli.report.imported import print_imported

_GATES = [option for option in GATE_OPTIONS if option.path == "gates.fail_if"]


@with_shared_options(common="before fail-if json output", only=RESULT, beside=_GATES)
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
    """Read the speculation of a run that another tool made. Exits with 3 if a gate is crossed.

    Examples:
        # Read the log of a vLLM server.
        specdec import vllm.log
        # Read what a server counted during a run.
        specdec import after.txt --before before.txt
        # Fail if too little is accepted.
        specdec import bench.json --fail-if 'speculative.acceptance_length<2'
    """
    from specdec_cli.measure.gates import check_paths, judge, parse_all, raise_if_crossed
    from specdec_cli.measure.imported.reading import read_runs

    shared.loads_models = False
    gates = parse_all(shared.resolve().recipe.gates.fail_if)
    check_paths(gates, ImportDocument.json_schema(), {})
    run = read_runs(files, before)
    document = envelope(ImportDocument, None, run.body(files))
    judged = judge(gates, document)
    document["gates"] = [gate.as_json() for gate in judged]
    deliver_with_report(document, shared, lambda page: print_imported(page, document))
    raise_if_crossed(judged)
