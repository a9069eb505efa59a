"""What some keys imply of others, and what contradicts it."""

from pathlib import Path

import pytest

from specdec_cli.cli.shared import draft_methods
from specdec_cli.errors import UsageError
from specdec_cli.recipe import resolve

METHODS = draft_methods()


def resolved(*sets, name=None, **flags):
    paths = {path.replace("__", "."): (value, f"--{path}") for path, value in flags.items()}
    return resolve(name, sets, {}, paths, METHODS)


def test_a_shape_has_random_weights_and_so_has_a_draft_beside_it() -> None:
    found = resolved(target__model="shape:llama-2-70b", draft={"model": "some/draft"})
    assert found.recipe.target.load_format == found.recipe.draft.load_format == "dummy"
    assert found.origins["target.load_format"] == "flag --target__model"
    assert found.recipe.as_dict()["draft"]["load_format"] == "dummy"


def test_a_drafts_own_format_stands() -> None:
    found = resolved("draft.load_format=auto", target__load_format="dummy", draft={"model": "some/draft"})
    assert (found.recipe.target.load_format, found.recipe.draft.load_format) == ("dummy", "auto")
    assert resolved(target__model="x", draft={"model": "shape:qwen2-0.5b"}).recipe.target.load_format == "auto"


def test_a_draft_that_loads_nothing_has_no_format() -> None:
    assert (
        "load_format" not in resolved(target__load_format="dummy", draft={"method": "ngram"}).recipe.as_dict()["draft"]
    )


def test_rates_imply_their_mode_and_the_resolved_recipe_reads_back(tmp_path: Path) -> None:
    found = resolved(speculation__synthetic_acceptance_rates=[0.8, 0.6, 0.6, 0])
    assert found.recipe.speculation.verify == "synthetic"
    assert found.origins["speculation.verify"] == "flag --speculation__synthetic_acceptance_rates"
    from specdec_cli.recipe.present import to_yaml

    (tmp_path / "again.yaml").write_text(to_yaml(found))
    assert resolved(name=tmp_path / "again.yaml").recipe == found.recipe


def test_none_is_none() -> None:
    document = resolved().recipe.as_dict()["speculation"]
    assert document["verify"] == "auto"
    assert not [key for key in document if key.startswith("synthetic")]


def test_one_way_given_anew_replaces_the_other(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("target: {model: x}\nspeculation: {synthetic_acceptance_length: 2.5}\n")
    found = resolved(name=tmp_path / "r.yaml", speculation__synthetic_acceptance_rates=[0.5] * 4)
    assert found.recipe.speculation.synthetic_acceptance_length is None
    assert resolved(name=tmp_path / "r.yaml").recipe.speculation.verify == "synthetic"


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["speculation.synthetic_acceptance_length=5.5"], "is more than k + 1 = 5"),
        (["speculation.synthetic_acceptance_length=0.9"], "at least 1"),
        (
            ["speculation.synthetic_acceptance_rates=[0.5, 0.4]"],
            "has 2 rates, and `speculation.num_speculative_tokens` is `4`",
        ),
        (["speculation.synthetic_acceptance_rates=[0.5, 0.6, 0.4, 0.1]"], "that do not increase"),
        (["speculation.synthetic_acceptance_rates=[1.5, 0.6, 0.4, 0.1]"], "1"),
        (["speculation.synthetic_acceptance_rates=[]"], "must be rates from 0 to 1"),
        (["speculation.synthetic_acceptance_rates=[a]"], "rates"),
        (["speculation.verify=synthetic"], "needs an acceptance"),
        (["speculation.verify=block", "speculation.synthetic_acceptance_length=2"], "verify is `block`"),
        (
            ["speculation.synthetic_acceptance_length=2", "speculation.synthetic_acceptance_rates=[1, 1, 1, 1]"],
            "cannot go with `--set speculation.synthetic_acceptance_length`",
        ),
        (["target.model=shape:llama-2-7b", "target.load_format=auto"], "a shape without weights"),
        (["draft.model=shape:llama-2-7b", "draft.load_format=auto"], "a shape without weights"),
        (["target.load_format=pt"], "load_format"),
    ],
)
def test_contradictions_are_refused(sets: list[str], said: str) -> None:
    with pytest.raises(UsageError) as error:
        resolved(*sets)
    assert said in str(error.value)
