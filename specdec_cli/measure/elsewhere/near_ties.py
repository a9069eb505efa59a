"""Where another engine's greedy text with a draft leaves its own text without one: is it a near tie?

The engine is asked again for the one token behind the prefix that both have, with its log-probabilities. A forward over
k + 1 rows rounds otherwise than one over a single row, so two tokens of almost the same probability may change places.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdec_cli.document import Count, Seconds, computed
from specdec_cli.engine.outputs import first_difference

if TYPE_CHECKING:
    from specdec_cli.engine.decoding import Request
    from specdec_cli.measure.bench.passes import Track
    from specdec_cli.measure.elsewhere.server_arm import ServerArm

NEAR_NATS = 0.05
"""Two tokens whose log-probabilities are this close may change places: bfloat16 keeps 8 bits of a logit."""
_MOST = 16
_ALTERNATIVES = 5


@dataclass(frozen=True, slots=True)
class LeftText:
    """The first token in which an output with a draft differs from the one without.

    Args:
        arm: the draft's.
        index: of the prompt.
        position: of the token in the output, from 0.
        gap_nats: log-probability of the likeliest token over the other one's; None where the engine does not tell.
    """

    arm: str
    index: Count
    position: Count
    gap_nats: Seconds | None

    @computed
    def near_tie(self) -> bool:
        """Whether both tokens were about as likely."""
        return self.gap_nats is not None and self.gap_nats <= NEAR_NATS


def left_texts(arm: ServerArm, draft: Track, plain: Track) -> list[LeftText]:
    """The outputs of the first repeat that differ, at most a few, each with the engine's own probabilities.

    Raises:
        RunError: the engine does not answer.
    """
    from specdec_cli.measure.bench.passes import compared_outputs

    left: list[LeftText] = []
    seen: set[int] = set()
    for request, got, want in compared_outputs([draft], plain):
        place, index = first_difference(got, want), request.row.index
        if place is not None and index not in seen and place < min(len(got), len(want)) and len(left) < _MOST:
            gap = _gap(arm, request, want[:place], (got[place], want[place]))
            left.append(LeftText(draft.name, index, place, gap))
        seen.add(index)
    return left


def words(left: list[LeftText]) -> list[str]:
    """A sentence about each text."""
    where = "prompt {} leaves the plain text at token {}: {}"
    return [where.format(text.index + 1, text.position + 1, _why(text)) for text in left]


def _why(text: LeftText) -> str:
    if text.gap_nats is None:
        return "the engine does not tell how likely the two tokens are"
    kind = "a near tie" if text.near_tie else "NO near tie"
    return f"{kind}, the two tokens are {text.gap_nats:.4f} nats apart"


def _gap(arm: ServerArm, request: Request, prefix: tuple[int, ...], tokens: tuple[int, int]) -> float | None:
    """How far apart two tokens are behind a prompt and a prefix, in nats; None where the engine does not tell."""
    asked = {"max_tokens": 1, "return_token_ids": True}
    prompt = arm.prompt_ids(request.row)
    if prompt is None:
        return None
    more = {"logprobs": _ALTERNATIVES, "return_tokens_as_token_ids": True}
    answer = arm.whole("/completions", {"prompt": [*prompt, *prefix], **asked, **more})
    logprobs = (answer["choices"][0].get("logprobs") or {}).get("top_logprobs") or [{}]
    known = [logprobs[0].get(f"token_id:{token}") for token in tokens]
    first, second = known
    return None if first is None or second is None else abs(float(first) - float(second))
