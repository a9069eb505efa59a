"""A measurement in an export: sentences for its head, the recommended k, and times of steps."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import inf
from pathlib import Path
from typing import Any

from specdec_cli.draft_shape import DraftShape
from specdec_cli.errors import UsageError
from specdec_cli.quantities import counted
from specdec_cli.recipe.schema import Draft

DAMAGED = (AttributeError, ArithmeticError, LookupError, TypeError, ValueError)
"""Errors of reading a document that is not what its schema says."""
_HINT = "give the file that `bench`, `sweep-k` or `compare-drafts` wrote with --output"


def read_measurement(path: Path, target: str) -> dict[str, Any]:
    """A result of `bench`, `sweep-k` or `compare-drafts`.

    Args:
        path: the file.
        target: whose result it must be.

    Raises:
        UsageError: it is none, or of another target.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except OSError as error:
        raise UsageError(f"`{path}` cannot be read: {error.strerror}", _HINT) from None
    except (ValueError, RecursionError):
        raise UsageError(f"`{path}` is not JSON", _HINT) from None
    schema = str(document.get("schema")).partition("/")[0] if isinstance(document, dict) else ""
    if schema.removeprefix("specdec.") not in _FIGURES:
        raise UsageError(f"`{path}` is no result of a measurement", _HINT)
    try:
        measured = document["recipe"]["target"]["model"]
        sentences(document)
        measured_schedule(document, "")
        if _kind(document) == "sweep-k":
            step_times(document)
    except DAMAGED:
        raise UsageError(f"`{path}` lacks what a result of `{schema}` has", _HINT) from None
    if measured != target:
        raise UsageError(f"`{path}` measured the target `{measured}`, and the recipe's is `{target}`", _HINT)
    return dict(document)


def refuse_another_draft(path: Path, document: Mapping[str, Any], draft: Draft) -> None:
    """Refuse the figures of another draft, which would stand beside this one.

    Args:
        path: the file of the measurement.
        document: its content.
        draft: the recipe's. A comparison of drafts names each of its own.

    Raises:
        UsageError: the measurement is of another draft.
    """
    measured_draft = document["recipe"]["draft"]
    if isinstance(measured_draft, list):
        return
    measured, asked = (_draft_name(fields) for fields in (measured_draft, draft.model_dump()))
    if measured != asked:
        raise UsageError(f"`{path}` measured the draft `{measured}`, and the recipe's is `{asked}`", _HINT)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _draft_name(draft: Mapping[str, Any]) -> str:
    """The draft of a recipe, as `--draft` names it."""
    name = draft.get("model") or draft.get("method")
    first = draft.get("first")
    return str(name) if first is None else f"{first}+{name}"


def as_measured(draft: Draft, document: Mapping[str, Any]) -> Draft:
    """The draft with its method said where a measurement found a model with another tokenizer: it drafted by text."""
    is_by_text = draft.method in (None, "model") and document["environment"].get("draft_vocabulary")
    return draft.model_copy(update={"method": "universal"}) if is_by_text else draft


def machine_of(document: Mapping[str, Any]) -> str:
    """The machine of a measurement, for people."""
    environment = document["environment"]
    return str(environment["gpu"] or environment["cpu"] or environment["device"] or environment["platform"])


def sentences(document: Mapping[str, Any]) -> list[str]:
    """Sentences that say what was measured, on which machine, and whether it was busy."""
    kind = _kind(document)
    workload, engine = document["workload"], document.get("engine")
    machine = machine_of(document)
    where = machine if engine is None else f"{engine['name']} {engine['version'] or ''}".rstrip() + f" on {machine}"
    date = str(document["created"])[:10]
    prompts = f"{counted(workload['num_prompts'], 'prompt')} of {workload['dataset']}"
    message = [f"Measured by specdec {kind} on {where} on {date}, {prompts}:"]
    message += _FIGURES[kind](document)
    if document["machine"].get("busy"):
        message.append(f"But {document['machine']['busy']}.")
    return message


def _bench(document: Mapping[str, Any]) -> list[str]:
    k = document["recipe"]["speculation"]["num_speculative_tokens"]
    length = document["draft"]["speculative"]["acceptance_length"]
    tokens = "" if length is None else f", {length:.2f} tokens for each step with drafted tokens"
    name, speed = _draft_name(document["recipe"]["draft"]), _speedup(document["speedup"]["decode"])
    return [f"with the draft {name} at k = {k} {speed} as fast as without a draft{tokens}."]


