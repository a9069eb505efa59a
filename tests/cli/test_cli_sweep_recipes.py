"""Recipes that `sweep-k --write-recipe` tunes: a k, a table of k, and what the user set."""

from pathlib import Path
from typing import Any

import pytest
from toy_sweeps import checked, slow_target, sweep_k, toy_engines
from typed import not_none

from specdec_cli.cli.shared import draft_methods
from specdec_cli.recipe import resolve

HERE: dict[str, Any] = {"environment": {"draft_vocabulary": None}}


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch):
    """Engines that the command made, of toys."""
    return toy_engines(monkeypatch)


def recommended(size: int, k: int, verdict: str | None = None) -> dict[str, Any]:
    """What a tuned recipe is made of."""
    said = verdict or ("speculate" if k else "do-not-speculate")
    needs = ["a quiet machine"] if said == "inconclusive" else []
    its = {"k": k, "tree": None, "p_min": None, "why": "so", "verdict": said, "needs": needs}
    return {"batch_size": size, "recommended": its}


def test_a_tuned_recipe_holds_what_was_decided_and_what_the_user_set(tmp_path: Path) -> None:
    from specdec_cli.report.tuned_recipe import tuned_recipe

    own = tmp_path / "own.yaml"
    pair = "target: {model: builtin:target}\ndraft: {model: builtin:draft}\n"
    own.write_text(pair + "sampling: {top_p: 0.9, temperature: 0.7}\nserve: {port: 8123}\n")
    flags: dict[str, Any] = {"sampling.max_new_tokens": (32, "-n"), "workload.num_prompts": (6, "--num-prompts")}
    flags |= {"sampling.temperature": (0.8, "--temperature"), "gates.fail_if": (["recommended.k < 1"], "--fail-if")}
    resolved = resolve(own, flags=flags)
    text = tuned_recipe(resolved, {"by_batch_size": [recommended(1, 4)], **HERE})
    assert text.splitlines()[1:] == [
        "target:",
        "  model: builtin:target",
        "draft:",
        "  model: builtin:draft",
        "speculation:",
        "  num_speculative_tokens: 4",
        "sampling:",
        "  temperature: 0.8",
        "  top_p: 0.9",
        "serve:",
        "  port: 8123",
    ]


@pytest.mark.parametrize("k", [0, 4])
def test_a_tuned_recipe_is_served_where_no_key_is_set(tmp_path: Path, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from specdec_cli.cli.serve import _check_key_variable
    from specdec_cli.report.tuned_recipe import tuned_recipe

    monkeypatch.delenv("SPECDEC_API_KEY", raising=False)
    path = tmp_path / "tuned.yaml"
    path.write_text(tuned_recipe(resolve("builtin"), {"by_batch_size": [recommended(1, k)], **HERE}))
    _check_key_variable(resolve(path))
    assert resolve(path).recipe.sampling == resolve("builtin").recipe.sampling


@pytest.mark.parametrize(
    "synthetic",
    [
        {"synthetic_acceptance_rates": (0.9, 0.7, 0.5, 0.2)},
        {"synthetic_acceptance_length": 4.5},
    ],
)
@pytest.mark.parametrize("ks", [{1: 2}, {1: 0}, {1: 3, 4: 1}, {2: 1, 4: 3}, {2: 0, 4: 4}, {1: 0, 4: 0}])
def test_a_recipe_tuned_with_synthetic_acceptance_reads_back(tmp_path: Path, synthetic, ks) -> None:
    from specdec_cli.engine.synthetic import synthetic_rates
    from specdec_cli.report.tuned_recipe import tuned_recipe

    swept = {"speculation.num_speculative_tokens": 4} | {f"speculation.{key}": one for key, one in synthetic.items()}
    sets = [f"{key}={list(one) if isinstance(one, tuple) else one}" for key, one in swept.items()]
    resolved = resolve(sets=sets)
    found = [recommended(size, k) for size, k in ks.items()]
    path = tmp_path / "tuned.yaml"
    path.write_text(tuned_recipe(resolved, {"by_batch_size": found, **HERE}))
    tuned = resolve(path).recipe
    most = max(ks.values())
    assert tuned.speculation.num_speculative_tokens == most
    if most == 0:
        assert (tuned.draft.method, tuned.speculation.verify) == ("none", "auto")
        return
    rates = synthetic_rates(resolved.recipe.speculation)
    assert synthetic_rates(tuned.speculation) == pytest.approx(not_none(rates)[:most])
    table = tuned.speculation.k_by_batch or ()
    assert (table[-len(ks) :] == tuple(ks.items())) is (len(ks) > 1)
    assert dict(table).get(1, most) == ks[min(ks)]


@pytest.mark.parametrize("verdict", ["speculate", "inconclusive"])
def test_a_draft_that_drafts_by_text_is_tuned_as_such(verdict: str, tmp_path: Path) -> None:
    from specdec_cli.report.tuned_recipe import tuned_recipe

    given, path = resolve("builtin", sets=["draft.model=another"]), tmp_path / "tuned.yaml"
    document = {"by_batch_size": [recommended(1, 2, verdict)], "environment": {"draft_vocabulary": {"share": 0.5}}}
    path.write_text(tuned_recipe(given, document))
    draft = resolve(str(path), methods=draft_methods()).recipe.draft
    assert (draft.model, draft.method, draft.quantize) == ("another", "universal", given.recipe.draft.quantize)


def test_a_table_keeps_the_k_in_use_where_a_batch_size_is_inconclusive() -> None:
    from specdec_cli.report.tuned_recipe import tuned_recipe

    given = resolve(sets=["speculation.num_speculative_tokens=5"])
    for found, table in (
        ([recommended(1, 3), recommended(8, 5, "inconclusive")], "k_by_batch: 1:3,8:5"),
        ([recommended(1, 0), recommended(8, 5, "inconclusive")], "k_by_batch: 1:0,8:5"),
    ):
        text = tuned_recipe(given, {"by_batch_size": found, **HERE}).replace('"', "")
        assert table in text
        said = text.replace("\n# ", " ")
        assert "Batch size 8: Inconclusive: so. To settle it: a quiet machine. Until then the draft and k = 5" in said


def test_a_table_that_begins_without_a_draft_keeps_it_from_smaller_batches() -> None:
    from specdec_cli.recipe import resolve as resolved
    from specdec_cli.report.tuned_recipe import tuned_recipe

    found = [recommended(size, k) for size, k in ((2, 0), (4, 3))]
    text = tuned_recipe(resolved(), {"by_batch_size": found, **HERE})
    assert "k_by_batch: 1:0,2:0,4:3" in text.replace('"', "")
    assert "num_speculative_tokens: 3" in text


def test_the_tuned_recipe_reads_back(
    loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slow_target(monkeypatch)
    path = tmp_path / "tuned.yaml"
    assert sweep_k("--json", "--write-recipe", str(path), "-n", "24") == 0
    document = checked(capsys.readouterr().out)
    recipe = resolve(path).recipe
    assert recipe.speculation.num_speculative_tokens == document["recommended"]["k"] > 0
    assert recipe.as_dict()["draft"] == document["recipe"]["draft"]
    assert path.read_text().startswith("# By `specdec sweep-k`: k = ")
    assert all(len(line) <= 100 for line in path.read_text().splitlines())
    assert sweep_k("--write-recipe", str(path)) == 2
    assert "already exists" in capsys.readouterr().err
    assert sweep_k("--write-recipe", str(path), "--force") == 0
