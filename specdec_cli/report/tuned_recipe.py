"""The recipe that `sweep-k --write-recipe` writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from textwrap import fill, indent
from typing import TYPE_CHECKING, Any

from specdec_cli.export.measured import as_measured
from specdec_cli.recipe.present import to_yaml
from specdec_cli.recipe.schema import MODEL_KEYS, Draft, Gates
from specdec_cli.report.recommendation import INCONCLUSIVE, recommendation_words

if TYPE_CHECKING:
    from specdec_cli.recipe import Resolved
    from specdec_cli.recipe.schema import Recipe, Speculation

_WIDTH = 98
"""Columns of the comment's text, so that its lines end within 100."""
_NO_DRAFT: Mapping[str, Any] = {
    "num_speculative_tokens": 0,
    "tree": None,
    "depth_policy": "fixed",
    "synthetic_acceptance_length": None,
    "synthetic_acceptance_rates": None,
}


def tuned_recipe(resolved: Resolved, document: Mapping[str, Any]) -> str:
    """The recipe as YAML with the recommended k or tree, a table of k, or no draft if the sweep is sure that none pays.

    If the sweep is inconclusive, the draft and k or the tree stay as they are. Defaults are left out, as are the
    prompts and the length (`-n`) that flags set for the sweep alone.

    Args:
        resolved: what the sweep ran with.
        document: of the sweep; its reasons stand above the recipe as a comment.
    """
    recipe, by_size = resolved.recipe, document["by_batch_size"]
    ks, sizes = [at_size["recommended"]["k"] for at_size in by_size], [at_size["batch_size"] for at_size in by_size]
    verdicts = {at_size["recommended"]["verdict"] for at_size in by_size}
    update: dict[str, Any] = {"draft": as_measured(recipe.draft, document)}
    update["gates"] = Gates()  # a sweep's own are of no other command's document
    if verdicts != {INCONCLUSIVE}:
        num_seqs = max(recipe.engine.max_num_seqs, by_size[-1]["batch_size"])
        update["engine"] = recipe.engine.model_copy(update={"max_num_seqs": num_seqs})
    if verdicts != {INCONCLUSIVE} and any(ks):
        first = by_size[0]["recommended"]  # of several batch sizes none has a tree or a p-min
        speculation = _at_depths(recipe.speculation, dict(zip(sizes, ks, strict=True)))
        update["speculation"] = speculation.model_copy(update={"tree": first["tree"]} | _policy(recipe, first["p_min"]))
    elif INCONCLUSIVE not in verdicts:
        verify = "auto" if recipe.speculation.is_synthetic else recipe.speculation.verify
        update["speculation"] = recipe.speculation.model_copy(update={**_NO_DRAFT, "verify": verify})
        update["draft"] = Draft(method="none")
    tuned = recipe.model_copy(update=update)
    text = to_yaml(replace(resolved, recipe=tuned), only=_chosen(resolved, tuned))
    comment = "\n".join(_reasons(by_size))
    return indent(comment, "# ") + "\n" + text


def _chosen(resolved: Resolved, tuned: Recipe) -> set[str]:
    """The values that the user set or the sweep decided, and the three without which no reader knows the pair."""
    chosen = {"target.model", "draft.model", "draft.method", "speculation.num_speculative_tokens"}
    if tuned.draft.quantize != "none":  # the built-in pair's draft is int8 without a word
        chosen.add("draft.quantize")
    for path, origin in resolved.origins.items():
        is_for_the_sweep = path.startswith("workload.") or path == "sampling.max_new_tokens"
        if origin != "default" and (origin.startswith("recipe ") or not is_for_the_sweep):
            chosen.add(path)
    if tuned.draft.method is not None:  # the options that a method was swept with, its defaults too
        chosen |= {f"draft.{key}" for key in tuned.as_dict()["draft"] if key not in MODEL_KEYS}
    before = resolved.recipe.as_dict()
    for section, keys in tuned.as_dict().items():
        chosen |= {f"{section}.{key}" for key, value in keys.items() if before[section].get(key) != value}
    return {path for path in chosen if not path.startswith("gates.")}


def _policy(recipe: Recipe, p_min: float | None) -> dict[str, Any]:
    """The policy of another engine's drafts with a p-min or without; our own engine's stays."""
    if recipe.engine.name == "specdec":
        return {}
    return {"depth_policy": "fixed"} if p_min is None else {"depth_policy": "confidence", "p_min": p_min}


def _at_depths(speculation: Speculation, ks: Mapping[int, int]) -> Speculation:
    """Speculation at the largest k, with a table for several batch sizes; synthetic acceptance is cut to it."""
    from specdec_cli.engine.synthetic import at_depth

    (size, first), most = next(iter(ks.items())), max(ks.values())
    speculation_at_most = at_depth(speculation, most)
    if len(ks) == 1:
        return speculation_at_most
    below = [(1, first)] if size > 1 and first != most else []
    return speculation_at_most.model_copy(update={"k_by_batch": (*below, *ks.items())})


def _reasons(by_size: list[dict[str, Any]]) -> Iterator[str]:
    for at_size in by_size:
        at = f"Batch size {at_size['batch_size']}: " if len(by_size) > 1 else ""
        message = recommendation_words(at_size["recommended"]).removeprefix("Recommended: ")
        message = "".join(letter for letter in message if letter.isprintable())
        yield fill(f"By `specdec sweep-k`: {at}{message}", _WIDTH, break_long_words=False, break_on_hyphens=False)
