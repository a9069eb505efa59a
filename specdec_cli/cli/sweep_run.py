"""A sweep over k, wherever it decodes: its options, its document, the tuned recipe and the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from specdec_cli.cli.measured_run import ComparedRun
from specdec_cli.cli.measurement_options import MeasurementOptions
from specdec_cli.cli.output import write_file
from specdec_cli.measure.documents.sweep_k import SweepDocument, sweep_body
from specdec_cli.report.sweep_k import print_sweeps
from specdec_cli.report.tuned_recipe import tuned_recipe
from specdec_cli.tree_shape import AUTO, TreeShape

if TYPE_CHECKING:
    from rich.console import Console

    from specdec_cli.measure.bench.study import Study
    from specdec_cli.measure.machine.load import Conditions, CountedPass
    from specdec_cli.measure.predict.traced import Traced
    from specdec_cli.recipe import Resolved

Swept = TypeVar("Swept", bound="Study")


@dataclass(frozen=True, slots=True)
class SweepOptions(MeasurementOptions):
    """The command's further options.

    `trees` has each shape once, and `auto` first. `goes_further` lets k_max grow while the best k is the largest.
    """

    k_max: int
    batch_sizes: tuple[int, ...]
    write_recipe: Path | None
    exhaustive: bool = False
    trace: Path | None = None
    trees: tuple[str, ...] = ()
    goes_further: bool = False

    @property
    def shapes(self) -> list[TreeShape]:
        """The named trees."""
        return [TreeShape.parse(tree) for tree in self.trees if tree != AUTO]

    @property
    def first_batch_size(self) -> int:
        """Batch size of the document's own figures; `by_batch_size` has the others."""
        return self.batch_sizes[0]


@dataclass(slots=True)
class SweepRun(ComparedRun[Swept]):
    """One run of the command.

    Args:
        arms: where it decodes.
        options: the command's own, whose k_max may grow.
        given: the recipe without what the measurement changed, for the tuned one.
        notices: what a reader should know of k_max and of the predictions.
    """

    document_class = SweepDocument
    order: ClassVar[str]
    """The order of two arms A and B over two groups."""

    options: SweepOptions
    given: Resolved
    notices: list[str]
    _trace: dict[str, Any] | None = field(init=False, default=None)

    def gate_names(self) -> dict[str, list[str]]:
        """Tasks."""
        return {"by_task": list(dict.fromkeys(row.category for row in self.arms.rows if row.category is not None))}

    def is_measured(self, study: Swept) -> bool:
        """Whether a prediction or a measurement can be reported."""
        return bool(study.known())

    def passes(self, study: Swept) -> Sequence[CountedPass]:
        """Counted passes of all arms and batch sizes."""
        return study.passes()

    def body(self, study: Swept, machine: Conditions, interrupted: bool) -> dict[str, Any]:
        """The document's own keys."""
        options, arms = self.options, self.arms
        plan = {
            "k_max": options.k_max,
            "exhaustive": options.exhaustive,
            "trees": list(options.trees),
            "repeats": options.repeats,
            "order": self.order,
            "interrupted": interrupted,
        }
        notices = [notice for notice in (arms.workload.notice, *self.notices) if notice] + study.notices()
        further = self.engine_sweep(study)
        return sweep_body(
            study, arms.workload, plan, arms.promise, self.must_agree, machine, self._trace, notices, further
        )

    def engine_sweep(self, study: Swept) -> dict[str, Any] | None:
        """The document's part about another engine's starts."""
        return None

    def keep_trace(self, traced: Traced, is_read: bool = False) -> None:
        """Keep what the document says of the trace.

        Args:
            traced: what predictions rest on.
            is_read: whether it stood in a file.
        """
        path, trace = self.options.trace, traced.trace
        self._trace = {
            "file": None if path is None else str(path),
            "read": is_read,
            "draft": traced.draft,
            "prompts": len(trace.prompts),
            "tokens": trace.num_output_tokens,
        }

    def write_files(self, study: Swept, document: dict[str, Any], interrupted: bool) -> None:
        """The tuned recipe."""
        path = self.options.write_recipe
        if path is not None and interrupted:
            self.arms.screen.say(f"{path} was not written: the sweep is not whole", "yellow")
        elif path is not None:
            write_file(path, tuned_recipe(self.given, document), self.arms.shared.force)

    def csv(self, study: Swept, document: dict[str, Any]) -> str:
        """A row per batch size and k, and one per tree."""
        from specdec_cli.report.result_files import sweep_csv

        return sweep_csv(document)

    def draw(self, page: Console, study: Swept, document: dict[str, Any]) -> None:
        """Print the report."""
        print_sweeps(page, document, self.arms.shared.details)
