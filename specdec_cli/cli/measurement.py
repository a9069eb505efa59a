"""The shared part of `bench`, `sweep-k` and `compare-drafts`: from a recipe to a judged and written document.

A command says what it loads, how that is measured and what stands in its document; the order of things is here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from specdec_cli import __version__
from specdec_cli.cli.measurement_options import check_batch, check_timed_tasks
from specdec_cli.cli.output import (
    deliver_with_report,
    envelope,
    environment,
    machine_of,
)
from specdec_cli.cli.result_output import write_results
from specdec_cli.cli.screen import interruptible, progress
from specdec_cli.errors import ExitCode, RunError
from specdec_cli.measure.workload.turns import every_turn, lost_turns, turn_ends
from specdec_cli.report.generate import Promise
from specdec_cli.report.view import Screen
from specdec_cli.sampling.params import SamplingParams

if TYPE_CHECKING:
    from rich.console import Console

    from specdec_cli.cli.measurement_options import MeasurementOptions
    from specdec_cli.cli.options import Shared
    from specdec_cli.engine.engine import Engine
    from specdec_cli.engine.prompts import PromptRow, PromptSet
    from specdec_cli.measure.bench.journal import Journal
    from specdec_cli.measure.bench.passes import Pass
    from specdec_cli.measure.gates import GateResult
    from specdec_cli.measure.machine.load import Load
    from specdec_cli.measure.machine.machine import Machine
    from specdec_cli.measure.workload.workload import Workload
    from specdec_cli.recipe import Recipe, Resolved

Study = TypeVar("Study")


@dataclass(slots=True)
class Measurement(ABC, Generic[Study]):
    """One run of a measuring command.

    Args:
        resolved: the recipe as given; with several drafts, that of the first.
        asked: what the command's own options ask for.
        prompts: what is decoded.
        shared: the command's shared options.
        screen: shows the progress.
    """

    schema: ClassVar[str]
    doing: ClassVar[str]

    resolved: Resolved
    asked: MeasurementOptions
    prompts: PromptSet
    shared: Shared
    screen: Screen
    _judged: list[GateResult] = field(init=False, default_factory=list)
    _baseline: dict[str, Any] | None = field(init=False, default=None)
    journal: Journal | None = field(init=False, default=None)
    load_before: Load = field(init=False)

    @property
    def rows(self) -> Sequence[PromptRow]:
        """The prompts' rows."""
        return self.prompts.rows

    @property
    def recipe(self) -> Recipe:
        """The recipe that is measured; with several drafts, what they have in common."""
        return self.sized(self.resolved.recipe)

    @abstractmethod
    def json_schema(self) -> dict[str, Any]:
        """The JSON Schema of the document."""

    @abstractmethod
    def gate_names(self) -> dict[str, list[str]]:
        """Keys of the document that depend on the workload, by the path above them."""

    @abstractmethod
    def load(self, say: Callable[[str], None]) -> tuple[Engine, Workload]:
        """Load the models; gives the engine whose machine the document names, and the tokenized workload."""

    @abstractmethod
    def study(self, engine: Engine, workload: Workload) -> Study:
        """Prepare the measurement. Code that reads clocks here draws nothing."""

    @abstractmethod
    def measure(self, study: Study, stopped: Callable[[], bool]) -> None:
        """Measure, drawing between the passes alone."""

    @abstractmethod
    def is_measured(self, study: Study) -> bool:
        """Whether there is anything to report."""

    @abstractmethod
    def passes(self, study: Study) -> list[Pass]:
        """Those that count, of all arms."""

    @abstractmethod
    def body(
        self, study: Study, promise: Promise, must_agree: bool, machine: dict[str, Any], interrupted: bool
    ) -> dict[str, Any]:
        """The document's own keys.

        Args:
            study: after it was measured.
            promise: of the verification mode.
            must_agree: whether tokens with and without a draft are promised to be the same.
            machine: how busy it was before, meanwhile and after.
            interrupted: whether it was ended early.
        """

    @abstractmethod
    def draw(self, page: Console, study: Study, document: dict[str, Any]) -> None:
        """Print the report."""

    def document_recipe(self) -> dict[str, Any]:
        """The recipe as the document has it."""
        return self.recipe.as_dict()

    @abstractmethod
    def csv(self, study: Study, document: dict[str, Any]) -> str:
        """The figures as rows of a table."""

    def write_files(self, study: Study, document: dict[str, Any], interrupted: bool) -> None:
        """The command's own files."""

    def go(self) -> ExitCode | None:
        """Load, measure, show, write, judge."""
        from specdec_cli.engine.caveats import slow_forwards
        from specdec_cli.measure.gates import raise_if_crossed

        self._prepare_gates()
        if self.resolved.built_in_pair:
            self.screen.say(f"no target named: {self.doing} the built-in {self.recipe.target.model}")
        with progress(self.screen) as say:
            machine, engine, workload = self._load(say)
        self.load_before = machine.load
        for note in slow_forwards(engine):
            self.screen.say(f"note: {note}", "yellow")
        if workload.notice:
            self.screen.say(f"note: {workload.notice}", "yellow")
        self._open_journal(engine, workload)
        study = self.study(engine, workload)
        with interruptible() as stopped:
            self.measure(study, stopped)
            was_stopped = stopped()  # what comes later stops nothing: all is measured
            if not self.is_measured(study):
                if not was_stopped:
                    raise RunError("no prompt decoded a second token, so nothing was measured", "raise -n")
                self.screen.say(f"interrupted before anything was measured{self._how_to_go_on()}", "yellow")
                return ExitCode.INTERRUPTED
            document = self._document(engine, study, was_stopped)
            self._write(study, document, was_stopped)
            if was_stopped:
                self.screen.say(f"interrupted: these are the results so far{self._how_to_go_on()}", "yellow")
                return ExitCode.INTERRUPTED
        if self.journal is not None:
            self.journal.remove()
        raise_if_crossed(self._judged)
        return None

    def sized(self, recipe: Recipe, k: int | None = None) -> Recipe:
        """A recipe with room for the batch, for a largest k, and where no arm finds what another left in the cache."""
        from specdec_cli.engine.synthetic import at_depth

        changed: dict[str, Any] = {"max_num_seqs": max(recipe.engine.max_num_seqs, self.asked.batch_size)}
        if recipe.engine.enable_prefix_caching:
            changed["enable_prefix_caching"] = False
        update: dict[str, Any] = {"engine": recipe.engine.model_copy(update=changed)}
        if k is not None:
            update["speculation"] = at_depth(recipe.speculation, k)
        return recipe.model_copy(update=update)

    def trace_file(self, named: Path | None) -> Path | None:
        """Where the trace is kept: in the file that --trace names, else beside the journal."""
        return named or (None if self.journal is None else self.journal.trace_path)

    def tokenize(self, engine: Engine) -> Workload:
        """The prompts, tokenized; of conversations every turn, with the target's answers before it."""
        from specdec_cli.measure.workload.workload import workload_of

        params = SamplingParams(**self.recipe.sampling.model_dump() | {"logprobs": None})
        requests, num_lost = every_turn(engine, self.rows, self.asked.chat, params)
        if num_lost:
            self.prompts.notices.append(lost_turns(num_lost))
        found = workload_of(requests, self.recipe.workload.dataset, engine.target.max_context)
        check_batch(self.asked.batch_size, len(found.requests))
        return found

    def _prepare_gates(self) -> None:
        """Refuse gates that could not be judged and a batch that is not there, before anything is loaded."""
        from specdec_cli.measure.baseline import read_baseline
        from specdec_cli.measure.gates import Pairs, check_measurable, check_paths, parse_all

        gates, schema, names = self.recipe.gates, self.json_schema(), self.gate_names()
        check_paths(parse_all(gates.fail_if), schema, names)
        check_batch(self.asked.batch_size, len(self.rows))
        check_timed_tasks(gates, self.asked.batch_size, self.rows)
        turn_rows = [row for row in self.rows for _ in turn_ends(row)]
        if gates.baseline is not None:
            self._baseline = read_baseline(gates.baseline, self.schema)
        check_measurable(gates, schema, names, Pairs.of(turn_rows, self.asked.first_batch_size, self.asked.repeats))

    def _load(self, say: Callable[[str], None]) -> tuple[Machine, Engine, Workload]:
        """The machine before we keep it busy, the models and the workload."""
        say("starting torch and transformers")
        from specdec_cli.engine.garbage import leave_alone
        from specdec_cli.measure.machine.machine import look

        machine = look()
        loaded = self.load(say)
        leave_alone()
        return machine, *loaded

    def _open_journal(self, engine: Engine, workload: Workload) -> None:
        """With --output, every pass is kept beside it as soon as it is finished."""
        from specdec_cli.measure.bench.journal import open_journal, workload_digest

        if self.shared.output is None:
            return
        head = {
            "specdec_version": __version__,
            "schema": self.schema,
            "recipe": {key: value for key, value in self.document_recipe().items() if key != "gates"},
            "plan": self.asked.as_plan(),
            "workload": workload_digest(workload.requests),
            "environment": environment(**machine_of(engine)),
        }
        self.journal = open_journal(self.shared.output, head, self.shared.resume)
        if self.shared.resume:
            num = self.journal.num_kept
            self.screen.say(
                f"resuming after {num} passes" if num else "nothing to resume: starting from the beginning", "dim"
            )

    def _changes(self) -> Iterator[str]:
        """Where the recipe was not measured as it was given."""
        given, measured = self.resolved.recipe.engine, self.recipe.engine
        if given.max_num_seqs != measured.max_num_seqs:
            yield f"max_num_seqs is {measured.max_num_seqs} here, not {given.max_num_seqs}: a batch runs together"
        if given.enable_prefix_caching:
            yield "prefix caching is off here, because the arms decode the same prompts"

    def _how_to_go_on(self) -> str:
        return "" if self.journal is None else "; --resume continues it"

    def _document(self, engine: Engine, study: Study, interrupted: bool) -> dict[str, Any]:
        from specdec_cli.engine.caveats import caveats
        from specdec_cli.measure.baseline import judge_document
        from specdec_cli.measure.machine.load import Conditions

        promise = Promise.of(self.recipe)
        conditions = Conditions.of(self.load_before, self.passes(study))
        body = self.body(study, promise, promise.keeps_tokens, conditions.as_dict(), interrupted)
        num_resumed = 0 if self.journal is None else self.journal.num_resumed
        body["plan"] |= {"chat": self.asked.chat, "resumed": num_resumed}
        if num_resumed:
            body["notices"].append(
                f"{num_resumed} of {body['plan']['passes']} passes are of an earlier, interrupted run"
            )
        outputs = [tokens for one in self.passes(study) for tokens in one.run.token_ids or ()]
        document = envelope(self.schema, self.document_recipe(), body, **machine_of(engine, outputs))
        known = [*self.prompts.notices, *caveats(self.recipe, engine), *self._changes()]
        document["notices"] = [*known, *document["notices"]]
        document["notices"] += [conditions.discarded] if conditions.discarded else []
        self._judged = judge_document(document, self.recipe.gates, self._baseline)
        return document

    def _write(self, study: Study, document: dict[str, Any], interrupted: bool) -> None:
        """The result's files and the document, then the report, on stdout unless the document stands there."""
        self.write_files(study, document, interrupted)
        write_results(document, self.asked, lambda: self.csv(study, document), self.shared.force)
        deliver_with_report(document, self.shared, lambda page: self.draw(page, study, document))
