"""`specdec train-draft`: a draft for a target, trained on the target's own answers to given prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec_cli.cli.completion import choices
from specdec_cli.cli.convert_draft import ConversionRequest, convert
from specdec_cli.cli.measurement_options import DryRun
from specdec_cli.cli.options import (
    FILE_OPTIONS,
    OPTIONS,
    RUN,
    Chat,
    Option,
    key_option,
    prompt_file_option,
    section_options,
)
from specdec_cli.cli.output import deliver, envelope, machine_of, write_file, write_results
from specdec_cli.cli.screen import interruptible, open_screen, progress
from specdec_cli.cli.shared import Shared, check_template, with_shared_options
from specdec_cli.cli.train_plan import check_pictures, checked_data, is_in, show_training_plan
from specdec_cli.cli.training_data import PromptReader, training_data
from specdec_cli.errors import ExitCode, SpecdecError, UsageError
from specdec_cli.measure.workload.workload import read_rows
from specdec_cli.quantities import counted, sized
from specdec_cli.recipe.present import to_yaml
from specdec_cli.train.folder import TrainingFolder
from specdec_cli.train.launcher import check_launcher, hush_torch, launched_index

if TYPE_CHECKING:
    from specdec_cli.engine.engine import Engine
    from specdec_cli.engine.prompts import PromptRow
    from specdec_cli.measure.predict.cost import Payoff
    from specdec_cli.recipe import Recipe, Resolved
    from specdec_cli.report.pace import Waiting
    from specdec_cli.report.view import Screen
    from specdec_cli.train.events import TrainingEvent
    from specdec_cli.train.features import CachedFeatures, TargetFeatures
    from specdec_cli.train.loop import TrainingRun
    from specdec_cli.train.processes import Processes
    from specdec_cli.train.samples import Sample
    from specdec_cli.train.session import TrainingData, TrainingSession
    from specdec_cli.train.target import TrainingTarget

_METHOD, _SCHEDULE, _DRAFT = "Method and data", "Schedule", "Draft"
_OF_METHOD = (
    *("method", "data", "num_prompts", "num_held_out", "answers_per_prompt", "keep_answers", "answers_from"),
    "cache_features",
)
_OF_SCHEDULE = (
    *("epochs", "max_steps", "batch_size", "learning_rate", "warmup_ratio", "weight_decay", "max_grad_norm"),
    "precision",
    *("evaluate_every", "save_every", "patience", "seed"),
)

_OPTIONS: tuple[Option, ...] = (
    *(key_option(f"train.{key}", _METHOD) for key in _OF_METHOD),
    prompt_file_option("train.data", _METHOD),
    *(key_option(f"train.{key}", _SCHEDULE) for key in _OF_SCHEDULE),
    *section_options("train", _DRAFT, without=(*_OF_METHOD, *_OF_SCHEDULE)),
)
_ALL, _PAYOFF_SECONDS = 2**31 - 1, 3.0
_WITHOUT = (
    *(option.path for option in OPTIONS if option.path.startswith(("draft", "speculation.", "serve."))),
    *("output", "sampling.logprobs", "sampling.ignore_eos"),
)


@with_shared_options(
    common="recipe target method data chat output resume export max-new-tokens temperature epochs batch-size dry-run",
    without=_WITHOUT,
    beside=(*_OPTIONS, *FILE_OPTIONS[:2]),
)
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
        bool,
        typer.Option(
            "--resume", help="Continue the run in the folder of --output, with its recipe.", rich_help_panel=RUN
        ),
    ] = False,
    chat: Chat = False,
    dry_run: DryRun = False,
    *,
    shared: Shared,
) -> ExitCode | None:
    """Train a draft for a target on the target's own answers, and see its acceptance while it trains.

    Examples:
        # Train an EAGLE-3 head for the built-in target.
        specdec train-draft --method eagle3 --data builtin:stories --output head
        # Train one for your own model on your chats.
        specdec train-draft -t MODEL --data chats.jsonl --chat --temperature 0.7 --output head
        # Write a head as vLLM's speculators library has it.
        specdec train-draft --export speculators head -t MODEL --output speculator
    """
    with _said_once(shared):
        check_template(shared, chat or export is not None)
        if resume and output is not None and export is None:
            folder = TrainingFolder(output)
            shared.drawn_seed = folder.seed or shared.drawn_seed
            if shared.recipe is None and folder.recipe.is_file():
                shared.recipe = str(folder.recipe)
        resolved = shared.resolve()
        if export is not None:
            beside = {"--resume": resume, "--chat": chat, **{f"--{kind}": path for kind, path in shared.files.items()}}
            beside["--trust-remote-code"] = shared.trust_remote_code
            without = tuple(name for name, value in beside.items() if value)
            convert(ConversionRequest(draft, export, output, dry_run, without), resolved, shared)
            return None
        if draft is not None:
            raise UsageError(f"`{draft}` is a draft to convert, and no format is named", "add --export speculators")
        data = checked_data(resolved.recipe)
        check_pictures(shared.files, output, shared.force or resume)
        if dry_run:
            show_training_plan(resolved, chat, shared)
            return None
        if output is None:
            raise UsageError("there is no folder to write the draft into", "add --output DIR")
        processes = _processes(resolved)
    with processes.guarded():
        resolved = processes.from_main(lambda: resolved)  # with the same seed where one was drawn
        num_prompts = resolved.recipe.train.num_prompts or _ALL
        prompts = processes.each(lambda: read_rows(data, None, num_prompts, chat or None))
        screen = open_screen(shared.quiet, streams_text=False)
        for notice in prompts.notices:
            screen.say(f"note: {notice}", "yellow")
        return _TrainCommand(resolved, prompts.rows, chat, output, resume, shared, screen, processes).go()


@contextmanager
def _said_once(shared: Shared) -> Iterator[None]:
    """Let the first of several processes alone say what each of them finds before they are connected."""
    if launched_index() > 0:
        shared.quiet, shared.tells_variables = True, False
    try:
        yield
    except SpecdecError as error:
        if launched_index() == 0:
            raise
        raise typer.Exit(error.exit_code) from error


def _processes(resolved: Resolved) -> Processes:
    check_launcher()
    hush_torch()
    from specdec_cli.train.processes import Processes

    return Processes(resolved.recipe.target.device)


@dataclass(frozen=True, slots=True)
class _TrainCommand:
    """One run of the command.

    Args:
        resolved: the recipe.
        rows: the prompts.
        chat: whether they are messages.
        output: folder of the draft.
        resume: go on with the run that is there.
        shared: the command's shared options.
        screen: shows the progress.
        processes: that share the run; the main one reports.
    """

    resolved: Resolved
    rows: Sequence[PromptRow]
    chat: bool
    output: Path
    resume: bool
    shared: Shared
    screen: Screen
    processes: Processes

    def go(self) -> ExitCode | None:
        """Load, answer, train, report."""
        from specdec_cli.train.session import TrainingSession

        folder, its = TrainingFolder(self.output), self.processes
        its.from_main(lambda: folder.check(self.resume, self.shared.force))
        with progress(self.screen) as say:
            engine = its.each(lambda: self._load(say))
            data = its.each(lambda: training_data(PromptReader.of(engine), self.rows, self.chat, self._recipe.train))
            trusts = self.shared.trust_remote_code
            session = its.each(lambda: TrainingSession(engine, self._recipe, data, self._params, folder, its, trusts))
        with ExitStack() as stack:
            its.from_main(lambda: stack.enter_context(folder.locked()))
            plan, recipe = self._plan(session.target, data), to_yaml(self.resolved)
            its.from_main(lambda: folder.begin(plan, recipe, self.resume, self.shared.force))
            for notice in data.notices:
                self.screen.say(f"note: {notice}", "yellow")
            # A launcher hands Ctrl-C, which all its processes see by themselves, on to each of them again.
            with interruptible(repeatedly=its.num > 1) as stopped, suppress(KeyboardInterrupt):
                return self._run(session, folder, stopped)
        return self._interrupted()

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

        settings, target = self._recipe.engine, self._recipe.target
        size = max(settings.max_num_seqs, self._recipe.train.batch_size)
        changes = {
            "draft": Draft(method="none"),
            "engine": settings.model_copy(update={"max_num_seqs": size}),
            "target": target.model_copy(update={"device": self.processes.own_device(target.device)}),
        }
        recipe = self._recipe.model_copy(update=changes)
        return Engine.from_recipe(recipe, trust_remote_code=self.shared.trust_remote_code, progress=say)

    def _plan(self, target: TrainingTarget, data: TrainingData) -> dict[str, Any]:
        """Everything that decides what the run does; a run that goes on has the same."""
        from specdec_cli.train.precision import product_precision

        recipe = self._recipe.as_dict()
        train = self._recipe.train.model_dump(mode="json")
        for key in ("evaluate_every", "save_every", "patience", "data", "answers_from"):
            del train[key]  # these change no weights; data, answers and target are compared by content
        train["precision"] = product_precision(self._recipe.train.precision, target.device)
        contents = {"target_weights": target.weights_identity, "data": data.identity}
        return {**train, "target": recipe["target"], "sampling": recipe["sampling"], **contents}

    def _run(self, session: TrainingSession, folder: TrainingFolder, stopped: Callable[[], bool]) -> ExitCode | None:
        its = self.processes
        with progress(self.screen) as say:
            samples = session.answer(lambda done, total: say("answers", done, total), stopped)
            features = None if its.any(stopped()) else self._features(session, samples, say, stopped)
            if its.any(stopped()):
                return self._interrupted()
            say("building the draft")
            run = session.start(samples, self.resume, features)
        events = self._watched(run, samples, folder, stopped)
        is_interrupted = its.any(stopped())
        if its.is_main:
            document = self._document(session, events, is_interrupted)
            self._describe(session, samples, run.num_parameters, document)
            self._report(session, document)
        return self._interrupted() if is_interrupted else None

    def _watched(
        self, run: TrainingRun, samples: Sequence[Sample], folder: TrainingFolder, stopped: Callable[[], bool]
    ) -> Sequence[TrainingEvent]:
        """Take the steps that are left; the main process logs and shows them, and returns its log's events."""
        from specdec_cli.report.train import TrainView
        from specdec_cli.train.log import TrainingLog

        if not self.processes.is_main:
            return list(run.run(stopped))
        log = TrainingLog(folder.log, run.progress.step)
        num_tokens = sum(sample.num_counted for sample in samples)
        words = f"{counted(len(samples), 'sample')} of {num_tokens} tokens, {run.num_parameters} parameters"
        if self.resume and run.progress.step == 0:
            self.screen.say("there is no checkpoint yet: training begins at step 1")
        self.screen.say(f"training {self._recipe.train.method}: {words}, {counted(run.num_steps, 'step')}")
        with TrainView(self.screen, run.num_steps, run.progress.step) as view:
            for event in run.run(stopped):
                log.add(event)
                view.watch(event)
        return log.events

    def _features(
        self,
        session: TrainingSession,
        samples: Sequence[Sample],
        say: Waiting,
        stopped: Callable[[], bool],
    ) -> TargetFeatures | CachedFeatures:
        """The target's hidden states, written to disk first where the settings say so."""
        from specdec_cli.train.features import CachedFeatures

        its = self.processes
        features = its.each(lambda: session.features(samples))
        if isinstance(features, CachedFeatures):
            self.screen.say(f"the target's hidden states take {sized(features.num_bytes)} in {self.output}")
            its.together(
                lambda: features.prepare(
                    lambda done, total: say("hidden states of samples", done, total), stopped, its.index, its.num
                )
            )
        return features

    def _interrupted(self) -> ExitCode:
        self.screen.say_whole(f"interrupted; continue with --resume --output {quote(str(self.output))}")
        return ExitCode.INTERRUPTED

    def _document(self, session: TrainingSession, events: Sequence[TrainingEvent], is_interrupted: bool) -> Any:
        from specdec_cli.train.documents import TrainDocument
        from specdec_cli.train.precision import product_precision

        settled = {
            **session.method.settled(),
            "learning_rate": session.method.learning_rate,
            "loss": session.method.loss,
            "precision": product_precision(self._recipe.train.precision, session.target.device),
        }
        body = TrainDocument.of_events(events, settled, session.data.notices, is_interrupted).as_json()
        return envelope(TrainDocument, self._recipe.as_dict(), body, **machine_of(session.engine))

    def _describe(
        self, session: TrainingSession, samples: Sequence[Sample], num_parameters: int, document: Mapping[str, Any]
    ) -> None:
        """Write the model card and a recipe beside the draft, once there is one."""
        from specdec_cli.report.training_card import CARD, RECIPE, TrainedDraft

        if document["best"] is None:
            return
        num_tokens = sum(sample.num_counted for sample in samples)
        draft = TrainedDraft(self._recipe, self.output, document, len(samples), num_tokens, num_parameters)
        session.folder.claim((CARD, RECIPE))
        write_file(self.output / CARD, draft.card(), force=True)
        write_file(self.output / RECIPE, draft.usage_recipe(), force=True)

    def _report(self, session: TrainingSession, document: Mapping[str, Any]) -> None:
        session.folder.claim(file.name for file in self.shared.files.values() if is_in(file, self.output))
        write_results(document, self.shared, force=True)
        if self.shared.json:
            deliver(document, self.shared)
        best, is_interrupted = document["best"], document["interrupted"]
        if best is None:
            return
        k, is_measured = "", bool(best["acceptance_by_depth"])
        if is_measured:
            message = f"best: acceptance length {best['acceptance_length']:.2f} at k = {best['k']}, step {best['step']}"
            self.screen.say(message)
        calibration = None if is_interrupted else session.calibrate()
        if calibration is not None:
            errors = (fmean(its) for its in (calibration.ece_before, calibration.ece_after))
            before, after = (f"{error:.1%}" for error in errors)
            self.screen.say(f"calibrated the draft's confidences: expected calibration error {before} -> {after}")
        if is_measured and not is_interrupted:
            payoff = self._payoff(session, best)
            self.screen.say(payoff.words())
            k = "" if payoff.k == best["k"] else f" -k {payoff.k}"
        self.screen.say_whole(f"try it: specdec bench -r {quote(str(self.output / 'recipe.yaml'))}{k}")

    def _payoff(self, session: TrainingSession, best: dict[str, Any]) -> Payoff:
        """Predicted gain of the trained draft, from its acceptance and the costs of its steps on this machine."""
        from specdec_cli.measure.predict.cost import Payoff
        from specdec_cli.measure.predict.profiling import profile
        from specdec_cli.train.acceptance import engine_with

        k, prompts = best["k"], session.data.held_out
        engine = engine_with(session.engine, self.output, k)
        text = [token for prompt in prompts for token in prompt.tokens]
        middle = len(text) // len(prompts) + self._params.max_new_tokens // 2
        with progress(self.screen) as say:
            say("measuring the costs of a step with the draft")
            costs = profile(engine, k, (middle,), text=text, params=self._params, time_limit_seconds=_PAYOFF_SECONDS)
        return Payoff.of(costs, best["acceptance_by_depth"])
