"""The document of `bench --endpoint --slo`, `specdec.bench-slo/1`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from specdec_cli.document import Count, ResultDocument, Share
from specdec_cli.measure.documents.parts import GateResult
from specdec_cli.measure.documents.request_audit import AuditedServers
from specdec_cli.measure.endpoint.slo import SHARE, UserCapacity

if TYPE_CHECKING:
    from specdec_cli.measure.endpoint.slo import SloStudy


class SloDocument(ResultDocument):
    """Users that a server serves at once within service-level objectives, with its draft and without."""

    schema_name: ClassVar[str] = "specdec.bench-slo/1"

    dataset: str
    num_prompts: Count
    endpoint: AuditedServers
    objectives: list[str]
    share: Share = Field(description="Share of the requests that must meet all objectives.")
    most_users: Count
    draft: UserCapacity
    plain: UserCapacity
    notices: list[str]
    gates: list[GateResult] = Field(default_factory=list)


def slo_body(study: SloStudy, dataset: str) -> dict[str, Any]:
    """The document's own fields. `gates` is empty until the gates are judged."""
    return SloDocument(
        dataset=dataset,
        num_prompts=len(study.rows),
        endpoint=AuditedServers.of_arms(study.draft, study.plain),
        objectives=[objective.text for objective in study.objectives],
        share=SHARE,
        most_users=study.most,
        draft=study.capacities["draft"],
        plain=study.capacities["plain"],
        notices=study.notices,
    ).as_json()
