"""Limits of time and size for rendering chat templates: a template comes with a model, so it is a stranger's program.

jinja2's sandbox keeps a template from Python, not from `'a' * 10**9`. Here every operation that makes a value is
checked before or after it: operators, filters, calls, loops, list displays and `~`. So every value stays small, the
whole has a budget, and time is looked at in between. Constants are not folded, because that would happen unchecked.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from time import thread_time
from typing import Any

import jinja2
from jinja2 import compiler, meta, nodes, parser, visitor
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_SECONDS = 5.0
"""Processor time of a rendering."""
MAX_SIZE = 8 * 2**20
"""Characters of a text, with those of all texts inside a list."""
MAX_SOURCE = 2**20
"""Characters of a template."""
_MAX_ITEMS = 2**18
_MAX_TOTAL = 32 * MAX_SIZE
_MAX_BITS = 10_000
_MAX_NUMBER = 10**5
_CHARGES_PER_CLOCK = 64
_WIDTH = re.compile(r"\d{6,}|\*")
_TAKING = frozenset({"length", "count", "first", "last", "default", "d", "list", "map", "items", "reverse", "attr"})
_TAKING |= {"select", "selectattr", "reject", "rejectattr"}
"""Filters that make no text and no value but those that they are given: templates use them in every turn of a loop."""
_SIZED = (str, bytes, list, tuple)
_ITERATION, _DISPLAY, _CONCAT = "limited iteration", "limited display", "limited concat"


class TemplateLimitError(jinja2.TemplateRuntimeError):
    """A template that would take too long or make too much text."""


class _Budget(threading.local):
    """The budget that the rendering of this thread has left."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin a rendering."""
        self._size = _MAX_TOTAL
        self._num_charges = 0
        self._deadline = thread_time() + MAX_SECONDS

    def charge(self, size: int = 1) -> None:
        """Take off what a value's size is, or 1 for a piece of work."""
        self._size -= size
        if self._size < 0:
            raise TemplateLimitError(f"it makes more than {_MAX_TOTAL} characters")
        self._num_charges += 1
        if self._num_charges % _CHARGES_PER_CLOCK == 0 and thread_time() > self._deadline:
            raise TemplateLimitError(f"it takes more than {MAX_SECONDS:g} s of processor time")


_budget = _Budget()


def _check_size(size: float) -> None:
    if size > MAX_SIZE:
        raise TemplateLimitError(f"it makes a text or a list of more than {MAX_SIZE} characters")


def _size(value: Any) -> int:
    """Characters of a value with all that is in it, as often as it is in it.

    Raises:
        TemplateLimitError: it is too large.
    """
    if isinstance(value, str | bytes):
        _check_size(len(value))
        return len(value)
    size, num_items, open_values = 0, 0, [value]
    while open_values:
        inner = open_values.pop()
        num_items += 1
        size += len(inner) if isinstance(inner, str | bytes) else 1
        if isinstance(inner, dict):
            open_values += [*inner.keys(), *inner.values()]
        elif isinstance(inner, list | tuple | set | frozenset):
            open_values += inner
        elif isinstance(inner, jinja2.utils.Namespace):
            open_values.append(inner._Namespace__attrs)
        _check_size(size + len(open_values))
        if num_items + len(open_values) > _MAX_ITEMS:
            raise TemplateLimitError(f"it makes a list of more than {_MAX_ITEMS} items")
    _budget.charge(num_items)
    return size


def _made(value: Any) -> Any:
    """A value that was made, if it is small."""
    if isinstance(value, str | bytes | list | tuple | dict):
        _budget.charge(_size(value))
    return value