def _sweep_k(document: Mapping[str, Any]) -> list[str]:
    by_size = document["by_batch_size"]
    message = []
    for at_size in by_size:
        recommended, size = at_size["recommended"], f"batch size {at_size['batch_size']}: " if len(by_size) > 1 else ""
        verdict, speed, shape = recommended["verdict"], recommended["speedup"], DraftShape.recommended(recommended)
        figures = "" if speed is None else f", {_speedup(speed)} as fast as without a draft"
        words = f"{shape}{figures}"
        if verdict == "inconclusive":  # its speed is that of another k, and why says of which
            words = f"{recommended['why']}; {shape} stays in use"
        message.append(f"{size}verdict {verdict}: {words}.")
    for costs in document.get("engine_sweep", {}).get("costs", ()):
        plain, base, slope = (1e3 * costs[name] for name in ("plain_seconds", "base_seconds", "seconds_per_token"))
        message.append(
            f"batch size {costs['batch_size']}: a step takes {plain:.1f} ms and {base:.1f} + {slope:.1f} k ms more "
            "with k drafted tokens."
        )
    return message


def _compare_drafts(document: Mapping[str, Any]) -> list[str]:
    rows: Sequence[Mapping[str, Any]] = document["rows"]
    message = [
        f"{row['draft']} at k = {row['best_k']} {_speedup(row['speedup'])} as fast as without a draft" for row in rows
    ]
    return [f"verdict {document['verdict']}: " + "; ".join(message) + "."]


def measured_schedule(document: Mapping[str, Any], draft: str) -> tuple[tuple[tuple[int, int], ...], str | None]:
    """The k that a measurement recommends or was made with, by batch size, and why there is none.

    Args:
        document: of the measurement.
        draft: its name in a comparison.
    """
    kind = _kind(document)
    if kind == "bench":
        speculation = document["recipe"]["speculation"]
        has_one = speculation.get("tree") is None and speculation.get("k_by_batch") is None
        return ((1, int(speculation["num_speculative_tokens"])),) if has_one else (), None
    if kind == "compare-drafts":
        return tuple(
            (1, int(row["best_k"])) for row in document["rows"] if row["draft"] == draft and row["best_k"]
        ), None
    recommended = [(int(at_size["batch_size"]), at_size["recommended"]) for at_size in document["by_batch_size"]]
    unknown = [str(size) for size, its in recommended if its["verdict"] == "inconclusive"]
    if unknown:
        return (), f"the sweep is inconclusive at batch size {', '.join(unknown)}, so k is not taken from it"
    if any(its.get("tree") for _, its in recommended):
        return (), "the sweep recommends a tree, so k is not taken from it"
    return tuple((size, int(its["k"])) for size, its in recommended), None


def step_times(document: Mapping[str, Any]) -> tuple[dict[int, float], str | None]:
    """Measured seconds of a step by the tokens that it verifies, of all sequences together; or why there are none.

    A step drafts as many tokens as the sweep's largest k, whatever it verifies. Where two batch sizes verify as many
    tokens, the longer time counts, and no step counts as shorter than one that verifies fewer.
    """
    if _kind(document) != "sweep-k" or "engine_sweep" in document:
        return {}, "step times are those of `specdec sweep-k` on its own engine, which times each part of a step"
    slowest: dict[int, float] = {}
    for at_size in document["by_batch_size"]:
        costs, size = at_size["costs"], int(at_size["batch_size"])
        draft = max(float(seconds) for seconds in costs["draft_seconds_by_k"])
        parts = zip(costs["target_seconds_by_rows"], costs["overhead_seconds_by_k"], strict=True)
        for rows, (target, overhead) in enumerate(parts, 1):
            seconds = float(target) + draft + float(overhead)
            if not 0 < seconds < inf:
                raise ValueError("no step takes so long")
            slowest[rows * size] = max(slowest.get(rows * size, 0.0), seconds)
    tokens = sorted(slowest)
    return dict(zip(tokens, accumulate((slowest[num] for num in tokens), max), strict=True)), None


def _kind(document: Mapping[str, Any]) -> str:
    """The command that made a document."""
    return str(document["schema"]).partition("/")[0].removeprefix("specdec.")


_FIGURES: dict[str, Any] = {
    "bench": _bench,
    "sweep-k": _sweep_k,
    "compare-drafts": _compare_drafts,
}


def _speedup(found: Mapping[str, Any]) -> str:
    interval = found["ci95"]
    around = "" if interval is None else f" ({interval[0]:.2f} to {interval[1]:.2f})"
    return f"{found['median']:.2f} times{around}"
