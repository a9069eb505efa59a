#!/usr/bin/env python
"""The reference of the documentation, written from the code: commands, recipes, Python API, tables of rooms and rules.

python scripts/docs_reference.py           # write docs/{cli,recipe-reference,python-api,architecture,exactness}.md
python scripts/docs_reference.py --check   # exit 1 if that would change something
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

import specdec_cli
from specdec_cli.cli import help, main
from specdec_cli.cli.shared import draft_methods
from specdec_cli.recipe.present import json_schema
from specdec_cli.verification import AUTO, RULES, Rule

DOCS = Path(__file__).resolve().parents[1] / "docs"
MADE = "<!-- Written by scripts/docs_reference.py. Do not edit. -->\n\n"


SHARED_BY = 3
"""Commands that an option must belong to, word for word, before it is described once for all of them."""
Row = tuple[str, str, str, str]
Panels = dict[str, list[Row]]
"""Rows of a command's options by the title of their panel: names, value, default, meaning."""


def cli() -> str:
    """Every command with its arguments and own options; options of several commands once, at the end."""
    program = typer.main.get_command(main._app())
    context = program.make_context("specdec", [], resilient_parsing=True)
    parts = [
        "# Command line\n\n",
        MADE,
        "`specdec COMMAND --help` shows a command's common options on a terminal, `--help-all` every one. Options "
        "override `--set`, which overrides `SPECDEC_…` variables, which override the recipe, which overrides the "
        "defaults. Options of several commands are described once, under [Shared options](#shared-options).\n\n",
    ]
    parts += _examples(program)
    commands = [found for name, child in program.commands.items() for found in _leaves(name, child, context)]  # type: ignore[attr-defined]
    shared = _shared([_panels(command, context) for _, command, context in commands])
    for name, command in program.commands.items():  # type: ignore[attr-defined]
        parts += _command(f"specdec {name}", name, command, context, shared)
    parts.append("## Shared options\n\n")
    for panel, rows in shared.items():
        parts += _table(f"Shared: {panel}", rows)
    return "".join(parts)


def _leaves(name: str, command: Any, parent: Any) -> Iterator[tuple[str, Any, Any]]:
    """A command, or the commands of a group, each with its context."""
    context = command.make_context(name, [], parent=parent, resilient_parsing=True)
    if not hasattr(command, "commands"):
        yield name, command, context
        return
    for inner, child in command.commands.items():
        yield from _leaves(inner, child, context)


def _panels(command: Any, context: Any) -> Panels:
    shown = [one for one in command.get_params(context) if not getattr(one, "hidden", False) and not _is_help(one)]
    arguments = [one for one in shown if not help.is_option(one)]
    options = help.panels(one for one in shown if help.is_option(one))
    named = {**({"Arguments": arguments} if arguments else {}), **options}
    return {panel: [_option(parameter) for parameter in parameters] for panel, parameters in named.items()}


def _shared(commands: list[Panels]) -> Panels:
    """The options that enough commands have in the same panel, in their usual form and with their usual default."""
    shared: Panels = {}
    for panel in dict.fromkeys(panel for panels in commands for panel in panels if panel != "Arguments"):
        forms: dict[str, list[Row]] = {}
        for row in (row for panels in commands for row in panels.get(panel, ())):
            forms.setdefault(_main_name(row), []).append(row)
        usual = [_usual(rows) for rows in forms.values()]
        shared[panel] = [row for row, count in usual if count >= SHARED_BY]
    return {panel: rows for panel, rows in shared.items() if rows}


def _usual(rows: list[Row]) -> tuple[Row, int]:
    """The most frequent form of an option, with every name and its usual default, and how many commands have it."""
    form, count = Counter(map(_form, rows)).most_common(1)[0]
    rows = [row for row in rows if _form(row) == form]
    names = max((row[0] for row in rows), key=len)
    return (names, rows[0][1], Counter(row[2] for row in rows).most_common(1)[0][0], rows[0][3]), count


def _command(path: str, name: str, command: Any, parent: Any, shared: Panels) -> Iterator[str]:
    context = command.make_context(name, [], parent=parent, resilient_parsing=True)
    yield f"## {path}\n\n{_sentence(help.text_and_examples(command)[0])}\n\n"
    if hasattr(command, "commands"):
        for inner, child in command.commands.items():
            yield from _command(f"{path} {inner}", inner, child, context, shared)
        return
    yield f"```text\n{help.usage(command, context)}\n```\n\n"
    yield from _examples(command)
    references = []
    for panel, rows in _panels(command, context).items():
        usual = {_main_name(row): row for row in shared.get(panel, ())}
        of_all = [
            row for row in rows if _form(row) == _form(usual.get(_main_name(row), row)) and _main_name(row) in usual
        ]
        if own := [row for row in rows if row not in of_all]:
            yield from _table(f"{path}: {panel}", own)
        if of_all:
            references.append(_reference(panel, of_all, usual, {_main_name(row) for row in rows}))
    if references:
        yield "".join(["Shared options:\n\n", *references, "\n"])


