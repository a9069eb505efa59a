"""Gates: a measurement against limits, judged on whole intervals, never on points."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec_cli.engine.prompts import PromptRow
from specdec_cli.errors import GateError, UsageError, did_you_mean
from specdec_cli.measure.documents.parts import GateResult
from specdec_cli.measure.paths import first_key, value_at
from specdec_cli.measure.stats import FIGURES, MIN_PAIRS
from specdec_cli.measure.workload.workload import task_of
from specdec_cli.recipe.gate import VERDICTS, GateExpression, parse_gate
from specdec_cli.recipe.schema import Gates

_BY_TASK = ("by_task.", "task_winners.")
RECOMMENDED = "recommended.speedup"


@dataclass(frozen=True, slots=True)
class Pairs:
    """How many pairs a run makes for its intervals to rest on.

    Args:
        rows: what is decoded.
        batch_size: prompts that decode together.
        repeats: how often each of them does.
    """

    rows: Sequence[PromptRow]
    batch_size: int
    repeats: int

    def under(self, path: str) -> int:
        """Number of pairs behind a figure: replayed ones rest on prompts, measured ones on groups of prompts.

        Of a single group its repeats are the pairs.
        """
        task = next((below for name in _BY_TASK if (below := path.partition(name)[2])), None)
        counts = Counter(map(task_of, self.rows))
        num = len(self.rows) if task is None else counts[first_key(task, list(counts))[0]]
        if _is_replayed(path):
            return num
        num_groups = -(-num // self.batch_size)
        return num_groups if num_groups > 1 else self.repeats

    def wanted(self, path: str) -> str:
        """The requirements of an interval, in words."""
        num = MIN_PAIRS if _is_replayed(path) else MIN_PAIRS * self.batch_size
        return f"measure {num} prompts or more{' of that task' if any(name in path for name in _BY_TASK) else ''}"


def _is_replayed(path: str) -> bool:
    return ".predicted" in path or path.endswith("acceptance_length")


_EXAMPLES = (
    "lossless.mismatches",
    "speedup.decode",
    "draft.speculative.acceptance_length",
    "recommended.verdict",
    "recommended.speedup",
    "verdict",
    "timing.ttft_s",
    "acceptance.length",
    "speculative.acceptance_length",
    "speculative.acceptance_rate",
)
"""Paths that gates often ask for; each command's document has some of them."""


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
        names: for each mapping whose keys depend on the run (`by_task`), the keys that it will have; for each list
            whose items are known by name (`rows` of several drafts), their names.

    Raises:
        UsageError: no such path, or no number at its end.
    """
    for gate in gates:
        if problem := path_problem(gate, schema, names):
            examples = [path for path in _EXAMPLES if _walked(path, schema, names)[1] is None]
            hint = f"paths of this command: {', '.join(examples)}; a recipe's gates are in `gates.fail_if`"
            raise UsageError(f"`--fail-if '{gate}'`: {problem}", hint)


def path_problem(
    gate: GateExpression, schema: Mapping[str, Any], names: Mapping[str, Sequence[str]] | None
) -> str | None:
    """The fault of a gate's path, as `check_paths` takes it; names of None let any name pass."""
    node, problem = _walked(gate.path, schema, names)
    return problem or (_unlike(gate, node) if node else None)


def _walked(
    path: str, schema: Mapping[str, Any], names: Mapping[str, Sequence[str]] | None
) -> tuple[Mapping[str, Any], str | None]:
    """The schema's node at a path, and what is wrong with the path."""
    node, rest, above = _resolved(schema, schema), path, ""
    while rest:
        is_named = "items" in node or isinstance(node.get("additionalProperties"), Mapping)
        if names is None and is_named and "properties" not in node:
            return {}, None  # a name of the run's own, which may hold dots
        names_here = (names or {}).get(above, ())
        if "items" in node:
            named = names_here
            known: Sequence[str] = [*named, "0", "1", "…"]
            key, rest = first_key(rest, named)
            inner = node["items"] if key in named or key.isdigit() else None
        elif "properties" in node:
            known = list(node["properties"])
            key, rest = first_key(rest, known)
            inner = node["properties"].get(key)
        else:
            known = names_here
            key, rest = first_key(rest, known)
            inner = node.get("additionalProperties") if key in known else None
        if not isinstance(inner, Mapping):
            where = f"`{above}`" if above else "the document"
            there_is = ", ".join(known) or "nothing below it"
            return node, f"{where} has no `{key}`, but {there_is}{did_you_mean(key, known)}"
        node, above = _resolved(inner, schema), f"{above}.{key}" if above else key
    types = node.get("type", ())
    is_number = {"number", "integer"} & ({types} if isinstance(types, str) else {*types})
    return node, None if is_number or _is_interval(node) or _is_verdict(node) else f"`{path}` is not a number"


