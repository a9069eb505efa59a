"""Prompts for another engine, which tokenizes them itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specdec_cli.engine.prompts import PromptRow
from specdec_cli.errors import UsageError
from specdec_cli.measure.workload.turns import request_of, turn_ends
from specdec_cli.measure.workload.workload import Workload
from specdec_cli.sampling.params import SamplingParams

if TYPE_CHECKING:
    from specdec_cli.recipe import Recipe


def requests_of(rows: Sequence[PromptRow], recipe: Recipe) -> Workload:
    """The workload of rows without their token ids.

    Raises:
        UsageError: a row is a conversation of several turns.
    """
    several = next((row for row in rows if len(turn_ends(row)) > 1), None)
    if several is not None:
        said = f"prompt {several.index + 1} is a conversation of several turns"
        raise UsageError(
            f"{said}, and --engine {recipe.engine.name} measures single ones",
            "start the server and measure it with `bench --endpoint`",
        )
    params = SamplingParams(**recipe.sampling.model_dump() | {"logprobs": None})
    return Workload(recipe.workload.dataset, tuple(request_of(row, [], params) for row in rows), (), None)
