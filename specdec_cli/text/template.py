"""The names that a chat template reads, from its syntax tree. A name that merely occurs in the text does not count."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from jinja2 import ext, nodes, parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specdec_cli.template_limits import limited, parsed, undeclared_variables

_GIVEN = ("raise_exception", "strftime_now")
"""Functions that transformers gives to every template."""
_BY_ATTRIBUTE = {"selectattr", "rejectattr", "map", "groupby", "sort", "sum", "unique", "min", "max", "attr"}
_WRITES_ALL = {"tojson", "items", "dictsort", "string", "pprint"}


class _Generation(ext.Extension):
    """The tag around the assistant's turns, which training masks are made from."""

    tags = {"generation"}  # noqa: RUF012 - declared as in jinja2

    def parse(self, parser: parser.Parser) -> list[nodes.Node]:
        """The body alone."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_ENVIRONMENT = limited(
    ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols], autoescape=False
    )
)
"""Parses what transformers' own environment parses; nothing is rendered with it."""
_ENVIRONMENT.globals.update(dict.fromkeys(_GIVEN))


@dataclass(frozen=True, slots=True)
class TemplateReads:
    """The names that a chat template looks up.

    Args:
        variables: of the context, such as `messages`, `tools` or `enable_thinking`.
        fields: of whatever object, such as `role` or `tool_calls`.
        texts: that something is compared with, such as the roles that it knows.
        writes_messages: whether it writes a message with all its fields, as `{{ message | tojson }}` does.
    """

    variables: frozenset[str] = frozenset()
    fields: frozenset[str] = frozenset()
    texts: frozenset[str] = frozenset()
    writes_messages: bool = False

    def has_field(self, name: str) -> bool:
        """Whether a message's field reaches the prompt."""
        return self.writes_messages or name in self.fields


@lru_cache(maxsize=32)
def read_template(source: str) -> TemplateReads:
    """The names that a template reads.

    Raises:
        jinja2.TemplateSyntaxError: it is no template.
    """
    tree = parsed(_ENVIRONMENT, source)
    return TemplateReads(
        fields=frozenset(_fields(tree)),
        texts=frozenset(_compared(tree)),
        writes_messages=_writes_messages(tree),
        variables=frozenset(undeclared_variables(_ENVIRONMENT, tree)),
    )


def _fields(tree: nodes.Template) -> Iterator[str]:
    """Names of attributes and items, in every way of writing them but those of the template's own namespaces."""
    own = {
        assigned.target.name
        for assigned in tree.find_all(nodes.Assign)
        if isinstance(assigned.target, nodes.Name) and _calls(assigned.node, "namespace")
    }
    for attribute in tree.find_all(nodes.Getattr):
        if _name(attribute.node) not in own:
            yield attribute.attr
    for item in tree.find_all(nodes.Getitem):
        if _name(item.node) not in own:
            yield _text(item.arg)
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr == "get" and call.args:
            yield _text(call.args[0])
    for compared in tree.find_all(nodes.Compare):
        if compared.ops[0].op in ("in", "notin"):
            yield _text(compared.expr)
    for used in tree.find_all(nodes.Filter):
        if used.name in _BY_ATTRIBUTE:
            given = [*used.args[:1], *(pair.value for pair in used.kwargs if pair.key == "attribute")]
            yield from (part for argument in given for part in _text(argument).split("."))


def _compared(tree: nodes.Template) -> Iterator[str]:
    for node in tree.find_all((nodes.Compare, nodes.Dict)):
        yield from (const.value for const in node.find_all(nodes.Const) if isinstance(const.value, str))


def _writes_messages(tree: nodes.Template) -> bool:
    messages = {"messages"}
    for loop in tree.find_all(nodes.For):
        if isinstance(loop.target, nodes.Name) and any("messages" in name for name in _names(loop.iter)):
            messages.add(loop.target.name)
    written: list[nodes.Node | None] = [used.node for used in tree.find_all(nodes.Filter) if used.name in _WRITES_ALL]
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr in ("items", "values"):
            written.append(call.node.node)
    for item in tree.find_all(nodes.Getitem):
        if isinstance(item.arg, nodes.Name) and _name(item.node) != "messages":
            written.append(item.node)
    return any(_name(node) in messages for node in written)


def _names(node: nodes.Node) -> Iterator[str]:
    if isinstance(node, nodes.Name):
        yield node.name
    yield from (name.name for name in node.find_all(nodes.Name))


def _calls(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Call) and _name(node.node) == name


def _name(node: nodes.Node | None) -> str:
    return node.name if isinstance(node, nodes.Name) else ""


def _text(node: nodes.Node) -> str:
    """A constant's text; empty for anything else."""
    return node.value if isinstance(node, nodes.Const) and isinstance(node.value, str) else ""
