"""The document of `audit --endpoint` and `audit --tools`, `specdec.audit-requests/1`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from specdec_cli.document import Count, Result, ResultDocument, Seconds

if TYPE_CHECKING:
    from specdec_cli.measure.audit.requests import RequestAudit
    from specdec_cli.measure.endpoint.endpoint_arm import EndpointArm

RequestKind = Literal["text", "tool calls", "JSON", "grammar"]
DifferenceClass = Literal["near-tie", "damage", "unknown"]


class AuditedServers(Result):
    """The server with the draft, and the one without; the same one where a request can switch its draft off."""

    url: str
    plain_url: str
    model: str
    server: str | None
    version: str | None

    @classmethod
    def of_arms(cls, draft: EndpointArm, plain: EndpointArm) -> AuditedServers:
        """The servers of two arms that have started."""
        return cls(
            url=draft.plan.address.root,
            plain_url=plain.plan.address.root,
            model=draft.model,
            server=draft.server,
            version=draft.version,
        )


class KindResult(Result):
    """The requests of one kind. An answer is valid if it parses as the request demands; null where none was checked."""

    requests: Count = 0
    equal: Count = 0
    near_ties: Count = 0
    damaged: Count = 0
    unknown: Count = 0
    checked: Count = Field(0, description="Requests whose answers end by themselves and can be checked.")
    valid_with_draft: Count = 0
    valid_without: Count = 0


class AnswerDifference(Result):
    """A request with another answer with the draft: `position` is the first different token's, from 0."""

    index: Count
    id: str | int | None
    kind: RequestKind
    difference: Annotated[DifferenceClass, Field(serialization_alias="class")]
    position: Count | None
    gap_nats: Seconds | None = Field(description="Log-probability of the plain token over the other one's.")
    with_draft: str
    without: str


class RequestAuditDocument(ResultDocument):
    """Answers of a server with and without its draft, at temperature 0; after Ctrl-C, those that were compared."""

    schema_name: ClassVar[str] = "specdec.audit-requests/1"

    source: str
    num_requests: Count
    interrupted: bool
    endpoint: AuditedServers
    by_kind: dict[str, KindResult]
    differences: list[AnswerDifference]
    num_draft_tokens: Count | None
    num_accepted_tokens: Count | None
    notices: list[str]
    seconds: Seconds
    verdict: Literal["pass", "fail", "inconclusive"]


def request_audit_body(audit: RequestAudit) -> dict[str, Any]:
    """The document's own fields, after those that every document has."""
    is_interrupted = audit.num_compared < len(audit.requests)
    return RequestAuditDocument(
        source=audit.source,
        num_requests=len(audit.requests),
        interrupted=is_interrupted,
        endpoint=AuditedServers.of_arms(audit.draft, audit.plain),
        by_kind=audit.by_kind,
        differences=audit.differences,
        num_draft_tokens=audit.num_draft_tokens,
        num_accepted_tokens=audit.num_accepted_tokens,
        notices=audit.notices,
        seconds=audit.seconds,
        verdict="fail" if not audit.passed else "inconclusive" if is_interrupted else "pass",
    ).as_json()
