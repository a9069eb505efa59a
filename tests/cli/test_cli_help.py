"""What `--help` shows: defaults, value names, common options, examples; and that a narrow terminal breaks no word."""

import io
import os
import re
import resource
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from functools import cache
from unittest.mock import patch

import pytest
import typer
from test_readme import parse, program

from specdec_cli.cli import main
from specdec_cli.cli.commands import COMMANDS
from specdec_cli.cli.help import (
    default_words,
    description,
    ends_the_program,
    first_sentence,
    is_option,
    name_and_value,
    text_and_examples,
    value_name,
    words_of,
)
from specdec_cli.cli.options import OPTIONS, SERVE_OPTIONS
from specdec_cli.recipe import resolve
from specdec_cli.recipe.keys import default_of
from specdec_cli.recipe.schema import Recipe


def contexts():
    """Every command that has options, by its path."""
    found = {}

    def visit(command, name, parent) -> None:
        context = command.make_context(name, [], parent=parent, resilient_parsing=True)
        found[context.command_path] = context
        for inner, child in getattr(command, "commands", {}).items():
            visit(child, inner, context)

    visit(program(), "specdec", None)
    return found


CONTEXTS = contexts()
PATHS = sorted(CONTEXTS)


def options(path: str):
    shown = [one for one in CONTEXTS[path].command.get_params(CONTEXTS[path]) if is_option(one)]
    return [one for one in shown if not one.hidden]


@cache
def help_of(path: str, flag: str = "--help", columns: int = 120) -> str:
    with redirect_stdout(io.StringIO()) as out, patch.dict(os.environ, COLUMNS=str(columns)):
        assert main.run([*path.split()[1:], flag]) == 0
    return out.getvalue()


@pytest.mark.parametrize("path", PATHS)
def test_every_option_has_a_default_or_says_none(path: str) -> None:
    rows = re.split(r"\n  (?=-)|\n\n", help_of(path, "--help-all"))
    shown = [" ".join(row.split()) for row in rows]
    for one in options(path):
        if not ends_the_program(one):
            row = next(row for row in shown if row.startswith(name_and_value(one)))
            assert re.search(r"\[default: [^\]]+\]$", row), one.opts


def test_a_default_that_a_recipe_sets_is_the_schemas() -> None:
    by_name = {name: one for one in options("specdec serve") for name in one.opts}
    port, k = by_name["--port"], by_name["--num-speculative-tokens"]
    assert default_words(port) == str(Recipe().serve.port)
    built_in = resolve("builtin").recipe.speculation.num_speculative_tokens
    assert default_words(k) == f"{Recipe().speculation.num_speculative_tokens}; {built_in} for the built-in pair"
    named = [one for one in (*OPTIONS, *SERVE_OPTIONS) if "." in one.path and one.default is None]
    for one in named:
        section, key = one.path.split(".")
        assert default_of(one.path) == getattr(getattr(Recipe(), section), key)
        assert one.default_words == words_of(default_of(one.path))


def test_a_default_follows_the_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    field = type(Recipe().sampling).model_fields["max_new_tokens"]
    monkeypatch.setattr(field, "default", 77)
    option = next(one for one in OPTIONS if one.path == "sampling.max_new_tokens")
    assert option.default_words == "77"


@pytest.mark.parametrize(
    ("path", "name", "default"),
    [
        ("specdec generate", "--temperature", "0"),
        ("specdec serve", "--temperature", "1"),
        ("specdec serve", "--max-new-tokens", "to the context's end"),
        ("specdec serve", "--prefix-caching", "on"),
        ("specdec generate", "--prefix-caching", "off"),
        ("specdec audit", "--max-new-tokens", "32"),
        ("specdec generate", "--max-new-tokens", "128"),
        ("specdec generate", "--logit-bias", "none"),
        ("specdec bench", "--lossless-check", "on"),
        ("specdec bench", "--repeats", "2; 1 with --endpoint"),
        ("specdec bench", "--chat", "off"),
    ],
)
def test_a_commands_own_default_is_shown(path: str, name: str, default: str) -> None:
    option = next(one for one in options(path) if name in one.opts)
    assert default_words(option) == default