def _check_call(name: str, subject: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Refuse a filter or a method of a text whose result would be large, before it is made."""
    values = [*arguments, *named.values()]
    numbers = [value for value in values if isinstance(value, int)]
    if any(abs(number) > _MAX_NUMBER for number in numbers) and name not in ("format", "format_map"):
        raise TemplateLimitError(f"`{name}` with a number of more than {_MAX_NUMBER}")
    if name in ("indent", "tojson", "expandtabs"):
        _check_size(_size(subject) * max(numbers, default=0))
    sizes = [_size(value) for value in values if isinstance(value, str | bytes | list | tuple | dict)]
    if name in ("replace", "translate", "wordwrap", "indent"):
        _check_size((len(subject) + 1) * max(sizes, default=0) if isinstance(subject, str) else 0)
    elif name == "join":
        parts, separator = (
            (subject, values[:1]) if not isinstance(subject, str) or not values else (values[0], [subject])
        )
        _check_size(_size(parts) + len(parts) * sum(map(_size, separator)) if hasattr(parts, "__len__") else 0)
    elif name in ("format", "format_map") and isinstance(subject, str):
        _check_format(subject, values)
    elif name == "sum" and any(isinstance(value, list | tuple) for value in values):
        raise TemplateLimitError("it adds lists up")


def _check_format(text: str, values: list[Any]) -> None:
    if _WIDTH.search(text):
        raise TemplateLimitError("it formats with a width of six digits or one that is given")
    if re.search(r":[^{}]*\{", text) and any(isinstance(value, int) and value > 10_000 for value in values):
        raise TemplateLimitError("it formats with a width of five digits")
    _check_size(len(text) + (text.count("%") + text.count("{")) * sum(map(_size, values)))


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter with limits; what it is passed first (an environment, a context) stays."""
    num_passed = 1 if getattr(function, "jinja_pass_arg", None) is not None else 0

    @functools.wraps(function)
    def limited(*arguments: Any, **named: Any) -> Any:
        _budget.charge()
        passed, given = arguments[:num_passed], list(arguments[num_passed:])
        is_iterated = bool(given) and isinstance(given[0], Iterator)
        if is_iterated:
            given[0] = list(_iterated(given[0]))
        if given and name not in _TAKING:
            _size(given[0])
        _check_call(name, given[0] if given else "", tuple(given[1:]), named)
        made = function(*passed, *given, **named)
        if isinstance(made, Iterator):
            return _iterated(made)
        return made if name in _TAKING and not is_iterated else _made(made)

    return limited


def _iterated(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        _budget.charge()
        yield value


def _iteration(values: Any) -> Any:
    """The items that a loop goes through: as they are where its length is known, else counted as it comes."""
    return _Counted(values) if hasattr(values, "__len__") else _iterated(values)


class _Counted:
    """A sequence whose items are counted as a loop takes them."""

    def __init__(self, values: Any) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Any]:
        return _iterated(self._values)


def _concatenated(values: list[Any]) -> str:
    _size(values)
    return str(_made("".join(map(str, values))))


class _Limits(visitor.NodeTransformer):
    """Puts the limits into a template: around loops, list displays and `~`."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - named by jinja2
        self.generic_visit(node)
        node.iter = _filtered(node.iter, _ITERATION)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 - named by jinja2
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), _CONCAT)

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802 - named by jinja2
        self.generic_visit(node)
        return _filtered(node, _DISPLAY)

    visit_Dict = visit_List  # noqa: N815 - named by jinja2

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802 - named by jinja2
        return self.visit_List(node) if node.ctx == "load" else node  # type: ignore[arg-type]


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _WithoutFolding(compiler.CodeGenerator):
    """Leaves everything but a template's own text for the rendering."""

    def _output_child_to_const(self, node: nodes.Expr, frame: compiler.Frame, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


class _Tracking(_WithoutFolding, meta.TrackingCodeGenerator):
    """Collects names instead of writing code."""


class _LimitedTemplate(jinja2.Template):
    """Begins a budget for every rendering."""

    def new_context(self, *arguments: Any, **named: Any) -> Context:
        """The context of a rendering."""
        _budget.begin()
        return super().new_context(*arguments, **named)


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox with limits; `limited` makes one of another sandbox."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)
    code_generator_class = _WithoutFolding
    template_class = _LimitedTemplate

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """The result of an operator."""
        _budget.charge()
        if operator == "*":
            for sized, number in ((left, right), (right, left)):
                if isinstance(sized, _SIZED) and isinstance(number, int):
                    _check_size(max(_size(sized), 1) * number)
        elif operator == "+" and isinstance(left, _SIZED) and isinstance(right, _SIZED):
            _check_size(len(left) + len(right))
        elif operator == "%" and isinstance(left, str | bytes):
            text = left if isinstance(left, str) else left.decode("latin-1")
            _check_format(text, [right])
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _MAX_BITS:
                raise TemplateLimitError(f"it computes a number of more than {_MAX_BITS} bits")
        made = super().call_binop(context, operator, left, right)
        if isinstance(made, list | tuple):  # what is in it was looked at
            _budget.charge(len(made))
            return made
        return _made(made)

    def call(self, context: Context, called: Any, *arguments: Any, **named: Any) -> Any:
        """The result of a call."""
        _budget.charge()
        name = getattr(called, "__name__", "")
        subject = getattr(getattr(called, "__wrapped__", called), "__self__", None)  # the sandbox wraps `format`
        if isinstance(subject, str | bytes):
            if arguments and isinstance(arguments[0], Iterator):
                arguments = (list(_iterated(arguments[0])), *arguments[1:])
            _check_call(name, subject, arguments, named)
        elif name == "strftime_now":
            _check_format(str(arguments[0]) if arguments else "", [])
        return _made(super().call(context, called, *arguments, **named))

    def concat(self, parts: Iterable[str]) -> str:
        """The text of all parts."""
        taken, size = [], 0
        for part in parts:
            size += len(part)
            _budget.charge()
            _check_size(size)
            taken.append(part)
        return "".join(taken)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Limits().visit(parsed(self, source))
        return tree


def parsed(environment: jinja2.Environment, source: str) -> nodes.Template:
    """The syntax tree of a template as it is written.

    Raises:
        jinja2.TemplateSyntaxError: it is none, too long or nested too deep.
    """
    if len(source) > MAX_SOURCE:
        raise jinja2.TemplateSyntaxError(f"it has more than {MAX_SOURCE} characters", 1)
    try:
        return parser.Parser(environment, source).parse()
    except RecursionError as error:
        raise jinja2.TemplateSyntaxError("it is nested too deep", 1) from error


def undeclared_variables(environment: jinja2.Environment, tree: nodes.Template) -> set[str]:
    """The names that a template reads from its context, as `jinja2.meta` finds them, without computing constants."""
    generator = _Tracking(environment)
    generator.optimizer = None
    generator.visit(tree)
    return generator.undeclared_identifiers


def limited(environment: Any) -> LimitedEnvironment:
    """A sandbox of jinja2 with limits, in place of what it was.

    Args:
        environment: shared with no other; its filters, globals and extensions stay.
    """
    environment.__class__ = LimitedEnvironment
    environment.optimized = False
    environment.globals.pop("lipsum", None)
    environment.finalize = _finalized
    environment.filters = {name: _guarded(name, function) for name, function in environment.filters.items()}
    environment.filters |= {_ITERATION: _iteration, _DISPLAY: _made, _CONCAT: _concatenated}
    assert isinstance(environment, LimitedEnvironment), "its class was set"
    return environment


def _finalized(value: Any) -> Any:
    """A value that is written."""
    if isinstance(value, list | tuple | dict | set | jinja2.utils.Namespace):
        _budget.charge(_size(value))
    return value
