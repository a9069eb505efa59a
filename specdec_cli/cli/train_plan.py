"""The plan of `specdec train-draft --dry-run`, and checks of settings that need no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec_cli.cli.output import check_destination, show_plan
from specdec_cli.cli.screen import say_notices
from specdec_cli.cli.training_data import PromptReader, training_data
from specdec_cli.errors import RunError, UsageError
from specdec_cli.lm.files.names import NONE
from specdec_cli.measure.workload.dataset import is_at_hand
from specdec_cli.measure.workload.workload import read_rows
from specdec_cli.quantities import counted
from specdec_cli.recipe.present import to_yaml
from specdec_cli.report.plot import check_available, check_plot
from specdec_cli.report.train import plan_lines
from specdec_cli.train.held_out import check_held_out

if TYPE_CHECKING:
    from specdec_cli.cli.shared import Shared
    from specdec_cli.engine.prompts import PromptRow
    from specdec_cli.recipe import Recipe, Resolved
    from specdec_cli.train.plan import TrainingPlan

_ALL = 2**31 - 1


def show_training_plan(resolved: Resolved, chat: bool, shared: Shared) -> None:
    """Show what would be trained and what it takes, and where each value comes from. No weights are read.

    Args:
        resolved: the recipe.
        chat: whether the data has conversations.
        shared: the command's shared options.

    Raises:
        UsageError: the command would refuse the data or the settings.
        RunError: a file of the target cannot be read.
    """
    from specdec_cli.train.methods import training_method
    from specdec_cli.train.plan import is_here

    recipe = resolved.recipe
    training_method(recipe.train.method).check(recipe.train)
    missing = [f"the target {recipe.target.model}"] * (not is_here(recipe.target.model))
    if recipe.train.start_from is not None and not is_here(recipe.train.start_from):
        missing.append(f"the model {recipe.train.start_from}")
    body: dict[str, Any] = {"origins": dict(resolved.origins), "plan": None}
    lines = [f"would train {recipe.train.method}"]
    rows = _rows_at_hand(recipe, chat, shared)
    if rows is None:
        lines[0] += f" on the prompts of {recipe.train.data}, which is not read"
    else:
        lines[0] += f": {_outline(recipe, len(rows))}"
    if missing:
        lines.append(f"not known: parameters, memory and time, because {' and '.join(missing)} is not here")
    elif rows is not None:
        plan = _timed(recipe, _plan(recipe, rows, chat, shared))
        lines += plan_lines(plan)
        body["plan"] = plan.as_json()
    head = "".join(f"# {line}\n" for line in lines)
    show_plan(recipe.as_dict(), body, shared, f"{head}{to_yaml(resolved, origins=True)}")


def _rows_at_hand(recipe: Recipe, chat: bool, shared: Shared) -> Sequence[PromptRow] | None:
    """The prompts, where they can be read at once."""
    name = str(recipe.train.data)
    if not is_at_hand(name):
        return None
    prompts = read_rows(name, None, recipe.train.num_prompts or _ALL, chat or None)
    say_notices(prompts.notices, shared.quiet)
    check_held_out(recipe.train.num_held_out, len(prompts.rows))
    return prompts.rows


def _outline(recipe: Recipe, num: int) -> str:
    """Prompts, tokens and steps, as far as they are known without the target's tokenizer."""
    settings = recipe.train
    answers = (num - settings.num_held_out) * settings.answers_per_prompt
    steps = settings.max_steps or settings.epochs * -(-answers // settings.batch_size)
    tokens = "" if settings.keep_answers else f" with at most {answers * recipe.sampling.max_new_tokens} tokens"
    outline = f"{counted(answers, 'answer')}{tokens}, {counted(steps, 'step')}"
    return f"{outline}, {counted(settings.num_held_out, 'prompt')} held out"


def _plan(recipe: Recipe, rows: Sequence[PromptRow], chat: bool, shared: Shared) -> TrainingPlan:
    from specdec_cli.engine.loading import model_settings
    from specdec_cli.lm.facts import model_facts
    from specdec_cli.lm.model_tokenizer import tokenizer_of
    from specdec_cli.lm.plan import ModelPlan
    from specdec_cli.text.chat_template import chat_tokenizer
    from specdec_cli.train.plan import TrainingPlan

    target = recipe.target
    trusted = shared.trust_remote_code
    plan = ModelPlan(target.model, model_settings(target), recipe.engine.decoder, NONE, trusted, fetches_weights=False)
    facts, tokenizer = model_facts(plan), tokenizer_of(plan)
    longest = min(facts.max_context, recipe.engine.max_model_len or facts.max_context)
    in_chats = chat_tokenizer(tokenizer, target.chat_template, target.default_chat_template_kwargs)
    reader = PromptReader(in_chats, longest, facts.eos_token_ids)
    data = training_data(reader, rows, chat, recipe.train)
    say_notices(data.notices, shared.quiet)
    return TrainingPlan.of_recipe(recipe, facts, data, trusted)


def _timed(recipe: Recipe, plan: TrainingPlan) -> TrainingPlan:
    """The plan with times on this machine's device in float32, which drafts are trained in, if it has such a device."""
    import torch

    from specdec_cli.lm.machine.devices import device_named
    from specdec_cli.measure.machine.roofline import measure_speed

    try:
        device = device_named(recipe.target.device)
    except RunError:
        return plan
    machine = measure_speed(device, torch.float32, plan.memory_bytes["target"])
    return plan.at_speed(machine.flops_per_second, machine.bandwidth_bytes_per_second)


def checked_data(recipe: Recipe) -> str:
    """The name of the data, once the settings that need no model are found to go together."""
    settings, sampling = recipe.train, recipe.sampling
    if settings.data is None:
        raise UsageError("there is no data to train on", "name prompts: --data FILE, or --data builtin:stories")
    if settings.answers_per_prompt > 1 and sampling.temperature == 0:
        message = f"`{settings.answers_per_prompt}` answers to a prompt would be the same at temperature 0"
        raise UsageError(message, "add --temperature 0.8, or leave --answers-per-prompt out")
    if settings.keep_answers and settings.answers_per_prompt > 1:
        raise UsageError("`--keep-answers` has one answer to each prompt", "leave --answers-per-prompt out")
    if settings.keep_answers and settings.answers_from is not None:
        raise UsageError("`--keep-answers` and `--answers-from` name two sources of answers", "leave one of them out")
    if sampling.max_new_tokens < 2:
        what = "to measure acceptance on" if settings.keep_answers else "to learn from"
        raise UsageError(f"an answer of 1 token is too short {what}", "raise -n (--max-new-tokens) to 2 or more")
    return settings.data


def check_pictures(files: Mapping[str, Path], output: Path | None, force: bool) -> None:
    """Refuse files that could not be written or drawn at the end; the folder of the draft may still be to come."""
    if "plot" in files:
        check_plot(files["plot"])
    if "html" in files:
        check_available("--html")
    for kind, path in files.items():
        if output is None or output.exists() or not is_in(path, output):
            check_destination(path, force, f"--{kind}")


def is_in(path: Path, folder: Path) -> bool:
    """Whether a file is to lie in a folder, which need not exist."""
    return path.parent.resolve() == folder.resolve()
