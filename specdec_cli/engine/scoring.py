"""Log-probabilities of a given text's tokens under the target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specdec_cli.errors import UsageError
from specdec_cli.events import TokenLogprob
from specdec_cli.lm.door import Row

if TYPE_CHECKING:
    import torch

    from specdec_cli.engine.engine import Engine

_HANDLE = -1  # no sequence's id


def score_prompt(engine: Engine, tokens: Sequence[int], num: int) -> list[TokenLogprob]:
    """Log-probabilities (nats, at temperature 1, no processor applied) of every token after the first.

    It runs between two steps, in pieces of `prefill_chunk`; ask `engine.has_room` first.

    Raises:
        UsageError: more tokens than the target's context, or ids that the vocabulary lacks.
    """
    if len(tokens) > engine.target.max_context:
        raise UsageError(f"the prompt has `{len(tokens)}` tokens, and the context is `{engine.target.max_context}`")
    wrong = next((token for token in tokens if not 0 <= token < engine.num_tokens), None)
    if wrong is not None:
        raise UsageError(f"the prompt names token `{wrong}`, and the vocabulary has `{engine.num_tokens}` tokens")
    logprobs: list[TokenLogprob] = []
    try:
        for begin in range(0, len(tokens), engine.options.prefill_chunk):
            end = min(begin + engine.options.prefill_chunk, len(tokens))
            logits = engine.target.score([Row(_HANDLE, list(tokens[:end]), end - begin)])
            logprobs += _read(logits[:, : engine.num_tokens], tokens[begin + 1 : end + 1], num)
    finally:
        engine.target.release(_HANDLE)
    return logprobs


def _read(logits: torch.Tensor, following: Sequence[int], num: int) -> list[TokenLogprob]:
    """Log-probabilities of the tokens that follow logits [n, V] float32; the last of these may be missing."""
    logprobs = logits.log_softmax(dim=-1)
    best = logprobs.topk(min(num, logprobs.shape[-1]), dim=-1)
    ids, values = best.indices.tolist(), best.values.tolist()
    return [
        TokenLogprob(token, float(logprobs[i, token]), tuple(zip(ids[i], values[i], strict=True)))
        for i, token in enumerate(following)
    ]
