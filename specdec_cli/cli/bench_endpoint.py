"""`specdec bench --endpoint`: the same prompts sent to any OpenAI-compatible server, each request timed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

from specdec_cli.cli.endpoint_options import EndpointOptions, key_of
from specdec_cli.cli.measured_run import MeasuredRun
from specdec_cli.cli.measurement_options import (
    MeasurementOptions,
    check_files,
    check_regression,
    chosen_prompts,
    num_prompts_words,
)
from specdec_cli.cli.output import envelope
from specdec_cli.cli.place import Place
from specdec_cli.measure.documents.endpoint import EndpointDocument, endpoint_body, endpoint_schema
from specdec_cli.measure.endpoint.address import check_key, parse_address
from specdec_cli.measure.endpoint.endpoint_arm import EndpointArm
from specdec_cli.measure.endpoint.endpoint_bench import EndpointBench
from specdec_cli.measure.endpoint.endpoint_plan import EndpointPlan, pace_words, parse_rate
from specdec_cli.measure.endpoint.request_fields import check_max_tokens_field, parse_extra_body, sampling_fields
from specdec_cli.measure.gates import Pairs
from specdec_cli.measure.workload.turns import turn_ends
from specdec_cli.quantities import counted
from specdec_cli.report.bench_endpoint import live_table, print_endpoint
from specdec_cli.report.counting import CountingLine
from specdec_cli.report.live_table import LiveTable
from specdec_cli.report.pace import Pace
from specdec_cli.report.result_files import server_csv

if TYPE_CHECKING:
    from rich.console import Console

    from specdec_cli.cli.shared import Shared
    from specdec_cli.recipe import Recipe, Resolved


def endpoint_run(shared: Shared, server: EndpointOptions, options: MeasurementOptions, dry_run: bool) -> EndpointRun:
    """A measurement of a server, which needs neither torch nor the model's files.

    Args:
        shared: the command's shared options; workload, sampling and gates count, and a target's name.
        server: the server, and how it is asked.
        options: how often every prompt is sent, and whether prompts are messages.
        dry_run: whether nothing will be sent.

    Raises:
        UsageError: options that contradict themselves.
    """
    shared.loads_models = False
    resolved = shared.resolve()
    check_regression(resolved.recipe, shared)
    plan = _plan(resolved, server, options)
    check_files(shared)
    prompts = chosen_prompts(resolved.recipe.workload, options.chat, only_at_hand=dry_run, by=options.by)
    return EndpointRun(Place([resolved], [plan.address.root], options, prompts, shared), plan)


def _plan(resolved: Resolved, server: EndpointOptions, options: MeasurementOptions) -> EndpointPlan:
    named = None if resolved.built_in_pair else resolved.recipe.target.model
    rate = parse_rate(server.request_rate)
    max_tokens_field = server.max_tokens_field or "max_tokens"
    check_max_tokens_field(max_tokens_field, options.chat)
    timeout: dict[str, Any] = {} if server.timeout_s is None else {"timeout_s": server.timeout_s}
    return EndpointPlan(
        address=parse_address(server.url),
        key=check_key(key_of(server.key)),
        model=server.model or named,
        model_from="--endpoint-model" if server.model else "the recipe's target" if named else "/v1/models",
        chat=options.chat,
        concurrency=server.concurrency or (1 if rate == inf else None),
        request_rate=rate,
        seed=resolved.recipe.sampling.seed,
        extra_body=parse_extra_body(server.extra_body),
        max_tokens_field=max_tokens_field,
        repeats=options.repeats,
        **timeout,
    )


@dataclass(slots=True)
class EndpointRun(MeasuredRun["EndpointBench"]):
    """One run of the command."""

    document_class = EndpointDocument

    server: EndpointPlan

    def json_schema(self) -> dict[str, Any]:
        """The JSON Schema of the document."""
        return endpoint_schema(self.server.has_arrivals)

    def gate_names(self) -> dict[str, list[str]]:
        """Tasks, and turns of conversations."""
        most = max((len(turn_ends(row)) for row in self.arms.rows), default=1)
        return {"by_task": self.tasks, "by_turn": [str(turn) for turn in range(1, most + 1)] if most > 1 else []}

    def pairs(self) -> Pairs:
        """The prompts, however often each is sent."""
        return Pairs(self.arms.rows, batch_size=1, repeats=1)

    def shown(self, recipe: Recipe) -> dict[str, Any]:
        """The parts of a recipe that apply to a server."""
        whole = recipe.as_dict()
        target = {"target": {"model": self.server.model}} if self.server.model_from == "the recipe's target" else {}
        return target | {name: whole[name] for name in ("sampling", "workload", "gates")}

    def plan(self, num: int | None) -> tuple[dict[str, Any], str]:
        """The requests that would be sent."""
        recipe, server = self.arms.recipe, self.server
        endpoint = {"url": server.address.root, "path": server.path}
        body = {
            "endpoint": endpoint | {"model": server.model, "model_from": server.model_from},
            "fields": sampling_fields(recipe.sampling, server.max_tokens_field),
            "extra_body": dict(server.extra_body),
            "concurrency": server.concurrency,
            "request_rate": server.request_rate if server.has_arrivals else None,
            "repeats": server.repeats,
        }
        model = f"`{server.model}`" if server.model else "the first model that it lists"
        prompts, pace = num_prompts_words(recipe.workload, num), pace_words(server.concurrency, server.request_rate)
        to = f"to {server.address.api}{server.path} for {model}"
        return body, f"# would send {prompts}, {server.repeats} times, {pace}, {to}"

    def study(self) -> EndpointBench:
        """The requests, not yet sent."""
        return EndpointBench(EndpointArm(self.server, self.arms.recipe.sampling), self.arms.rows)

    def measure(self, study: EndpointBench, stopped: Callable[[], bool]) -> None:
        """Send everything; the table is drawn while no request is open, elsewhere a thread counts in one line."""
        screen, server = self.arms.screen, self.server
        screen.say(f"asking {server.address.root}; the first answer is not counted")
        pace, how = Pace(), pace_words(server.concurrency, server.request_rate)

        def line() -> str:
            done, total = len(study.visits), study.total
            return f"{done} of {counted(total, 'request')}, {pace.words(done, total)}, {how}"

        may_draw = screen.is_live and server.concurrency == 1 and not server.has_arrivals
        counting = nullcontext() if may_draw else CountingLine(screen, line)
        with LiveTable(screen.console, may_draw) as view, counting:
            study.run(stopped, lambda: view.draw(lambda: live_table(study), line()))

    def is_measured(self, study: EndpointBench) -> bool:
        """Whether a request was answered."""
        return study.num_answered > 0

    def document(self, study: EndpointBench, interrupted: bool) -> dict[str, Any]:
        """The document, whose gates are not judged yet."""
        arms = self.arms
        body = endpoint_body(study, arms.recipe.workload.dataset, arms.load_before.since(), interrupted)
        if arms.options.by is not None:
            body["plan"]["by"] = arms.options.by
        body["notices"] = [*arms.prompts.notices, *body["notices"]]
        return envelope(self.document_class, self.shown(arms.recipe), body)

    def csv(self, study: EndpointBench, document: dict[str, Any]) -> str:
        """A row of all requests, and one for each task."""
        return server_csv(document)

    def draw(self, page: Console, study: EndpointBench, document: dict[str, Any]) -> None:
        """Print the report."""
        print_endpoint(page, document, self.arms.shared.details)
