#!/usr/bin/env python
"""The reference pages of the documentation, written from the code: commands, recipes, Python API, table of rooms.

python scripts/docs_reference.py           # write docs/{cli,recipe-reference,python-api,architecture}.md
python scripts/docs_reference.py --check   # exit 1 if that would change something
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

import specdec_cli
from specdec_cli.cli import help, main
from specdec_cli.cli.guide import GUIDES
from specdec_cli.cli.options import draft_methods
from specdec_cli.recipe.present import json_schema

DOCS = Path(__file__).resolve().parents[1] / "docs"
MADE = "<!-- Written by scripts/docs_reference.py. Do not edit. -->\n\n"


def cli() -> str:
    """Every command with its arguments and options."""
    program = typer.main.get_command(main._app())
    context = program.make_context("specdec", [], resilient_parsing=True)
    parts = [
        "# Command line\n\n",
        MADE,
        "`specdec COMMAND --help` shows a command's common options on a terminal, `--help-all` every one. Options "
        "override `--set`, which overrides `SPECDEC_…` variables, which override the recipe, which overrides the "
        "defaults.\n\n",
    ]
    parts += _examples("specdec")
    for name, command in program.commands.items():  # type: ignore[attr-defined]
        parts += _command(f"specdec {name}", name, command, context)
    return "".join(parts)


def _command(path: str, name: str, command: Any, parent: Any) -> Iterator[str]:
    context = command.make_context(name, [], parent=parent, resilient_parsing=True)
    yield f"## {path}\n\n{_sentence(command.help)}\n\n"
    if hasattr(command, "commands"):
        for inner, child in command.commands.items():
            yield from _command(f"{path} {inner}", inner, child, context)
        return
    yield f"```text\n{help.usage(command, context)}\n```\n\n"
    yield from _examples(path)
    shown = [one for one in command.get_params(context) if not getattr(one, "hidden", False) and not _is_help(one)]
    arguments = [one for one in shown if not help.is_option(one)]
    options = help.panels(one for one in shown if help.is_option(one))
    for panel, parameters in {**({"Arguments": arguments} if arguments else {}), **options}.items():
        yield f"### {path}: {panel}\n\n| option | value | default | meaning |\n| --- | --- | --- | --- |\n"
        for parameter in parameters:
            yield f"| {' | '.join(map(_cell, _option(parameter)))} |\n"
        yield "\n"


def _is_help(parameter: Any) -> bool:
    return parameter.name in ("help", "help_all")


def _examples(path: str) -> Iterator[str]:
    """A command's examples as one block."""
    yield "```bash\n" + "".join(f"# {text}\n{line}\n" for text, line in GUIDES[path].examples) + "```\n\n"


def _option(parameter: Any) -> tuple[str, str, str, str]:
    """Names, value, default and meaning, as the help has them."""
    text = _sentence(parameter.help)
    if not help.is_option(parameter):
        return f"`{help.name_and_value(parameter)}`", "", "", text
    names = ", ".join(f"`{name}`" for name in [*parameter.opts, *parameter.secondary_opts])
    value, default = (
        help.value_name(parameter),
        "" if help.ends_the_program(parameter) else help.default_words(parameter),
    )
    facts = [fact for fact in (default, help.limits(parameter)) if fact]
    return names, f"`{value}`" if value else "", "; ".join(facts), text


def recipes() -> str:
    """Every section and key of a recipe."""
    schema = json_schema(draft_methods())
    parts = [
        "# Recipe reference\n\n",
        MADE,
        "`specdec recipe schema` prints this as JSON Schema for editors. `specdec recipe show NAME --origin` shows "
        "every value of a recipe and where it comes from.\n\n",
    ]
    for section, its in schema["properties"].items():
        definition = _definition(its, schema)
        if "properties" not in definition:
            parts.append(f"## {section}\n\n{_type(its, schema)}. {_sentence(its.get('description'))}\n\n")
            continue
        parts.append(f"## {section}\n\n{_sentence(definition.get('description'))}\n\n")
        parts.append("| key | value | default | meaning |\n| --- | --- | --- | --- |\n")
        for key, value in definition["properties"].items():
            default = "" if value.get("default") is None else f"`{value['default']}`"
            cells = (f"`{section}.{key}`", _type(value, schema), default, _sentence(value.get("description")))
            parts.append(f"| {' | '.join(map(_cell, cells))} |\n")
        parts.append("\n")
    return "".join(parts)


