"""`specdec audit --endpoint` and `--tools`: a server's answers with and without its draft, or our own server's."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec_cli.cli.endpoint_options import key_of
from specdec_cli.cli.output import deliver_with_report, envelope, show_plan
from specdec_cli.cli.screen import interruptible, open_screen, progress, say_notices
from specdec_cli.engine.prompts import PromptSet
from specdec_cli.errors import ExitCode, UsageError
from specdec_cli.measure.audit.requests import AuditRequest, RequestAudit, read_requests, source_of, text_requests
from specdec_cli.measure.documents.request_audit import RequestAuditDocument, request_audit_body
from specdec_cli.measure.elsewhere.engine_process import EngineProcess
from specdec_cli.measure.endpoint.address import Address, check_key, parse_address
from specdec_cli.measure.endpoint.draft_switch import PLAIN_OPTION
from specdec_cli.measure.endpoint.endpoint_arm import EndpointArm, started
from specdec_cli.measure.endpoint.endpoint_plan import EndpointPlan
from specdec_cli.measure.endpoint.request_fields import sampling_fields
from specdec_cli.quantities import counted
from specdec_cli.recipe.present import to_yaml
from specdec_cli.report.request_audit import print_request_audit

if TYPE_CHECKING:
    from specdec_cli.cli.shared import Shared
    from specdec_cli.recipe import Resolved


@dataclass(frozen=True, slots=True)
class AuditedEndpoint:
    """The options that name servers and requests; None if an option is not given.

    Args:
        url: of the server with the draft; None starts our own.
        plain_url: of the one without.
        model: the name to ask for.
        timeout_s: longest silence of a server.
        key: their API key.
        tools: file of requests.
        chat: whether prompts are messages.
    """

    url: str | None
    plain_url: str | None
    model: str | None
    timeout_s: float | None
    key: str | None
    tools: Path | None
    chat: bool

    def plan(self, address: Address, named: str | None) -> EndpointPlan:
        """How a server at an address is asked."""
        plan = EndpointPlan(address, check_key(key_of(self.key)), self.model or named, chat=self.chat)
        return plan if self.timeout_s is None else replace(plan, timeout_s=self.timeout_s)


def audit_requests(
    resolved: Resolved, options: AuditedEndpoint, prompts: PromptSet, shared: Shared, dry_run: bool
) -> ExitCode | None:
    """Compare a server's answers with and without its draft; after Ctrl-C, report those that were compared.

    Args:
        resolved: the recipe; sampling counts, and for our own server everything.
        options: the servers, and the file of requests.
        prompts: the requests without such a file.
        shared: the command's shared options.
        dry_run: whether nothing is asked.

    Raises:
        UsageError: options that contradict themselves, or a file that holds no requests.
        RunError: a server cannot be asked.
        GateError: an answer differs, and not at a near tie.
    """
    recipe = resolved.recipe
    if recipe.sampling.temperature:
        raise UsageError(
            f"answers are compared at temperature 0, not at {recipe.sampling.temperature:g}", "leave it out"
        )
    addresses = [parse_address(url, flag) for url, flag in _urls(options)]
    requests, source = _requests(resolved, options, prompts)
    if dry_run:
        where = " and ".join(address.root for address in addresses) or "our own server"
        body = {"num_requests": len(requests), "endpoints": [address.root for address in addresses]}
        show_plan(
            recipe.as_dict(),
            body,
            shared,
            f"# would ask {where} twice for each of {counted(len(requests), 'request')}\n",
        )
        return None
    screen = open_screen(shared.quiet, streams_text=False)
    say_notices(prompts.notices, shared.quiet)
    named = None if resolved.built_in_pair or options.url is None else recipe.target.model
    with (
        interruptible() as stopped,
        progress(screen) as say,
        _running(resolved, shared, addresses, say) as places,
    ):
        arms = [EndpointArm(options.plan(place, named), recipe.sampling) for place in places]
        draft, plain = arms[0], arms[-1]
        watch = lambda done, total: say(f"{done} of {counted(total, 'request')}")  # noqa: E731
        audit = RequestAudit(draft, plain, requests, source, watch, stopped)
        with started(arms):
            audit.run()
    is_interrupted = audit.num_compared < len(requests)
    if is_interrupted and not audit.num_compared:
        screen.say("interrupted before anything was compared", "yellow")
        return ExitCode.INTERRUPTED
    audit.notices[:0] = prompts.notices
    document = envelope(RequestAuditDocument, recipe.as_dict(), request_audit_body(audit))
    deliver_with_report(document, shared, lambda page: print_request_audit(page, document))
    if is_interrupted:
        screen.say(f"interrupted: {audit.num_compared} of {counted(len(requests), 'request')} were compared", "yellow")
        return ExitCode.INTERRUPTED
    audit.gate()
    return None


def _urls(options: AuditedEndpoint) -> Iterator[tuple[str, str]]:
    for url, flag in ((options.url, "--endpoint"), (options.plain_url, PLAIN_OPTION)):
        if url is not None:
            yield url, flag


def _requests(resolved: Resolved, options: AuditedEndpoint, prompts: PromptSet) -> tuple[list[AuditRequest], str]:
    if options.tools is not None:
        return read_requests(str(options.tools)), source_of(options.tools, "")
    recipe = resolved.recipe
    fields = sampling_fields(recipe.sampling)
    return text_requests(prompts.rows, fields, options.chat), source_of(None, recipe.workload.dataset)


@contextmanager
def _running(resolved: Resolved, shared: Shared, addresses: list[Address], say: Any) -> Iterator[list[Address]]:
    """The servers' addresses; our own server runs meanwhile if none is named."""
    if addresses:
        yield addresses
        return
    with tempfile.TemporaryDirectory(prefix="specdec-audit-") as folder:
        recipe = Path(folder) / "recipe.yaml"
        given = {path for path, origin in resolved.origins.items() if origin != "default"}
        words = [sys.executable, "-m", "specdec_cli", "serve"]
        if given:
            recipe.write_text(to_yaml(resolved, only=given), encoding="utf-8")
            words += ["--recipe", str(recipe)]
        words += ["--trust-remote-code"] if shared.trust_remote_code else []
        with EngineProcess("specdec", words, tell=say) as url:
            yield [parse_address(url)]
