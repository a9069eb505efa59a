"""`specdec bench --engine vllm`: another engine with the draft against the same engine without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specdec_cli.cli.measurement_options import num_prompts_words, show_plan
from specdec_cli.cli.other_engine import OtherEngine
from specdec_cli.cli.other_engine_run import PLAIN, OtherEngineRun
from specdec_cli.cli.output import envelope
from specdec_cli.measure.elsewhere.requests import requests_of
from specdec_cli.measure.machine.load import Conditions
from specdec_cli.measure.workload.workload import task_of
from specdec_cli.recipe.present import to_yaml
from specdec_cli.report.bench import SCHEMA, BenchView, bench_body, json_schema, print_bench

if TYPE_CHECKING:
    from rich.console import Console

    from specdec_cli.cli.measurement_options import MeasurementOptions
    from specdec_cli.cli.options import Shared
    from specdec_cli.measure.bench.bench import Bench
    from specdec_cli.recipe import Resolved

_DRAFT = "with the draft"


def show_other_plan(
    resolved: Resolved, engine: OtherEngine, asked: MeasurementOptions, shared: Shared, num: int | None
) -> None:
    """Show what would be started and sent, without starting anything."""
    commands = {PLAIN: engine.shown(0), _DRAFT: engine.shown()}
    body: dict[str, Any] = {
        "origins": resolved.origins,
        "num_prompts": num,
        "arms": list(commands),
        "repeats": asked.repeats,
        "batch_size": asked.batch_size,
        "commands": commands,
    }
    prompts = num_prompts_words(resolved.recipe.workload, num)
    lines = [f"# would measure {prompts}, {asked.repeats} times in each arm:"]
    lines += [f"#   {name}: {command}" for name, command in commands.items()]
    lines += [f"# warning: {warning}" for warning in engine.server().warnings]
    text = "\n".join([*lines, to_yaml(resolved, origins=True)])
    show_plan(resolved.recipe.as_dict(), body, shared, text)


@dataclass(slots=True)
class OtherBenchRun(OtherEngineRun["Bench"]):
    """One run of the command."""

    schema = SCHEMA

    def json_schema(self) -> dict[str, Any]:
        """The JSON Schema of the document."""
        return json_schema()

    def gate_names(self) -> dict[str, list[str]]:
        """Tasks; there are no other engines beside this one."""
        return {"by_task": list(dict.fromkeys(map(task_of, self.rows))), "against": []}

    def csv(self, study: Bench, document: dict[str, Any]) -> str:
        """A row per task and arm."""
        from specdec_cli.report.result_files import bench_csv

        return bench_csv(study)

    def draw(self, page: Console, study: Bench, document: dict[str, Any]) -> None:
        """Print the report."""
        print_bench(page, document, self.shared.details)

    def study(self, stopped: Callable[[], bool]) -> Bench:
        """The benchmark of two arms, of which one is up at a time."""
        from specdec_cli.measure.bench.bench import Bench, Plan

        plain, draft = self.arm(PLAIN, self.engine, 0, stopped), self.arm(_DRAFT, self.engine, None, stopped)
        plan = Plan(self.asked.batch_size, self.asked.repeats, in_turn=False)
        return Bench(requests_of(self.rows, self.recipe), plan, draft, plain)

    def measure(self, study: Bench, stopped: Callable[[], bool]) -> None:
        """Let one server run after the other."""
        view = BenchView(self.screen.console, self.screen.is_live, say=self.screen.say)
        self.watch(study.run(stopped), lambda: study, view, stopped)

    def is_measured(self, study: Bench) -> bool:
        """Whether both servers decoded."""
        return bool(study.draft.passes and study.plain.passes)

    def document(self, study: Bench, interrupted: bool) -> dict[str, Any]:
        """The document, whose gates are not judged yet."""
        conditions = Conditions.of(self.load_before, study.passes)
        body = bench_body(study, self.promise, self.compares, conditions.as_dict(), None, {}, interrupted)
        body["plan"] |= {"chat": self.asked.chat, "resumed": 0}
        body["notices"] = [*self.prompts.notices, *self.notices(), *body["notices"]]
        body["engine"] = self.engine_section()
        return envelope(SCHEMA, self.document_recipe(), body)
