"""What a run refuses, and what it keeps when the disk fills up."""

import json
import math
import shutil
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tiny_training import PROMPTS, ignore, never, session, tiny_target

from specdec_cli.errors import RunError, UsageError
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.train.answers import Answers, TrainingPrompt, fingerprint
from specdec_cli.train.checkpoints import Checkpoints
from specdec_cli.train.documents import TrainDocument
from specdec_cli.train.events import Saved, Trained
from specdec_cli.train.log import TrainingLog, last_saved
from specdec_cli.train.processes import Processes
from specdec_cli.train.session import TrainingData


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_target(tmp_path_factory.mktemp("target"))


def test_prompts_without_room_for_an_answer_are_left_out() -> None:
    prompts = [[1] * num for num in (3, 9, 4, 11, 5)]
    data = TrainingData.of(prompts, max_context=10, num_held_out=1, num_answers=2)
    assert data.notices == ["2 prompts left out: no room for an answer in the context"]
    assert [len(one.tokens) for one in (*data.held_out, *data.train)] == [4, 3, 5, 3, 5]
    assert len({one.index for one in data.train}) == 4
    with pytest.raises(UsageError, match="no prompt leaves room for an answer in the context of `4` tokens"):
        TrainingData.of(prompts, max_context=4, num_held_out=1, num_answers=1)
    with pytest.raises(UsageError, match="leaves none to train on"):
        TrainingData.of(prompts, max_context=10, num_held_out=3, num_answers=1)


def test_49_a_held_out_prompt_is_not_trained_on_in_another_row() -> None:
    data = TrainingData.of([[1, 2], [3, 4], [1, 2], [5, 6]], max_context=10, num_held_out=1, num_answers=1)
    assert [list(one.tokens) for one in data.held_out] == [[1, 2]]
    assert [(list(one.tokens), one.index) for one in data.train] == [([3, 4], 1), ([5, 6], 3)]
    assert data.notices == ["1 prompt left out: the same prompt is held out"]
    with pytest.raises(UsageError, match="every prompt to train on is also held out"):
        TrainingData.of([[1, 2]] * 3, max_context=10, num_held_out=1, num_answers=1)


def test_answers_end_at_the_context(tmp_path: Path) -> None:
    found = session(tiny_target(tmp_path / "target", max_position_embeddings=16), tmp_path / "head")
    samples = found.answer(ignore, never)
    assert {len(one.tokens) for one in samples} == {16}
    assert all(one.num_counted >= 2 for one in samples)


def test_answers_of_other_prompts_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    prompts = [TrainingPrompt(one, index) for index, one in enumerate(PROMPTS)]
    path.write_text(json.dumps({"format": "specdec.answers/1", "fingerprint": "of other prompts"}) + "\n")
    with pytest.raises(UsageError, match="belong to other prompts or sampling options"):
        Answers(path, prompts, SamplingParams(), Processes(), "")


def test_a_half_written_answer_is_asked_for_again(target: str, tmp_path: Path) -> None:
    found = session(target, tmp_path / "head")
    whole = found.answer(ignore, never)
    content = found.folder.answers.read_bytes()
    found.folder.answers.write_bytes(content[:-9])
    assert [list(one.tokens) for one in found.answer(ignore, never)] == [list(one.tokens) for one in whole]
    assert found.folder.answers.read_bytes() == content


