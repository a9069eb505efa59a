"""What a run refuses, and what it keeps when the disk fills up."""

import json
from pathlib import Path

import pytest
from tiny_training import PROMPTS, ignore, never, session, tiny_target

from specdec_cli.errors import RunError, UsageError
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.train.answers import Answers, TrainingPrompt
from specdec_cli.train.events import Saved
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
        Answers(path, prompts, SamplingParams())


def test_a_half_written_answer_is_asked_for_again(target: str, tmp_path: Path) -> None:
    found = session(target, tmp_path / "head")
    whole = found.answer(ignore, never)
    content = found.folder.answers.read_bytes()
    found.folder.answers.write_bytes(content[:-9])
    assert [list(one.tokens) for one in found.answer(ignore, never)] == [list(one.tokens) for one in whole]
    assert found.folder.answers.read_bytes() == content


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


def test_an_unreadable_checkpoint_is_named(target: str, tmp_path: Path) -> None:
    found = session(target, tmp_path / "head", max_steps=1)
    for _ in found.start(found.answer(ignore, never), False).run(never):
        pass
    (found.folder.work / "checkpoint" / "model.safetensors").write_bytes(b"half")
    again = session(target, tmp_path / "head", is_resumed=True, max_steps=1)
    with pytest.raises(RunError, match=r"the checkpoint in .* cannot be read"):
        again.start(again.answer(ignore, never), True)


def test_patience_ends_a_run_without_gain(target: str, tmp_path: Path) -> None:
    found = session(target, tmp_path / "head", epochs=20, evaluate_every=1, patience=2, learning_rate=1e-9)
    run = found.start(found.answer(ignore, never), False)
    for _ in run.run(never):
        pass
    assert run.progress.step == run.progress.best_step + 2 < run.num_steps
