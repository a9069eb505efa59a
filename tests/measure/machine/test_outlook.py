"""What a pair can give by its bytes, and what published claims imply."""

import pytest
from shortened import mostly_slow
from typed import not_none

from specdec_cli.cli.shared import draft_methods
from specdec_cli.engine.synthetic import iid_length, synthetic_rates
from specdec_cli.lm.facts import describe
from specdec_cli.measure.machine.outlook import outlook
from specdec_cli.recipe import resolve

PUBLISHED = {
    "published-llama2-70b-tinyllama": 2.4,
    "published-llama2-70b-7b": 2.1,
    "published-llama2-70b-13b": 1.8,
    "published-qwen2-72b-0.5b": 2.0,
}


def seen(name, *sets):
    recipe = resolve(name, sets, methods=draft_methods()).recipe
    target, draft = (describe(not_none(model.model), dtype=model.dtype) for model in (recipe.target, recipe.draft))
    return recipe, outlook(target, draft, recipe)


@pytest.mark.parametrize("name", mostly_slow(PUBLISHED, list(PUBLISHED)[:1]))
def test_the_implied_acceptance_gives_the_claim_back(name) -> None:
    recipe, found = seen(name)
    (claim,) = found.claims
    assert claim.speedup == PUBLISHED[name]
    assert iid_length(claim.acceptance, found.k) / (1 + found.cost_ratio * found.k) == pytest.approx(claim.speedup)
    assert f"at least {claim.acceptance:.2f} of" in (recipe_text := " ".join(head(name).split())), recipe_text
    assert claim.acceptance_length <= recipe.speculation.synthetic_acceptance_length < claim.acceptance_length + 0.1
    assert found.synthetic.acceptance_length == pytest.approx(1 + sum(not_none(synthetic_rates(recipe.speculation))))
    assert found.synthetic.speedup > claim.speedup


def head(name):
    from specdec_cli.recipe import shipped

    return "\n".join(shipped.head_comment(shipped.find(name)))


def test_costs_are_bytes_read() -> None:
    _, found = seen("published-llama2-70b-tinyllama")
    assert found.cost_ratio == pytest.approx((1_100_048_384 - 32000 * 2048) / (68_976_648_192 - 32000 * 8192))
    assert found.ceiling == pytest.approx(5 / (1 + 4 * found.cost_ratio))
    assert found.break_even.acceptance_length == pytest.approx(1 + 4 * found.cost_ratio)


def test_a_claim_beyond_everything_accepted_cannot_be() -> None:
    _, found = seen("published-llama2-70b-13b", "gates.fail_if=['speedup.decode < 3', 'recommended.k < 2']")
    (claim,) = found.claims
    assert claim.acceptance is None


def test_without_drafting_there_is_no_outlook() -> None:
    _, found = seen(
        "published-llama2-70b-13b",
        "speculation.num_speculative_tokens=0",
        "speculation.synthetic_acceptance_length=null",
    )
    assert found is None
