"""Request fields that switch a server's draft off, so that one server answers with and without it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec_cli.errors import RunError
from specdec_cli.measure.endpoint.endpoint_arm import EndpointArm
from specdec_cli.quantities import counted

PLAIN_OPTION = "--plain-endpoint"
_WITHOUT_DRAFT: Mapping[str, Mapping[str, Any]] = {"specdec": {"speculative": {"enabled": False}}}
"""By `owned_by` of the server's models. llama-server no longer reads `speculative.n_max`; vLLM has no such field."""


def without_draft(arm: EndpointArm) -> Mapping[str, Any]:
    """The fields that switch the draft of a server off.

    Args:
        arm: the server, which has started.

    Raises:
        RunError: it has no such field.
    """
    fields = _WITHOUT_DRAFT.get(arm.owner or "")
    if fields is None:
        message = f"`{arm.plan.address.root}` has no request field that switches its draft off"
        raise RunError(message, f"start the same model without a draft and name it: {PLAIN_OPTION} URL")
    return fields


def check_plain(arm: EndpointArm, num_drafted: int) -> None:
    """Refuse to take answers for plain ones for which the server drafted.

    Args:
        arm: the server that was to answer without a draft.
        num_drafted: tokens that it drafted, as far as it tells.

    Raises:
        RunError: there are some.
    """
    if num_drafted:
        message = f"`{arm.plan.address.root}` drafted {counted(num_drafted, 'token')} for answers without a draft"
        raise RunError(message, f"{PLAIN_OPTION} must name a server without a draft")
