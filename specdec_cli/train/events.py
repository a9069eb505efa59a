"""Events of a training run, in the form that its log keeps: steps, evaluations and checkpoints."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, PlainSerializer

from specdec_cli.document import Count, Result, Seconds, Share

_ROUNDED = PlainSerializer(lambda value: round(value, 4), return_type=float, when_used="json")
_LINE = ConfigDict(extra="ignore", ser_json_inf_nan="constants")  # a diverging run has no finite loss


class Trained(Result):
    """A step: its loss, learning rate and counted tokens.

    `matches_by_depth` is, for each depth, the share of positions where the draft's likeliest token is the target's.
    """

    model_config = _LINE

    event: Literal["step"] = "step"
    step: int
    loss: float
    matches_by_depth: list[Annotated[Share, _ROUNDED]]
    learning_rate: float
    num_tokens: Count
    seconds: Annotated[Seconds, _ROUNDED]


class HeldOutAcceptance(Result):
    """Acceptance on the held-out prompts at k drafted tokens in a step.

    The length counts the target's own token. `acceptance_by_depth` is the share of the `num_steps` counted steps that
    accepted the token at each depth and all before it.
    """

    k: Count
    acceptance_length: Annotated[float, _ROUNDED]
    acceptance_rate: Annotated[Share, _ROUNDED]
    acceptance_by_depth: list[Annotated[Share, _ROUNDED]]
    num_steps: Count = 0


class Evaluated(HeldOutAcceptance):
    """Acceptance after a step; if it is the best so far, the draft was written to the output folder."""

    model_config = _LINE

    event: Literal["evaluation"] = "evaluation"
    step: int
    is_best: bool
    seconds: Annotated[Seconds, _ROUNDED]


class Saved(Result):
    """A checkpoint was written after a step."""

    model_config = _LINE

    event: Literal["checkpoint"] = "checkpoint"
    step: int


TrainingEvent = Annotated[Trained | Evaluated | Saved, Field(discriminator="event")]
