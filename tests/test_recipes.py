"""Every shipped recipe is valid, says what it shows, and its command line parses."""

import shlex
from pathlib import Path

import pytest
import typer

from specdec_cli.cli import main
from specdec_cli.cli.shared import Shared, draft_methods, with_shared_options
from specdec_cli.recipe import resolve, shipped

RECIPES = [recipe.name for recipe in shipped.list_recipes()]


def commands(name: str) -> list[str]:
    lines = shipped.head_comment(shipped.find(name))
    return [line for line in lines if line.startswith("specdec ")]


def test_the_recipes_of_the_contract_are_shipped() -> None:
    assert {"builtin", "builtin-ngram", "qwen3-8b", "llama2-70b-tinyllama"} <= set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_is_valid_and_complete(name: str) -> None:
    resolved = resolve(name, methods=draft_methods())
    assert resolved.origins["target.model"].startswith("recipe ")
    assert not resolved.built_in_pair


@pytest.mark.parametrize("name", RECIPES)
def test_head_comment_begins_with_a_sentence(name: str) -> None:
    title = shipped.head_comment(shipped.find(name))[0]
    assert 20 <= len(title) <= 118
    assert title.endswith(".")


@pytest.mark.parametrize("name", RECIPES)
def test_head_comment_has_a_command_that_parses(name: str) -> None:
    found = commands(name)
    assert found, f"the head comment of {name} shows no `specdec …` line"
    for line in found:
        word, *arguments = shlex.split(line)[1:]
        shared = parse(word, arguments)
        assert shared.recipe == name
        assert shared.resolve().source == f"{name}.yaml"


def parse(command: str, arguments: list[str]) -> Shared:
    """Parse a decoding command's line as far as the shared options go; the prompt is its argument."""
    assert command in {"generate", "audit", "bench", "doctor"}
    seen: list[Shared] = []

    @with_shared_options(aliases=True)
    def stand_in(prompt: str | None = typer.Argument(None), *, shared: Shared) -> None:
        seen.append(shared)

    app = typer.Typer()
    app.command()(stand_in)
    with typer.main.get_command(app).make_context("specdec", arguments) as context:
        context.command.invoke(context)
    return seen[0]


def test_recipes_are_found_from_a_checkout_and_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shipped.folder() == Path(main.__file__).parents[2] / "recipes"
    package = tmp_path / "specdec_cli"
    (package / "recipes").mkdir(parents=True)
    (package / "recipes" / "one.yaml").write_text("# One.\ntarget: {model: x}\n")
    monkeypatch.setattr(shipped, "__file__", str(package / "recipe" / "shipped.py"))
    assert [recipe.name for recipe in shipped.list_recipes()] == ["one"]
    assert resolve("one").recipe.target.model == "x"
