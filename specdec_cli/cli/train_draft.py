"""`specdec train-draft`: a draft for a target, trained on the target's own answers to given prompts."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec_cli.cli.completion import choices
from specdec_cli.cli.convert_draft import ConversionWish, convert
from specdec_cli.cli.measurement_options import Chat, DryRun, Html, Plot
from specdec_cli.cli.options import OPTIONS, RUN, Shared, with_shared_options
from specdec_cli.cli.output import check_destination, deliver, envelope, machine_of, write_file
from specdec_cli.cli.screen import interruptible, open_screen, progress
from specdec_cli.cli.train_options import TRAIN_OPTIONS
from specdec_cli.cli.training_data import training_data
from specdec_cli.errors import ExitCode, UsageError
from specdec_cli.measure.workload.dataset import is_at_hand
from specdec_cli.measure.workload.workload import read_rows
from specdec_cli.recipe.present import to_yaml
from specdec_cli.report.plot import check_available, check_plot
from specdec_cli.train.folder import TrainingFolder
from specdec_cli.train.held_out import check_held_out
from specdec_cli.train.words import counted

if TYPE_CHECKING:
    from specdec_cli.engine.engine import Engine
    from specdec_cli.engine.prompts import PromptRow
    from specdec_cli.recipe import Recipe, Resolved
    from specdec_cli.report.view import Screen
    from specdec_cli.train.features import CachedFeatures, TargetFeatures
    from specdec_cli.train.samples import Sample
    from specdec_cli.train.session import TrainingData, TrainingSession

_ALL = 2**31 - 1
_WITHOUT = (
    *(one.path for one in OPTIONS if one.path.startswith(("draft", "speculation.", "serve."))),
    *("output", "sampling.logprobs", "sampling.ignore_eos"),
)


@with_shared_options(without=_WITHOUT, beside=TRAIN_OPTIONS)
def train_draft(
    draft: Annotated[
        str | None, typer.Argument(help="The draft that --export converts: a folder or a hub id.", metavar="DRAFT")
    ] = None,
    export: Annotated[
        str | None,
        typer.Option(
            "--export",
            help="Train nothing: write DRAFT in another format into the folder of --output.",
            metavar="official|speculators|z-lab",
            autocompletion=choices("official|speculators|z-lab"),
            rich_help_panel=RUN,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", help="Write the draft into this folder.", metavar="DIR", rich_help_panel=RUN),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in the folder of --output.", rich_help_panel=RUN)
    ] = False,
    chat: Chat = False,
    dry_run: DryRun = False,
    plot: Plot = None,
    html: Html = None,
    *,
    shared: Shared,
) -> ExitCode | None:
    """Train a draft for a target on the target's own answers, and see its acceptance while it trains."""
    if resume and output is not None:
        shared.drawn_seed = TrainingFolder(output).seed or shared.drawn_seed
    resolved = shared.resolve()
    if export is not None:
        beside = {"--resume": resume, "--chat": chat, "--plot": plot, "--html": html}
        beside["--trust-remote-code"] = shared.trust_remote_code
        without = tuple(name for name, value in beside.items() if value)
        convert(ConversionWish(draft, export, output, dry_run, without), resolved, shared)
        return None
    if draft is not None:
        raise UsageError(f"`{draft}` is a draft to convert, and no format is named", "add --export speculators")
    data = _checked_data(resolved.recipe)
    _check_pictures(plot, html, shared.force or resume)
    if dry_run:
        sys.stdout.write(
            f"# would train {resolved.recipe.train.method}{_plan_words(resolved.recipe)}\n"
            f"{to_yaml(resolved, origins=True)}"
        )
        return None
    if output is None:
        raise UsageError("there is no folder to write the draft into", "add --output DIR")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("train-draft trains in one process", "start it without `accelerate launch` or `torchrun`")
    rows = read_rows(data, None, resolved.recipe.train.num_prompts or _ALL, chat or None).rows
    screen = open_screen(shared.quiet, streams_text=False)
    return _TrainCommand(resolved, rows, chat, output, resume, plot, html, shared, screen).go()


def _checked_data(recipe: Recipe) -> str:
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


def _check_pictures(plot: Path | None, html: Path | None, force: bool) -> None:
    """Refuse files that could not be written or drawn at the end."""
    if plot is not None:
        check_plot(plot)
        check_destination(plot, force, "--plot")
    if html is not None:
        check_available("--html")
        check_destination(html, force, "--html")


