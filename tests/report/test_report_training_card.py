"""The model card and the recipe of a trained draft."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specdec_cli.recipe import resolve
from specdec_cli.report.training_card import TrainedDraft
from specdec_cli.train.documents import TrainDocument
from specdec_cli.train.events import Evaluated, Trained, TrainingEvent


def trained(target: str, events: Sequence[TrainingEvent], *more: str) -> TrainedDraft:
    sets = [f"target.model={target}", "target.dtype=float32", "train.data=prompts.jsonl", "train.method=medusa"]
    recipe = resolve(sets=[*sets, "sampling.temperature=0.8", *more]).recipe
    document = TrainDocument.of_events(events, {"depth": 2}, (), interrupted=False).as_json()
    return TrainedDraft(recipe, Path("out/heads"), document, 12, 340, 5000)


def step(number: int, loss: float) -> Trained:
    return Trained(step=number, loss=loss, matches_by_depth=[], learning_rate=0.1, num_tokens=9, seconds=1.5)


def evaluation(number: int, length: float, *by_depth: float) -> Evaluated:
    return Evaluated(
        step=number, k=2, acceptance_length=length, acceptance_rate=0.5, acceptance_by_depth=list(by_depth),
        is_best=False, seconds=1.0,
    )  # fmt: skip


ROWS: list[TrainingEvent] = [
    step(1, 5.0),
    step(2, 4.0),
    evaluation(2, 1.5, 0.4, 0.1),
    step(3, 3.0),
    evaluation(3, 1.25, 0.25),
]


def test_a_card_tells_the_run(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("---\nlicense: apache-2.0\n---\nA target.\n")
    card = trained(str(tmp_path), ROWS).card()
    assert card.startswith("---\nbase_model: ")
    assert "license: apache-2.0\ntags: [speculative-decoding, medusa]\n---\n" in card
    assert f"# Medusa heads for `{tmp_path.name}`" in card
    assert "| step | loss | length | accepted | depth 1 | depth 2 |" in card
    assert "| 2 | 4.500 | 1.50 | 50.0% | 40.0% | 10.0% |\n| 3 | 3.000 | 1.25 | 50.0% | 25.0% | – |" in card
    assert "On 16 held-out prompts, k = 2, temperature 0.8. The folder has the draft of step 2." in card
    assert "- samples: 12, with 340 tokens of answers\n- steps: 3, 4 s of training" in card
    assert "sampling:\n  temperature: 0.8\ntrain:\n  method: medusa\n" in card
    assert f"- target `{tmp_path}`: `apache-2.0`, by its model card" in card


def test_a_card_without_an_evaluation_or_a_licence(tmp_path: Path) -> None:
    card = trained(str(tmp_path), ROWS[:1]).card()
    assert "license: unknown" in card
    assert "It was not measured." in card
    assert "not stated in its folder" in card


def test_a_card_says_whose_answers_it_learnt(tmp_path: Path) -> None:
    own, given = (trained(str(tmp_path), ROWS, *more).card() for more in ([], ["train.keep_answers=true"]))
    assert "on the target's own answers." in own
    assert "- prompts: `prompts.jsonl`, answered by the target" in own
    assert "on the answers given in its data." in given
    assert "- prompts: `prompts.jsonl`, with the answers given there" in given
    assert "the target's own answers" not in given


def test_the_recipe_is_one(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(trained(str(tmp_path), ROWS).usage_recipe())
    recipe = resolve(str(path)).recipe
    assert (recipe.target.model, recipe.target.dtype, recipe.draft.model) == (str(tmp_path), "float32", "out/heads")
    assert recipe.speculation.num_speculative_tokens == 2
