"""A made-up conversation, written by a chat template to see what the template does with tools and calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specdec_cli.errors import UsageError

if TYPE_CHECKING:
    from specdec_cli.text.tokenizer import Tokenizer

CALLED = "probe_called"
"""The function of the made-up call; the declared tool has another name."""
CALL_ID = "000000000"
"""Its id, which a template may write in place of the name."""
SAID = "§probe§"
"""The assistant's text in a turn without a call."""
_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_declared",
        "description": "probe",
        "parameters": {
            "type": "object",
            "properties": {"probe_key": {"type": "string", "description": "probe"}},
            "required": ["probe_key"],
        },
    },
}
_USER = {"role": "user", "content": "probe"}


def written_call(tokenizer: Tokenizer, arguments: Any) -> str | None:
    """A conversation with a call, as the template writes it; None where it refuses the conversation.

    Args:
        tokenizer: has the template.
        arguments: of the call, as the template is given them.
    """
    call = {"id": CALL_ID, "type": "function", "function": {"name": CALLED, "arguments": arguments}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    answer = {"role": "tool", "name": CALLED, "tool_call_id": CALL_ID, "content": "1"}
    written = _write(tokenizer, [_USER, turn])
    return _write(tokenizer, [_USER, turn, answer]) if written is None else written


def written_text(tokenizer: Tokenizer) -> str | None:
    """A conversation in which the assistant says `SAID`."""
    return _write(tokenizer, [_USER, {"role": "assistant", "content": SAID}])


def written_prompt(tokenizer: Tokenizer) -> str | None:
    """A conversation that the assistant is to answer: with the template's instructions about tools, if it has any."""
    return _write(tokenizer, [_USER], generates=True)


def _write(tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], generates: bool = False) -> str | None:
    try:
        return tokenizer.render_chat(messages, generates, tools=[_TOOL])
    except UsageError:
        return None