def _form(row: Row) -> tuple[str, str, str]:
    """An option without its aliases and its default, which may differ between commands."""
    return _main_name(row), row[1], row[3]


def _reference(panel: str, rows: list[Row], usual: dict[str, Row], present: set[str]) -> str:
    """The shared options of a panel that a command has, the aliases it lacks, and its own defaults."""
    missing = [name for name in usual if name not in present]
    is_few = len(rows) < len(missing)
    notes = [f"only {', '.join(map(_main_name, rows))}"] if is_few else []
    pairs = [(row, usual[_main_name(row)]) for row in rows]
    aliases = [name for row, full in pairs for name in full[0].split(", ") if name not in row[0].split(", ")]
    if left_out := [*([] if is_few else missing), *aliases]:
        notes.append(f"without {', '.join(left_out)}")
    notes += [f"default of {_main_name(row)}: {row[2] or 'none'}" for row, full in pairs if row[2] != full[2]]
    link = f"[{panel}](#shared-{panel.lower().replace(' ', '-')})"
    return f"- {'; '.join([link, *notes])}\n"


def _main_name(row: Row) -> str:
    """The first long name of an option."""
    names = row[0].split(", ")
    return next((name for name in names if name.startswith("`--")), names[0])


def _table(title: str, rows: list[Row]) -> Iterator[str]:
    yield f"### {title}\n\n| option | value | default | meaning |\n| --- | --- | --- | --- |\n"
    for row in rows:
        yield f"| {' | '.join(map(_cell, row))} |\n"
    yield "\n"


def _is_help(parameter: Any) -> bool:
    return parameter.name in ("help", "help_all")


def _examples(command: Any) -> Iterator[str]:
    """A command's examples as one block."""
    examples = help.text_and_examples(command)[1]
    yield "```bash\n" + "".join(f"# {meaning}\n{line}\n" for meaning, line in examples) + "```\n\n"


def _option(parameter: Any) -> Row:
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
from specdec_cli import Engine, SamplingParams, trace

engine = Engine.load()  # the built-in pair
[output] = engine.generate("Once upon a time", SamplingParams(max_new_tokens=64))
print(output.text, output.speculative.acceptance_rate)

traced = trace(engine, ["Once upon a time", "The dog"])
traced.predict(k=range(1, 9))  # a table of predicted speed-ups; .to_pandas() gives a DataFrame
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
        if not callable(thing):
            continue
        parts.append(f"## {name}\n\n")
        parts.append(f"```python\n{name}{_signature(thing)}\n```\n\n{_prose(inspect.getdoc(thing))}\n\n")
        for method, function in _methods(thing) if inspect.isclass(thing) else ():
            owner = f"{name}.{method}"
            if isinstance(function, property):
                parts.append(f"### {owner}\n\n{_prose(inspect.getdoc(function))}\n\n")
                continue
            plain = inspect.unwrap(function)
            mark = "async " if inspect.iscoroutinefunction(plain) or inspect.isasyncgenfunction(plain) else ""
            parts.append(f"### {owner}()\n\n```python\n{mark}{owner}{_signature(function)}\n```\n\n")
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


def exactness() -> str:
    """The page of exactness, its table of verification rules filled from the rules."""
    text = (DOCS / "exactness.md").read_text(encoding="utf-8")
    head = (
        "| `--verify` | when a drafted token is accepted | trees | output | source |\n| --- | --- | --- | --- | --- |\n"
    )
    auto = f"| `{AUTO}` (default) | as `greedy` at temperature 0, else as `block` or a tree's rule | yes | exact | |"
    rows = "\n".join([auto, *(_rule_row(name, rule) for name, rule in RULES.items())])
    before, found, behind = text.partition(head)
    assert found, "the page has the table"
    return before + head + rows + "\n" + behind[behind.index("\n\n") + 1 :]


def _rule_row(name: str, rule: Rule) -> str:
    if rule.needs_rates:
        output = "**meaningless text**"
    elif not rule.is_lossless:
        output = "**lossy** above temperature 0"
    elif not rule.samples:
        output = "exact"
    else:
        output = "exact in distribution" + "; the text does not depend on the draft" * rule.keeps_tokens
    source = re.sub(r"arXiv:([\d.]+)", r"[arXiv:\1](https://arxiv.org/abs/\1)", rule.source)
    return f"| `{name}` | {rule.meaning} | {'yes' if rule.judges_trees else 'no'} | {output} | {source} |"


PAGES = {
    "cli.md": cli,
    "recipe-reference.md": recipes,
    "python-api.md": python_api,
    "architecture.md": architecture,
    "exactness.md": exactness,
}


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
