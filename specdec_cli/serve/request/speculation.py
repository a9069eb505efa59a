"""How a request speculates: vLLM's and llama-server's fields, OpenAI's `prediction`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdec_cli.drafted import MOST_NODES
from specdec_cli.engine.drafting import NONE
from specdec_cli.errors import UsageError
from specdec_cli.serve.errors import ApiError, bad_field
from specdec_cli.serve.protocol import GenerationBody, Speculative
from specdec_cli.serve.request.conversation import text_of
from specdec_cli.serve.request.prompts import encode_text
from specdec_cli.tree_shape import TreeShape

if TYPE_CHECKING:
    from specdec_cli.serve.request.prepare import Facts


@dataclass(frozen=True, slots=True)
class RequestSpeculation:
    """A request's own k, drafter, prediction and tree; None takes the server's."""

    num_speculative_tokens: int | None
    draft: str | None
    prediction: tuple[int, ...] | None
    tree: str | None = None


def find_speculation(request: GenerationBody, facts: Facts, temperature: float) -> RequestSpeculation:
    """The request's speculation. `enabled: false` decodes without a draft, whatever the other fields say.

    Args:
        request: the typed body.
        facts: of the served model.
        temperature: the request's, on which the rule that judges its drafts depends.

    Raises:
        ApiError: 400 naming the field: an unknown draft, too many tokens, a tree that does not fit, two answers to
            one question.
    """
    own = request.speculative or Speculative()
    field, k = _wished_k(request, own, facts)
    if own.draft not in (None, "none", *facts.drafters):
        known = ", ".join(dict.fromkeys((*facts.drafters, "none")))
        raise bad_field(
            "speculative.draft", f"must be one of this server's drafts ({known}), not `{str(own.draft)[:100]}`"
        )
    if own.enabled is False:
        return RequestSpeculation(0, None, None)
    prediction = _prediction(request, own, facts)
    servers = facts.drafters[0] if facts.drafters else "none"
    name = own.draft or (servers if prediction is None else "prediction")
    if name == "prediction" != servers and prediction is None:
        raise bad_field("speculative.draft", "`prediction` needs the field `prediction`")
    if own.tree is not None and k != 0:
        k = _k_of_tree(own.tree, RequestSpeculation(k, own.draft, prediction), facts, temperature)
        field = field or "speculative.tree"
    if k is not None and field is not None:
        _check_reach(field, k, name, facts)
    effective = 0 if name == "none" else facts.num_speculative_tokens if k is None else k
    _check_speculates(request, own, prediction, effective)
    tree = NONE if own.tree is None and "tree" in own.model_fields_set else own.tree
    return RequestSpeculation(0 if name == "none" else k, own.draft, prediction, tree)


def _k_of_tree(tree: str, beside: RequestSpeculation, facts: Facts, temperature: float) -> int | None:
    """The k of a request with a tree of its own: as given, or a static tree's depth.

    Raises:
        ApiError: 400: no shape, too many nodes, or a tree that the drafter, the rule, the depth policy or k does not
            fit.
    """
    field = "speculative.tree"
    try:
        TreeShape.parse(tree)
    except UsageError as error:
        said = f"must be children per depth such as `4,2,1` or `3,2+1`, or `dynamic:N`, of at most {MOST_NODES} nodes"
        raise bad_field(field, f"{said}, not `{tree[:100]}`") from error
    try:
        plan = facts.planner.plan(
            temperature, beside.num_speculative_tokens, None, tree, beside.draft, beside.prediction
        )
    except UsageError as error:
        raise ApiError(400, f"`{field}`: {error.message}", param=field) from error
    num_nodes = plan.k if plan.tree is None else plan.tree.num_nodes(plan.k)
    most = max(facts.limits.max_speculative_tokens, facts.planner.options.most_nodes)
    if num_nodes > most:
        raise bad_field(field, f"must have at most {most} nodes, not `{num_nodes}`")
    return plan.wish


def _check_speculates(request: GenerationBody, own: Speculative, prediction: tuple[int, ...] | None, k: int) -> None:
    """Refuse what asks for speculation where none would take place; a k of 0 that was given asks for none."""
    if k or 0 in (own.num_speculative_tokens, request.speculative_n_max):
        if own.enabled and not k:
            raise bad_field("speculative.enabled", "is true, and `num_speculative_tokens` is `0`: give one of them")
        return
    other = "give `num_speculative_tokens` and, where the server has no draft of its own, `draft`"
    asked = {
        "speculative.num_speculative_tokens": own.num_speculative_tokens,
        "speculative.n_max": request.speculative_n_max,
        "speculative.enabled": own.enabled,
        "speculative.tree": own.tree is not None,
        "speculative.draft": own.draft not in (None, "none"),
        "prediction": prediction is not None,
    }
    field = next((name for name, is_asked in asked.items() if is_asked), None)
    if field is not None:
        raise bad_field(field, f"would draft nothing here: {other}")


def _wished_k(request: GenerationBody, own: Speculative, facts: Facts) -> tuple[str | None, int | None]:
    """The request's k, by either name, and that name; None takes the server's."""
    field, k = "speculative.num_speculative_tokens", own.num_speculative_tokens
    dotted = request.speculative_n_max
    if dotted is not None:
        if k is not None and k != dotted:
            raise bad_field("speculative.n_max", f"is `{dotted}`, and `{field}` is `{k}`: give one of them")
        field, k = "speculative.n_max", dotted
    if k is not None and k > facts.limits.max_speculative_tokens:
        raise bad_field(field, f"must be at most {facts.limits.max_speculative_tokens}, not `{k}`")
    return (None, None) if k is None else (field, k)


def _check_reach(field: str, k: int, draft: str, facts: Facts) -> None:
    """Refuse a depth of the request's own that its draft does not reach.

    Raises:
        ApiError: 400 naming the field.
    """
    drafter = facts.planner.drafters.by_name.get(draft)
    most = None if drafter is None else drafter.most_depth
    if most is not None and k > most:
        raise bad_field(field, f"must be at most {most} tokens deep with the draft `{draft}`, not `{k}`")


def _prediction(request: GenerationBody, own: Speculative, facts: Facts) -> tuple[int, ...] | None:
    """Token ids of the predicted text."""
    if request.prediction is None:
        return None
    text = text_of(request.prediction.content, "prediction.content")
    if not text:
        return None
    if "prediction" not in facts.drafters:
        raise bad_field("prediction", "cannot be used: this server has no draft of that name")
    if own.draft not in (None, "prediction"):
        raise bad_field("prediction", f"cannot go with the draft `{own.draft}`")
    tokens = encode_text(text, "prediction", facts, add_special_tokens=False)
    if len(tokens) > facts.max_context:
        said = f"has {len(tokens)} tokens, and prompt and output have at most {facts.max_context} together"
        raise bad_field("prediction", said)
    return tokens
