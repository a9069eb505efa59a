"""The text of `--help`: common options and examples first, every option under `--help-all`.

Every option shows a name for its value and its default. Lines wrap between words at any width.
"""

from __future__ import annotations

import enum
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

ALL = "--help-all"
_COLUMN = 34
"""Widest first column; a longer option has its description on the next line."""
_NARROW, _WIDEST = 64, 110
_SPACE = "\N{NO-BREAK SPACE}"
_VALUE_NAMES = {int: "N", float: "X", Path: "FILE"}


class _WithHelpAll:
    """The option `--help-all` beside `--help`, and help in this module's form."""

    shows_everything = False
    """Whether `--help` shows every option, so that `--help-all` need not be shown."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The command's parameters, `--help-all` and `--help`."""
        *own, last = super().get_params(ctx)  # type: ignore[misc]
        return [*own, self._help_all, last]

    @cached_property
    def _help_all(self) -> Any:
        option = _help_all_option()
        option.hidden = self.shows_everything
        return option

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the options, the commands and the examples."""
        formatter.write(help_text(self, ctx, self.shows_everything))


class Command(_WithHelpAll, TyperCommand):
    """A command whose `--help` shows common options, and `--help-all` every one."""


class CommandGroup(_WithHelpAll, TyperGroup):
    """A command that has commands; its few options are shown by `--help` and `--help-all` alike."""

    shows_everything = True


def _show_everything(context: typer.Context, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        sys.stdout.write(help_text(context.command, context, everything=True))
        raise typer.Exit


def _command(
    help_all: Annotated[
        bool,
        typer.Option(ALL, help="Show every option and exit.", callback=_show_everything, is_eager=True),
    ] = False,
) -> None: ...


def _help_all_option() -> Any:
    """`--help-all` as typer makes options, which no command receives."""
    app = typer.Typer(add_completion=False)
    app.command()(_command)
    option = typer.main.get_command(app).params[0]
    option.expose_value = False
    return option


def help_text(command: Any, context: Any, everything: bool = False) -> str:
    """The text of `--help` or `--help-all`."""
    page = _Page(min(shutil.get_terminal_size((80, 24)).columns, _WIDEST))
    text, examples = text_and_examples(command)
    page.paragraph(f"Usage: {usage(command, context)}", then="    ")
    for paragraph in text.split("\n\n"):
        page.paragraph(" ".join(paragraph.split()))
    parameters = [parameter for parameter in command.get_params(context) if not getattr(parameter, "hidden", False)]
    arguments = [parameter for parameter in parameters if not is_option(parameter)]
    page.section("Arguments", [(name_and_value(argument), description(argument)) for argument in arguments])
    options = [parameter for parameter in parameters if is_option(parameter)]
    shown = dict(panels(options)) if everything else {"Common options": _common(command, options)}
    for head, some in shown.items():
        page.section(head, [(name_and_value(option), description(option)) for option in some])
    if hasattr(command, "commands"):
        summaries = command.summaries() if hasattr(command, "summaries") else _summaries(command)
        page.section("Commands", summaries)
    page.section("Examples", [(f"$ {line}", meaning) for meaning, line in examples], is_code=True)
    num_more = len(options) - sum(len(some) for some in shown.values())
    if num_more:
        page.paragraph(f"{num_more} more options: {context.command_path} {ALL}")
    return page.text


def text_and_examples(command: Any) -> tuple[str, list[tuple[str, str]]]:
    """A command's help without its examples, and of each example what it does and its line."""
    text, _, examples = (command.help or "").partition("\n\nExamples:\n")
    lines = [line.strip() for line in examples.splitlines()]
    return text, [(meaning.removeprefix("# "), line) for meaning, line in zip(lines[::2], lines[1::2], strict=True)]


def _common(command: Any, options: list[Any]) -> list[Any]:
    """The options that a command names as common, in its order; all of them where it names none."""
    names = getattr(command.callback, "common_options", None)
    if not names:
        return options
    by_name = {name: option for option in options for name in option.opts}
    return [by_name[f"--{name}"] for name in (*names, "help-all", "help")]


def usage(command: Any, context: Any) -> str:
    """How a command is called: its path, options and arguments."""
    arguments = [parameter for parameter in command.get_params(context) if not is_option(parameter)]
    names = [
        name_and_value(argument) if argument.required else f"[{name_and_value(argument)}]" for argument in arguments
    ]
    commands = ["COMMAND [ARGS]..."] if hasattr(command, "commands") else []
    return " ".join([context.command_path, "[OPTIONS]", *names, *commands])


def _summaries(command: Any) -> list[tuple[str, str]]:
    return [(name, first_sentence(child.help)) for name, child in command.commands.items()]


def first_sentence(text: str | None) -> str:
    """A docstring's first paragraph on one line."""
    return " ".join((text or "").split("\n\n")[0].split())


def is_option(parameter: Any) -> bool:
    """Whether a parameter is an option, not an argument."""
    return bool(parameter.param_type_name == "option")


def panels(options: Iterable[Any]) -> dict[str, list[Any]]:
    """Options by the panel that they stand in."""
    panels: dict[str, list[Any]] = {}
    for option in options:
        panels.setdefault(getattr(option, "rich_help_panel", None) or "Options", []).append(option)
    return panels


