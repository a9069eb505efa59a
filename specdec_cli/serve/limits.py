"""How much one request may ask for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Bounds of one request; each is refused with a 400 that names the field.

    Args:
        max_body_bytes: of the JSON body.
        max_json_depth: objects and lists inside each other.
        max_choices: prompts × n.
        max_logprobs: alternatives beside each token.
        max_stop: stop strings, and stop token ids.
        max_stop_chars: characters of a stop string.
        max_logit_bias: entries of logit_bias.
        max_messages: turns of a conversation.
        max_tools: functions.
        max_grammar_bytes: of a JSON schema, a regular expression, a grammar, or all choices together.
        max_speculative_tokens: k that a request may ask for, and nodes of its tree.
    """

    max_body_bytes: int = 4 * 2**20
    max_json_depth: int = 64
    max_choices: int = 64
    max_logprobs: int = 20
    max_stop: int = 16
    max_stop_chars: int = 1024
    max_logit_bias: int = 1024
    max_messages: int = 4096
    max_tools: int = 128
    max_grammar_bytes: int = 64 * 2**10
    max_speculative_tokens: int = 32
