"""What the documentation says of fields, gates, limits and recipes is what the code has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from specdec_cli.errors import UsageError
from specdec_cli.lm.files.draft_formats import published_kinds
from specdec_cli.measure.documents.bench import BenchDocument
from specdec_cli.measure.documents.compare_drafts import CompareDocument
from specdec_cli.measure.documents.endpoint import EndpointDocument
from specdec_cli.measure.documents.sweep_k import SweepDocument
from specdec_cli.measure.gates import check_paths, parse_all
from specdec_cli.recipe.document import read_document
from specdec_cli.recipe.resolve import resolve_document
from specdec_cli.recipe.schema import Recipe, Serve

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def rows(text: str, first: str) -> list[list[str]]:
    """The cells of the table whose head begins with some words."""
    lines = iter(text.splitlines())
    next(line for line in lines if line.startswith(f"| {first} |"))
    next(lines)
    found = []
    for line in lines:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def names_of(kind) -> set[str]:
    return {field.alias or name for name, field in kind.model_fields.items()}


@pytest.mark.parametrize("kind", ["ChatCompletionRequest", "CompletionRequest", "Message", "Speculative"])
def test_the_http_page_names_every_field(kind: str) -> None:
    protocol = pytest.importorskip("specdec_cli.serve.protocol")
    said = " ".join(code(without_blocks(page("http-api.md"))))
    missing = {name for name in names_of(getattr(protocol, kind)) if not re.search(rf"\b{re.escape(name)}\b", said)}
    assert not missing


def test_the_http_page_names_every_route() -> None:
    routes = pytest.importorskip("specdec_cli.serve.http.routes").router.routes
    text = page("http-api.md")
    for route in routes:
        assert route.path.replace("{name:path}", "{id}") in text


def test_every_published_draft_is_on_the_page_of_drafts() -> None:
    titles = {kind.title for kind in published_kinds() if kind.method}
    named = re.findall(r"[\w-]+", page("choosing-a-draft.md").partition("\n## Two drafts")[0])
    assert titles - {*named} == set()


SCHEMAS = {
    "bench": BenchDocument.json_schema,
    "bench --endpoint": EndpointDocument.json_schema,
    "sweep-k": SweepDocument.json_schema,
    "compare-drafts": CompareDocument.json_schema,
}
NAMES = {"by_task": ["code"], "rows": ["builtin:draft"]}


@pytest.mark.parametrize("row", rows(page("ci-gates.md"), "gate"), ids=lambda row: row[0])
def test_a_gate_is_on_a_figure_of_its_command(row) -> None:
    gate, *_ = code(row[0])
    commands = code(row[1]) or ["bench", "sweep-k", "compare-drafts"]
    for command in commands:
        check_paths(parse_all([gate]), SCHEMAS[command](), NAMES)


def test_a_gate_on_no_figure_is_found() -> None:
    with pytest.raises(UsageError, match="speed_up"):
        check_paths(parse_all(["speed_up < 1"]), BenchDocument.json_schema(), NAMES)


def test_the_limits_are_the_servers() -> None:
    shown = rows(page("serving.md"), "option")
    defaults = {name: field.default for name, field in Serve.model_fields.items()}
    for options, default, _ in shown:
        for option, value in zip(code(options), default.split(", "), strict=False):
            field = option.removeprefix("--").replace("-", "_")
            number, _, unit = value.partition(" ")
            if field in defaults:
                assert defaults[field] == int(number) * {"": 1, "KiB": 2**10, "MiB": 2**20}[unit], option
    named = {option for options, *_ in shown for option in code(options)}
    limits = {f"--{name.replace('_', '-')}" for name in defaults if name.startswith("max_")}
    assert limits - {"--max-queue-delay-microseconds"} <= named


def test_the_actions_inputs_are_its_own() -> None:
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    shown = {code(row[0])[0]: row[1] for row in rows(page("ci-gates.md"), "input")}
    assert shown.keys() == action["inputs"].keys()
    for name, words in shown.items():
        if words.startswith("`"):
            assert action["inputs"][name]["default"] == words.strip("`"), name
    workflow = next(block for block in blocks("ci-gates.md") if "OWNER/specdec" in block)
    steps = yaml.safe_load(workflow)["jobs"]["bench"]["steps"]
    used = next(step["with"] for step in steps if "OWNER/specdec" in step.get("uses", ""))
    assert used.keys() <= action["inputs"].keys()


def blocks(name: str) -> list[str]:
    return re.findall(r"^```yaml\n(.*?)^```$", page(name), re.MULTILINE | re.DOTALL)


def recipes() -> list[tuple[str, str]]:
    """Every YAML block with sections of a recipe, by its page."""
    found = [(path.name, block) for path in sorted(DOCS.glob("*.md")) for block in blocks(path.name)]
    return [(name, block) for name, block in found if yaml.safe_load(block).keys() <= Recipe.model_fields.keys()]


@pytest.mark.parametrize(("name", "block"), recipes(), ids=lambda text: text.splitlines()[0][:40])
def test_a_recipe_is_valid(name, block) -> None:
    resolve_document(read_document(block.encode(), name))


def test_there_are_recipes() -> None:
    assert {name for name, _ in recipes()} >= {"recipes.md", "choosing-k.md"}


@pytest.mark.parametrize("name", sorted(path.name for path in DOCS.glob("*.md")))
def test_every_block_of_json_is_json(name) -> None:
    import json

    for block in re.findall(r"^```json\n(.*?)^```$", page(name), re.MULTILINE | re.DOTALL):
        json.loads(block)


def examples() -> list[tuple[str, str]]:
    """Every block of Python that runs by itself, by its page; python-api.md holds signatures."""
    pages = [path.name for path in sorted(DOCS.glob("*.md")) if path.name != "python-api.md"]
    found = [(name, re.findall(r"^```python\n(.*?)^```$", page(name), re.MULTILINE | re.DOTALL)) for name in pages]
    return [(name, block) for name, blocks in found for block in blocks if "import OpenAI" not in block]


@pytest.mark.skipif(not (ROOT / "specdec_cli/builtin/target/model.safetensors").is_file(), reason="no built-in pair")
@pytest.mark.parametrize(("name", "block"), examples(), ids=lambda text: text.splitlines()[0][:40])
def test_an_example_in_python_runs(name, block, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(block, name, "exec"), {"__name__": "example"})
    assert capsys.readouterr().out


def test_there_are_examples_in_python() -> None:
    assert "decoding.md" in [name for name, _ in examples()]
