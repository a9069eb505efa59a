"""No argument at all runs what the recipe `builtin` has."""

from pathlib import Path

import pytest

from specdec_cli.cli.shared import draft_methods
from specdec_cli.recipe import resolve
from specdec_cli.report.tuned_recipe import tuned_recipe


def test_no_argument_is_the_recipe_builtin() -> None:
    assert resolve(methods=draft_methods()).recipe == resolve("builtin", methods=draft_methods()).recipe


def test_a_recipe_that_names_no_models_has_the_pairs_draft_and_k(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("sampling: {temperature: 0.5}\n")
    found = resolve(path).recipe
    assert (found.draft.model, found.draft.quantize) == ("builtin:draft", "int8")
    assert found.speculation.num_speculative_tokens == 5


@pytest.mark.parametrize(("sets", "draft", "quantize", "k"), [
    (["speculation.num_speculative_tokens=2"], "builtin:draft", "int8", 2),
    (["draft.quantize=none"], "builtin:draft", "none", 5),
    (["draft.method=ngram"], None, "none", 4),
    (["draft.model=builtin:draft"], "builtin:draft", "none", 4),
    (["target.model=builtin:target"], None, "none", 4),
])  # fmt: skip
def test_what_is_named_stays_as_it_is_named(sets: list[str], draft: str | None, quantize: str, k: int) -> None:
    found = resolve(sets=sets).recipe
    assert (found.draft.model, found.draft.quantize, found.speculation.num_speculative_tokens) == (draft, quantize, k)


def test_a_tuned_recipe_of_the_pair_keeps_the_int8_draft(tmp_path: Path) -> None:
    found = {"k": 3, "tree": None, "p_min": None, "why": "so", "verdict": "speculate", "needs": []}
    path = tmp_path / "tuned.yaml"
    document = {"by_batch_size": [{"batch_size": 1, "recommended": found}], "environment": {}}
    path.write_text(tuned_recipe(resolve(), document))
    tuned = resolve(path).recipe
    assert (tuned.draft.quantize, tuned.speculation.num_speculative_tokens) == ("int8", 3)
