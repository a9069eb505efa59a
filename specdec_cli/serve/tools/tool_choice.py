"""Which tools a chat request may call, how their calls are read, and what grammar forces them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from specdec_cli.serve.constraint import Constraint, force_tools
from specdec_cli.serve.errors import bad_field
from specdec_cli.serve.protocol import ChatCompletionRequest, NamedTool, Tool, allows_objects
from specdec_cli.serve.tools.formats import FORMATS
from specdec_cli.serve.tools.parser import ToolPlan
from specdec_cli.serve.tools.strict_calls import constrain_strict

if TYPE_CHECKING:
    from specdec_cli.serve.request.prepare import ModelInfo


def choose_tools(request: ChatCompletionRequest, model: ModelInfo) -> tuple[ToolPlan | None, Constraint | None]:
    """How a request's tool calls are read, and the grammar of forced and strict ones; None for one without tools.

    Raises:
        ApiError: 400 naming the field: a choice without tools, a name that is no tool's or two tools', a model whose
            template has no tool calls.
    """
    tools, choice = request.tools or [], request.tool_choice
    if not tools:
        if choice not in (None, "none"):
            raise bad_field("tool_choice", "needs `tools`")
        return None, None
    _check_tools(tools)
    if choice == "none":
        return None, None
    form = model.tool_call_format
    schemas = {tool.function.name: tool.function.parameters or {} for tool in tools}
    plan = ToolPlan(
        "required",
        schemas,
        request.parallel_tool_calls is False,
        ids="long" if form is None else FORMATS[form].ids,
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
        message = "cannot be used: the model's chat template writes no tool calls of a known format"
        raise bad_field(
            "tools", f"{message}; start the server with --tool-call-parser, or force a call with `tool_choice`"
        )
    tokenizer = model.tokenizer
    strict = None if tokenizer is None else constrain_strict(form, tools, tokenizer, plan.only_one)
    return replace(plan, form=form), strict


def _check_tools(tools: list[Tool]) -> None:
    for i, tool in enumerate(tools):
        if not allows_objects(tool.function.parameters or {}):
            message = "must be a schema of `type: object`: a function's arguments are an object"
            raise bad_field(f"tools[{i}].function.parameters", message)
    names = tuple(tool.function.name for tool in tools)
    twice = next((i for i, name in enumerate(names) if name in names[:i]), None)
    if twice is not None:
        raise bad_field(f"tools[{twice}].function.name", f"is the name of two tools: `{names[twice]}`")
