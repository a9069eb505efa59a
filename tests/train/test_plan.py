"""The plan of a run counts what the run itself has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_training import PROMPTS, tiny_target

from specdec_cli.cli import main
from specdec_cli.lm.facts import describe
from specdec_cli.lm.load import load_lm
from specdec_cli.recipe.schema import Recipe, Sampling, Target, Train
from specdec_cli.train.methods import training_method
from specdec_cli.train.plan import TrainingPlan
from specdec_cli.train.samples import Sample
from specdec_cli.train.session import TrainingData
from specdec_cli.train.target import TrainingTarget

METHODS: dict[str, dict[str, Any]] = {
    "eagle3": {"draft_vocab_size": 40},
    "dflash": {},
    "dflash2": {},
    "dspark": {},
    "pard": {},
    "medusa": {"depth": 3},
    "distill": {"num_layers": 2, "intermediate_size": 20},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_target(tmp_path_factory.mktemp("target"))


def plan_of(target: str, **settings: Any) -> TrainingPlan:
    recipe = Recipe(
        target=Target(model=target),
        train=Train(num_held_out=2, batch_size=4, **settings),
        sampling=Sampling(max_new_tokens=20),
    )
    data = TrainingData.of(PROMPTS, 64, 2, 1)
    return TrainingPlan.of_recipe(recipe, describe(target), data, trust_remote_code=False)


@pytest.mark.in_turn(1, every=3)
@pytest.mark.parametrize("method", METHODS)
def test_a_plan_has_the_parameters_of_the_network(target: str, start: str, method: str) -> None:
    settings = METHODS[method] | ({"start_from": start} if method == "pard" else {})
    plan = plan_of(target, method=method, **settings)
    lm = load_lm(target, block_size=4, max_num_seqs=4, check=False)
    made = training_method(method)(Train(method=method, **settings), TrainingTarget.of(lm))
    made.prepare([Sample(PROMPTS[0] * 3, 3)])
    module = made.build()
    assert plan.num_trained == sum(one.numel() for one in module.parameters())
    assert plan.num_target == lm.num_parameters
    assert plan.memory_bytes["frozen"] == sum(one.numel() * one.element_size() for one in module.buffers())
    assert plan.memory_bytes["optimizer"] == 2 * plan.memory_bytes["draft"] == 8 * plan.num_trained


def test_tokens_steps_and_space_are_counted(target: str) -> None:
    plan, cached = plan_of(target, epochs=2), plan_of(target, epochs=2, cache_features=True)
    assert (plan.num_samples, plan.num_held_out, plan.num_steps) == (10, 2, 6)
    assert plan.num_answer_tokens == 10 * 20
    prompts = cached.num_prompt_tokens
    assert prompts == plan.num_prompt_tokens < sum(map(len, PROMPTS))
    assert plan.disk_bytes["hidden_states"] == 0
    assert cached.disk_bytes["hidden_states"] == (prompts + 200) * 4 * 32 * 2, "three layers and the final states"
    assert cached.operations < plan.operations


def dry(target: str, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    words = ["train-draft", "-t", target, "--data", "builtin:stories", "-n", "32", "--dry-run", *more]
    assert main.run(words) == 0
    return capsys.readouterr().out


def test_a_dry_run_shows_the_plan(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = dry(target, capsys, "--output", str(tmp_path / "head"))
    said = [line.partition(":")[0] for line in text.splitlines() if line.startswith("# ")]
    assert said == ["# would train eagle3", "# tokens", "# parameters", "# memory", "# disk", "# time"]
    assert "640 of answers at most" in text
    document = json.loads(dry(target, capsys, "--json"))
    assert document["schema"] == "specdec.recipe/1"
    assert document["recipe"]["train"]["method"] == "eagle3"
    assert document["plan"]["num_answer_tokens"] == 640
    assert document["plan"]["step_seconds"] > 0
    assert not (tmp_path / "head").exists()


def test_a_target_that_is_not_here_leaves_the_rest_of_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    text = dry("nobody/nowhere", capsys)
    assert "# would train eagle3: 20 answers with at most 640 tokens, 9 steps, 16 prompts held out" in text
    assert "not known: parameters, memory and time, because the target nobody/nowhere is not here" in text
    assert json.loads(dry("nobody/nowhere", capsys, "--json"))["plan"] is None


@pytest.mark.in_turn(1, every=3)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--method", "eagle9"], "unknown training method `eagle9`"),
        (["--method", "medusa", "--num-anchors", "8"], "`train.num_anchors` has no meaning"),
        (["--method", "dflash", "--mask-token", "100000"], "the mask token is `100000`"),
        (["--method", "pard"], "there is none to begin with"),
        (["--layers", "0-99-3"], "layer `99`"),
        (["--keep-answers"], "no answer to keep"),
    ],
)
def test_a_dry_run_refuses_what_the_run_refuses(
    target: str, words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train-draft", "-t", target, "--data", "builtin:stories", *words]
    assert main.run([*command, "--dry-run"]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert main.run([*command, "--output", str(tmp_path / "head")]) == 2
    assert capsys.readouterr().err == told
