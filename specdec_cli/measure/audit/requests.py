"""The audit of a server: does each request get the same answer with the draft as without, at temperature 0?

Both answers come with their log-probabilities. Where they part, two tokens of almost the same probability are a near
tie, which rounding decides in every engine; anything else is damage.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from specdec_cli.engine.driver import never
from specdec_cli.errors import GateError, UsageError
from specdec_cli.files import RepeatedKeyError, given_path, parse_json, read_text
from specdec_cli.measure.documents.request_audit import AnswerDifference, DifferenceClass, KindResult, RequestKind
from specdec_cli.measure.elsewhere.near_ties import NEAR_NATS
from specdec_cli.measure.endpoint.draft_switch import check_plain, without_draft
from specdec_cli.measure.endpoint.endpoint_arm import EndpointArm
from specdec_cli.measure.endpoint.refusal import EndpointError
from specdec_cli.measure.endpoint.request_counts import request_counts
from specdec_cli.measure.endpoint.server_counts import ACCEPTED, DRAFTED

_JSON_FIELDS = ("guided_json", "guided_json_object", "json_schema", "schema", "format")
_GRAMMAR_FIELDS = (
    *("guided_regex", "guided_choice", "guided_grammar", "regex", "ebnf", "grammar", "structural_tag"),
    *("grammar_string", "regex_pattern"),
)
_OWNED = ("model", "stream", "stream_options", "logprobs", "top_logprobs")
_ALTERNATIVES = 5
_MOST_SHOWN = 160
_EXAMPLE = 'one JSON object per line: {"messages": […], "tools": […]}'


@dataclass(frozen=True, slots=True)
class AuditRequest:
    """A request whose answers are compared.

    Args:
        index: its place, from 0.
        id: its own name, if it has one.
        body: as the server gets it, without model, stream and log-probabilities.
    """

    index: int
    id: str | int | None
    body: Mapping[str, Any]

    @property
    def is_chat(self) -> bool:
        """Whether it is a conversation."""
        return "messages" in self.body

    @property
    def kind(self) -> RequestKind:
        """The form that its answer must have."""
        body, form = self.body, self.body.get("response_format")
        outputs = body.get("structured_outputs")
        if body.get("tools") and body.get("tool_choice") != "none":
            return "tool calls"
        form_type = form.get("type") if isinstance(form, Mapping) else None
        inner = outputs if isinstance(outputs, Mapping) else {}
        if form_type in ("json_object", "json_schema", "json") or {"json", "json_object"} & inner.keys():
            return "JSON"
        if any(body.get(name) for name in _JSON_FIELDS):
            return "JSON"
        is_bound = bool(inner) or form_type in ("regex", "grammar", "ebnf")
        return "grammar" if is_bound or any(body.get(name) for name in _GRAMMAR_FIELDS) else "text"


def read_requests(name: str) -> list[AuditRequest]:
    """The requests of a file: bodies of chat completions or completions, or lines of OpenAI's batch files.

    Raises:
        UsageError: it cannot be read, or a line is no such request.
    """
    lines = read_text(given_path(name), f"`{name}`").split("\n")
    requests: list[AuditRequest] = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            requests.append(_request(line, f"line {number} of `{name}`", len(requests)))
    if not requests:
        raise UsageError(f"`{name}` holds no request", _EXAMPLE)
    return requests


def _request(line: str, where: str, index: int) -> AuditRequest:
    try:
        row = parse_json(line)
    except RepeatedKeyError as error:
        raise UsageError(f"{where} has the key `{error}` twice", "keep one of them") from None
    except (ValueError, RecursionError):
        raise UsageError(f"{where} is not JSON", _EXAMPLE) from None
    body = row.get("body", row) if isinstance(row, dict) else None
    if not isinstance(body, dict) or not ("messages" in body or "prompt" in body):
        raise UsageError(f"{where} is no request: it has neither `messages` nor `prompt`", _EXAMPLE)
    if body.get("temperature"):
        hint = "leave it out: requests are compared at temperature 0"
        raise UsageError(f"{where} has `temperature: {body['temperature']}`", hint)
    if (body.get("n") or 1) != 1:
        raise UsageError(f"{where} asks for {body['n']} answers", "leave `n` out: one answer is compared")
    own = next((row[key] for key in ("custom_id", "id") if isinstance(row.get(key), str | int)), None)
    sent = {key: value for key, value in body.items() if key not in (*_OWNED, "id")}
    return AuditRequest(index, own, sent | {"temperature": 0})


@dataclass(slots=True)
class RequestAudit:
    """The comparison of two servers, or of one with and without its draft.

    Args:
        draft: the server with the draft.
        plain: the one without; the same where requests switch their draft off.
        requests: what both are asked.
        source: of the requests, for people.
        watch: called with the requests done and in all.
        stopped: whether to ask no more.

    Attributes:
        by_kind: results by the form that the answers must have.
        differences: requests with different answers.
        num_draft_tokens: drafted for the answers with the draft; None where the server does not tell.
        num_accepted_tokens: likewise.
        notices: sentences about what the comparison rests on.
        seconds: how long it took.
    """

    draft: EndpointArm
    plain: EndpointArm
    requests: Sequence[AuditRequest]
    source: str
    watch: Callable[[int, int], None]
    stopped: Callable[[], bool] = never
    by_kind: dict[str, KindResult] = field(init=False, default_factory=dict)
    differences: list[AnswerDifference] = field(init=False, default_factory=list)
    num_draft_tokens: int | None = field(init=False, default=None)
    num_accepted_tokens: int | None = field(init=False, default=None)
    notices: list[str] = field(init=False, default_factory=list)
    seconds: float = field(init=False, default=0.0)
    _has_logprobs: bool = field(init=False, default=True)

    @property
    def num_compared(self) -> int:
        """Requests whose answers were compared."""
        return sum(kind.requests for kind in self.by_kind.values())

    @property
    def passed(self) -> bool:
        """Whether every difference is a near tie."""
        return all(each.difference == "near-tie" for each in self.differences)

    def gate(self) -> None:
        """Raise on any difference that is no near tie.

        Raises:
            GateError: there is one.
        """
        odd = [each for each in self.differences if each.difference != "near-tie"]
        if odd:
            message = f"{len(odd)} of {self.num_compared} answers differ with the draft, and not at a near tie"
            raise GateError(f"the audit found a difference: {message}", "the report names each request and the tokens")

    def run(self) -> None:
        """Ask for every answer twice, one request at a time, until it is stopped.

        Raises:
            RunError: a request fails without the draft, or a server cannot switch its draft off.
        """
        begin = perf_counter()
        self._without_draft()
        for request in self.requests:
            if self.stopped():
                break
            self._compare(request)
            self.watch(self.num_compared, len(self.requests))
        self._note()
        self.seconds = perf_counter() - begin

    def _without_draft(self) -> Mapping[str, Any]:
        """Fields of the plain requests.

        Raises:
            RunError: the server has no switch.
        """
        return {} if self.plain is not self.draft else without_draft(self.draft)

    def _compare(self, request: AuditRequest) -> None:
        plain = _Outcome(request, self._ask(self.plain, request, self._without_draft()))
        check_plain(self.plain, plain.num_drafted)
        kind = self.by_kind.setdefault(request.kind, KindResult())
        kind.requests += 1
        try:
            draft = _Outcome(request, self._ask(self.draft, request, {}))
        except EndpointError as error:
            if error.is_gone:
                raise
            self._differ(kind, request, ("damage", None, None), error.message, plain.words)
            return
        self._count(draft)
        if plain.is_valid is not None and draft.is_valid is not None:
            kind.checked += 1
            kind.valid_with_draft += draft.is_valid
            kind.valid_without += plain.is_valid
        if draft.result == plain.result:
            kind.equal += 1
            return
        self._differ(kind, request, _parting(plain, draft), draft.words, plain.words)

    def _ask(self, arm: EndpointArm, request: AuditRequest, more: Mapping[str, Any]) -> dict[str, Any]:
        path = "/chat/completions" if request.is_chat else "/completions"
        logprobs = {"logprobs": True, "top_logprobs": _ALTERNATIVES} if request.is_chat else {"logprobs": _ALTERNATIVES}
        if self._has_logprobs:
            try:
                return arm.whole(path, {**request.body, **more, **logprobs})
            except EndpointError as error:
                if error.status != 400 or "logprobs" not in error.message:
                    raise
                self._has_logprobs = False
        return arm.whole(path, {**request.body, **more})

    def _differ(
        self,
        kind: KindResult,
        request: AuditRequest,
        how: tuple[DifferenceClass, int | None, float | None],
        with_draft: str,
        without: str,
    ) -> None:
        found, position, gap = how
        counter = {"near-tie": "near_ties", "damage": "damaged", "unknown": "unknown"}[found]
        setattr(kind, counter, getattr(kind, counter) + 1)
        self.differences.append(
            AnswerDifference(
                index=request.index,
                id=request.id,
                kind=request.kind,
                difference=found,
                position=position,
                gap_nats=gap,
                with_draft=with_draft,
                without=without,
            )
        )

    def _count(self, draft: _Outcome) -> None:
        if draft.counts is not None:
            self.num_draft_tokens = (self.num_draft_tokens or 0) + draft.counts[DRAFTED]
            self.num_accepted_tokens = (self.num_accepted_tokens or 0) + draft.counts[ACCEPTED]

    def _note(self) -> None:
        if self.num_draft_tokens == 0:
            self.notices.append("nothing was drafted, so equality says little")
        elif self.num_draft_tokens is None:
            self.notices.append("the server does not tell how much it drafted: equality says little if it was nothing")
        if not self._has_logprobs:
            self.notices.append("the server gives no log-probabilities: whether a difference is a near tie is unknown")


class _Outcome:
    """An answer as it is compared.

    Attributes:
        result: text, tool calls and the reason of the end.
        words: the answer for people, cut short.
        tokens: its tokens with log-probabilities; empty where the server gives none.
        counts: what was drafted for it; None where the server does not tell.
    """

    def __init__(self, request: AuditRequest, answer: Mapping[str, Any]) -> None:
        choice = answer["choices"][0]
        message = choice.get("message") if isinstance(choice.get("message"), Mapping) else {}
        self.content = str((message.get("content") if request.is_chat else choice.get("text")) or "")
        calls = [call.get("function") or {} for call in message.get("tool_calls") or () if isinstance(call, Mapping)]
        self.calls = [(call.get("name"), call.get("arguments")) for call in calls]
        self.end = choice.get("finish_reason")
        thought = message.get("reasoning_content") or message.get("reasoning")
        self.result = (self.content, self.calls, self.end, thought)
        called = [f"{name}({arguments})" for name, arguments in self.calls]
        shown = " ".join([*called, *([self.content] if self.content or not called else [])])
        self.words = shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}…"
        self.tokens = _tokens(choice.get("logprobs"))
        own = request_counts(answer)
        self.counts = None if own is None else own.counts
        self._request = request

    @property
    def num_drafted(self) -> int:
        """Tokens drafted for it, as far as the server tells."""
        return 0 if self.counts is None else self.counts[DRAFTED]

    @property
    def is_valid(self) -> bool | None:
        """Whether it has the form that the request demands; None where it was cut, or has no form to check."""
        body, kind = self._request.body, self._request.kind
        if self.end == "length" or kind == "text":
            return None
        if kind == "JSON":
            return _parses(self.content)
        if kind == "tool calls":
            return all(isinstance(arguments, str) and _parses(arguments) for _, arguments in self.calls)
        pattern, choices = body.get("guided_regex") or body.get("regex"), body.get("guided_choice")
        if isinstance(pattern, str):
            return re.fullmatch(pattern, self.content) is not None
        return self.content in choices if isinstance(choices, list) else None


_Token = tuple[str, float, Mapping[str, float]]
"""A token's text, its log-probability, and those of the likeliest tokens in its place."""


