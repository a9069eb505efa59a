"""The training loop: steps, evaluations by the real engine, and checkpoints, as events.

accelerate moves, wraps and saves; what a step does depends on nothing but its number, so that a run that goes on from a
checkpoint takes the same steps as one that was never stopped. Several processes share the samples of each step, and
take the step that one process takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from specdec_cli.train.checkpoints import Checkpoints
from specdec_cli.train.events import Evaluated, HeldOutAcceptance, Saved, Trained, TrainingEvent
from specdec_cli.train.folder import TrainingFolder
from specdec_cli.train.method import BatchLoss, DraftModule, TrainingMethod
from specdec_cli.train.order import SampleOrder
from specdec_cli.train.precision import product_precision
from specdec_cli.train.samples import Sample, TrainingBatch

if TYPE_CHECKING:
    from specdec_cli.recipe.schema import Train
    from specdec_cli.train.processes import Processes

_NUM_EVALUATIONS = 10


@dataclass(slots=True)
class TrainingProgress:
    """How far a run is; part of its checkpoints.

    Args:
        step: steps taken.
        best_length: the largest acceptance length so far.
        best_step: the step after which it was measured.
        num_without_gain: evaluations since.
        seconds: of training so far.
    """

    step: int = 0
    best_length: float = 0.0
    best_step: int = 0
    num_without_gain: int = 0
    seconds: float = 0.0

    def state_dict(self) -> dict[str, Any]:
        """State for accelerate's checkpoints."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        for name, value in state.items():
            setattr(self, name, value)


@dataclass(slots=True)
class TrainingRun:
    """One run over samples.

    Attributes:
        progress: how far it is.
    """

    method: TrainingMethod
    module: DraftModule
    settings: Train
    samples: Sequence[Sample]
    batch_of: Callable[[Sequence[Sample]], TrainingBatch]
    evaluate: Callable[[Path], HeldOutAcceptance]
    folder: TrainingFolder
    checkpoints: Checkpoints
    processes: Processes
    progress: TrainingProgress = field(init=False, default_factory=TrainingProgress)
    _wrapped: Any = field(init=False)
    _optimizer: Any = field(init=False)
    _is_bfloat16: bool = field(init=False)

    def __post_init__(self) -> None:
        self._is_bfloat16 = product_precision(self.settings.precision, self.method.target.device) == "bfloat16"
        self.module.loss.total = self.processes.total
        torch.manual_seed(self.settings.seed + self.processes.index)  # dropout differs between processes
        optimizer = torch.optim.AdamW(
            self.module.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=self.settings.weight_decay, fused=True
        )
        self._wrapped, self._optimizer = self.processes.prepare(self.module, optimizer)
        self.processes.accelerator.register_for_checkpointing(self.progress)

    @property
    def order(self) -> SampleOrder:
        """Which samples each step takes."""
        return SampleOrder(
            [len(sample.tokens) for sample in self.samples], self.settings.batch_size, self.settings.seed
        )

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        return self.settings.max_steps or self.settings.epochs * self.order.steps_per_epoch

    @property
    def num_parameters(self) -> int:
        """Parameters that are trained."""
        return sum(parameter.numel() for parameter in self.module.parameters() if parameter.requires_grad)

    def resume(self) -> bool:
        """Go on from the last checkpoint; whether there is one."""
        return self.checkpoints.load(self.processes.accelerator)

    def run(self, stopped: Callable[[], bool]) -> Iterator[TrainingEvent]:
        """Take the steps that are left; evaluate and save on the way, and save when stopped.

        Raises:
            RunError: the disk is full, or the folder cannot be written.
        """
        order, num_steps = self.order, self.num_steps
        evaluate_every = self.settings.evaluate_every or max(1, math.ceil(num_steps / _NUM_EVALUATIONS))
        save_every = self.settings.save_every or evaluate_every
        saved_at = self.progress.step
        while self.progress.step < num_steps and not self.processes.any(stopped()) and not self._is_exhausted:
            yield self._step(order.samples_of(self.progress.step), num_steps)
            step, is_last = self.progress.step, self.progress.step == num_steps
            if step % evaluate_every == 0 or is_last:
                yield self._evaluate()
            if step % save_every == 0 or is_last:
                yield self._save()
                saved_at = step
        if saved_at != self.progress.step:
            yield self._save()

    @property
    def _is_exhausted(self) -> bool:
        """Whether so many evaluations have brought no gain that the run ends."""
        return 0 < self.settings.patience <= self.progress.num_without_gain

    def _step(self, places: Sequence[int], num_steps: int) -> Trained:
        begin = perf_counter()
        rate = learning_rate(self.progress.step, num_steps, self.method.learning_rate, self.settings.warmup_ratio)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        accelerator, batch = self.processes.accelerator, self._own_batch(places)
        with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=self._is_bfloat16):
            result: BatchLoss = self._wrapped(batch)
        accelerator.backward(result.value * self.processes.num)  # the wrapper takes the mean over processes
        accelerator.clip_grad_norm_(self._wrapped.parameters(), self.settings.max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.progress.step += 1
        seconds = perf_counter() - begin
        self.progress.seconds += seconds
        total = self.processes.total
        num_matches, num_counted = total((result.matches * result.num_counted).round()), total(result.num_counted)
        return Trained(
            step=self.progress.step,
            loss=float(total(result.value)),
            matches_by_depth=(num_matches / num_counted.clamp(min=1)).tolist(),
            learning_rate=rate,
            num_tokens=int(total(batch.is_counted.sum())),
            seconds=seconds,
        )

    def _own_batch(self, places: Sequence[int]) -> TrainingBatch:
        """This process's samples of a step; if there are fewer samples than processes, perhaps one that counts nothing.

        What is drawn at random in a sample depends on the seed, the step and the sample alone.
        """
        own = self.processes.share(places)
        batch = self.batch_of([self.samples[place] for place in own or places[:1]])
        if not own:
            batch = replace(batch, is_counted=torch.zeros_like(batch.is_counted))
        step = self.settings.seed * 1_000_003 + self.progress.step
        return replace(batch, seeds=[(step * 1_000_003 + place) % 2**63 for place in own or places[:1]])

    def _evaluate(self) -> Evaluated:
        begin, progress = perf_counter(), self.progress
        acceptance = self.processes.from_main(self._measured)
        length = acceptance.acceptance_length
        is_best = length > progress.best_length
        if is_best:
            progress.best_length, progress.best_step, progress.num_without_gain = length, progress.step, 0
        else:
            progress.num_without_gain += 1
        seconds = perf_counter() - begin
        return Evaluated(**acceptance.model_dump(), step=progress.step, is_best=is_best, seconds=seconds)

    def _measured(self) -> HeldOutAcceptance:
        """The acceptance of the draft as it is now, which goes to the output folder if it is the best so far."""
        candidate = self.checkpoints.candidate_folder()
        self.method.save(self.module, candidate)
        acceptance = self.evaluate(candidate)
        if acceptance.acceptance_length > self.progress.best_length:
            self.checkpoints.publish(candidate, self.folder)
        return acceptance

    def _save(self) -> Saved:
        self.checkpoints.save(self.processes)
        return Saved(step=self.progress.step)


def learning_rate(step: int, num_steps: int, peak: float, warmup_ratio: float) -> float:
    """The learning rate of a step, counted from 0: a linear warm-up, then a cosine that ends at zero."""
    warmup = math.ceil(warmup_ratio * num_steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, num_steps - warmup)
    return peak * (1 + math.cos(math.pi * done)) / 2
