"""Which tools a chat request may call, how their calls are read, and what grammar forces them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec_cli.serve.constraint import Constraint, force_tools
from specdec_cli.serve.errors import bad_field
from specdec_cli.serve.limits import RequestLimits
from specdec_cli.serve.protocol import ChatCompletionRequest, NamedTool, Tool
from specdec_cli.serve.tools import Format, ToolPlan, find_format

if TYPE_CHECKING:
    from specdec_cli.text.tokenizer import Tokenizer


def choose_tools(
    request: ChatCompletionRequest, tool_format: Format | None, tokenizer: Tokenizer | None, limits: RequestLimits
) -> tuple[ToolPlan | None, Constraint | None]:
    """How a request's tool calls are read, and the grammar of forced ones; None for a request without tools.

    Args:
        request: the typed body.
        tool_format: the server's; None takes the chat template's.
        tokenizer: of the model.
        limits: on the number of tools.

    Raises:
        ApiError: 400 naming the field: a choice without tools, a name that is no tool's or two tools', a model whose
            template has no tool calls.
    """
    tools, choice = request.tools or [], request.tool_choice
    if not tools:
        if choice not in (None, "none"):
            raise bad_field("tool_choice", "needs `tools`")
        return None, None
    names = _names(tools, limits)
    if choice == "none":
        return None, None
    only_one = request.parallel_tool_calls is False
    if isinstance(choice, NamedTool):
        name = choice.function.name
        if name not in names:
            raise bad_field("tool_choice.function.name", f"must be one of `tools`, not `{name[:100]}`")
        return ToolPlan("named", (name,), only_one), force_tools(tools, name, only_one)
    if choice == "required":
        return ToolPlan("required", names, only_one), force_tools(tools, None, only_one)
    return ToolPlan(_format(tool_format, tokenizer), names, only_one), None


def _names(tools: list[Tool], limits: RequestLimits) -> tuple[str, ...]:
    if len(tools) > limits.max_tools:
        raise bad_field("tools", f"has `{len(tools)}` entries, and at most {limits.max_tools} are taken")
    names = tuple(tool.function.name for tool in tools)
    twice = next((i for i, name in enumerate(names) if name in names[:i]), None)
    if twice is not None:
        raise bad_field(f"tools[{twice}].function.name", f"is the name of two tools: `{names[twice]}`")
    return names


def _format(tool_format: Format | None, tokenizer: Tokenizer | None) -> Format:
    if tool_format is not None:
        return tool_format
    found = None if tokenizer is None else find_format(tokenizer.chat_template)
    if found is None:
        raise bad_field("tools", "cannot be used: the model's chat template knows no tool calls of a known format")
    return found
