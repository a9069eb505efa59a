"""The options of `bench` and `chat` that speak of a server."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from specdec_cli.measure.endpoint.draft_switch import PLAIN_OPTION
from specdec_cli.measure.endpoint.request_fields import MaxTokensField

_PANEL = "Server"
_OWN_VARIABLE = "SPECDEC_API_KEY"
_KEY_VARIABLES = (_OWN_VARIABLE, "OPENAI_API_KEY")


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
PlainEndpoint = Annotated[
    str | None,
    typer.Option(
        PLAIN_OPTION,
        help="The same model without a draft, where --endpoint cannot switch its draft off by request.",
        metavar="URL",
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
class EndpointOptions:
    """The values of these options; None if an option is not given.

    Args:
        url: the server's address.
        concurrency: requests at a time.
        model: the name to ask for.
        timeout_s: longest silence of the server.
        request_rate: requests that arrive per second.
        extra_body: fields to add to every request, as JSON.
        max_tokens_field: the field that holds the most tokens of an answer.
        key: its API key.
    """

    url: str
    concurrency: int | None
    model: str | None
    timeout_s: float | None
    request_rate: float | None
    extra_body: str | None
    max_tokens_field: MaxTokensField | None
    key: str | None = field(repr=False)


def key_of(given: str | None) -> str | None:
    """The server's key: the one given, else a variable's; None where there is none."""
    return next((value for value in (given, *map(_key_in, _KEY_VARIABLES)) if value), None)


def _key_in(variable: str) -> str | None:
    """The key in a variable: the first one if it holds several, as for `serve`."""
    value = os.environ.get(variable, "")
    keys = value.split(",") if variable == _OWN_VARIABLE else [value]
    return next(filter(None, map(str.strip, keys)), None)
