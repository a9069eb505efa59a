"""The study of one draft: every k and tree at every batch size, predicted, partly measured, and which to run with.

`Sweep` measures our own engine and `EngineSize` another engine's server. What follows from their figures is here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from specdec_cli.document import DifferencesResult, Interval
from specdec_cli.draft_shape import PLAIN, DraftShape
from specdec_cli.events import SpeculativeCounts
from specdec_cli.measure.bench.passes import Compared, differences
from specdec_cli.measure.bench.recommend import Case
from specdec_cli.measure.bench.step_split import StepSplit
from specdec_cli.measure.machine.load import Conditions, CountedPass, Load, look_at_load
from specdec_cli.measure.predict.cost import Costs
from specdec_cli.measure.predict.evidence import TRUSTED, Evidence, Recommendation, largest_words
from specdec_cli.measure.predict.predict import Predicted, Prediction
from specdec_cli.measure.predict.replay import Replay
from specdec_cli.measure.predict.traced import Traced


@dataclass(frozen=True, slots=True)
class Measured:
    """One k or tree, measured.

    Args:
        shape: what a step drafts.
        speedup: of decoding, over the same engine without a draft.
        tokens_per_second: of decoding, all passes together.
        counts: of its steps.
    """

    shape: DraftShape
    speedup: Interval
    tokens_per_second: float | None
    counts: SpeculativeCounts


@dataclass(slots=True, kw_only=True)
class SizeStudy(ABC):
    """One draft at one batch size.

    Args:
        batch_size: requests decoded together.
        k_max: largest k.
        costs: of steps.
        prediction: of every k and tree; None where no trace can know.
        load: of the machine, before.
        in_use: the recipe's own k or tree at this batch size, which stays where the study is inconclusive.
        most_depth: largest k that the draft can reach; None without a limit, and where that is not known.
        trusted: factor by which prediction and measurement may lie apart before they exclude each other.
    """

    batch_size: int = 1
    k_max: int
    costs: Costs
    prediction: Prediction | None
    load: Load = field(default_factory=look_at_load)
    in_use: DraftShape = PLAIN
    most_depth: int | None = None
    trusted: float = TRUSTED
    settled_after: int | None = field(init=False, default=None)
    """Groups (repeats counted) after which more would not have changed the choice; None if all ran."""

    @abstractmethod
    def measured(self) -> dict[DraftShape, Measured]:
        """The measurements so far, the smallest shape first."""

    @abstractmethod
    def passes(self) -> Sequence[CountedPass]:
        """Counted passes of all arms."""

    @abstractmethod
    def notices(self) -> list[str]:
        """Sentences for the report about this batch size."""

    @property
    def conditions(self) -> Conditions:
        """How busy the machine was."""
        return Conditions.of_passes(self.load, self.passes())

    def compared_outputs(self) -> Iterable[Compared]:
        """Every output with a draft, of every shape, beside the same request's without."""
        return ()

    def step_split(self, shape: DraftShape) -> StepSplit | None:
        """Parts of the time of a measured shape's steps; None where that is not known."""
        return None

    def every_shape(self) -> list[DraftShape]:
        """Every k, and the predicted shapes with p-mins and trees."""
        further = [] if self.prediction is None else [*self.prediction.unsure, *self.prediction.trees]
        return [*map(DraftShape, range(1, self.k_max + 1)), *(row.shape for row in further)]

    def predicted(self, shape: DraftShape) -> Predicted | None:
        """The prediction of a shape; None where there is none."""
        return None if self.prediction is None else self.prediction.row(shape)

    def evidence(self, measured: Measured) -> Evidence:
        """The evidence for a measured shape."""
        row = self.predicted(measured.shape)
        return Evidence(measured.speedup, None if row is None else row.speedup, self.trusted)

    def recommended(self) -> Recommendation:
        """The k or tree to run with, and how sure that is."""
        by_shape = {shape: self.evidence(measured) for shape, measured in self.measured().items()}
        recommendation = Case(self, by_shape, self.conditions.busy).recommend()
        is_last = recommendation.verdict == "speculate" and recommendation.tree is None
        if not is_last or recommendation.k != self.k_max:
            return recommendation
        return replace(recommendation, why=f"{recommendation.why}; {largest_words(self.k_max, self.most_depth)}")


@dataclass(slots=True)
class Study:
    """One draft at several batch sizes; most runs have one alone.

    Args:
        by_size: ascending.
        traced: what the predictions rest on; None where no trace can tell.
    """

    by_size: Sequence[SizeStudy] = ()
    traced: Traced | None = None

    def known(self) -> list[SizeStudy]:
        """Batch sizes with a prediction or a measurement to report."""
        return [at_size for at_size in self.by_size if at_size.prediction is not None or at_size.measured()]

    def k_by_batch(self) -> dict[int, int]:
        """The recommended k of every batch size that is known."""
        return {at_size.batch_size: at_size.recommended().k for at_size in self.known()}

    def table(self) -> Replay | None:
        """Predicted acceptance with the recommended table of k, up to the largest batch.

        None for one size, and where the recipe's own k stays that is larger than what the draft was traced for.
        """
        known = self.k_by_batch()
        if self.traced is None or len(known) < 2:
            return None
        most = self.traced.trace.draft(self.traced.draft).most_depth
        if most is not None and most < max(known.values()):
            return None
        return self.traced.table({1: next(iter(known.values())), **known}, max(known))

    def passes(self) -> list[CountedPass]:
        """Counted passes of all arms and batch sizes."""
        return [pass_ for at_size in self.by_size for pass_ in at_size.passes()]

    def differences(self) -> DifferencesResult:
        """Every output with a draft, of every batch size, against the same request's without."""
        return differences(chain.from_iterable(at_size.compared_outputs() for at_size in self.by_size))

    def notices(self) -> list[str]:
        """Sentences for the report about the trace and every batch size, each once."""
        of_trace = [] if self.traced is None else self.traced.trace.notices
        return list(dict.fromkeys([*of_trace, *(text for at_size in self.by_size for text in at_size.notices())]))
