"""How a request speculates: vLLM's and llama-server's fields, OpenAI's `prediction`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specdec_cli.drafted import MOST_NODES
from specdec_cli.engine.drafting import NONE
from specdec_cli.errors import UsageError
from specdec_cli.quantities import counted
from specdec_cli.serve.errors import ApiError, bad_field
from specdec_cli.serve.protocol import GenerationBody, Speculative
from specdec_cli.serve.request.conversation import text_of
from specdec_cli.serve.request.prompts import encode_text
from specdec_cli.tree_shape import TreeShape

if TYPE_CHECKING:
    from specdec_cli.serve.request.prepare import ModelInfo


def find_speculation(request: GenerationBody, model: ModelInfo, temperature: float) -> dict[str, Any]:
    """Fields of a `Job`: a request's own k, draft, prediction and tree; None takes the server's.

    `enabled: false` decodes without a draft.

    Args:
        request: the typed body.
        model: the served model.
        temperature: the request's, on which the rule that judges its drafts depends.

    Raises:
        ApiError: 400 naming the field: an unknown draft, too many tokens, a tree that does not fit, two answers to
            one question.
    """
    own = request.speculative or Speculative()
    field, k = _requested_k(request, own, model)
    if own.draft not in (None, "none", *model.drafters):
        known = ", ".join(dict.fromkeys((*model.drafters, "none")))
        raise bad_field(
            "speculative.draft", f"must be one of this server's drafts ({known}), not `{str(own.draft)[:100]}`"
        )
    if own.enabled is False:
        if own.num_speculative_tokens:
            raise bad_field("speculative.enabled", f"is false, and `num_speculative_tokens` is `{k}`: give one of them")
        return {"num_speculative_tokens": 0}
    prediction = _prediction(request, own, model)
    servers = model.drafters[0] if model.drafters else "none"
    name = own.draft or (servers if prediction is None else "prediction")
    if name == "prediction" != servers and prediction is None:
        raise bad_field("speculative.draft", "`prediction` needs the field `prediction`")
    if own.tree is not None and k != 0:
        k = _k_of_tree(own.tree, k, own.draft, prediction, model, temperature)
        field = field or "speculative.tree"
    if k is not None and field is not None:
        _check_reach(field, k, name, model)
    effective = 0 if name == "none" else model.num_speculative_tokens if k is None else k
    _check_speculates(request, own, prediction, effective)
    tree = NONE if own.tree is None and "tree" in own.model_fields_set else own.tree
    k = 0 if name == "none" else k
    return {"num_speculative_tokens": k, "draft": own.draft, "prediction": prediction, "tree": tree}


def _k_of_tree(
    tree: str,
    k: int | None,
    draft: str | None,
    prediction: tuple[int, ...] | None,
    model: ModelInfo,
    temperature: float,
) -> int | None:
    """The k of a request with a tree of its own: as given, or a static tree's depth.

    Raises:
        ApiError: 400: no shape, too many nodes, or a tree that the drafter, the rule, the depth policy or k does not
            fit.
    """
    field = "speculative.tree"
    try:
        TreeShape.parse(tree)
    except UsageError as error:
        message = (
            f"must be children per depth such as `4,2,1` or `3,2+1`, or `dynamic:N`, of at most {MOST_NODES} nodes"
        )
        raise bad_field(field, f"{message}, not `{tree[:100]}`") from error
    try:
        plan = model.planner.plan(temperature, k, None, tree, draft, prediction)
    except UsageError as error:
        raise ApiError(400, f"`{field}`: {error.message}", param=field) from error
    num_nodes = plan.k if plan.tree is None else plan.tree.num_nodes(plan.k)
    most = max(model.serve.max_speculative_tokens, model.planner.options.most_nodes)
    if num_nodes > most:
        raise bad_field(field, f"must have at most {most} nodes, not `{num_nodes}`")
    return plan.own_k


def _check_speculates(request: GenerationBody, own: Speculative, prediction: tuple[int, ...] | None, k: int) -> None:
    """Refuse what asks for speculation where none would take place; a k of 0 that was given asks for none."""
    if k or 0 in (own.num_speculative_tokens, request.speculative_n_max):
        if own.enabled and not k:
            raise bad_field("speculative.enabled", "is true, and `num_speculative_tokens` is `0`: give one of them")
        return
    other = "give `num_speculative_tokens` and, where the server has no draft of its own, `draft`"
    requested = {
        "speculative.num_speculative_tokens": own.num_speculative_tokens,
        "speculative.n_max": request.speculative_n_max,
        "speculative.enabled": own.enabled,
        "speculative.tree": own.tree is not None,
        "speculative.draft": own.draft not in (None, "none"),
        "prediction": prediction is not None,
    }
    field = next((name for name, is_asked in requested.items() if is_asked), None)
    if field is not None:
        raise bad_field(field, f"would draft nothing here: {other}")


def _requested_k(request: GenerationBody, own: Speculative, model: ModelInfo) -> tuple[str | None, int | None]:
    """The request's k, by either name, and that name; None takes the server's."""
    field, k = "speculative.num_speculative_tokens", own.num_speculative_tokens
    dotted = request.speculative_n_max
    if dotted is not None:
        if k is not None and k != dotted:
            raise bad_field("speculative.n_max", f"is `{dotted}`, and `{field}` is `{k}`: give one of them")
        field, k = "speculative.n_max", dotted
    if k is not None and k > model.serve.max_speculative_tokens:
        raise bad_field(field, f"must be at most {model.serve.max_speculative_tokens}, not `{k}`")
    return (None, None) if k is None else (field, k)


def _check_reach(field: str, k: int, draft: str, model: ModelInfo) -> None:
    """Refuse a depth of the request's own that its draft does not reach.

    Raises:
        ApiError: 400 naming the field.
    """
    drafter = model.planner.drafters.by_name.get(draft)
    most = None if drafter is None else drafter.most_depth
    if most is not None and k > most:
        raise bad_field(field, f"must be at most {counted(most, 'token')} deep with the draft `{draft}`, not `{k}`")


def _prediction(request: GenerationBody, own: Speculative, model: ModelInfo) -> tuple[int, ...] | None:
    """Token ids of the predicted text."""
    if request.prediction is None:
        return None
    text = text_of(request.prediction.content, "prediction.content")
    if not text:
        return None
    if "prediction" not in model.drafters:
        raise bad_field("prediction", "cannot be used: this server has no draft of that name")
    if own.draft not in (None, "prediction"):
        raise bad_field("prediction", f"cannot go with the draft `{own.draft}`")
    tokens = encode_text(text, "prediction", model, add_special_tokens=False)
    if len(tokens) > model.max_context:
        message = f"has {len(tokens)} tokens, and prompt and output have at most {model.max_context} together"
        raise bad_field("prediction", message)
    return tokens
