"""`specdec bench --endpoint`: the same prompts sent to any OpenAI-compatible server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

import typer

from specdec_cli.cli.endpoint_options import EndpointWish, key_of, refuse_others
from specdec_cli.cli.measurement_options import (
    MeasurementOptions,
    check_files,
    check_regression,
    chosen_prompts,
    num_prompts_words,
    show_plan,
    tell,
)
from specdec_cli.cli.options import DETAILS_OPTION, GATE_OPTIONS, OPTIONS, WORKLOAD_OPTIONS, Shared
from specdec_cli.cli.output import deliver_with_report, envelope
from specdec_cli.cli.result_output import write_results
from specdec_cli.cli.screen import interruptible, open_screen
from specdec_cli.errors import ExitCode
from specdec_cli.measure.endpoint.address import check_key, parse_address
from specdec_cli.measure.endpoint.arrivals import parse_rate
from specdec_cli.measure.endpoint.endpoint_arm import EndpointArm
from specdec_cli.measure.endpoint.endpoint_bench import EndpointBench
from specdec_cli.measure.endpoint.endpoint_plan import EndpointPlan, pace_words
from specdec_cli.measure.endpoint.request_fields import check_max_tokens_field, parse_extra_body, sampling_fields
from specdec_cli.measure.machine.load import look_at_load
from specdec_cli.measure.workload.turns import turn_ends
from specdec_cli.measure.workload.workload import task_of
from specdec_cli.recipe.present import to_yaml
from specdec_cli.report.bench import BenchView
from specdec_cli.report.bench_endpoint import SCHEMA, endpoint_body, json_schema, live_table, print_endpoint
from specdec_cli.report.counting import CountingLine
from specdec_cli.report.pace import Pace
from specdec_cli.report.result_files import server_csv
from specdec_cli.report.view import Screen

if TYPE_CHECKING:
    from specdec_cli.engine.prompts import PromptRow, PromptSet
    from specdec_cli.recipe import Recipe, Resolved

_OWN = {
    *("endpoint", "concurrency", "endpoint_model", "endpoint_timeout", "api_key", "repeats", "chat", "dry_run"),
    *("request_rate", "extra_body", "max_tokens_field", "markdown", "csv", "junit", "plot", "html"),
}
_PATHS = {"recipe", "sets", "json", "output", "force", "quiet", "details", "target.model"}
_SECTIONS = ("sampling.", "workload.", "gates.")


def run_endpoint(
    context: typer.Context, shared: Shared, asked: EndpointWish, wish: MeasurementOptions, dry_run: bool
) -> ExitCode | None:
    """Measure a server. Needs neither torch nor the model's files.

    Args:
        context: the command line, whose options that say nothing to a server are refused.
        shared: the command's shared options; workload, sampling and gates count, and a target's name.
        asked: the server and how it is asked.
        wish: how often every prompt is sent, whether prompts are messages, and the files of the result.
        dry_run: show what would be sent, without contacting the server.

    Raises:
        UsageError: options that say nothing to a server, or contradict themselves.
        RunError: the server cannot be measured.
        GateError: a gate was crossed.
    """
    refuse_others(context, (*OPTIONS, *WORKLOAD_OPTIONS, *GATE_OPTIONS, DETAILS_OPTION), _OWN, _PATHS, _SECTIONS)
    shared.loads_models = False
    resolved = shared.resolve()
    recipe = resolved.recipe
    check_regression(recipe, shared)
    plan = _plan(resolved, asked, wish)
    check_files(wish, shared)
    _check_gates(recipe, plan.has_arrivals)
    prompts = chosen_prompts(recipe.workload, wish.chat, only_at_hand=dry_run)
    if dry_run:
        tell(prompts.notices, shared)
        if prompts.rows:
            _check_gates(recipe, plan.has_arrivals, prompts.rows)
        _show(resolved, shared, plan, len(prompts.rows) or None)
        return None
    return _EndpointRun(resolved, shared, plan, wish, prompts, open_screen(shared.quiet, streams_text=False)).go()


def _plan(resolved: Resolved, wish: EndpointWish, how: MeasurementOptions) -> EndpointPlan:
    assert wish.url is not None, "without a server there is nothing to measure"
    named = None if resolved.built_in_pair else resolved.recipe.target.model
    rate = parse_rate(wish.request_rate)
    max_tokens_field = wish.max_tokens_field or "max_tokens"
    check_max_tokens_field(max_tokens_field, how.chat)
    return EndpointPlan(
        address=parse_address(wish.url),
        key=check_key(key_of(wish.key)),
        model=wish.model or named,
        model_from="--endpoint-model" if wish.model else "the recipe's target" if named else "/v1/models",
        chat=how.chat,
        concurrency=wish.concurrency or (1 if rate == inf else None),
        request_rate=rate,
        seed=resolved.recipe.sampling.seed,
        extra_body=parse_extra_body(wish.extra_body),
        max_tokens_field=max_tokens_field,
        repeats=how.repeats,
        **({} if wish.timeout_s is None else {"timeout_s": wish.timeout_s}),
    )


def _check_gates(recipe: Recipe, has_arrivals: bool, rows: Sequence[PromptRow] | None = None) -> None:
    """Refuse gates that could not be judged, before anybody is asked; tasks are checked once the rows are read."""
    from specdec_cli.measure.gates import Pairs, check_measurable, check_paths, parse_all

    gates, schema = parse_all(recipe.gates.fail_if), json_schema(has_arrivals)
    if rows is None:
        gates = [gate for gate in gates if not gate.path.startswith(("by_task.", "by_turn."))]
    most_turns = max((len(turn_ends(row)) for row in rows or ()), default=1)
    turns = [str(turn) for turn in range(1, most_turns + 1)] if most_turns > 1 else []
    names = {"by_task": list(dict.fromkeys(map(task_of, rows or ()))), "by_turn": turns}
    check_paths(gates, schema, names)
    if rows is not None:
        check_measurable(recipe.gates, schema, names, Pairs.of(rows, batch_size=1, repeats=1))


def _document_recipe(resolved: Resolved, plan: EndpointPlan) -> dict[str, Any]:
    """The parts of the recipe that apply to a server."""
    whole = resolved.recipe.as_dict()
    target = {"target": {"model": plan.model}} if plan.model_from == "the recipe's target" else {}
    return target | {name: whole[name] for name in ("sampling", "workload", "gates")}


def _show(resolved: Resolved, shared: Shared, plan: EndpointPlan, num: int | None) -> None:
    """Show what would be sent, and where the recipe's values come from, without contacting the server."""
    recipe = resolved.recipe
    kept = _document_recipe(resolved, plan)
    body = {
        "origins": {key: origin for key, origin in resolved.origins.items() if key.partition(".")[0] in kept},
        "num_prompts": num,
        "endpoint": {"url": plan.address.root, "path": plan.path, "model": plan.model, "model_from": plan.model_from},
        "fields": sampling_fields(recipe.sampling, plan.max_tokens_field),
        "extra_body": dict(plan.extra_body),
        "concurrency": plan.concurrency,
        "request_rate": plan.request_rate if plan.has_arrivals else None,
        "repeats": plan.repeats,
    }
    model = f"`{plan.model}`" if plan.model else "the first model that it lists"
    prompts = num_prompts_words(recipe.workload, num)
    head = (
        f"# would send {prompts}, {plan.repeats} times, {pace_words(plan.concurrency, plan.request_rate)}, "
        f"to {plan.address.api}{plan.path} for {model}"
    )
    show_plan(kept, body, shared, f"{head}\n{to_yaml(resolved, origins=True)}")


