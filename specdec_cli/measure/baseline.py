"""A measurement against an earlier one: what is compared, by how much it may be less, and what makes the two unlike."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from specdec_cli.errors import UsageError
from specdec_cli.files import given_path, read_text
from specdec_cli.measure.documents.parts import GateResult
from specdec_cli.measure.gates import RECOMMENDED, figure_at, judge, parse_all
from specdec_cli.measure.paths import value_at
from specdec_cli.measure.stats import MIN_PAIRS, TOO_FEW, lacks_interval
from specdec_cli.recipe.gate import parse_percentage
from specdec_cli.recipe.schema import Gates, Recipe

_MORE_IS_BETTER = ("speedup.decode", "speedup.latency", RECOMMENDED)
_LESS_IS_BETTER = (
    *("timing.ttft_s", "timing.tpot_s", "timing.latency_s"),
    *("timing.arrival_ttft_s", "timing.arrival_latency_s"),
)
_COMPARED = (*_MORE_IS_BETTER, *_LESS_IS_BETTER)
_SAME = ("target", "workload", "sampling")
_SAME_OF_SERVERS = ("concurrency", "request_rate", "chat", "repeats", "extra_body")
_OTHERWISE = (
    *("plan.batch_size", "plan.chat", "environment.cpu", "environment.gpu", "environment.threads", "machine.num_cores"),
    *("environment.device", "environment.draft_device", "environment.dtype"),
    *("environment.decoder", "environment.draft_decoder"),
    *("environment.specdec", "environment.torch", "environment.transformers", "environment.python"),
)
"""Differences that affect a speed-up apart from the recipe, as far as both documents have them."""
_OTHER_SERVER = ("endpoint.server", "endpoint.version")
_NOT_COMPARED = f"{{}} has no interval to compare by, which takes {MIN_PAIRS} pairs or more"


def read_baseline(path: str, schema_name: str) -> dict[str, Any]:
    """An earlier document.

    Raises:
        UsageError: it cannot be read, or is another kind of document.
    """
    text = read_text(given_path(path), f"baseline `{path}`")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"baseline `{path}` is not JSON", "name a result of --output") from error
    if not isinstance(document, dict) or document.get("schema") != schema_name:
        raise UsageError(f"baseline `{path}` is no `{schema_name}` document", "name a result of the same command")
    if not any(_interval(document, name) for name in _COMPARED):
        raise UsageError(f"baseline `{path}` has no interval to compare with", "measure it with more prompts")
    return document


def judge_document(document: dict[str, Any], gates: Gates, baseline: Mapping[str, Any] | None) -> list[GateResult]:
    """Judge a document by a recipe's gates, and write the results into it.

    Args:
        document: its `notices` grow, and it gets its `gates`.
        gates: the recipe's.
        baseline: an earlier document, where the gates name one.
    """
    document["notices"] += [TOO_FEW] if lacks_interval(document) else []
    judged = judge(parse_all(gates.fail_if), document)
    if baseline is not None:
        judged += against_baseline(document, baseline, gates.max_regression)
        unlike = (other_recipe(document, baseline), other_circumstances(document, baseline))
        document["notices"] += [sentence for sentence in unlike if sentence is not None]
    document["gates"] = [result.as_json() for result in judged]
    return judged


def against_baseline(document: Mapping[str, Any], baseline: Mapping[str, Any], max_regression: str) -> list[GateResult]:
    """Judge a document against an earlier one.

    The ratio's interval adds both intervals in squares on a logarithmic scale, as of independent measurements; the
    gate fails where all of it lies below the allowed loss, or above it for a server's times.
    """
    allowed = parse_percentage(max_regression)
    assert allowed is not None, "a recipe's percentage was checked when it was read"
    names = (*_COMPARED, *_more_batch_sizes(document, baseline))
    return [_regression(name, document, baseline, allowed) for name in names if _interval(baseline, name)]


def _more_batch_sizes(document: Mapping[str, Any], baseline: Mapping[str, Any]) -> list[str]:
    """A sweep's recommendations beyond the smallest batch size, where both have the same batch size."""
    places = [f"by_batch_size.{place}" for place in range(1, len(document.get("by_batch_size") or ()))]
    sizes = ([value_at(each, f"{place}.batch_size") for place in places] for each in (document, baseline))
    return [f"{place}.{RECOMMENDED}" for place, new, old in zip(places, *sizes, strict=True) if new == old]


def _regression(name: str, document: Mapping[str, Any], baseline: Mapping[str, Any], allowed: float) -> GateResult:
    is_time = name in _LESS_IS_BETTER
    expression = f"{name} / baseline > {1 + allowed:g}" if is_time else f"{name} / baseline < {1 - allowed:g}"
    new, old = _interval(document, name), _interval(baseline, name)
    assert old is not None, "only what the baseline has is compared"
    if new is None:
        figure = value_at(document, name)
        message = "nothing was measured" if not figure or figure.get("median") is None else _NOT_COMPARED.format(name)
        return GateResult(expression=expression, value=None, ci95=None, passed=False, reason=message)
    logs = [[math.log(value) for value in three] for three in (new, old)]
    (new_log, new_low, new_high), (old_log, old_low, old_high) = logs
    ratio = math.exp(new_log - old_log)
    low = ratio * math.exp(-math.hypot(new_log - new_low, old_high - old_log))
    high = ratio * math.exp(math.hypot(new_high - new_log, old_log - old_low))
    passed = low <= 1 + allowed if is_time else high >= 1 - allowed
    message = f"{name} is {new[0]:.4g}, the baseline's {old[0]:.4g}: {ratio:.3g} of it (95 %: {low:.3g} to {high:.3g})"
    return GateResult(expression=expression, value=ratio, ci95=(low, high), passed=passed, reason=message)


def _interval(document: Mapping[str, Any], name: str) -> tuple[float, float, float] | None:
    """Figure, lower and upper end, all above 0."""
    figure = figure_at(document, name)
    if not isinstance(figure, Mapping) or not figure.get("median") or not figure.get("ci95"):
        return None
    low, high = figure["ci95"]
    return (figure["median"], low, high) if low > 0 else None


def other_recipe(document: Mapping[str, Any], baseline: Mapping[str, Any]) -> str | None:
    """A sentence where the baseline measured something else, or None."""
    new, old, defaults = document.get("recipe") or {}, baseline.get("recipe") or {}, Recipe().as_dict()
    # An earlier version's recipe lacks the settings that came later, which stood at their defaults.
    changed = [
        name for name in _SAME if defaults[name] | (new.get(name) or {}) != defaults[name] | (old.get(name) or {})
    ]
    if "endpoint" in document:
        plan, earlier = document["plan"], baseline.get("plan") or {}
        changed += [name for name in _SAME_OF_SERVERS if (plan[name] or None) != (earlier.get(name) or None)]
    return f"the baseline is of another {' and '.join(changed)}: the two are not comparable" if changed else None


def other_circumstances(document: Mapping[str, Any], baseline: Mapping[str, Any]) -> str | None:
    """A sentence where the baseline was measured in another way or on another machine, or None."""
    paths = _OTHER_SERVER if "endpoint" in document else _OTHERWISE
    values = [(path, value_at(baseline, path), value_at(document, path)) for path in paths]
    unlike = [
        f"{path.partition('.')[2]} {_shown(was)}, here {_shown(now)}"
        for path, was, now in values
        if was is not None and now is not None and was != now
    ]
    return f"the baseline was measured differently: {'; '.join(unlike)}" if unlike else None


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
