"""Interrupted runs: the weights at the end have the bits of a run that was never stopped."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_training import ignore, never, session, tiny_target
from torch import Tensor

from specdec_cli.train.events import Trained
from specdec_cli.train.log import TrainingLog
from specdec_cli.train.loop import TrainingRun


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_target(tmp_path_factory.mktemp("target"))


def after(num: int) -> Callable[[], bool]:
    """Stop when asked for the time after `num`."""
    asked = iter(range(num))
    return lambda: next(asked, None) is None


def go(target: str, folder: Path, is_resumed: bool, stopped: Callable[[], bool]) -> TrainingRun:
    found = session(target, folder, is_resumed, epochs=4, save_every=3, evaluate_every=100)
    run = found.start(found.answer(ignore, never), is_resumed)
    log = TrainingLog(folder / "training" / "log.jsonl", run.progress.step)
    for event in run.run(stopped):
        log.add(event)
    return run


def weights(run: TrainingRun) -> dict[str, Tensor]:
    return {name: one.detach().clone() for name, one in run.module.named_parameters()}


def interrupted_as(target: str, folder: Path, moment: int, whole: TrainingRun) -> None:
    first = go(target, folder, False, after(moment))
    assert first.progress.step == moment
    second = go(target, folder, True, never)
    assert second.progress.step == whole.progress.step
    assert second.progress.best_length == whole.progress.best_length
    expected = weights(whole)
    assert all(torch.equal(one, expected[name]) for name, one in weights(second).items())


@pytest.fixture(scope="module")
def whole(target: str, tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    return go(target, tmp_path_factory.mktemp("whole") / "head", False, never)


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("moment", [1, 7])
def test_an_interrupted_run_ends_with_the_same_bits(
    moment: int, target: str, whole: TrainingRun, tmp_path: Path
) -> None:
    interrupted_as(target, tmp_path / "head", moment, whole)


@pytest.mark.slow
@pytest.mark.parametrize("moment", random.Random(5).sample(range(1, 12), 10))
def test_ten_moments(moment: int, target: str, whole: TrainingRun, tmp_path: Path) -> None:
    interrupted_as(target, tmp_path / "head", moment, whole)


def test_steps_after_the_last_checkpoint_are_logged_once(target: str, tmp_path: Path) -> None:
    folder = tmp_path / "head"
    go(target, folder, False, after(5))
    path = folder / "training" / "log.jsonl"
    last = json.loads(path.read_text().splitlines()[-2])
    path.write_text(path.read_text() + json.dumps({**last, "step": 6}) + '\n{"event": "st')
    go(target, folder, True, never)
    events = TrainingLog(path, 100).events
    assert [event.step for event in events if isinstance(event, Trained)] == list(range(1, 13))
