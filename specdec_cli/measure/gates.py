"""Gates: a measurement against limits and against an earlier one, judged on whole intervals, never on points."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec_cli.errors import GateError, UsageError
from specdec_cli.recipe.gate import GateExpression, parse_gate, parse_percentage
from specdec_cli.recipe.schema import Gates

_COMPARED = ("speedup.decode", "speedup.latency")
_SAME = ("target", "workload", "sampling")


@dataclass(frozen=True, slots=True)
class Judged:
    """A gate and what became of it.

    Args:
        expression: what was asked.
        value: the figure; None where nothing was measured, which fails.
        ci95: its interval, or None for a plain number.
        passed: whether the gate holds.
        reason: in words.
    """

    expression: str
    value: float | None
    ci95: tuple[float, float] | None
    passed: bool
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """The JSON form (INTERFACE, `gates[]`)."""
        return {
            "expression": self.expression,
            "value": self.value,
            "ci95": None if self.ci95 is None else list(self.ci95),
            "passed": self.passed,
            "reason": self.reason,
        }


def parse_all(texts: Sequence[str]) -> list[GateExpression]:
    """The expressions of a recipe, which were checked when it was read."""
    gates = [parse_gate(text) for text in texts]
    assert None not in gates, "a recipe's gates were checked when it was read"
    return [gate for gate in gates if gate is not None]


def check_paths(gates: Sequence[GateExpression], schema: Mapping[str, Any], names: Mapping[str, Sequence[str]]) -> None:
    """Refuse a path that the document will not have, before anything is measured.

    Args:
        gates: the expressions.
        schema: the document's JSON Schema.
        names: for each mapping whose keys depend on the run (`by_task`), the keys that it will have.

    Raises:
        UsageError: no such path, or no number at its end.
    """
    for gate in gates:
        problem = _path_problem(gate.path, schema, names)
        if problem:
            raise UsageError(
                f"`--fail-if '{gate}'`: {problem}", "for example speedup.decode, draft.speculative.acceptance_length"
            )


def _path_problem(path: str, schema: Mapping[str, Any], names: Mapping[str, Sequence[str]]) -> str | None:
    node, rest, above = _resolved(schema, schema), path, ""
    while rest:
        if "items" in node:
            key, _, rest = rest.partition(".")
            inner = node["items"] if key.isdigit() else None
            known: Sequence[str] = ["0", "1", "…"]
        elif "properties" in node:
            known = list(node["properties"])
            key, rest = _first_key(rest, known)
            inner = node["properties"].get(key)
        else:
            known = names.get(above, ())
            key, rest = _first_key(rest, known)
            inner = node.get("additionalProperties") if key in known else None
        if not isinstance(inner, Mapping):
            where = f"`{above}`" if above else "the document"
            return f"{where} has no `{key}`, but {', '.join(known) or 'nothing below it'}"
        node, above = _resolved(inner, schema), f"{above}.{key}" if above else key
    is_number = {"number", "integer"} & set(_types(node))
    return None if is_number or "ci95" in node.get("properties", ()) else f"`{path}` is no number"


def _first_key(path: str, known: Sequence[str]) -> tuple[str, str]:
    """The longest known key that a path begins with (a task's name may hold dots), else its first part."""
    fitting = [key for key in known if path == key or path.startswith(f"{key}.")]
    key = max(fitting, key=len, default=path.partition(".")[0])
    return key, path[len(key) + 1 :]


def _resolved(node: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema's node without references, and of alternatives the one that is not null."""
    while True:
        if "$ref" in node:
            node = schema["$defs"][node["$ref"].rpartition("/")[2]]
        elif "anyOf" in node:
            node = next(one for one in node["anyOf"] if one.get("type") != "null")
        else:
            return node


def _types(node: Mapping[str, Any]) -> list[str]:
    kind = node.get("type", [])
    return [kind] if isinstance(kind, str) else list(kind)


def judge(gates: Sequence[GateExpression], document: Mapping[str, Any]) -> list[Judged]:
    """Judge a document; a gate fails where the whole interval lies on its failing side, or where there is no figure."""
    return [_judge(gate, _value_at(document, gate.path)) for gate in gates]


def _judge(gate: GateExpression, found: Any) -> Judged:
    value = found.get("median", found.get("speedup")) if isinstance(found, Mapping) else found
    interval = found.get("ci95") if isinstance(found, Mapping) else None
    if value is None:
        return Judged(str(gate), None, None, False, "nothing was measured")
    if isinstance(found, Mapping) and interval is None:
        return Judged(str(gate), value, None, False, "a single pair has no interval to judge by")
    low, high = interval or (value, value)
    crossed = gate.is_crossed(low) and gate.is_crossed(high)
    if gate.operator == "==":
        crossed = crossed and low == high
    said = f"{value:.4g}" if interval is None else f"{value:.4g} (95 %: {low:.4g} to {high:.4g})"
    return Judged(str(gate), float(value), (low, high) if interval else None, not crossed, f"{gate.path} is {said}")


def _value_at(document: Mapping[str, Any], path: str) -> Any:
    """The value at a path; None where it was not measured."""
    node: Any = document
    while path and node is not None:
        if isinstance(node, Mapping):
            key, path = _first_key(path, list(node))
            node = node.get(key)
        else:
            key, _, path = path.partition(".")
            node = node[int(key)] if isinstance(node, list) and key.isdigit() and int(key) < len(node) else None
    return node


def read_baseline(path: str, schema_name: str) -> dict[str, Any]:
    """An earlier document.

    Raises:
        UsageError: it cannot be read, or is another kind of document.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"baseline `{path}` cannot be read: {error.strerror}", "name a result of --output") from error
    except ValueError as error:
        raise UsageError(f"baseline `{path}` is no JSON", "name a result of --output") from error
    if not isinstance(document, dict) or document.get("schema") != schema_name:
        raise UsageError(f"baseline `{path}` is no `{schema_name}` document", "name a result of the same command")
    if not any(_interval(document, name) for name in _COMPARED):
        raise UsageError(f"baseline `{path}` has no interval to compare with", "measure it with more prompts")
    return document


def against_baseline(document: Mapping[str, Any], baseline: Mapping[str, Any], max_regression: str) -> list[Judged]:
    """Judge a document against an earlier one.

    The ratio's interval adds both intervals in squares on a logarithmic scale, as of independent measurements; the
    gate fails where all of it lies below the allowed loss.
    """
    allowed = parse_percentage(max_regression)
    assert allowed is not None, "a recipe's percentage was checked when it was read"
    return [_regression(name, document, baseline, allowed) for name in _COMPARED if _interval(baseline, name)]


def _regression(name: str, document: Mapping[str, Any], baseline: Mapping[str, Any], allowed: float) -> Judged:
    expression = f"{name} / baseline < {1 - allowed:g}"
    new, old = _interval(document, name), _interval(baseline, name)
    assert old is not None, "only what the baseline has is compared"
    if new is None:
        return Judged(expression, None, None, False, "nothing was measured")
    logs = [[math.log(one) for one in three] for three in (new, old)]
    (new_log, new_low, new_high), (old_log, old_low, old_high) = logs
    ratio = math.exp(new_log - old_log)
    low = ratio * math.exp(-math.hypot(new_log - new_low, old_high - old_log))
    high = ratio * math.exp(math.hypot(new_high - new_log, old_log - old_low))
    passed = high >= 1 - allowed
    said = f"{name} is {new[0]:.4g}, the baseline's {old[0]:.4g}: {ratio:.3g} of it (95 %: {low:.3g} to {high:.3g})"
    return Judged(expression, ratio, (low, high), passed, said)


def _interval(document: Mapping[str, Any], name: str) -> tuple[float, float, float] | None:
    """Figure, lower and upper end, all above 0."""
    found = _value_at(document, name)
    if not isinstance(found, Mapping) or not found.get("median") or not found.get("ci95"):
        return None
    low, high = found["ci95"]
    return (found["median"], low, high) if low > 0 else None


def other_recipe(document: Mapping[str, Any], baseline: Mapping[str, Any]) -> str | None:
    """A sentence where the baseline measured something else, or None."""
    new, old = document.get("recipe") or {}, baseline.get("recipe") or {}
    changed = [name for name in _SAME if new.get(name) != old.get(name)]
    return f"the baseline is of another {' and '.join(changed)}: the two are not alike" if changed else None


def raise_if_crossed(judged: Sequence[Judged]) -> None:
    """End with exit code 3 where a gate failed.

    Raises:
        GateError: naming every one of them.
    """
    failed = [one for one in judged if not one.passed]
    if failed:
        raise GateError("\n".join(f"gate crossed: `{one.expression}`: {one.reason}" for one in failed))


def check_measurable(gates: Gates, num_measured: int) -> None:
    """Refuse gates where so little is measured that there is no interval to judge them on.

    Args:
        gates: the recipe's gates.
        num_measured: decodes of each arm, prompts times repeats.

    Raises:
        UsageError: one prompt, measured once.
    """
    if (gates.fail_if or gates.baseline) and num_measured < 2:
        raise UsageError(
            "gates are judged on intervals, which one prompt measured once does not have",
            "raise --num-prompts or --repeats",
        )