def _tokens(logprobs: object) -> list[_Token]:
    """An answer's tokens, from the form of chats or from that of completions."""
    if not isinstance(logprobs, Mapping):
        return []
    content = logprobs.get("content")
    if isinstance(content, list):
        return [(item["token"], item["logprob"], _alternatives(item.get("top_logprobs"))) for item in content]
    tokens, values, best = (logprobs.get(key) or [] for key in ("tokens", "token_logprobs", "top_logprobs"))
    return list(zip(tokens, values, (each or {} for each in best), strict=False))


def _alternatives(items: Sequence[Mapping[str, Any]] | None) -> dict[str, float]:
    return {item["token"]: item["logprob"] for item in items or ()}


def _parting(plain: _Outcome, draft: _Outcome) -> tuple[DifferenceClass, int | None, float | None]:
    """The class of a difference, the first different token's place, and how far apart both tokens are in nats."""
    if not plain.tokens or not draft.tokens:
        return "unknown", None, None
    pairs = zip(plain.tokens, draft.tokens, strict=False)
    position = next((place for place, (want, have) in enumerate(pairs) if want[0] != have[0]), None)
    if position is None:
        return "damage", min(len(plain.tokens), len(draft.tokens)), None
    token, logprob, best = plain.tokens[position]
    other = best.get(draft.tokens[position][0])
    if other is None:
        return "damage", position, None
    gap = abs(best.get(token, logprob) - other)
    return ("near-tie" if gap <= NEAR_NATS else "damage"), position, gap


def _parses(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def text_requests(rows: Sequence[Any], fields: Mapping[str, Any], chat: bool) -> list[AuditRequest]:
    """Prompts as requests.

    Args:
        rows: the prompts.
        fields: sampling fields of every request.
        chat: whether they are messages.
    """
    return [
        AuditRequest(row.index, row.id, {**({"messages": row.chat()} if chat else {"prompt": row.prompt}), **fields})
        for row in rows
    ]


def source_of(path: Path | None, dataset: str) -> str:
    """Where the requests come from, for people."""
    return dataset if path is None else str(path)
