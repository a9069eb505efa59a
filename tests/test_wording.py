"""Plain English: phrases that read as translated occur in no message, help text, docstring, comment or page."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
PAGES += [ROOT / "action.yml", *(ROOT / "recipes").glob("*.yaml"), *(ROOT / "specdec_cli").glob("serve/page/*.html")]
SOURCES = [path for room in ("specdec_cli", "scripts", "benchmarks") for path in (ROOT / room).rglob("*.py")]
EXAMPLES = {"Describe a person."}  # prompts, not our words

INSTEAD = {
    r"\b[Aa] person('s)?\b": "the user, the reader, or nobody at all",
    r"\b(is|are|be|was|were) (said|told)\b": "you get a warning; the report says",
    r"\b([Nn]obody|[Ss]omebody|[Ww]hoever)\b": "name who does it: the user, the client, another process",
    r"\b[Oo]f several,": "the first of several; if there are several",
    r"\bthe one that\b": "repeat the noun",
    r"\b(thereof|wherein|hereby|foretells?|foretold|anew)\b": "of it; predicts; again",
    r"\bhow deep to (guess|speculate)\b": "how many tokens to draft; which k",
    r"\bprogrammes?\b|\bquantis|\btokenis|\boptimis|\bsummaris": "American spelling, as in the names of the field",
}
"""Regular expressions of such phrases, and what to write instead."""
ANY = re.compile("|".join(INSTEAD))


def words_of_source(path: Path) -> Iterator[tuple[int, str]]:
    """Every string and comment of a module, by line; placeholders of f-strings are left out."""
    text = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from enumerate(node.value.splitlines(), node.lineno)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def found(words: Iterator[tuple[int, str]], path: Path) -> list[str]:
    """Each forbidden phrase with its place and what to write instead."""
    return [
        f"{path.relative_to(ROOT)}:{line}: `{match[0]}` ({instead}): {text.strip()}"
        for line, text in words
        if ANY.search(text) and not any(example in text for example in EXAMPLES)
        for pattern, instead in INSTEAD.items()
        if (match := re.search(pattern, text))
    ]


@pytest.mark.parametrize("room", ["specdec_cli", "scripts", "benchmarks"])
def test_no_source_reads_as_translated(room: str) -> None:
    paths = [path for path in SOURCES if path.is_relative_to(ROOT / room)]
    assert paths
    problems = [problem for path in paths for problem in found(words_of_source(path), path)]
    assert "\n".join(problems) == ""


def test_no_page_reads_as_translated() -> None:
    lines = {path: iter(enumerate(path.read_text(encoding="utf-8").splitlines(), 1)) for path in PAGES}
    assert "\n".join(problem for path, words in lines.items() for problem in found(words, path)) == ""


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """The first line of every docstring of a module."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), text.splitlines()[0]


@pytest.mark.parametrize("room", ["specdec_cli", "scripts", "benchmarks"])
def test_a_docstring_begins_with_a_noun_or_a_verb(room: str) -> None:
    """`The fields of a row.`, `Read a row.`, not `What a row asks for.`"""
    headless = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in SOURCES
        if path.is_relative_to(ROOT / room)
        for line, text in docstrings(path)
        if re.match(r"What\b", text) and not re.search(r"\bis\b.*\?$", text)
    ]
    assert "\n".join(headless) == ""


@pytest.mark.parametrize("text", ["It is said, and", "what a person calls it", "Of several, the first", "begin anew"])
def test_a_phrase_is_found(text: str) -> None:
    assert found(iter([(1, text)]), ROOT / "x.py")
