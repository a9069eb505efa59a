"""The recipe's sections for measuring: workload and gates, with positions in their errors."""

from pathlib import Path

import pytest

from specdec_cli.recipe import RecipeError, resolve


def written(tmp_path: Path, text: str):
    path = tmp_path / "r.yaml"
    path.write_text(text)
    return path


def test_the_sections(tmp_path: Path) -> None:
    text = "workload: {dataset: gsm8k, tasks: [a, b], num_prompts: 5}\n"
    text += 'gates: {fail_if: ["speedup.decode < 1.2"], baseline: old.json, max_regression: 2.5%}\n'
    recipe = resolve(written(tmp_path, text)).recipe
    assert recipe.workload.model_dump() == {"dataset": "gsm8k", "tasks": ("a", "b"), "num_prompts": 5}
    assert (recipe.gates.fail_if, recipe.gates.baseline) == (("speedup.decode < 1.2",), "old.json")
    assert recipe.gates.max_regression == "2.5%"


def test_the_defaults() -> None:
    document = resolve().recipe.as_dict()
    assert document["workload"] == {"dataset": "builtin:mini", "tasks": None, "num_prompts": 24}
    assert document["gates"] == {"fail_if": [], "baseline": None, "max_regression": "5%"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("workload: {num_prompts: 0}", r"r\.yaml:1:25: .* at least 1"),
        ("workload: {tasks: []}", r"r\.yaml:1:19: .* must name a task"),
        ("workload: {datasets: x}", r"did you mean `dataset`"),
        ("gates: {fail_if: [speedup]}", r"r\.yaml:1:19: .* must be PATH OP NUMBER"),
        ("gates: {max_regression: 5}", r"r\.yaml:1:25: .* must be a percentage such as 5%"),
        ("gates: {max_regression: 100%}", r"must be a percentage"),
        ("gates: {fail_if: speedup.decode < 1}", r"must be a list"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        resolve(written(tmp_path, text))
