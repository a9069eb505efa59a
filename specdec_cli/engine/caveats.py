"""What a run must not be taken for: random weights, a tokenizer that is none, acceptance by chance."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec_cli.lm.dummy import StandIn

if TYPE_CHECKING:
    from specdec_cli.recipe.schema import Draft, Recipe, Target
    from specdec_cli.text.tokenizer import Tokenizer


def caveats(recipe: Recipe, tokenizer: Tokenizer | None) -> list[str]:
    """Sentences for people and documents; none for a pair with its own weights and acceptance.

    Args:
        recipe: resolved.
        tokenizer: the loaded target's.
    """
    models: dict[str, Target | Draft] = {"target": recipe.target, "draft": recipe.draft}
    random = [role for role, model in models.items() if model.model is not None and model.load_format == "dummy"]
    found = []
    if random:
        found.append(f"random weights (load_format dummy) of {' and '.join(random)}: what is decoded means nothing")
    if isinstance(getattr(tokenizer, "hf", None), StandIn):
        found.append("no tokenizer: a dummy reads text as its bytes and writes every further token as `<its id>`")
    if recipe.speculation.verify == "synthetic":
        found.append(
            "synthetic acceptance: drafted tokens stand by chance, so nothing here says how often this draft is right"
        )
    return found
