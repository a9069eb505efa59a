"""The shared part of `bench`, `sweep-k` and `compare-drafts`: from a recipe to a judged and written document.

A command says what it loads, how that is measured and what stands in its document; the order of things is here.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from specdec_cli import __version__
from specdec_cli.cli.judged_run import JudgedRun
from specdec_cli.cli.measurement_options import check_batch
from specdec_cli.cli.output import (
    envelope,
    environment,
    machine_of,
)
from specdec_cli.cli.screen import interruptible, progress
from specdec_cli.errors import ExitCode, RunError
from specdec_cli.measure.workload.turns import every_turn, lost_turns
from specdec_cli.report.generate import Promise
from specdec_cli.sampling.params import SamplingParams

if TYPE_CHECKING:
    from specdec_cli.engine.engine import Engine
    from specdec_cli.measure.bench.journal import Journal
    from specdec_cli.measure.bench.passes import Pass
    from specdec_cli.measure.machine.load import Load
    from specdec_cli.measure.machine.machine import Machine
    from specdec_cli.measure.workload.workload import Workload
    from specdec_cli.recipe import Recipe

Study = TypeVar("Study")


@dataclass(slots=True)
class Measurement(JudgedRun[Study]):
    """One run of a measuring command with our own engine."""

    doing: ClassVar[str]

    journal: Journal | None = field(init=False, default=None)
    load_before: Load = field(init=False)

    @property
    def recipe(self) -> Recipe:
        """The recipe that is measured, sized for its batch; with several drafts, what they have in common."""
        return self.sized(self.resolved.recipe)

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

    def go(self) -> ExitCode | None:
        """Load, measure, show, write, judge."""
        from specdec_cli.engine.caveats import slow_forwards

        self.prepare_gates()
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
            self.write(study, document, was_stopped)
            if was_stopped:
                self.screen.say(f"interrupted: these are the results so far{self._how_to_go_on()}", "yellow")
                return ExitCode.INTERRUPTED
        if self.journal is not None:
            self.journal.remove()
        self.raise_if_crossed()
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
        self.judge(document)
        return document