@pytest.mark.parametrize("path", PATHS)
def test_values_have_names_and_flags_none(path: str) -> None:
    for one in options(path):
        if one.is_flag:
            assert value_name(one) == ""
        else:
            assert re.fullmatch(r"[\w.|:,=%-]+", value_name(one)), (one.opts, value_name(one))


@pytest.mark.parametrize("path", PATHS)
def test_no_type_of_the_parser_is_shown(path: str) -> None:
    assert not re.search(r"<\w+( range)?>|\bINTEGER\b|\bBOOLEAN\b|list\[", help_of(path, "--help-all"))


@pytest.mark.parametrize("path", PATHS)
def test_every_command_has_three_examples_that_parse(path: str) -> None:
    shown, examples = help_of(path, columns=4000), text_and_examples(CONTEXTS[path].command)[1]
    assert len(examples) == 3
    for text, line in examples:
        assert f"# {text}" in shown
        assert f"$ {line}" in shown
        words = shlex.split(line.split(" | ")[0].split(" > ")[0])
        assert parse(program(), "specdec", words[1:]).command_path.startswith(path)


@pytest.mark.parametrize("path", PATHS)
def test_help_shows_at_most_fifteen_options_and_help_all_every_one(path: str) -> None:
    shown, everything = help_of(path, columns=4000), help_of(path, "--help-all", 4000)
    names = [name_and_value(one) for one in options(path)]
    few = [name for name in names if re.search(rf"^  {re.escape(name)}( |$)", shown, re.MULTILINE)]
    assert len(few) <= 15
    assert all(re.search(rf"^  {re.escape(name)}( |$)", everything, re.MULTILINE) for name in names)
    if len(names) > 15:
        assert f"{len(names) - len(few)} more options: {path} --help-all" in shown


@pytest.mark.parametrize("name", COMMANDS)
def test_the_programs_help_has_each_commands_first_sentence(name: str) -> None:
    assert first_sentence(program().commands[name].help) == COMMANDS[name]


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("path", PATHS)
def test_help_breaks_no_word_at_any_width(path: str, width: int) -> None:
    words, shown = set(help_of(path, "--help-all", 4000).split()), help_of(path, "--help-all", width)
    assert set(shown.split()) - {"\\", "#"} <= words
    for line in shown.splitlines():
        assert len(line) <= width or max(map(len, line.split())) + 10 > width, line


def test_help_of_a_function_without_help_has_its_default() -> None:
    def command(size: int = 3, wide: bool = True, names: list[str] | None = None) -> None: ...

    app = typer.Typer(add_completion=False)
    app.command()(command)
    found = typer.main.get_command(app).params
    assert [description(one).replace("\xa0", " ") for one in found] == [
        "[default: 3]",
        "[default: on]",
        "[default: none]",
    ]
    assert [value_name(one) for one in found] == ["N", "", "TEXT"]


def cpu_seconds(words: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *words], stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_the_programs_help_costs_little_more_than_its_libraries() -> None:
    libraries, program_help = ["-c", "import typer, typer.rich_utils"], ["-m", "specdec_cli.cli.main", "--help"]
    pairs = [(cpu_seconds(libraries), cpu_seconds(program_help)) for _ in range(5)]
    least = [min(seconds) for seconds in zip(*pairs, strict=True)]
    assert least[1] <= 1.5 * least[0]


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], []])
def test_the_programs_help_loads_no_command_and_no_schema(arguments: list[str]) -> None:
    code = (
        "import sys; from specdec_cli.cli.main import run; run(sys.argv[1:])\n"
        "slow = {'pydantic', 'yaml', 'rich.console', 'specdec_cli.cli.generate', 'specdec_cli.recipe'}\n"
        "sys.exit(f'loaded {slow & set(sys.modules)}' if slow & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
