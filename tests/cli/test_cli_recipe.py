import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from schemas import assert_fits

from specdec_cli.cli.main import run
from specdec_cli.cli.shared import draft_methods
from specdec_cli.measure.documents.recipes import PlanDocument, RecipeListDocument, RecipeValidationDocument
from specdec_cli.recipe import shipped
from specdec_cli.recipe.present import json_schema


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def document(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    out, err = capsys.readouterr()
    assert err == ""
    return checked(json.loads(out))


def checked(found: dict[str, Any]) -> dict[str, Any]:
    """A document that fits the schema of its name."""
    kinds = {kind.schema_name: kind for kind in (PlanDocument, RecipeListDocument, RecipeValidationDocument)}
    assert_fits(found, kinds[found["schema"]])
    return found


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["recipe", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [recipe.name for recipe in shipped.list_recipes()]
    assert run(["recipe", "list", "--json"]) == 0
    found = document(capsys)
    assert found["schema"] == "specdec.recipe-list/1"
    assert {"name", "title", "path"} == set(found["recipes"][0])


def test_show_prints_a_recipe_that_validates(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["recipe", "show", "builtin", "--temperature", "0.5", "--origin"]) == 0
    text = capsys.readouterr().out
    assert "temperature: 0.5" in text
    assert "# flag --temperature" in text
    Path("mine.yaml").write_text(text)
    assert run(["recipe", "validate", "mine.yaml"]) == 0
    assert capsys.readouterr().out == "mine.yaml: valid\n"


def test_show_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["recipe", "show", "builtin-ngram", "--json", "--origin"]) == 0
    found = document(capsys)
    assert found["recipe"]["draft"] == {"method": "ngram", "max": 4, "min": 2}
    assert found["origins"]["draft.max"] == "recipe builtin-ngram.yaml:5"


def test_show_of_two_recipes_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["recipe", "show", "builtin", "-r", "qwen3-8b"]) == 2
    assert "two recipes" in capsys.readouterr().err


def test_copy_refuses_to_overwrite(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["recipe", "copy", "builtin"]) == 0
    Path("builtin.yaml").write_text("mine")
    assert run(["recipe", "copy", "builtin"]) == 2
    assert Path("builtin.yaml").read_text() == "mine"
    assert run(["recipe", "copy", "builtin", "builtin.yaml", "--force"]) == 0
    assert Path("builtin.yaml").read_text() == shipped.find("builtin.yaml").read_text() != "mine"
    assert run(["recipe", "copy", "builtin", "missing/x.yaml"]) == 2
    assert run(["recipe", "copy", "nope"]) == 2


def test_validate_reports_every_error_of_every_file(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.yaml").write_text("sampling: {temperatur: 1, top_k: 0}\n")
    Path("b.yaml").write_text("target: {modle: x}\n")
    assert run(["recipe", "validate", "a.yaml", "builtin", "b.yaml", "c.yaml"]) == 2
    out, err = capsys.readouterr()
    assert out == "builtin: valid\n"
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert [line.split(": ")[1] for line in lines] == [
        "a.yaml:1:12",
        "a.yaml:1:34",
        "b.yaml:1:10",
        "there is no file `c.yaml`",
    ]


def test_validate_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.yaml").write_text("sampling: {temperatur: 1}\n")
    assert run(["recipe", "validate", "a.yaml", "--json"]) == 2
    found = checked(json.loads(capsys.readouterr().out))
    assert found["files"][0]["valid"] is False
    assert found["files"][0]["errors"][0]["column"] == 12


def test_schema_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["recipe", "schema"]) == 0
    assert json.loads(capsys.readouterr().out)["properties"]["draft"]


@pytest.mark.parametrize("content", [b"\xff\xfe", b"a: *x", b"a: [", b"\x00", b"- 1", b""])
def test_bad_files_are_one_error_each(content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    Path("x.yaml").write_bytes(content)
    assert run(["recipe", "show", "x.yaml"]) == 2
    err = capsys.readouterr().err
    assert err.count("error: ") == 1
    assert "Traceback" not in err


def test_a_folder_is_no_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["recipe", "show", str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err


@pytest.mark.in_turn(0, every=3)
@pytest.mark.parametrize(
    "words",
    [
        ["recipe", "show"],
        ["recipe", "show", "builtin", "--origin"],
        ["generate", "a prompt", "--dry-run"],
        ["bench", "--dry-run"],
        ["bench", "--dry-run", "--dataset", "some/dataset", "--against", "none"],
        ["bench", "--dry-run", "--endpoint", "http://127.0.0.1:1"],
        ["sweep-k", "--dry-run", "--batch-sizes", "1,4"],
        ["compare-drafts", "--dry-run", "-d", "ngram", "-d", "none"],
    ],
)
def test_documents_of_what_would_run_fit_their_schema(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert run([*words, "--json"]) == 0
    found = document(capsys)
    assert found["schema"] == "specdec.recipe/1"
    jsonschema.validate(found["recipe"], json_schema(draft_methods()))


def test_a_document_that_does_not_fit_is_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["recipe", "show", "--json"]) == 0
    found = document(capsys)
    for wrong in ({"more": 1}, {"num_prompts": -1}, {"created": 1}, {"recipe": 1}):
        with pytest.raises(jsonschema.ValidationError):
            checked(found | wrong)
