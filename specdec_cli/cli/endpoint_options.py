"""The options of `bench` that speak of a server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import typer

from specdec_cli.errors import UsageError
from specdec_cli.measure.request_fields import MaxTokensField

_PANEL = "A server"

Url = Annotated[
    str | None,
    typer.Option(
        "--endpoint",
        help="Measure this OpenAI-compatible server, whoever made it, in place of an engine here.",
        metavar="URL",
        rich_help_panel=_PANEL,
    ),
]
Concurrency = Annotated[
    int | None,
    typer.Option(
        "--concurrency",
        min=1,
        max=4096,
        help="Most requests to the server at a time.",
        show_default="1; no limit with --request-rate",
        rich_help_panel=_PANEL,
    ),
]
EndpointModel = Annotated[
    str | None,
    typer.Option(
        "--endpoint-model",
        help="The server's name of the model.",
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
        help="Longest silence of the server.",
        metavar="SECONDS",
        show_default="300",
        rich_help_panel=_PANEL,
    ),
]
RequestRate = Annotated[
    float | None,
    typer.Option(
        "--request-rate",
        help="Requests that arrive per second, at random (Poisson, by --seed), whether the server keeps up or not; "
        "--concurrency then limits how many are open. With inf the next is sent when one has ended.",
        metavar="RATE",
        show_default="inf",
        rich_help_panel=_PANEL,
    ),
]
ExtraBody = Annotated[
    str | None,
    typer.Option(
        "--extra-body",
        help="Fields to add to every request; those that the benchmark sets itself are refused.",
        metavar="JSON",
        rich_help_panel=_PANEL,
    ),
]
MaxTokens = Annotated[
    MaxTokensField | None,
    typer.Option(
        "--max-tokens-field",
        help="The field that holds -n/--max-new-tokens.",
        show_default="max_tokens",
        rich_help_panel=_PANEL,
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        help="The server's key, which is never written down.",
        metavar="KEY",
        show_default="SPECDEC_API_KEY, else OPENAI_API_KEY",
        rich_help_panel=_PANEL,
    ),
]


@dataclass(frozen=True, slots=True)
class EndpointWish:
    """What these options ask for; None where one is not given.

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

    def check_alone(self) -> None:
        """Refuse options about a server where none is named.

        Raises:
            UsageError: there is such an option.
        """
        options = {
            "--concurrency": self.concurrency,
            "--endpoint-model": self.model,
            "--endpoint-timeout": self.timeout_s,
            "--request-rate": self.request_rate,
            "--extra-body": self.extra_body,
            "--max-tokens-field": self.max_tokens_field,
            "--api-key": self.key,
        }
        given = next((name for name, value in options.items() if value is not None), None)
        if self.url is None and given is not None:
            raise UsageError(f"`{given}` has no effect without --endpoint", "name the server: --endpoint URL")
