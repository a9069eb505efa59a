"""A run of a measuring command, whatever decodes: its gates, its document and its files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from specdec_cli.cli.measurement_options import check_batch, check_timed_tasks, tell
from specdec_cli.cli.output import deliver_with_report
from specdec_cli.cli.result_output import write_results
from specdec_cli.measure.workload.turns import turn_ends
from specdec_cli.report.view import Screen

if TYPE_CHECKING:
    from rich.console import Console

    from specdec_cli.cli.measurement_options import MeasurementOptions
    from specdec_cli.cli.options import Shared
    from specdec_cli.engine.prompts import PromptRow, PromptSet
    from specdec_cli.measure.gates import GateResult
    from specdec_cli.recipe import Recipe, Resolved

Study = TypeVar("Study")


@dataclass(slots=True)
class JudgedRun(ABC, Generic[Study]):
    """One run of a measuring command.

    Args:
        resolved: the recipe as given; with several drafts, that of the first.
        asked: what the command's own options ask for.
        prompts: what is decoded.
        shared: the command's shared options.
        screen: shows the progress.
    """

    schema: ClassVar[str]

    resolved: Resolved
    asked: MeasurementOptions
    prompts: PromptSet
    shared: Shared
    screen: Screen
    _judged: list[GateResult] = field(init=False, default_factory=list)
    _baseline: dict[str, Any] | None = field(init=False, default=None)

    @property
    def rows(self) -> Sequence[PromptRow]:
        """The prompts' rows."""
        return self.prompts.rows

    @property
    def recipe(self) -> Recipe:
        """The recipe that is measured; with several drafts, what they have in common."""
        return self.resolved.recipe

    @abstractmethod
    def json_schema(self) -> dict[str, Any]:
        """The JSON Schema of the document."""

    @abstractmethod
    def gate_names(self) -> dict[str, list[str]]:
        """Keys of the document that depend on the workload, by the path above them."""

    @abstractmethod
    def draw(self, page: Console, study: Study, document: dict[str, Any]) -> None:
        """Print the report."""

    @abstractmethod
    def csv(self, study: Study, document: dict[str, Any]) -> str:
        """The figures as rows of a table."""

    def document_recipe(self) -> dict[str, Any]:
        """The recipe as the document has it."""
        return self.recipe.as_dict()

    def write_files(self, study: Study, document: dict[str, Any], interrupted: bool) -> None:
        """The command's own files."""

    def prepare_gates(self) -> None:
        """Refuse gates that could not be judged and a batch that is not there, before anything is loaded."""
        from specdec_cli.measure.baseline import read_baseline
        from specdec_cli.measure.gates import Pairs, check_measurable, check_paths, parse_all

        gates, schema, names = self.recipe.gates, self.json_schema(), self.gate_names()
        if not self.rows:
            check_paths([gate for gate in parse_all(gates.fail_if) if "task" not in gate.path], schema, names)
            return
        check_paths(parse_all(gates.fail_if), schema, names)
        check_batch(self.asked.batch_size, len(self.rows))
        check_timed_tasks(gates, self.asked.batch_size, self.rows)
        turn_rows = [row for row in self.rows for _ in turn_ends(row)]
        if gates.baseline is not None:
            self._baseline = read_baseline(gates.baseline, self.schema)
        check_measurable(gates, schema, names, Pairs.of(turn_rows, self.asked.first_batch_size, self.asked.repeats))

    def rehearse(self) -> int | None:
        """Refuse what the run would refuse before it loads anything, for its plan.

        Returns:
            The number of prompts; None where they are not at hand.
        """
        tell(self.prompts.notices, self.shared)
        self.prepare_gates()
        return len(self.rows) or None

    def judge(self, document: dict[str, Any]) -> None:
        """Judge the gates, whose results become part of the document; `raise_if_crossed` reports them."""
        from specdec_cli.measure.baseline import judge_document

        self._judged = judge_document(document, self.recipe.gates, self._baseline)

    def raise_if_crossed(self) -> None:
        """Report a gate that was crossed.

        Raises:
            GateError: there is one.
        """
        from specdec_cli.measure.gates import raise_if_crossed

        raise_if_crossed(self._judged)

    def write(self, study: Study, document: dict[str, Any], interrupted: bool) -> None:
        """The result's files and the document, then the report, on stdout unless the document stands there."""
        self.write_files(study, document, interrupted)
        write_results(document, self.asked, lambda: self.csv(study, document), self.shared.force)
        deliver_with_report(document, self.shared, lambda page: self.draw(page, study, document))
