"""Which tools a chat request may call, how their calls are read, and what grammar forces them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from specdec_cli.serve.constraint import Constraint, force_tools
from specdec_cli.serve.errors import bad_field
from specdec_cli.serve.limits import RequestLimits
from specdec_cli.serve.protocol import ChatCompletionRequest, NamedTool, Tool
from specdec_cli.serve.tools.formats import PARSERS, find_format
from specdec_cli.serve.tools.strict_calls import constrain_strict
from specdec_cli.serve.tools.tools import Format, ToolPlan

if TYPE_CHECKING:
    from specdec_cli.recipe.schema import ToolCallParser
    from specdec_cli.text.tokenizer import Tokenizer


def choose_tools(
    request: ChatCompletionRequest, parser: ToolCallParser | None, tokenizer: Tokenizer | None, limits: RequestLimits
) -> tuple[ToolPlan | None, Constraint | None]:
    """How a request's tool calls are read, and the grammar of forced and strict ones; None for one without tools.

    Args:
        request: the typed body.
        parser: the server's format; None takes the chat template's.
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
    _check_names(tools, limits)
    if choice == "none":
        return None, None
    form = model_format(parser, tokenizer)
    schemas = {tool.function.name: tool.function.parameters or {} for tool in tools}
    plan = ToolPlan(
        "required",
        schemas,
        request.parallel_tool_calls is False,
        ids="short" if form == "mistral" else "numbered" if form == "kimi_k2" else "long",
        num_earlier=sum(len(message.tool_calls or ()) for message in request.messages),
    )
    if isinstance(choice, NamedTool):
        name = choice.function.name
        if name not in schemas:
            raise bad_field("tool_choice.function.name", f"must be one of `tools`, not `{name[:100]}`")
        named = replace(plan, form="named", schemas={name: schemas[name]})
        return named, force_tools(tools, name, plan.only_one)
    if choice == "required":
        return plan, force_tools(tools, None, plan.only_one)
    if form is None:
        said = "cannot be used: the model's chat template writes no tool calls of a known format"
        raise bad_field(
            "tools", f"{said}; start the server with --tool-call-parser, or force a call with `tool_choice`"
        )
    strict = None if tokenizer is None else constrain_strict(form, tools, tokenizer, plan.only_one)
    return replace(plan, form=form), strict


def model_format(parser: ToolCallParser | None, tokenizer: Tokenizer | None) -> Format | None:
    """The format of the model's tool calls; None if none is named and the chat template writes no known one."""
    if parser is not None:
        return PARSERS[parser]
    return None if tokenizer is None else find_format(tokenizer, tokenizer.chat_template)


def _check_names(tools: list[Tool], limits: RequestLimits) -> None:
    if len(tools) > limits.max_tools:
        raise bad_field("tools", f"has `{len(tools)}` entries, and at most {limits.max_tools} are taken")
    names = tuple(tool.function.name for tool in tools)
    twice = next((i for i, name in enumerate(names) if name in names[:i]), None)
    if twice is not None:
        raise bad_field(f"tools[{twice}].function.name", f"is the name of two tools: `{names[twice]}`")
