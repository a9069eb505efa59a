"""`specdec compare-drafts --engine vllm`: drafts in another engine, each at the recipe's k, against no draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specdec_cli.cli.measurement_options import num_prompts_words, show_plan
from specdec_cli.cli.other_engine import OtherEngine
from specdec_cli.cli.other_engine_run import PLAIN, OtherEngineRun
from specdec_cli.cli.output import envelope
from specdec_cli.measure.elsewhere.requests import requests_of
from specdec_cli.measure.machine.load import Conditions
from specdec_cli.measure.workload.workload import task_of
from specdec_cli.report.bench import BenchView
from specdec_cli.report.compare_drafts import SCHEMA, compare_body, drafts_table, json_schema, print_compare

if TYPE_CHECKING:
    from rich.console import Console

    from specdec_cli.cli.measurement_options import MeasurementOptions
    from specdec_cli.cli.options import Shared
    from specdec_cli.measure.bench.compare import DraftComparison

_NONE = "none"


def show_other_drafts(
    names: Sequence[str], engines: Sequence[OtherEngine], asked: MeasurementOptions, shared: Shared, num: int | None
) -> None:
    """Show what would be started and sent, without starting anything."""
    resolved = engines[0].resolved
    commands = {PLAIN: engines[0].shown(0)}
    commands |= {name: engine.shown() for name, engine in zip(names, engines, strict=True) if _drafts(engine)}
    body: dict[str, Any] = {
        "drafts": list(names),
        "num_prompts": num,
        "repeats": asked.repeats,
        "batch_size": asked.batch_size,
        "commands": commands,
    }
    prompts = num_prompts_words(resolved.recipe.workload, num)
    lines = [f"# would compare {', '.join(names)}: {prompts}, {asked.repeats} times in each arm:"]
    lines += [f"#   {name}: {command}" for name, command in commands.items()]
    recipe = resolved.recipe.as_dict() | {"draft": [one.resolved.recipe.as_dict()["draft"] for one in engines]}
    show_plan(recipe, body, shared, "\n".join(lines) + "\n")


def _drafts(engine: OtherEngine) -> bool:
    return engine.resolved.recipe.draft.method != _NONE


@dataclass(slots=True)
class OtherCompareRun(OtherEngineRun["DraftComparison"]):
    """One run of the command.

    Args:
        names: the drafts'.
        engines: the engine with each of them.
    """

    schema = SCHEMA

    names: Sequence[str] = field(kw_only=True)
    engines: Sequence[OtherEngine] = field(kw_only=True)

    def json_schema(self) -> dict[str, Any]:
        """The JSON Schema of the document."""
        return json_schema()

    def gate_names(self) -> dict[str, list[str]]:
        """Drafts, which have a place too, and tasks, of every draft."""
        tasks = list(dict.fromkeys(map(task_of, self.rows)))
        places = [*self.names, *range(len(self.names))]
        return {"rows": list(self.names), "task_winners": tasks} | {f"rows.{one}.by_task": tasks for one in places}

    def document_recipe(self) -> dict[str, Any]:
        """The recipe with all its drafts."""
        drafts = [one.resolved.recipe.as_dict()["draft"] for one in self.engines]
        return self.recipe.as_dict() | {"draft": drafts}

    def warnings(self) -> list[str]:
        """Sentences about what the engine does not do as the recipe says, each once."""
        return list(dict.fromkeys(warning for one in self.engines for warning in one.server().warnings))

    def study(self, stopped: Callable[[], bool]) -> DraftComparison:
        """The comparison, without starting a server."""
        from specdec_cli.measure.bench.compare import Contender, DraftComparison

        contenders = [
            Contender(name, str(engine.resolved.recipe.draft.method or "model"))
            for name, engine in zip(self.names, self.engines, strict=True)
        ]
        ks = [engine.k for engine in self.engines]
        workload = requests_of(self.rows, self.recipe)
        found = DraftComparison(
            contenders, workload, max(ks), self.asked.batch_size, self.asked.repeats, load=self.load_before
        )
        found.notices.append("each draft was measured at the recipe's k alone; `sweep-k` finds a draft's own best k")
        return found

    def measure(self, study: DraftComparison, stopped: Callable[[], bool]) -> None:
        """Let one server run after the other."""
        plain = self.arm(PLAIN, self.engine, 0, stopped)
        arms = [
            (contender, engine.k, self.arm(f"{contender.draft} k={engine.k}", engine, None, stopped))
            for contender, engine in zip(study.contenders, self.engines, strict=True)
            if contender.drafts
        ]
        view = BenchView(self.screen.console, self.screen.is_live, lambda _: drafts_table(study), self.screen.say)
        self.watch(study.measure(arms, plain, stopped, in_turn=False), lambda: study.bench, view, stopped)

    def is_measured(self, study: DraftComparison) -> bool:
        """Whether there is a draft and a plain arm to compare."""
        return study.is_measured

    def document(self, study: DraftComparison, interrupted: bool) -> dict[str, Any]:
        """The document, whose gates are not judged yet."""
        conditions = Conditions.of(self.load_before, study.bench.passes)
        body = compare_body(study, self.promise, self.compares, conditions.as_dict(), interrupted)
        body["plan"] |= {"chat": self.asked.chat, "resumed": 0}
        body["notices"] = [*self.prompts.notices, *self.notices(), *body["notices"]]
        body["engine"] = self.engine_section()
        return envelope(SCHEMA, self.document_recipe(), body)

    def csv(self, study: DraftComparison, document: dict[str, Any]) -> str:
        """A row per draft, and one for each of its tasks."""
        from specdec_cli.report.result_files import compare_csv

        return compare_csv(document)

    def draw(self, page: Console, study: DraftComparison, document: dict[str, Any]) -> None:
        """Print the report."""
        print_compare(page, document, self.shared.details)
