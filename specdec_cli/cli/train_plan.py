"""What `specdec train-draft` would do: the settings that need no model to be checked, and the plan of `--dry-run`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from specdec_cli.cli.output import check_destination
from specdec_cli.errors import UsageError
from specdec_cli.measure.workload.dataset import is_at_hand
from specdec_cli.measure.workload.workload import read_rows
from specdec_cli.recipe.present import to_yaml
from specdec_cli.report.plot import check_available, check_plot
from specdec_cli.train.held_out import check_held_out
from specdec_cli.train.words import counted

if TYPE_CHECKING:
    from specdec_cli.recipe import Recipe, Resolved

_ALL = 2**31 - 1


def show_training_plan(resolved: Resolved) -> None:
    """Show what would be trained, and where each value comes from."""
    sys.stdout.write(
        f"# would train {resolved.recipe.train.method}{_plan_words(resolved.recipe)}\n{to_yaml(resolved, origins=True)}"
    )


def checked_data(recipe: Recipe) -> str:
    """The name of the data, once the settings that need no model are found to go together."""
    settings, sampling = recipe.train, recipe.sampling
    if settings.data is None:
        raise UsageError("there is no data to train on", "name prompts: --data FILE, or --data builtin:stories")
    if settings.answers_per_prompt > 1 and sampling.temperature == 0:
        said = f"`{settings.answers_per_prompt}` answers to a prompt would be the same at temperature 0"
        raise UsageError(said, "add --temperature 0.8, or leave --answers-per-prompt out")
    if settings.keep_answers and settings.answers_per_prompt > 1:
        raise UsageError("`--keep-answers` has one answer to each prompt", "leave --answers-per-prompt out")
    if sampling.max_new_tokens < 2:
        what = "to measure acceptance on" if settings.keep_answers else "to learn from"
        raise UsageError(f"an answer of 1 token is too short {what}", "raise -n (--max-new-tokens) to 2 or more")
    return settings.data


def _plan_words(recipe: Recipe) -> str:
    """Prompts, tokens and steps, as far as they are known before anything is loaded."""
    settings, name = recipe.train, str(recipe.train.data)
    if not name.startswith("builtin:") and not is_at_hand(name):
        return f" on the prompts of {name}, which is not read"
    num = len(read_rows(name, None, settings.num_prompts or _ALL).rows)
    check_held_out(settings.num_held_out, num)
    answers = (num - settings.num_held_out) * settings.answers_per_prompt
    steps = settings.max_steps or settings.epochs * -(-answers // settings.batch_size)
    tokens = answers * recipe.sampling.max_new_tokens
    told = f"{counted(answers, 'answer')} with at most {tokens} tokens, {counted(steps, 'step')}"
    return f": {told}, {counted(settings.num_held_out, 'prompt')} held out"


def check_pictures(plot: Path | None, html: Path | None, force: bool) -> None:
    """Refuse files that could not be written or drawn at the end."""
    if plot is not None:
        check_plot(plot)
        check_destination(plot, force, "--plot")
    if html is not None:
        check_available("--html")
        check_destination(html, force, "--html")