@dataclass(frozen=True, slots=True)
class _TrainCommand:
    """One run of the command.

    Args:
        resolved: the recipe.
        rows: the prompts.
        chat: whether they are messages.
        output: folder of the draft.
        resume: go on with the run that is there.
        plot: file of the curves, or None.
        html: file of a page, or None.
        shared: the command's shared options.
        screen: shows the progress.
    """

    resolved: Resolved
    rows: Sequence[PromptRow]
    chat: bool
    output: Path
    resume: bool
    plot: Path | None
    html: Path | None
    shared: Shared
    screen: Screen

    def go(self) -> ExitCode | None:
        """Load, answer, train, report."""
        from specdec_cli.train.session import TrainingSession

        folder = TrainingFolder(self.output)
        folder.check(self.resume, self.shared.force)
        with progress(self.screen) as say:
            engine = self._load(say)
            data = training_data(engine, self.rows, self.chat, self._recipe.train)
            trusts = self.shared.trust_remote_code
            session = TrainingSession(engine, self._recipe, data, self._params, folder, trusts)
        with folder.locked():
            folder.begin(self._plan(data), self.resume, self.shared.force)
            for notice in data.notices:
                self.screen.say(f"note: {notice}", "yellow")
            with interruptible() as stopped, suppress(KeyboardInterrupt):
                return self._run(session, folder, stopped)
        return ExitCode.INTERRUPTED

    @property
    def _recipe(self) -> Recipe:
        return self.resolved.recipe

    @property
    def _params(self) -> Any:
        from specdec_cli.sampling.params import SamplingParams

        return SamplingParams(**self._recipe.sampling.model_dump())

    def _load(self, say: Callable[[str], None]) -> Engine:
        """The target, without a draft."""
        from specdec_cli.engine.engine import Engine
        from specdec_cli.recipe.schema import Draft

        settings = self._recipe.engine
        size = max(settings.max_num_seqs, self._recipe.train.batch_size)
        changes = {"draft": Draft(method="none"), "engine": settings.model_copy(update={"max_num_seqs": size})}
        recipe = self._recipe.model_copy(update=changes)
        return Engine.from_recipe(recipe, trust_remote_code=self.shared.trust_remote_code, progress=say)

    def _plan(self, data: TrainingData) -> dict[str, Any]:
        """Everything that decides what the run does; a run that goes on has the same."""
        recipe = self._recipe.as_dict()
        train = self._recipe.train.model_dump(mode="json")
        for key in ("evaluate_every", "save_every", "patience", "data"):
            del train[key]  # these change no weights; the data is compared by its content
        return {**train, "target": recipe["target"], "sampling": recipe["sampling"], "data": data.identity}

    def _run(self, session: TrainingSession, folder: TrainingFolder, stopped: Callable[[], bool]) -> ExitCode | None:
        from specdec_cli.report.train import TrainView
        from specdec_cli.train.log import TrainingLog

        with progress(self.screen) as say:
            samples = session.answer(lambda done, total: say(f"answers: {done} of {total}"), stopped)
            features = None if stopped() else self._features(session, samples, say, stopped)
            if stopped():
                return self._interrupted()
            say("building the draft")
            run = session.start(samples, self.resume, features)
        log = TrainingLog(folder.log, run.progress.step)
        num_tokens = sum(one.num_counted for one in samples)
        words = f"{counted(len(samples), 'sample')} of {num_tokens} tokens, {run.num_parameters} parameters"
        if self.resume and run.progress.step == 0:
            self.screen.say("there is no checkpoint yet: training begins at step 1")
        self.screen.say(f"training {self._recipe.train.method}: {words}, {counted(run.num_steps, 'step')}")
        with TrainView(self.screen, run.num_steps, run.progress.step) as view:
            for event in run.run(stopped):
                log.add(event)
                view.watch(event)
        self._describe(session, samples, run.num_parameters, log.rows)
        return self._report(session, log.rows, stopped())

    def _features(
        self,
        session: TrainingSession,
        samples: Sequence[Sample],
        say: Callable[[str], None],
        stopped: Callable[[], bool],
    ) -> TargetFeatures | CachedFeatures:
        """The target's hidden states, written to disk first where the settings say so."""
        from specdec_cli.train.features import CachedFeatures

        features = session.features(samples)
        if isinstance(features, CachedFeatures):
            self.screen.say(f"the target's hidden states take {features.num_bytes / 1e9:.2f} GB in {self.output}")
            features.prepare(lambda done, total: say(f"hidden states: {done} of {counted(total, 'sample')}"), stopped)
        return features

    def _interrupted(self) -> ExitCode:
        self.screen.say_whole(f"interrupted; continue with --resume --output {quote(str(self.output))}")
        return ExitCode.INTERRUPTED

    def _describe(
        self, session: TrainingSession, samples: Sequence[Sample], num_parameters: int, rows: Sequence[dict[str, Any]]
    ) -> None:
        """Write the model card and a recipe beside the draft, once there is one."""
        from specdec_cli.report.training_card import CARD, RECIPE, TrainedDraft

        num_tokens, settled = sum(one.num_counted for one in samples), session.method.settled()
        made = TrainedDraft(self._recipe, self.output, rows, settled, len(samples), num_tokens, num_parameters)
        if made.best is not None:
            session.folder.claim((CARD, RECIPE))
            write_file(self.output / CARD, made.card(), force=True)
            write_file(self.output / RECIPE, made.usage_recipe(), force=True)

    def _report(
        self, session: TrainingSession, rows: Sequence[dict[str, Any]], is_interrupted: bool
    ) -> ExitCode | None:
        from specdec_cli.report.html import html
        from specdec_cli.report.plot import picture
        from specdec_cli.report.train import train_body
        from specdec_cli.report.train_pages import SCHEMA

        settled = {**session.method.settled(), "learning_rate": session.method.learning_rate}
        body = train_body(rows, settled, session.data.notices, is_interrupted)
        document = envelope(SCHEMA, self._recipe.as_dict(), body, **machine_of(session.engine))
        if self.plot is not None:
            write_file(self.plot, picture(document, self.plot.suffix.lower()), force=True)
        if self.html is not None:
            write_file(self.html, html(document), force=True)
        if self.shared.json:
            deliver(document, to_stdout=True)
        if body["best"] is not None:
            best = body["best"]
            said = f"best: acceptance length {best['acceptance_length']:.2f} at k = {best['k']}, step {best['step']}"
            self.screen.say(said)
            self.screen.say_whole(f"try it: specdec bench -r {quote(str(self.output / 'recipe.yaml'))}")
        return self._interrupted() if is_interrupted else None
