"""What a run must not be taken for, and what it cost to begin: random weights, chance, a forward that was compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec_cli.lm.dummy import StandIn

if TYPE_CHECKING:
    from specdec_cli.engine.engine import Engine
    from specdec_cli.recipe.schema import Draft, Recipe, Target


def caveats(recipe: Recipe, engine: Engine) -> list[str]:
    """Sentences for people and documents; none for a pair with its own weights and acceptance.

    Args:
        recipe: resolved.
        engine: loaded from it.
    """
    models: dict[str, Target | Draft] = {"target": recipe.target, "draft": recipe.draft}
    random = [role for role, model in models.items() if model.model is not None and model.load_format == "dummy"]
    found = []
    if random:
        found.append(f"random weights (load_format dummy) of {' and '.join(random)}: what is decoded means nothing")
    if isinstance(getattr(engine.tokenizer, "hf", None), StandIn):
        found.append("no tokenizer: a dummy reads text as its bytes and writes every further token as `<its id>`")
    if recipe.speculation.verify == "synthetic":
        found.append(
            "synthetic acceptance: drafted tokens stand by chance, so nothing here says how often this draft is right"
        )
    return [*found, *compiled(engine)]


def compiled(engine: Engine) -> list[str]:
    """How long torch compiled, and for what; nothing where it did not."""
    lms = {"target": engine.target, "draft": getattr(engine.drafter, "lm", None)}
    seconds = {role: getattr(lm, "compile_seconds", None) for role, lm in lms.items()}
    words = [f"{took:.1f} s for the {role}" for role, took in seconds.items() if took is not None]
    return [f"transformers' forward runs, compiled: that took {' and '.join(words)}"] if words else []
