"""`specdec bench --endpoint --slo`: how many users a server serves at once, with its draft and without."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from specdec_cli.cli.bench_endpoint import endpoint_run
from specdec_cli.cli.output import deliver_with_report, envelope, show_plan
from specdec_cli.cli.screen import interruptible, open_screen, progress, say_notices
from specdec_cli.errors import UsageError
from specdec_cli.measure.documents.slo import SloDocument, slo_body
from specdec_cli.measure.endpoint.address import parse_address
from specdec_cli.measure.endpoint.draft_switch import PLAIN_OPTION
from specdec_cli.measure.endpoint.endpoint_arm import EndpointArm, started
from specdec_cli.measure.endpoint.slo import MOST_USERS, SloStudy, parse_slo
from specdec_cli.measure.gates import check_paths, judge, parse_all, raise_if_crossed
from specdec_cli.quantities import counted
from specdec_cli.report.slo import print_slo

if TYPE_CHECKING:
    from specdec_cli.cli.endpoint_options import EndpointOptions
    from specdec_cli.cli.measurement_options import MeasurementOptions
    from specdec_cli.cli.shared import Shared


def slo_run(
    shared: Shared, server: EndpointOptions, options: MeasurementOptions, slo: str, plain_url: str | None, dry_run: bool
) -> None:
    """Search the number of users, show it, write it, judge the gates.

    Args:
        shared: the command's shared options; workload, sampling and --fail-if count.
        server: the server; its concurrency is the most users to try.
        options: whether prompts are messages.
        slo: the objectives.
        plain_url: the same model without a draft.
        dry_run: whether nothing is sent.

    Raises:
        UsageError: options that contradict themselves.
        RunError: the server cannot be measured.
        GateError: a gate is crossed.
    """
    objectives = parse_slo(slo)
    if server.request_rate is not None:
        raise UsageError("`--request-rate` has no effect with `--slo`: each user waits for an answer", "leave it out")
    if shared.files:
        raise UsageError("`--slo` writes JSON alone", "use --output FILE")
    most = server.concurrency or MOST_USERS
    run = endpoint_run(shared, replace(server, concurrency=1), options, dry_run)
    recipe, rows, plan = run.arms.recipe, run.arms.rows, run.server
    if recipe.gates.baseline is not None:
        raise UsageError("`--baseline` has no effect with `--slo`", "use --fail-if 'draft.users < 8'")
    gates = parse_all(recipe.gates.fail_if)
    check_paths(gates, SloDocument.json_schema(), {})
    if dry_run:
        body = {"objectives": [objective.text for objective in objectives], "most_users": most}
        where = f"{plan.address.root}{f' and {plain_url}' if plain_url else ''}"
        text = f"# would send up to {counted(most, 'request')} at once to {where}, with the draft and without\n"
        show_plan(run.shown(recipe), body, shared, text)
        return
    screen = open_screen(shared.quiet, streams_text=False)
    say_notices(run.arms.prompts.notices, shared.quiet)
    plan = replace(plan, concurrency=most)
    draft = EndpointArm(plan, recipe.sampling)
    plain = draft
    if plain_url is not None:
        plain = EndpointArm(replace(plan, address=parse_address(plain_url, PLAIN_OPTION)), recipe.sampling)
    with interruptible() as stopped, progress(screen) as say:
        study = SloStudy(draft, plain, rows, objectives, most, say, stopped)
        arms = [draft] if plain is draft else [draft, plain]
        with started(arms):
            study.run()
    study.notices[:0] = run.arms.prompts.notices
    document = envelope(SloDocument, run.shown(recipe), slo_body(study, recipe.workload.dataset))
    judged = judge(gates, document)
    document["gates"] = [gate.as_json() for gate in judged]
    deliver_with_report(document, shared, lambda page: print_slo(page, document))
    raise_if_crossed(judged)
