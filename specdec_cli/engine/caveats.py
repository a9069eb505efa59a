"""Caveats of a run: random weights, another tokenizer, synthetic acceptance, slow forwards, compilation time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec_cli.engine.drafts import matching
from specdec_cli.lm.llama import native

if TYPE_CHECKING:
    from specdec_cli.engine.engine import Engine
    from specdec_cli.lm.door import LM
    from specdec_cli.recipe.schema import Draft, Recipe, Target


def caveats(recipe: Recipe, engine: Engine) -> list[str]:
    """Sentences for people and documents; none for a pair with its own weights and acceptance."""
    models: dict[str, Target | Draft] = {"target": recipe.target, "draft": recipe.draft}
    random = [role for role, model in models.items() if model.model is not None and model.load_format == "dummy"]
    sentences = []
    if random:
        sentences.append(f"random weights (load_format dummy) of {' and '.join(random)}: the output is meaningless")
    if engine.tokenizer is not None and engine.tokenizer.is_stand_in:
        sentences.append("no tokenizer: a dummy reads text as its bytes and writes every further token as `<its id>`")
    if recipe.speculation.is_synthetic:
        sentences.append(
            "synthetic acceptance: drafted tokens are accepted at random, so the figures say nothing about this draft"
        )
    sentences += matching(engine.drafter)
    return [*sentences, *slow_forwards(engine), *not_sharing(engine)]


def slow_forwards(engine: Engine) -> list[str]:
    """That models run slower than they could: for want of a C++ compiler, and what helps; or of graphs on a GPU."""
    return [*_lacking_compiler(engine), *_lacking_graphs(engine)]


def _lacking_compiler(engine: Engine) -> list[str]:
    obstacles = {role: lm.decoder_obstacle for role, lm in _models(engine).items()}
    sentences = []
    for obstacle in dict.fromkeys(obstacles.values()):
        remedy = native.remedy(obstacle)
        if remedy is not None:
            roles = " and ".join(role for role, its in obstacles.items() if its == obstacle)
            sentences.append(
                f"{obstacle}: transformers' forward runs for {roles}, several times slower than specdec's own decoder; "
                f"{remedy}"
            )
    return sentences


def _lacking_graphs(engine: Engine) -> list[str]:
    obstacles = [*(lm.graphs_obstacle for lm in _models(engine).values()), engine.drafter.graphs_obstacle]
    known = dict.fromkeys(obstacle for obstacle in obstacles if obstacle is not None)
    return [f"{obstacle}; it runs without CUDA graphs, which is slower" for obstacle in known]


def not_sharing(engine: Engine) -> list[str]:
    """That prefix caching was asked for, and which models share nothing: there is no memory for a state's snapshot."""
    roles = [role for role, lm in _models(engine).items() if lm.state_bytes and not lm.num_prefix_states]
    if not roles or not engine.options.prefix_caching:
        return []
    return [
        f"prefix caching has no effect on the {' and the '.join(roles)}: the cache has no room for a snapshot of a "
        "recurrent state; raise engine.kv_cache_memory"
    ]


def _models(engine: Engine) -> dict[str, LM]:
    draft = engine.drafter.lm
    return {"target": engine.target} | ({} if draft is None else {"draft": draft})