def _definition(value: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """The object that a property is, through references, alternatives and lists."""
    for one in (value, *value.get("anyOf", ()), *value.get("allOf", ())):
        if "$ref" in one:
            found: dict[str, Any] = schema["$defs"][one["$ref"].rsplit("/", 1)[1]]
            return found
    return value


def _type(value: dict[str, Any], schema: dict[str, Any]) -> str:
    if "enum" in value:
        return ", ".join(f"`{one}`" for one in value["enum"] if one is not None)
    if "anyOf" in value:
        kinds = [_type(one, schema) for one in value["anyOf"] if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "$ref" in value:
        return _type(_definition(value, schema), schema) or "mapping"
    if value.get("type") == "array":
        return f"list of {_type(value.get('items', {}), schema)}"
    bounds = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    limits = [f"{sign} {value[name]}" for name, sign in bounds.items() if name in value]
    given = value.get("type", "any value")
    kinds = [one for one in (given if isinstance(given, list) else [given]) if one != "null"]
    return " ".join([" or ".join(kinds).replace("object", "mapping"), *limits])


_OVERVIEW = """\
```python
from specdec_cli import Engine, SamplingParams

engine = Engine.load()  # the built-in pair
[output] = engine.generate("Once upon a time", SamplingParams(max_new_tokens=64))
print(output.text, output.speculative.acceptance_rate)

trace = engine.trace(["Once upon a time", "The dog"])
trace.predict(k=range(1, 9))  # a table of predicted speed-ups; .to_pandas() gives a DataFrame
```

With asyncio, concurrent requests are decoded together:

```python
from specdec_cli import AsyncEngine


async def main():
    async with AsyncEngine.load() as engine:
        async for delta in engine.stream("Once upon a time"):
            print(delta.text, end="")
```

"""


def python_api() -> str:
    """The public classes and their methods."""
    parts = ["# Python API\n\n", MADE, _OVERVIEW]
    for name in specdec_cli.__all__:
        thing = getattr(specdec_cli, name)
        if not inspect.isclass(thing):
            continue
        parts.append(f"## {name}\n\n")
        parts.append(f"```python\n{name}{_signature(thing)}\n```\n\n{_prose(inspect.getdoc(thing))}\n\n")
        for method, function in _methods(thing):
            owner = f"{name}.{method}"
            if isinstance(function, property):
                parts.append(f"### {owner}\n\n{_prose(inspect.getdoc(function))}\n\n")
                continue
            parts.append(f"### {owner}()\n\n```python\n{owner}{_signature(function)}\n```\n\n")
            parts.append(f"{_prose(inspect.getdoc(function))}\n\n")
    return "".join(parts)


def _methods(thing: type) -> Iterator[tuple[str, Any]]:
    members: dict[str, Any] = {}
    for owner in (one for one in reversed(thing.__mro__) if one.__module__.startswith("specdec_cli")):
        members |= vars(owner)
    for name, member in members.items():
        if name.startswith("_"):
            continue
        function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        if (inspect.isfunction(function) or isinstance(member, property)) and inspect.getdoc(function):
            yield name, function


def _signature(thing: Any) -> str:
    """A signature without `self`, one parameter a line where it is long."""
    signature, words, is_named = inspect.signature(thing), [], False
    for parameter in signature.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not is_named:
            words.append("*")
            is_named = True
        words.append(_parameter(parameter))
    returns = "" if inspect.isclass(thing) else f" -> {signature.return_annotation}"
    one_line = f"({', '.join(words)}){returns}"
    if len(one_line) <= 100:
        return one_line
    return "".join(["(\n", *(f"    {word},\n" for word in words), f"){returns}"])


def _parameter(parameter: inspect.Parameter) -> str:
    kind = parameter.kind
    stars = "*" if kind is parameter.VAR_POSITIONAL else "**" if kind is parameter.VAR_KEYWORD else ""
    default = "" if parameter.default is parameter.empty else f" = {_default(parameter.default)}"
    return f"{stars}{parameter.name}: {parameter.annotation}{default}"


def _default(value: Any) -> str:
    return "…" if "factory" in repr(value) else repr(value)


def _prose(docstring: str | None) -> str:
    """A Google docstring as Markdown: sections become bold words, their entries a list."""
    lines, inside, is_code = [], False, False
    for line in (docstring or "").splitlines():
        if re.fullmatch(r"(Args|Returns|Raises|Yields|Attributes):", line):
            lines.append(f"\n**{line[:-1]}**\n")
            inside = True
        elif line == "Examples:":
            lines.append("\n**Examples**\n\n```python")
            is_code = True
        elif is_code and not line:
            lines.append("```\n")
            is_code = False
        elif is_code:
            lines.append(line.removeprefix("    "))
        elif inside and (entry := re.fullmatch(r"    ([\w*, ]+): (.*)", line)):
            lines.append(f"- `{entry[1]}`: {entry[2]}")
        else:
            inside = (inside and line.startswith("    ")) or not line
            lines.append(line.removeprefix("    ") if not line.startswith("        ") else "  " + line.strip())
    lines += ["```"] if is_code else []
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def _sentence(text: str | None) -> str:
    return " ".join((text or "").split())


def _cell(text: str) -> str:
    return (
        text.replace("|", "\\|").replace("<", "&lt;").replace(">", "&gt;")
        if "`" not in text
        else text.replace("|", "\\|")
    )


def architecture() -> str:
    """The architecture page, its table of rooms filled with the first line of each room's docstring."""
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    row = re.compile(r"^(\|[ \d]*\| `([\w/]+)/` \| ).* \|$", re.MULTILINE)
    return row.sub(lambda found: f"{found[1]}{_first_line(found[2])} |", text)


def _first_line(room: str) -> str:
    file = Path(specdec_cli.__file__).parent / room / "__init__.py"
    return file.read_text(encoding="utf-8").splitlines()[0].strip('"')


def modules() -> str:
    """Every module of the package with the first line of its docstring, room by room."""
    package = Path(specdec_cli.__file__).parent
    lines = ["# Modules", "", "<!-- Written by scripts/docs_reference.py. Do not edit. -->"]
    for folder in sorted({path.parent for path in package.rglob("*.py")}):
        room = folder.relative_to(package.parent).as_posix()
        files = sorted(path for path in folder.glob("*.py") if path.stem != "__init__")
        if not files:
            continue
        lines += ["", f"## {room}", "", "| module | what it holds |", "| --- | --- |"]
        lines += [f"| `{path.stem}` | {_headline(path)} |" for path in files]
    return "\n".join(lines) + "\n"


def _headline(path: Path) -> str:
    """First sentence of a module's docstring, fit for a cell of a table."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.split("\n\n")[0].replace("\n", " ").replace("|", "\\|")


PAGES = {
    "cli.md": cli,
    "recipe-reference.md": recipes,
    "python-api.md": python_api,
    "architecture.md": architecture,
} | {"modules.md": modules}


def run() -> int:
    """Write the pages, or say which of them are not current."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    stale = []
    for name, page in PAGES.items():
        path, text = DOCS / name, page().rstrip("\n") + "\n"
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if not options.check:
            path.write_text(text, encoding="utf-8")
    print("\n".join(f"{'not current' if options.check else 'written'}: docs/{name}" for name in stale) or "current")
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(run())