def value_name(parameter: Any) -> str:
    """The placeholder of a parameter's value: `N`, `FILE`, `a|b`; empty for a flag."""
    if not is_option(parameter):
        return str(parameter.metavar or parameter.name.upper())
    if parameter.is_flag:
        return ""
    if parameter.metavar:
        return str(parameter.metavar)
    choices = getattr(parameter.type_descriptor, "choices", None)
    if choices:
        return "|".join(str(getattr(choice, "value", choice)) for choice in choices)
    return _VALUE_NAMES.get(parameter.type_descriptor.annotation, "TEXT")


def default_words(parameter: Any) -> str:
    """A parameter's default as the help shows it: `4`, `none`, `on`; empty where a value is required."""
    if parameter.required:
        return ""
    if isinstance(parameter.show_default, str):
        return parameter.show_default
    return words_of(parameter.default)


def words_of(value: Any) -> str:
    """A default in words."""
    if value is None or value in ([], (), {}):
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, enum.Enum):
        value = value.value
    return f"{value:g}" if isinstance(value, float) else str(value)


def limits(parameter: Any) -> str:
    """The values that a number may take: `1 to 64`, `at least 1`, or nothing."""
    least, most = getattr(parameter, "min", None), getattr(parameter, "max", None)
    if least is None and most is None:
        return ""
    if most is None:
        return f"at least {least:g}"
    return f"at most {most:g}" if least is None else f"{least:g} to {most:g}"


def ends_the_program(parameter: Any) -> bool:
    """Whether an option shows or installs something in place of running a command."""
    return bool(parameter.is_eager) or (is_option(parameter) and not parameter.expose_value)


def description(parameter: Any) -> str:
    """A parameter's help with its default; options that show something and end the program have none."""
    text = " ".join((parameter.help or "").split())
    if ends_the_program(parameter):
        return text
    default = default_words(parameter)
    if not is_option(parameter) and default == "none":
        return text
    facts = [f"default:{_SPACE}{default}" if default else "required", limits(parameter)]
    return f"{text} [{'; '.join(fact for fact in facts if fact)}]".strip()


def name_and_value(parameter: Any) -> str:
    """`-k, --num-speculative-tokens N`, or an argument's name."""
    if not is_option(parameter):
        many = "..." if parameter.nargs != 1 and not value_name(parameter).endswith("...") else ""
        return f"{value_name(parameter)}{many}"
    names = sorted(parameter.opts, key=lambda name: name.startswith("--"))
    shown = ", ".join(names) + "".join(f" / {name}" for name in parameter.secondary_opts[:1])
    if len(parameter.opts) > 1 and parameter.secondary_opts:
        pairs = zip(parameter.opts, parameter.secondary_opts, strict=False)
        shown = ", ".join(f"{yes} / {no}" for yes, no in pairs)
    return f"{shown} {value_name(parameter)}".rstrip()


class _Page:
    """A text of a width."""

    def __init__(self, width: int) -> None:
        from specdec_cli.cli.terminal import colourful

        self.width = width
        self.text = ""
        self._colourful = colourful(sys.stdout)

    def paragraph(self, text: str, then: str = "") -> None:
        """Add a paragraph, wrapped, and an empty line."""
        self.text += "\n".join(self._wrapped(text, "", then)) + "\n\n"

    def section(self, head: str, rows: list[tuple[str, str]], is_code: bool = False) -> None:
        """Add a head and rows of a name and what it means; nothing where there are no rows."""
        if not rows:
            return
        self.text += self._styled(f"{head}:", "bold") + "\n"
        column = min(_COLUMN, 4 + max(len(name) for name, _ in rows))
        for name, text in rows:
            lines = self._example(name, text) if is_code else self._row(name, text, column)
            self.text += "\n".join(lines) + "\n"
        self.text += "\n"

    def _row(self, name: str, text: str, column: int) -> Iterator[str]:
        """Name and text beside each other where that fits, else below each other."""
        is_narrow = self.width < _NARROW
        indent = " " * (6 if is_narrow else column)
        names = self._wrapped(name, "  ", "    ")
        lines = self._wrapped(text, indent, indent)
        fits = not is_narrow and len(names) == 1 and len(names[0]) + 2 <= column
        if fits and lines:
            lines[0] = self._styled(names[0], "name") + lines[0][len(names[0]) :]
            yield from lines
            return
        yield from (self._styled(line, "name") for line in names)
        yield from lines

    def _example(self, line: str, text: str) -> Iterator[str]:
        yield from self._wrapped(f"# {text}", "  ", "  # ")
        whole = r"'[^']*'|\"[^\"]*\"" if self.width < _NARROW else r"'[^']*'|\"[^\"]*\"| (?!-)"
        line = re.sub(whole, lambda match: match[0].replace(" ", _SPACE), line)
        *first, last = self._wrapped(line, "  ", "      ", less=2)
        yield from (f"{part} \\" for part in first)
        yield last

    def _wrapped(self, text: str, first: str, then: str, less: int = 0) -> list[str]:
        lines = textwrap.wrap(
            text,
            max(self.width - less, 20),
            initial_indent=first,
            subsequent_indent=then,
            break_long_words=False,
            break_on_hyphens=False,
        )
        return [line.replace(_SPACE, " ") for line in lines]

    def _styled(self, text: str, kind: str) -> str:
        if not self._colourful:
            return text
        return typer.style(text, bold=True) if kind == "bold" else typer.style(text, fg="cyan")
