"""Documents of `train-draft`: a finished run, the plan of one, and a draft in another format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

from specdec_cli.document import Count, Figure, Result, ResultDocument, Seconds
from specdec_cli.train.events import Evaluated, Trained, TrainingEvent

_MOST_POINTS = 400


class LossPoint(Result):
    """Mean loss of neighbouring steps, of which `step` is the last."""

    step: int
    loss: Figure


class EvaluationResult(Evaluated):
    """An evaluation, and the mean loss of the steps since the one before."""

    loss: Figure


class TrainDocument(ResultDocument):
    """A training run: its sizes, evaluations and loss. `settled` has the sizes that the method chose."""

    schema_name: ClassVar[str] = "specdec.train/1"

    interrupted: bool
    notices: list[str]
    num_steps: Count
    seconds: Seconds
    num_tokens: Count
    last_loss: Figure
    settled: dict[str, Any]
    best: EvaluationResult | None
    evaluations: list[EvaluationResult]
    curve: list[LossPoint]

    @classmethod
    def of_events(
        cls, events: Sequence[TrainingEvent], settled: dict[str, Any], notices: Sequence[str], interrupted: bool
    ) -> Self:
        """The document of a log."""
        steps = [event for event in events if isinstance(event, Trained)]
        evaluations: list[EvaluationResult] = []
        for event in (event for event in events if isinstance(event, Evaluated)):
            before = evaluations[-1].step if evaluations else 0
            loss = _mean_loss([step for step in steps if before < step.step <= event.step])
            evaluations.append(EvaluationResult(**event.model_dump(), loss=loss))
        size = max(1, -(-len(steps) // _MOST_POINTS))
        parts = [steps[begin : begin + size] for begin in range(0, len(steps), size)]
        return cls(
            interrupted=interrupted,
            notices=list(notices),
            num_steps=steps[-1].step if steps else 0,
            seconds=round(sum(step.seconds for step in steps), 3),
            num_tokens=sum(step.num_tokens for step in steps),
            last_loss=steps[-1].loss if steps else None,
            settled=settled,
            best=max(evaluations, key=lambda evaluation: evaluation.acceptance_length, default=None),
            evaluations=evaluations,
            curve=[LossPoint(step=part[-1].step, loss=_mean_loss(part)) for part in parts],
        )


def _mean_loss(steps: Sequence[Trained]) -> float | None:
    return round(sum(step.loss for step in steps) / len(steps), 5) if steps else None


class ConversionDocument(ResultDocument):
    """A published draft that was written in another format; `holds` describes the new one."""

    schema_name: ClassVar[str] = "specdec.conversion/1"

    draft: str
    format: str
    folder: str
    holds: str
