"""One training run from prompts to a draft: what a command starts, watches and goes on with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from specdec_cli.errors import RunError, UsageError
from specdec_cli.lm.files.names import TEMPERATURES_FILE
from specdec_cli.lm.forward.taps import check_taps
from specdec_cli.quantities import counted
from specdec_cli.train.acceptance import engine_with, measure_acceptance
from specdec_cli.train.answers import Answers, TrainingPrompt, answers_origin, earlier_answers, usable
from specdec_cli.train.calibration import Calibration, fitted_temperatures, observed_confidences
from specdec_cli.train.checkpoints import Checkpoints
from specdec_cli.train.events import HeldOutAcceptance
from specdec_cli.train.features import CachedFeatures, TargetFeatures
from specdec_cli.train.folder import TrainingFolder
from specdec_cli.train.held_out import check_held_out
from specdec_cli.train.log import last_saved
from specdec_cli.train.loop import TrainingRun
from specdec_cli.train.method import TrainingMethod
from specdec_cli.train.methods import training_method
from specdec_cli.train.processes import Processes
from specdec_cli.train.samples import Sample
from specdec_cli.train.target import OutputLayer, TrainingTarget

if TYPE_CHECKING:
    from specdec_cli.engine.engine import Engine
    from specdec_cli.recipe.schema import Recipe
    from specdec_cli.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class TrainingData:
    """The prompts of a run.

    Args:
        train: those that are answered and trained on.
        held_out: those that acceptance is measured on.
        num_too_long: prompts that were left out because the context has no room for an answer.
        num_held_twice: prompts that were left out of training because a held-out one is the same.
    """

    train: Sequence[TrainingPrompt]
    held_out: Sequence[TrainingPrompt]
    num_too_long: int
    num_held_twice: int = 0

    @classmethod
    def of(
        cls,
        prompts: Sequence[Sequence[int]],
        max_context: int,
        num_held_out: int,
        num_answers: int,
        given: Sequence[Sequence[Sample]] | None = None,
    ) -> TrainingData:
        """Split prompts, the held-out ones spread evenly over all that leave room for an answer.

        Raises:
            UsageError: no prompt fits, or too few are left to train on.
        """
        fitting = [index for index, prompt in enumerate(prompts) if len(prompt) + 2 <= max_context]
        if not fitting:
            message = f"no prompt leaves room for an answer in the context of `{max_context}` tokens"
            raise UsageError(message, "choose data with shorter prompts")
        check_held_out(num_held_out, len(fitting))
        chosen = {fitting[(2 * i + 1) * len(fitting) // (2 * num_held_out)] for i in range(num_held_out)}
        held_out = [TrainingPrompt(prompts[index], index) for index in sorted(chosen)]
        learnt = fitting if given is None else [i for i, its in enumerate(given) if usable(its, max_context)]
        held = {tuple(prompts[index]) for index in chosen}
        twice = {index for index in learnt if tuple(prompts[index]) in held} - chosen
        if twice and not set(learnt) - chosen - twice:
            raise UsageError("every prompt to train on is also held out", "give more prompts, or lower --num-held-out")
        train = [
            TrainingPrompt(prompts[index], index + answer * len(prompts), None if given is None else given[index])
            for answer in range(num_answers)
            for index in learnt
            if index not in chosen | twice
        ]
        return cls(train, held_out, len(set(range(len(prompts))).difference(fitting, learnt)), len(twice))

    @property
    def notices(self) -> list[str]:
        """Sentences about prompts that were left out."""
        reasons = {
            "no room for an answer in the context": self.num_too_long,
            "the same prompt is held out": self.num_held_twice,
        }
        return [f"{counted(num, 'prompt')} left out: {reason}" for reason, num in reasons.items() if num]

    @property
    def identity(self) -> str:
        """SHA-256 of all prompts, in hexadecimal."""
        whole = [[[*prompt.tokens, -1, *_given(prompt)] for prompt in its] for its in (self.train, self.held_out)]
        content = json.dumps(whole)
        return hashlib.sha256(content.encode()).hexdigest()


@dataclass(slots=True)
class TrainingSession:
    """A run whose target is loaded.

    Args:
        engine: idle, with the target and no draft.
        recipe: with the run's settings.
        data: the prompts.
        params: how answers are sampled.
        folder: for the draft and the run's files; begun before the first answer.
        processes: that share the run; this is one of them.
        trust_remote_code: run Python code that comes with the target.

    Attributes:
        method: of the draft.
        target: as the method sees it.

    Raises:
        UsageError: the settings do not fit the method or the target, or all given answers are too short.
        RunError: a model that the method begins with does not load.
    """

    engine: Engine
    recipe: Recipe
    data: TrainingData
    params: SamplingParams
    folder: TrainingFolder
    processes: Processes
    trust_remote_code: bool = False
    target: TrainingTarget = field(init=False)
    method: TrainingMethod = field(init=False)

    def __post_init__(self) -> None:
        its = self.recipe.target
        self.target = TrainingTarget.of(self.engine.target, its.revision, self.trust_remote_code)
        self.method = training_method(self.recipe.train.method)(self.recipe.train, self.target)
        lm, taps = self.engine.target, self.method.taps
        if self.recipe.train.cache_features:
            taps = (*taps, "final")
        check_taps(lm.name, taps, self.target.config, lm.max_context)
        self._kept()

    def answer(self, progress: Callable[[int, int], None], stopped: Callable[[], bool]) -> list[Sample]:
        """The samples: the answers in the data, or the target's own; those so far where it was stopped.

        Raises:
            RunError: the file of answers cannot be written.
            UsageError: all answers are too short to learn from, or an earlier run has none that can be used again.
        """
        kept = self._kept()
        if kept is not None:
            return kept
        origin, source = answers_origin(self.target.weights_identity, self.params), self.recipe.train.answers_from
        earlier = None if source is None else earlier_answers(TrainingFolder(Path(source)).answers, origin)
        answers = Answers(self.folder.answers, self.data.train, self.params, self.processes, origin, earlier)
        answers.generate(self.engine, progress, stopped)
        samples = answers.samples(self.engine.target.max_context)
        return samples if answers.num_done < len(self.data.train) else _not_empty(samples)

    def features(self, samples: Sequence[Sample]) -> TargetFeatures | CachedFeatures:
        """The target's side of batches, on disk if the settings say so; `CachedFeatures.prepare` is still to be called.

        Raises:
            UsageError: the target has no such layers.
            RunError: the disk has no room for the hidden states.
        """
        self.method.prepare(samples)
        lm, taps, drafted = self.engine.target, self.method.taps, self.method.drafted
        if self.recipe.train.cache_features:
            output = None if drafted is None else OutputLayer.of(self.target, drafted)
            return CachedFeatures(lm, taps, self.folder.work / "features", samples, output)
        return TargetFeatures(lm, taps, drafted)

    def start(
        self, samples: Sequence[Sample], is_resumed: bool, features: TargetFeatures | CachedFeatures | None = None
    ) -> TrainingRun:
        """Build the draft and the loop, at its last checkpoint where the run goes on.

        Raises:
            UsageError: the method cannot be used with this target.
            RunError: a checkpoint cannot be read.
        """
        settings = self.recipe.train
        self.method.prepare(samples)
        features = features or TargetFeatures(self.engine.target, self.method.taps, self.method.drafted)
        run = TrainingRun(
            method=self.method,
            module=self.method.build(),
            settings=settings,
            samples=samples,
            batch_of=features.batch,
            evaluate=self.acceptance,
            folder=self.folder,
            checkpoints=Checkpoints(self.folder.work),
            processes=self.processes,
        )
        if is_resumed:
            self.processes.together(lambda: self._resume(run))
        return run

    def _resume(self, run: TrainingRun) -> None:
        """Continue from the last checkpoint, or from the first step where none was saved yet.

        Raises:
            RunError: the checkpoint is missing or cannot be read.
        """
        where, log = f"`{run.checkpoints.path}`", f"`{self.folder.log}`"
        hint = f"restore it, or delete it and {log} to train again from the first step; the answers are kept"
        try:
            is_there = run.resume()
        except Exception as error:
            raise RunError(f"the checkpoint in {where} cannot be read: {type(error).__name__}", hint) from error
        saved = last_saved(self.folder.log)
        if saved and not is_there:
            hint = f"restore it, or delete {log} to train again from the first step; the answers are kept"
            raise RunError(f"the checkpoint in {where}, which the run saved after step `{saved}`, is missing", hint)

    def acceptance(self, folder: Path) -> HeldOutAcceptance:
        """The acceptance of a draft in a folder on the held-out prompts."""
        return measure_acceptance(self.engine, folder, self.data.held_out, self.params, self.method.depth)

    def calibrate(self) -> Calibration | None:
        """Fit the temperatures of a draft's confidences on the held-out prompts, and write them beside the draft.

        Returns:
            None for a draft without confidences, and where no step drafted all tokens.

        Raises:
            RunError: the folder cannot be written.
        """
        if not self.method.has_confidence:
            return None
        path, depth = self.folder.path / TEMPERATURES_FILE, self.method.depth
        self.folder.claim([path.name])
        path.unlink(missing_ok=True)  # those of an earlier draft
        drafting = engine_with(self.engine, self.folder.path, depth)
        logits, num_accepted = observed_confidences(drafting, self.data.held_out, self.params, depth)
        if not len(logits):
            return None
        calibration = fitted_temperatures(logits, num_accepted)
        calibration.write(path)
        return calibration

    def _kept(self) -> list[Sample] | None:
        """The samples of the answers in the data; None where the target answers."""
        if not self.recipe.train.keep_answers:
            return None
        samples = [sample for prompt in self.data.train for sample in prompt.given or ()]
        return _not_empty(usable(samples, self.engine.target.max_context))


def _given(prompt: TrainingPrompt) -> list[int]:
    """Tokens of the samples that a prompt brings, each behind the place of its first one that counts."""
    return [
        number
        for sample in prompt.given or ()
        for number in (sample.num_prompt_tokens, *sample.tokens, *(-place for pair in sample.skipped for place in pair))
    ]


def _not_empty(samples: list[Sample]) -> list[Sample]:
    if not samples:
        raise UsageError("every answer has fewer than 2 tokens", "choose other prompts")
    return samples
