"""One run of a measuring command, wherever its arms decode: from a recipe to a judged and written document.

A command says what is studied and what stands in its document; its arms say what is loaded or started. The order of
things is here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from specdec_cli import __version__
from specdec_cli.cli.measurement_options import check_batch, check_timed_tasks
from specdec_cli.cli.output import deliver_with_report, envelope, environment, show_plan, write_results
from specdec_cli.cli.place import Arms, Place
from specdec_cli.cli.screen import interruptible, say_notices
from specdec_cli.errors import ExitCode, RunError
from specdec_cli.measure.workload.turns import turn_ends
from specdec_cli.measure.workload.workload import task_of

if TYPE_CHECKING:
    from rich.console import Console

    from specdec_cli.document import ResultDocument
    from specdec_cli.measure.bench.bench import Bench, Progress
    from specdec_cli.measure.bench.journal import Journal
    from specdec_cli.measure.gates import Pairs
    from specdec_cli.measure.machine.load import Conditions, CountedPass
    from specdec_cli.recipe import Recipe
    from specdec_cli.report.bench import BenchView

Measurement = TypeVar("Measurement")


@dataclass(slots=True)
class MeasuredRun(ABC, Generic[Measurement]):
    """One run of a measuring command."""

    document_class: ClassVar[type[ResultDocument]]
    doing: ClassVar[str] = "measuring"
    has_gates: ClassVar[bool] = True
    """Whether its document can be judged."""

    arms: Place
    journal: Journal | None = field(init=False, default=None)
    _baseline: dict[str, Any] | None = field(init=False, default=None)

    @property
    def tasks(self) -> list[str]:
        """Tasks of the prompts."""
        return list(dict.fromkeys(map(task_of, self.arms.rows)))

    def json_schema(self) -> dict[str, Any]:
        """The JSON Schema of the document."""
        return self.document_class.json_schema()

    def gate_names(self) -> dict[str, list[str]]:
        """Keys of the document that depend on the workload, by the path above them."""
        return {}

    @abstractmethod
    def plan(self, num: int | None) -> tuple[dict[str, Any], str]:
        """The command's keys of a dry run's document, and the line that says what would run.

        Args:
            num: number of prompts; None where they are not at hand.
        """

    @abstractmethod
    def study(self) -> Measurement:
        """Prepare the measurement. Code that reads clocks here draws nothing."""

    @abstractmethod
    def measure(self, study: Measurement, stopped: Callable[[], bool]) -> None:
        """Measure, drawing between the passes alone."""

    @abstractmethod
    def is_measured(self, study: Measurement) -> bool:
        """Whether there is anything to report."""

    @abstractmethod
    def document(self, study: Measurement, interrupted: bool) -> dict[str, Any]:
        """The document, whose gates are not judged yet.

        Args:
            study: after it was measured.
            interrupted: whether it was ended early.
        """

    def csv(self, study: Measurement, document: dict[str, Any]) -> str:
        """The figures as rows of a table."""
        raise AssertionError("a command without tables takes no --csv")

    @abstractmethod
    def draw(self, page: Console, study: Measurement, document: dict[str, Any]) -> None:
        """Print the report."""

    def shown(self, recipe: Recipe) -> dict[str, Any]:
        """A recipe as the document has it."""
        return recipe.as_dict()

    def pairs(self) -> Pairs:
        """How many pairs the run makes for its intervals to rest on."""
        from specdec_cli.measure.gates import Pairs

        options, turns = self.arms.options, [row for row in self.arms.rows for _ in turn_ends(row)]
        return Pairs(turns, options.first_batch_size, options.repeats)

    def plan_yaml(self) -> str:
        """The recipe as a dry run shows it, with the origin of each value."""
        from specdec_cli.recipe.present import to_yaml

        return to_yaml(self.arms.resolved, origins=True)

    def opened(self) -> None:
        """Refuse what only the loaded models tell."""

    def open_journal(self) -> None:
        """Keep every pass, where an interrupted run can be continued."""

    def write_files(self, study: Measurement, document: dict[str, Any], interrupted: bool) -> None:
        """The command's own files."""

    def start(self, dry_run: bool) -> ExitCode | None:
        """Show what would run, or run it."""
        if not dry_run:
            return self.go()
        self.rehearse()
        return None

    def rehearse(self) -> None:
        """Show what would run, and where each value comes from; refuse what the run would refuse before it loads."""
        arms = self.arms
        say_notices(arms.prompts.notices, arms.shared.quiet)
        self._prepare_gates()
        num = len(arms.rows) or None
        body, head = self.plan(num)
        commands = arms.commands()
        lines = [f"{head}:" if commands else head]
        lines += [f"#   {name}: {command}" for name, command in commands.items()]
        lines += [f"# warning: {warning}" for warning in arms.warnings()]
        recipe = self.shown(arms.resolved.recipe)
        origins = {key: origin for key, origin in arms.resolved.origins.items() if key.partition(".")[0] in recipe}
        body = {"origins": origins, "num_prompts": num, **body} | ({"commands": commands} if commands else {})
        show_plan(recipe, body, arms.shared, "\n".join([*lines, self.plan_yaml()]))

    def go(self) -> ExitCode | None:
        """Load, measure, show, write, judge.

        Raises:
            GateError: a gate was crossed.
            KeyboardInterrupt: Ctrl-C before the first pass; its text says how to continue.
        """
        try:
            return self._go()
        except KeyboardInterrupt as error:
            raise KeyboardInterrupt(self._how_to_go_on()) from error

    def _go(self) -> ExitCode | None:
        from specdec_cli.measure.baseline import judge_document
        from specdec_cli.measure.gates import raise_if_crossed

        arms, screen = self.arms, self.arms.screen
        self._prepare_gates()
        if arms.resolved.built_in_pair and arms.shared.loads_models:
            screen.say(f"no target named: {self.doing} the built-in {arms.recipe.target.model}")
        with arms.showing_failures():
            arms.open()
            self.opened()
            self.open_journal()
            study = self.study()
            with interruptible() as stopped:
                arms.stopped = stopped
                self.measure(study, stopped)
                was_stopped = stopped()  # what comes later stops nothing: all is measured
                if not self.is_measured(study):
                    if not was_stopped:
                        raise RunError("no prompt decoded a second token, so nothing was measured", "raise -n")
                    screen.say(f"interrupted before anything was measured{self._how_to_go_on()}", "yellow")
                    return ExitCode.INTERRUPTED
                document = self.document(study, was_stopped)
                judged = judge_document(document, arms.recipe.gates, self._baseline) if self.has_gates else []
                self._write(study, document, was_stopped)
                if was_stopped:
                    screen.say(f"interrupted: these are the results so far{self._how_to_go_on()}", "yellow")
                    return ExitCode.INTERRUPTED
        if self.journal is not None:
            self.journal.remove()
        raise_if_crossed(judged)
        return None

    def _prepare_gates(self) -> None:
        """Refuse gates that could not be judged and a batch that is not there, before anything is loaded."""
        from specdec_cli.measure.baseline import read_baseline
        from specdec_cli.measure.gates import check_measurable, check_paths, parse_all

        gates, schema, names = self.arms.resolved.recipe.gates, self.json_schema(), self.gate_names()
        rows, options = self.arms.rows, self.arms.options
        if not rows:
            check_paths([gate for gate in parse_all(gates.fail_if) if not _is_by_prompt(gate.path)], schema, names)
            return
        check_paths(parse_all(gates.fail_if), schema, names)
        check_batch(options.batch_size, len(rows))
        check_timed_tasks(gates, options.batch_size, rows)
        if gates.baseline is not None:
            self._baseline = read_baseline(gates.baseline, self.document_class.schema_name)
        check_measurable(gates, schema, names, self.pairs())

    def _how_to_go_on(self) -> str:
        return "" if self.journal is None else "; --resume continues it"

    def _write(self, study: Measurement, document: dict[str, Any], interrupted: bool) -> None:
        """The result's files and the document, then the report, on stdout unless the document stands there.

        Raises:
            RunError: a file cannot be written; the others and the report are.
        """
        shared = self.arms.shared
        try:
            try:
                self.write_files(study, document, interrupted)
                write_results(document, shared, lambda: self.csv(study, document))
            finally:
                deliver_with_report(document, shared, lambda page: self.draw(page, study, document))
        except RunError as error:
            if self.journal is None:
                raise
            hint = f"`{self.journal.path}` keeps every pass: free space, then repeat the command with --resume --force"
            raise RunError(error.message, hint) from error


