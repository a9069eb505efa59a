"""The plan of `specdec train-draft --dry-run`, and checks of settings that need no model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec_cli.cli.measurement_options import show_plan, tell
from specdec_cli.cli.output import check_destination
from specdec_cli.cli.training_data import PromptReader, training_data
from specdec_cli.errors import RunError, UsageError
from specdec_cli.measure.workload.dataset import is_at_hand
from specdec_cli.measure.workload.workload import read_rows
from specdec_cli.recipe.present import to_yaml
from specdec_cli.report.plot import check_available, check_plot
from specdec_cli.report.training_plan import plan_document, plan_lines
from specdec_cli.train.held_out import check_held_out
from specdec_cli.train.words import counted

if TYPE_CHECKING:
    from specdec_cli.cli.options import Shared
    from specdec_cli.engine.prompts import PromptRow
    from specdec_cli.measure.machine.roofline import Speed
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
        plan = _plan(recipe, rows, chat, shared)
        speed = _speed(recipe, plan)
        lines += plan_lines(plan, speed)
        body["plan"] = plan_document(plan, speed)
    head = "".join(f"# {line}\n" for line in lines)
    show_plan(recipe.as_dict(), body, shared, f"{head}{to_yaml(resolved, origins=True)}")


def _rows_at_hand(recipe: Recipe, chat: bool, shared: Shared) -> Sequence[PromptRow] | None:
    """The prompts, where they can be read at once."""
    name = str(recipe.train.data)
    if not is_at_hand(name):
        return None
    prompts = read_rows(name, None, recipe.train.num_prompts or _ALL, chat or None)
    tell(prompts.notices, shared)
    check_held_out(recipe.train.num_held_out, len(prompts.rows))
    return prompts.rows


def _outline(recipe: Recipe, num: int) -> str:
    """Prompts, tokens and steps, as far as they are known without the target's tokenizer."""
    settings = recipe.train
    answers = (num - settings.num_held_out) * settings.answers_per_prompt
    steps = settings.max_steps or settings.epochs * -(-answers // settings.batch_size)
    tokens = "" if settings.keep_answers else f" with at most {answers * recipe.sampling.max_new_tokens} tokens"
    told = f"{counted(answers, 'answer')}{tokens}, {counted(steps, 'step')}"
    return f"{told}, {counted(settings.num_held_out, 'prompt')} held out"


def _plan(recipe: Recipe, rows: Sequence[PromptRow], chat: bool, shared: Shared) -> TrainingPlan:
    from specdec_cli.lm.facts import describe
    from specdec_cli.lm.load import load_tokenizer
    from specdec_cli.text.chat_template import chat_tokenizer
    from specdec_cli.train.plan import TrainingPlan

    its = recipe.target
    facts = describe(
        its.model,
        revision=its.revision,
        dtype=its.dtype,
        trust_remote_code=shared.trust_remote_code,
        load_format=its.load_format,
        quantize=its.quantize,
        compute=its.compute,
        device=its.device,
        decoder=recipe.engine.decoder,
    )
    tokenizer = load_tokenizer(
        its.model, revision=its.revision, trust_remote_code=shared.trust_remote_code, load_format=its.load_format
    )
    longest = min(facts.max_context, recipe.engine.max_model_len or facts.max_context)
    in_chats = chat_tokenizer(tokenizer, its.chat_template, its.default_chat_template_kwargs)
    reader = PromptReader(in_chats, longest, facts.eos_token_ids)
    data = training_data(reader, rows, chat, recipe.train)
    tell(data.notices, shared)
    return TrainingPlan.of(recipe, facts, data, shared.trust_remote_code)


def _speed(recipe: Recipe, plan: TrainingPlan) -> Speed | None:
    """The speed of this machine's device in float32, which drafts are trained in; None if it has no such device."""
    import torch

    from specdec_cli.lm.load import device_named
    from specdec_cli.measure.machine.roofline import measure_speed

    try:
        device = device_named(recipe.target.device)
    except RunError:
        return None
    return measure_speed(device, torch.float32, plan.memory_bytes["target"])


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


def check_pictures(plot: Path | None, html: Path | None, output: Path | None, force: bool) -> None:
    """Refuse files that could not be written or drawn at the end; the folder of the draft may still be to come."""
    if plot is not None:
        check_plot(plot)
    if html is not None:
        check_available("--html")
    for path, flag in ((plot, "--plot"), (html, "--html")):
        if output is None or output.exists() or not is_in(path, output):
            check_destination(path, force, flag)


def is_in(path: Path | None, folder: Path) -> bool:
    """Whether a file is to lie in a folder, which need not exist."""
    return path is not None and path.parent.resolve() == folder.resolve()