def test_answers_of_an_earlier_run_are_used_again(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = session(target, tmp_path / "first")
    answers = {tuple(one.tokens) for one in first.answer(ignore, never)}
    second = session(target, tmp_path / "second", answers_from=str(tmp_path / "first"), num_held_out=1)
    asked: list[list[int]] = []
    generate = second.engine.generate

    def counting(prompts: list[list[int]], *others: Any, **more: Any) -> Any:
        asked.extend(prompts)
        return generate(prompts, *others, **more)

    monkeypatch.setattr(second.engine, "generate", counting)
    found = {tuple(one.tokens) for one in second.answer(ignore, never)}
    learnt = {tuple(prompt.tokens) for prompt in first.data.train}
    assert [tuple(prompt) for prompt in asked] == [
        tuple(prompt.tokens) for prompt in second.data.train if tuple(prompt.tokens) not in learnt
    ]
    assert 0 < len(asked) < len(learnt)
    assert len(answers & found) == len(answers) - len(learnt - {tuple(prompt.tokens) for prompt in second.data.train})
    others = replace(second, params=SamplingParams(max_new_tokens=5))
    with pytest.raises(UsageError, match="are those of another target or other sampling options"):
        others.answer(ignore, never)
    (tmp_path / "first" / "training" / "answers.jsonl").unlink()
    with pytest.raises(UsageError, match="there are no answers in"):
        second.answer(ignore, never)


def test_a_run_stopped_before_its_first_answer_goes_on_twice(target: str, tmp_path: Path) -> None:
    found = session(target, tmp_path / "head")
    assert found.answer(ignore, lambda: True) == []
    whole = found.answer(ignore, never)
    assert [list(one.tokens) for one in found.answer(ignore, never)] == [list(one.tokens) for one in whole]


def test_answers_are_stopped_between_two_steps(target: str, tmp_path: Path) -> None:
    found, times = session(target, tmp_path / "head"), count()
    assert found.answer(ignore, lambda: next(times) == 3) == []
    assert (next(times), found.engine.has_work) == (4, False)
    assert len(found.answer(ignore, never)) == len(found.data.train)


@pytest.mark.parametrize(
    ("number", "line", "hint"),
    [
        (1, "{", "restore the file, or delete it"),
        (1, "{}", "restore the file, or delete it"),
        (3, '{"index": 2, "answer": [1, 2', "keep its first 2 lines"),
        (3, '{"index": 99, "answer": [1, 2]}', "keep its first 2 lines"),
        (3, '{"index": 1}', "keep its first 2 lines"),
        (3, '{"index": 1, "answer": ["a"]}', "keep its first 2 lines"),
        (4, "\0\0\0", "keep its first 3 lines"),
    ],
)
def test_a_damaged_answer_is_named_and_the_others_are_kept(number: int, line: str, hint: str, tmp_path: Path) -> None:
    path, prompts = tmp_path / "answers.jsonl", [TrainingPrompt(one, index) for index, one in enumerate(PROMPTS)]
    rows: list[object] = [{"fingerprint": fingerprint(prompts, SamplingParams())}]
    rows += [{"index": index, "answer": [7, 8, index]} for index in range(5)]
    lines = [json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    assert Answers(path, prompts, SamplingParams(), Processes(), "").num_done == 5
    path.write_text("\n".join([*lines[: number - 1], line, *lines[number:]]) + "\n")
    before = path.read_bytes()
    with pytest.raises(RunError, match=rf"line {number} of `.*answers\.jsonl` is damaged") as error:
        Answers(path, prompts, SamplingParams(), Processes(), "")
    assert error.value.hint is not None
    assert hint in error.value.hint
    assert path.read_bytes() == before
    path.write_text("\n".join(lines[: number - 1]) + "\n" * (number > 1))
    assert Answers(path, prompts, SamplingParams(), Processes(), "").num_done == max(number - 2, 0)


def test_more_answers_than_prompts_are_refused(tmp_path: Path) -> None:
    path, prompts = tmp_path / "answers.jsonl", [TrainingPrompt(PROMPTS[0], 0)]
    rows = [{"fingerprint": fingerprint(prompts, SamplingParams())}, *[{"index": 0, "answer": [7]}] * 2]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(RunError, match="line 3 of"):
        Answers(path, prompts, SamplingParams(), Processes(), "")


def test_a_full_disk_leaves_the_last_checkpoint(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate import Accelerator

    found = session(target, tmp_path / "head", save_every=2, evaluate_every=100)
    run, save, saved = found.start(found.answer(ignore, never), False), Accelerator.save_state, []

    def full(self: Accelerator, folder: str) -> None:
        if saved:
            Path(folder).mkdir()
            (Path(folder) / "model.safetensors").write_bytes(b"half")
            raise OSError(28, "No space left on device")
        save(self, folder)

    monkeypatch.setattr(Accelerator, "save_state", full)
    with pytest.raises(RunError, match="cannot be written: No space left on device"):
        saved.extend(event.step for event in run.run(never) if isinstance(event, Saved))
    monkeypatch.undo()
    again = session(target, tmp_path / "head", is_resumed=True, save_every=2, evaluate_every=100)
    resumed = again.start(again.answer(ignore, never), True)
    assert saved == [2] == [resumed.progress.step]
    assert not (found.folder.work / "checkpoint.new").exists(), "a full disk needs the room"


def test_49_a_second_interruption_between_renames_leaves_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("checkpoint.new", "checkpoint.old"):  # the first one came before the new one had its name
        (tmp_path / name).mkdir()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Checkpoints(tmp_path)._take_over()
    assert (tmp_path / "checkpoint.old").exists()


def test_49_a_checkpoint_of_tied_weights_warns_of_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tied = tiny_target(tmp_path / "tied", layers=2, tie_word_embeddings=True)
    found = session(tied, tmp_path / "draft", method="distill", max_steps=1)
    samples = found.answer(ignore, never)
    assert [event.event for event in found.start(samples, False).run(never)][-1] == "checkpoint"
    assert not [record.getMessage() for record in caplog.records if record.name.startswith("accelerate")]


def test_an_unreadable_checkpoint_is_named(target: str, tmp_path: Path) -> None:
    found = session(target, tmp_path / "head", max_steps=1)
    for _ in found.start(found.answer(ignore, never), False).run(never):
        pass
    (found.folder.work / "checkpoint" / "model.safetensors").write_bytes(b"half")
    again = session(target, tmp_path / "head", is_resumed=True, max_steps=1)
    with pytest.raises(RunError, match=r"the checkpoint in .* cannot be read"):
        again.start(again.answer(ignore, never), True)


def test_a_missing_checkpoint_is_refused_and_none_yet_is_not(target: str, tmp_path: Path) -> None:
    found = session(target, tmp_path / "head", max_steps=2, save_every=1)
    samples = found.answer(ignore, never)
    assert found.start(samples, True).progress.step == 0, "the run was stopped before its first checkpoint"
    log, run = TrainingLog(found.folder.log, 0), found.start(samples, False)
    for event in run.run(never):
        log.add(event)
    shutil.rmtree(found.folder.work / "checkpoint")
    with pytest.raises(RunError, match=r"checkpoint`, which the run saved after step `2`, is missing") as error:
        found.start(samples, True)
    assert error.value.hint is not None
    assert "the answers are kept" in error.value.hint


@pytest.mark.parametrize("line", ["{", "[]", '{"event": "step", "step": 1}', '{"step": 2}', '{"event": [], "step": 2}'])
def test_a_damaged_log_is_named_and_left_as_it_is(line: str, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(f'{{"event": "checkpoint", "step": 1}}\n{line}\n{{"event": "checkpoint", "step": 3}}\n')
    before = path.read_bytes()
    for reading in (lambda: TrainingLog(path, 9), lambda: last_saved(path)):
        with pytest.raises(RunError, match=r"line 2 of `.*log\.jsonl` is damaged"):
            reading()
    assert path.read_bytes() == before


def test_patience_ends_a_run_without_gain(target: str, tmp_path: Path) -> None:
    found = session(target, tmp_path / "head", epochs=20, evaluate_every=1, patience=2, learning_rate=1e-9)
    run = found.start(found.answer(ignore, never), False)
    for _ in run.run(never):
        pass
    assert run.progress.step == run.progress.best_step + 2 < run.num_steps


def test_a_log_keeps_a_loss_that_is_no_number(tmp_path: Path) -> None:
    step = Trained(step=1, loss=float("nan"), matches_by_depth=[], learning_rate=0.1, num_tokens=9, seconds=1.5)
    TrainingLog(tmp_path / "log.jsonl", 0).add(step)
    [again] = TrainingLog(tmp_path / "log.jsonl", 1).events
    assert isinstance(again, Trained)
    assert math.isnan(again.loss)
    assert TrainDocument.of_events([again], {}, (), interrupted=False).as_json()["curve"] == [{"step": 1, "loss": None}]
