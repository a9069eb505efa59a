"""How a request speculates: vLLM's and llama-server's fields, OpenAI's `prediction`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdec_cli.serve.errors import bad_field
from specdec_cli.serve.protocol import GenerationBody, Speculative
from specdec_cli.serve.request.conversation import text_of

if TYPE_CHECKING:
    from specdec_cli.serve.request.prepare import Facts


@dataclass(frozen=True, slots=True)
class RequestSpeculation:
    """A request's own k, drafter and prediction; None takes the server's."""

    num_speculative_tokens: int | None
    draft: str | None
    prediction: tuple[int, ...] | None


def find_speculation(request: GenerationBody, facts: Facts) -> RequestSpeculation:
    """The request's speculation. `enabled: false` decodes without a draft, whatever the other fields say.

    Raises:
        ApiError: 400 naming the field: an unknown draft, too many tokens, two answers to one question.
    """
    own = request.speculative or Speculative()
    k = _wished_k(request, own, facts)
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
    effective = 0 if name == "none" else facts.num_speculative_tokens if k is None else k
    _check_speculates(request, own, prediction, effective)
    return RequestSpeculation(0 if name == "none" else k, own.draft, prediction)


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
        "speculative.draft": own.draft not in (None, "none"),
        "prediction": prediction is not None,
    }
    field = next((name for name, is_asked in asked.items() if is_asked), None)
    if field is not None:
        raise bad_field(field, f"would draft nothing here: {other}")


def _wished_k(request: GenerationBody, own: Speculative, facts: Facts) -> int | None:
    """The request's k, by either name; None takes the server's."""
    field, k = "speculative.num_speculative_tokens", own.num_speculative_tokens
    dotted = request.speculative_n_max
    if dotted is not None:
        if k is not None and k != dotted:
            raise bad_field("speculative.n_max", f"is `{dotted}`, and `{field}` is `{k}`: give one of them")
        field, k = "speculative.n_max", dotted
    if k is not None and k > facts.limits.max_speculative_tokens:
        raise bad_field(field, f"must be at most {facts.limits.max_speculative_tokens}, not `{k}`")
    return k


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
    if facts.tokenizer is None:
        raise bad_field("prediction", "needs a tokenizer, and the model has none")
    tokens = tuple(facts.tokenizer.encode(text, add_special_tokens=False))
    if len(tokens) > facts.max_context:
        said = f"has {len(tokens)} tokens, and prompt and output have at most {facts.max_context} together"
        raise bad_field("prediction", said)
    return tokens
