"""The documentation is current: references match the code, every page is listed, links lead somewhere."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from pathlib import Path

import pytest
import yaml
from test_readme import parse, program, words_of
from typed import not_none

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


def reference():
    spec = importlib.util.spec_from_file_location("docs_reference", ROOT / "scripts" / "docs_reference.py")
    module = importlib.util.module_from_spec(not_none(spec))
    not_none(not_none(spec).loader).exec_module(module)
    return module


@pytest.mark.parametrize("name", ["cli.md", "recipe-reference.md", "python-api.md", "architecture.md", "exactness.md"])
def test_a_reference_page_is_what_the_code_says(name: str) -> None:
    page = reference().PAGES[name]()
    hint = "run `python scripts/docs_reference.py`"
    assert (DOCS / name).read_text(encoding="utf-8").rstrip() == page.rstrip(), hint


def test_an_option_of_several_commands_is_described_once() -> None:
    own, _, shared = (DOCS / "cli.md").read_text(encoding="utf-8").partition("## Shared options")
    own_rows, shared_rows = (re.findall(r"^\| `-.*", text, re.MULTILINE) for text in (own, shared))
    keys = Counter(re.sub(r"(?<!\\)\|[^|]*(\|[^|]*\|)$", r"\1", row) for row in own_rows)
    assert min(len(own_rows), len(shared_rows)) > 50
    assert [key for key, count in keys.items() if count >= reference().SHARED_BY] == []


def test_every_option_stands_under_its_command_or_the_shared_ones() -> None:
    own, _, shared = (DOCS / "cli.md").read_text(encoding="utf-8").partition("## Shared options")
    for name, command in program().commands.items():
        text = own.partition(f"## specdec {name}\n")[2].partition("\n## specdec")[0] + shared
        options = [] if hasattr(command, "commands") else [one for one in command.params if one.opts[0].startswith("-")]
        shown = [one.opts[0] for one in options if not one.hidden and one.name not in ("help", "help_all")]
        assert [option for option in shown if f"`{option}`" not in text] == []


def listed(nav) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    inner = nav.values() if isinstance(nav, dict) else nav
    return [name for one in inner for name in listed(one)]


def test_every_page_is_listed_once() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert sorted(listed(nav)) == [str(page.relative_to(DOCS)) for page in PAGES]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as Markdown renderers make them."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        linked = (page.parent / name).resolve() if name else page
        assert linked.exists(), target
        if anchor and linked.suffix == ".md":
            assert anchor in anchors(linked), target


def command_lines() -> list[str]:
    """Every `$ specdec …` of a console block, continued lines joined."""
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    blocks = [block for text in texts for block in re.findall(r"^```console\n(.*?)^```$", text, re.M | re.S)]
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return sorted({line.removeprefix("$ ") for line in lines if line.startswith("$ specdec")})


@pytest.mark.parametrize("line", command_lines())
def test_a_command_line_parses(line) -> None:
    parse(program(), "specdec", words_of(line))


def test_every_command_is_used_on_some_page() -> None:
    assert {words_of(line)[0] for line in command_lines()} == set(program().commands)


def test_the_python_api_marks_what_is_awaited() -> None:
    page = (ROOT / "docs" / "python-api.md").read_text(encoding="utf-8")
    marked = set(re.findall(r"^async (\w+\.\w+)\(", page, re.MULTILINE))
    assert marked == {"AsyncEngine.close", "AsyncEngine.stream", "AsyncEngine.generate"}
