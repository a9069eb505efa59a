"""The options of `bench` and `chat` that speak of a server."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec_cli.errors import UsageError
from specdec_cli.measure.endpoint.request_fields import MaxTokensField

if TYPE_CHECKING:
    from specdec_cli.cli.options import Option

_PANEL = "Server"
_OWN_VARIABLE = "SPECDEC_API_KEY"
_KEY_VARIABLES = (_OWN_VARIABLE, "OPENAI_API_KEY")
_OF_A_RESULT = ("markdown", "csv", "junit", "plot", "html")
"""Parameters that name further files of a result."""


def url_option(help_text: str) -> Any:
    """The option `--endpoint` of a command, which says what the command does with a server."""
    return typer.Option("--endpoint", help=help_text, metavar="URL", rich_help_panel=_PANEL)


Concurrency = Annotated[
    int | None,
    typer.Option(
        "--concurrency",
        min=1,
        max=4096,
        help="Maximum number of concurrent requests to the server.",
        show_default="1; no limit with --request-rate",
        rich_help_panel=_PANEL,
    ),
]
EndpointModel = Annotated[
    str | None,
    typer.Option(
        "--endpoint-model",
        help="Model name to request from the server.",
        metavar="NAME",
        show_default="--target, else the first that it lists",
        rich_help_panel=_PANEL,
    ),
]
EndpointTimeout = Annotated[
    float | None,
    typer.Option(
        "--endpoint-timeout",
        min=0.001,
        help="Give up when the server sends nothing for this long.",
        metavar="SECONDS",
        show_default="300",
        rich_help_panel=_PANEL,
    ),
]
RequestRate = Annotated[
    float | None,
    typer.Option(
        "--request-rate",
        help="Requests per second, arriving at random (Poisson, by --seed) whether the server keeps up or not. "
        "--concurrency then limits how many are open. With inf, a new request is sent whenever one ends.",
        metavar="RATE",
        show_default="inf",
        rich_help_panel=_PANEL,
    ),
]
ExtraBody = Annotated[
    str | None,
    typer.Option(
        "--extra-body",
        help="Fields to add to every request. Fields that the benchmark sets itself are refused.",
        metavar="JSON",
        rich_help_panel=_PANEL,
    ),
]
MaxTokens = Annotated[
    MaxTokensField | None,
    typer.Option(
        "--max-tokens-field",
        help="Request field for -n/--max-new-tokens.",
        show_default="max_tokens",
        rich_help_panel=_PANEL,
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        help="API key for the server. It is never stored.",
        metavar="KEY",
        show_default="SPECDEC_API_KEY, else OPENAI_API_KEY",
        rich_help_panel=_PANEL,
    ),
]


@dataclass(frozen=True, slots=True)
class EndpointWish:
    """The values of these options; None if an option is not given.

    Args:
        url: the server's address; None measures no server.
        concurrency: requests at a time.
        model: the name to ask for.
        timeout_s: longest silence of the server.
        request_rate: requests that arrive per second.
        extra_body: fields to add to every request, as JSON.
        max_tokens_field: the field that holds the most tokens of an answer.
        key: its API key.
    """

    url: str | None
    concurrency: int | None
    model: str | None
    timeout_s: float | None
    request_rate: float | None
    extra_body: str | None
    max_tokens_field: MaxTokensField | None
    key: str | None = field(repr=False)


def refuse_without_server(context: typer.Context, url: str | None) -> None:
    """Refuse options about a server where none is named.

    Raises:
        UsageError: there is such an option.
    """
    given = (_flag(one) for one in _given(context) if getattr(one, "rich_help_panel", None) == _PANEL)
    if url is None and (flag := next(given, None)) is not None:
        raise UsageError(f"`{flag}` has no effect without --endpoint", "name the server: --endpoint URL")


def key_of(given: str | None) -> str | None:
    """The server's key: the one given, else a variable's; None where there is none."""
    return next((value for value in (given, *map(_key_in, _KEY_VARIABLES)) if value), None)


def _key_in(variable: str) -> str | None:
    """The key in a variable: the first one if it holds several, as for `serve`."""
    value = os.environ.get(variable, "")
    keys = value.split(",") if variable == _OWN_VARIABLE else [value]
    return next(filter(None, map(str.strip, keys)), None)


def refuse_others(
    context: typer.Context,
    options: Iterable[Option],
    own: Collection[str],
    paths: Collection[str],
    sections: tuple[str, ...],
    with_what: str = "--endpoint",
    why: str = "only prompts and sampling are sent to a server",
    hint: str = "leave it out; set it when you start the server",
) -> None:
    """Refuse an option of the command line that is never sent to a server: draft, k, dtype, devices.

    Args:
        context: the command line.
        options: the recipe's options that the command takes.
        own: the command's own parameters that say something to a server.
        paths: the same for keys of the recipe and fields of `Shared`.
        sections: the same for sections of the recipe, each with its dot.
        with_what: the option that sends the work elsewhere.
        why: the reason, for people.
        hint: what to do about a key of the recipe.

    Raises:
        UsageError: there is such an option.
    """
    path_of = {option.parameter: option.path for option in options}
    for parameter in _given(context):
        path = path_of.get(parameter.name, "")
        if parameter.name not in own and path not in paths and not path.startswith(sections):
            reason, advice = why, hint if path else "leave it out"
            if parameter.name in _OF_A_RESULT:
                reason, advice = "the result is written as JSON alone", "leave it out; --output FILE writes the result"
            raise UsageError(f"`{_flag(parameter)}` has no effect with {with_what}: {reason}", advice)


def _given(context: typer.Context) -> Iterator[Any]:
    """The command's parameters that the command line gives."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "COMMANDLINE":
            yield parameter


def _flag(parameter: Any) -> str:
    return next((word for word in parameter.opts if word.startswith("--")), str(parameter.name))