def _unlike(gate: GateExpression, node: Mapping[str, Any]) -> str | None:
    """The error if a number is compared with a verdict, or a verdict with a number."""
    if gate.verdict is not None and not _is_verdict(node):
        return f"`{gate.path}` is not a verdict"
    if gate.verdict is None and _is_verdict(node):
        return f"`{gate.path}` is not a number, but {', '.join(VERDICTS[:-1])} or {VERDICTS[-1]}"
    return None


def _is_verdict(node: Mapping[str, Any]) -> bool:
    return list(node.get("enum", ())) == list(VERDICTS)


def _is_interval(node: Mapping[str, Any]) -> bool:
    return "ci95" in node.get("properties", ())


def _resolved(node: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema's node with references resolved; of alternatives, the first that is not null."""
    while True:
        if "$ref" in node:
            node = schema["$defs"][node["$ref"].rpartition("/")[2]]
        elif "anyOf" in node:
            node = next(option for option in node["anyOf"] if option.get("type") != "null")
        else:
            return node


def judge(gates: Sequence[GateExpression], document: Mapping[str, Any]) -> list[GateResult]:
    """Judge a document; a gate fails where the whole interval lies on its failing side, or where there is no figure."""
    judged = []
    for gate in gates:
        value, interval, passed, reason = _compared(gate, figure_at(document, gate.path))
        judged.append(GateResult(expression=str(gate), value=value, ci95=interval, passed=passed, reason=reason))
    return judged


def figure_at(document: Mapping[str, Any], path: str) -> Any:
    """The value at a path; where a sweep recommends not to speculate, that is exactly as fast as plain decoding."""
    figure, name = value_at(document, path), path.removesuffix(".median")
    if figure is None and name.endswith(RECOMMENDED) and _is_firmly_plain(document, name.removesuffix("speedup")):
        return {"median": 1.0, "ci95": [1.0, 1.0]} if path == name else 1.0
    return figure


def _is_firmly_plain(document: Mapping[str, Any], above: str) -> bool:
    """Whether a sweep advises against speculation; documents of earlier versions say so by k alone."""
    verdict = value_at(document, f"{above}verdict")
    return verdict == "do-not-speculate" or (verdict is None and value_at(document, f"{above}k") == 0)


def _compared(gate: GateExpression, figure: Any) -> tuple[float | str | None, tuple[float, float] | None, bool, str]:
    """The value that a gate is about, its interval, whether the gate holds, and why."""
    if gate.verdict is not None and isinstance(figure, str):
        return figure, None, not gate.is_crossed_by(figure), f"{gate.path} is {figure}"
    value = next((figure[key] for key in FIGURES if key in figure), None) if isinstance(figure, Mapping) else figure
    interval = figure.get("ci95") if isinstance(figure, Mapping) else None
    if value is None or gate.verdict is not None:
        return None, None, False, "nothing was measured"
    if isinstance(figure, Mapping) and interval is None:
        message = f"{gate.path} is {value:.4g} without an interval to judge by, which takes {MIN_PAIRS} pairs or more"
        return float(value), None, False, message
    low, high = interval or (value, value)
    crossed = gate.is_crossed(low) and gate.is_crossed(high)
    if gate.operator == "==":
        crossed = crossed and low == high
    message = f"{value:.4g}" if interval is None else f"{value:.4g} (95 %: {low:.4g} to {high:.4g})"
    return float(value), interval, not crossed, f"{gate.path} is {message}"


def raise_if_crossed(judged: Sequence[GateResult]) -> None:
    """End with exit code 3 where a gate failed.

    Raises:
        GateError: naming every one of them.
    """
    failed = [result for result in judged if not result.passed]
    if failed:
        raise GateError("\n".join(f"gate crossed: `{result.expression}`: {result.reason}" for result in failed))


def check_measurable(gates: Gates, schema: Mapping[str, Any], names: Mapping[str, Sequence[str]], pairs: Pairs) -> None:
    """Refuse gates on figures that will have no interval to be judged by.

    Args:
        gates: the recipe's gates, whose paths the document has.
        schema: the document's JSON Schema.
        names: as for `check_paths`.
        pairs: how many the run makes.
    """
    for gate in parse_all(gates.fail_if):
        node, _ = _walked(gate.path, schema, names)
        num = pairs.under(gate.path)
        if _is_interval(node) and num < MIN_PAIRS:
            figure = next(key for key in FIGURES if key in node["properties"])
            raise UsageError(
                f"`--fail-if '{gate}'` is judged on an interval, which takes {MIN_PAIRS} pairs (prompts, or batches of "
                f"them), and there would be {num}",
                f"{pairs.wanted(gate.path)}, or judge the figure alone: {gate.path}.{figure}",
            )
    if gates.baseline is not None and (num := pairs.under("")) < MIN_PAIRS:
        raise UsageError(
            f"`--baseline {gates.baseline}` is compared by intervals, which take {MIN_PAIRS} pairs (prompts, or "
            f"batches of them), and there would be {num}",
            pairs.wanted(""),
        )