@dataclass(slots=True)
class ComparedRun(MeasuredRun[Measurement]):
    """One run of a command that compares arms."""

    arms: Arms

    @property
    def must_agree(self) -> bool:
        """Whether tokens with and without a draft are promised to be the same, and compared."""
        return self.arms.promise.keeps_tokens

    @abstractmethod
    def passes(self, study: Measurement) -> Sequence[CountedPass]:
        """Counted passes of all arms."""

    @abstractmethod
    def body(self, study: Measurement, machine: Conditions, interrupted: bool) -> dict[str, Any]:
        """The document's own keys.

        Args:
            study: after it was measured.
            machine: how busy it was before, meanwhile and after.
            interrupted: whether it was ended early.
        """

    def watch(
        self,
        passes: Generator[Progress, None, None],
        bench: Callable[[], Bench],
        view: BenchView,
    ) -> None:
        """Run the passes; before an arm that is alone ends, the differences of its text are explained."""
        with view, closing(passes):
            for at in passes:
                view.show(bench(), at)
                if not at.arm and self.must_agree and not self.arms.stopped():
                    self.arms.explain(bench())

    def trace_file(self, named: Path | None) -> Path | None:
        """File of the trace, named by --trace or beside the journal."""
        return named or (None if self.journal is None else self.journal.trace_path)

    def open_journal(self) -> None:
        """Open the journal, which keeps every finished pass beside the file of --output."""
        from specdec_cli.measure.bench.journal import open_journal, workload_digest

        arms = self.arms
        if arms.shared.output is None or not arms.keeps_journal:
            return
        head = {
            "specdec_version": __version__,
            "schema": self.document_class.schema_name,
            "recipe": {key: value for key, value in self.shown(arms.recipe).items() if key != "gates"},
            "plan": arms.options.as_plan(),
            "workload": workload_digest(arms.workload.requests),
            "environment": environment(**arms.machine()),
        }
        self.journal = open_journal(arms.shared.output, head, arms.shared.resume)
        if arms.shared.resume:
            num = self.journal.num_kept
            arms.screen.say(
                f"resuming after {num} {'pass' if num == 1 else 'passes'}"
                if num
                else "nothing to resume: starting from the beginning",
                "dim",
            )

    def document(self, study: Measurement, interrupted: bool) -> dict[str, Any]:
        """The document, whose gates are not judged yet."""
        from specdec_cli.measure.bench.passes import Pass
        from specdec_cli.measure.machine.load import Conditions

        arms, passes = self.arms, self.passes(study)
        conditions = Conditions.of_passes(arms.load_before, passes)
        body = self.body(study, conditions, interrupted)
        num_resumed = 0 if self.journal is None else self.journal.num_resumed
        body["plan"] |= {"chat": arms.options.chat, "resumed": num_resumed}
        if arms.options.by is not None:
            body["plan"]["by"] = arms.options.by
        if num_resumed:
            body["notices"].append(
                f"{num_resumed} of {body['plan']['passes']} passes are of an earlier, interrupted run"
            )
        outputs = [
            tokens for each_pass in passes if isinstance(each_pass, Pass) for tokens in each_pass.run.token_ids or ()
        ]
        document = envelope(self.document_class, self.shown(arms.recipe), body, **arms.machine(outputs))
        document["notices"] = [*arms.prompts.notices, *arms.notices(), *document["notices"]]
        document["notices"] += [conditions.discarded] if conditions.discarded else []
        return document | arms.section()


def _is_by_prompt(path: str) -> bool:
    """Whether a gate's path names something that the prompts decide."""
    return "task" in path or path.startswith("by_turn.")
