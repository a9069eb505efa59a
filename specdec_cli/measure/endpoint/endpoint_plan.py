"""How a server is measured, and what became of each request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, isnan
from typing import Any

from specdec_cli.engine.prompts import PromptRow
from specdec_cli.errors import UsageError
from specdec_cli.measure.endpoint.address import Address
from specdec_cli.measure.endpoint.answer import Answer
from specdec_cli.measure.endpoint.endpoint import Endpoint
from specdec_cli.measure.endpoint.refusal import EndpointError
from specdec_cli.measure.endpoint.request_fields import MaxTokensField


@dataclass(frozen=True, slots=True)
class EndpointPlan:
    """Server, pace and fields of a run's requests.

    Args:
        address: where it is.
        key: its API key, or None.
        model: the name to ask for; None takes the first that the server lists.
        model_from: source of the model's name, in words.
        chat: prompts are messages.
        concurrency: most requests at a time; None sets no limit to those that arrive at a rate.
        request_rate: conversations that arrive per second; inf sends the next as soon as one has ended.
        seed: of the times at which they arrive.
        repeats: how often every prompt is sent.
        timeout_s: longest silence of the server.
        extra_body: fields of every request beside the benchmark's own.
        max_tokens_field: the field that holds the most tokens of an answer.
        protocol: asks the server; another class than `Endpoint` for a server whose own API tells more.
    """

    address: Address
    key: str | None = field(default=None, repr=False)
    model: str | None = None
    model_from: str = "/v1/models"
    chat: bool = False
    concurrency: int | None = 1
    request_rate: float = inf
    seed: int = 0
    repeats: int = 1
    timeout_s: float = 300.0
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    max_tokens_field: MaxTokensField = "max_tokens"
    protocol: type[Endpoint] = Endpoint

    def __post_init__(self) -> None:
        """Check that something decides when a request is sent."""
        assert self.concurrency is not None or self.has_arrivals, "what does not arrive at a rate needs a limit"

    @property
    def path(self) -> str:
        """Path of requests below the API's address."""
        return "/chat/completions" if self.chat else "/completions"

    @property
    def has_arrivals(self) -> bool:
        """Whether requests arrive at times of their own, whatever the server does (an open loop)."""
        return self.request_rate != inf


def parse_rate(rate: float | None) -> float:
    """Read `--request-rate`; without one, requests are there from the beginning.

    Raises:
        UsageError: it is no positive number.
    """
    if rate is None:
        return inf
    if isnan(rate) or rate <= 0:
        raise UsageError(f"`--request-rate {rate:g}` must be above 0", "requests per second, or inf")
    return rate


def pace_words(concurrency: int | None, rate: float | None) -> str:
    """The pace in words: `4 at a time`, or the arrivals per second."""
    limit = "" if concurrency is None else f"{concurrency} at a time"
    if rate is None or rate == inf:
        return limit
    return f"{rate:g} arriving per second{limit and f', at most {limit}'}"


@dataclass(frozen=True, slots=True)
class Visit:
    """One request and its outcome: an answer, or an error.

    Args:
        row: the prompt, or the conversation that the request is a turn of.
        repeat: which of the row's visits.
        turn: which turn of the conversation, from 1.
        max_tokens: most tokens that were asked for.
        wait_s: from the request's arrival to its sending; 0 where nothing arrives at a time of its own.
        answer: the whole answer, or None.
        error: what went wrong, or None.
    """

    row: PromptRow
    repeat: int
    turn: int = 1
    max_tokens: int = 0
    wait_s: float = 0.0
    answer: Answer | None = None
    error: EndpointError | None = None
