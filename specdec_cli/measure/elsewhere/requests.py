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


def check_single_turns(rows: Sequence[PromptRow], engine: str) -> None:
    """Refuse conversations in which the user speaks several times.

    Args:
        rows: the prompts.
        engine: as `--engine` has it.

    Raises:
        UsageError: there is one.
    """
    several = next((row for row in rows if len(turn_ends(row)) > 1), None)
    if several is not None:
        raise UsageError(
            f"prompt {several.index + 1} is a conversation of several turns, and --engine {engine} takes single ones",
            "make each turn a prompt of its own",
        )


def requests_of(rows: Sequence[PromptRow], recipe: Recipe) -> Workload:
    """The workload of rows without their token ids.

    Raises:
        UsageError: a row is a conversation of several turns.
    """
    check_single_turns(rows, recipe.engine.name)
    params = SamplingParams(**recipe.sampling.model_dump() | {"logprobs": None})
    return Workload(recipe.workload.dataset, tuple(request_of(row, [], params) for row in rows), (), None)