@dataclass(slots=True)
class _EndpointRun:
    """One run of the command."""

    resolved: Resolved
    shared: Shared
    plan: EndpointPlan
    wish: MeasurementOptions
    prompts: PromptSet
    screen: Screen

    def go(self) -> ExitCode | None:
        """Ask, show, write, judge."""
        from specdec_cli.measure.baseline import judge_document, read_baseline
        from specdec_cli.measure.gates import raise_if_crossed

        recipe, rows = self.resolved.recipe, self.prompts.rows
        _check_gates(recipe, self.plan.has_arrivals, rows)
        earlier = None if recipe.gates.baseline is None else read_baseline(recipe.gates.baseline, SCHEMA)
        load = look_at_load()
        bench = EndpointBench(EndpointArm(self.plan, recipe.sampling), rows)
        with interruptible() as stopped:
            self._measure(bench, stopped)
            if not bench.num_answered:
                self.screen.say("interrupted before anything was measured", "yellow")
                return ExitCode.INTERRUPTED
            body = endpoint_body(bench, recipe.workload.dataset, load.since(), stopped())
            body["notices"] = [*self.prompts.notices, *body["notices"]]
            document = envelope(SCHEMA, _document_recipe(self.resolved, self.plan), body)
            judged = judge_document(document, recipe.gates, earlier)
            write_results(document, self.wish, lambda: server_csv(document), self.shared.force)
            deliver_with_report(document, self.shared, lambda page: print_endpoint(page, document, self.shared.details))
            if stopped():
                self.screen.say("interrupted: these are the results so far", "yellow")
                return ExitCode.INTERRUPTED
        raise_if_crossed(judged)
        return None

    def _measure(self, bench: EndpointBench, stopped: Callable[[], bool]) -> None:
        """Send everything; the table is drawn while no request is open, elsewhere a thread counts in one line."""
        self.screen.say(f"asking {self.plan.address.root}; the first answer is not counted")
        pace, how = Pace(), pace_words(self.plan.concurrency, self.plan.request_rate)

        def line() -> str:
            done, total = len(bench.visits), bench.total
            return f"{done} of {total} requests, {pace.words(done, total)}, {how}"

        may_draw = self.screen.is_live and self.plan.concurrency == 1 and not self.plan.has_arrivals
        with BenchView(self.screen.console, may_draw) as view:
            counting = nullcontext() if may_draw else CountingLine(self.screen, line)
            with counting:
                bench.run(stopped, lambda: view.draw(lambda: live_table(bench), line()))
