"""`sweep-k` without the models: acceptance at every k through servers that hold them, or from recorded traffic."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec_cli.cli.draft_reader import reader_without_models
from specdec_cli.cli.endpoint_options import key_of
from specdec_cli.cli.honoured import HERE, RECORDED, SERVER
from specdec_cli.cli.measured_run import MeasuredRun
from specdec_cli.cli.measurement_options import MeasurementOptions, check_files, chosen_prompts
from specdec_cli.cli.options import FILES
from specdec_cli.cli.output import envelope
from specdec_cli.cli.place import Place
from specdec_cli.cli.screen import timed_progress
from specdec_cli.cli.shared import Shared
from specdec_cli.engine.prompts import PromptSet
from specdec_cli.errors import UsageError
from specdec_cli.measure.documents.replayed import AcceptanceDocument, acceptance_body
from specdec_cli.measure.endpoint.address import check_key, parse_address
from specdec_cli.report.acceptance import print_acceptance

if TYPE_CHECKING:
    from rich.console import Console

    from specdec_cli.measure.predict.trace import Trace
    from specdec_cli.measure.predict.tracing import Tell
    from specdec_cli.recipe import Recipe

_SERVERS = "Servers"
_DRAFT = "draft"

TargetEndpoint = Annotated[
    str | None,
    typer.Option(
        "--target-endpoint",
        help="Predict acceptance through the server of the target, which is not loaded here.",
        metavar="URL",
        rich_help_panel=_SERVERS,
    ),
]
DraftEndpoint = Annotated[
    str | None,
    typer.Option(
        "--draft-endpoint",
        help="Server of the draft, which scores the target's text.",
        metavar="URL",
        rich_help_panel=_SERVERS,
    ),
]
TraceFrom = Annotated[
    Path | None,
    typer.Option(
        "--trace-from",
        help="Predict acceptance from recorded prompts and answers, for drafts without a model (ngram, suffix).",
        metavar="FILE",
        rich_help_panel=FILES,
    ),
]
AtATime = Annotated[
    int | None,
    typer.Option(
        "--concurrency",
        min=1,
        max=4096,
        help="Maximum number of concurrent requests to a server.",
        show_default="8",
        rich_help_panel=_SERVERS,
    ),
]


@dataclass(frozen=True, slots=True)
class TextSource:
    """Source of the target's text if no model is loaded; None for options that are not given."""

    target_endpoint: str | None
    draft_endpoint: str | None
    trace_from: Path | None
    timeout_s: float | None
    key: str | None = field(repr=False)
    concurrency: int | None = None

    @property
    def place(self) -> tuple[str, str]:
        """Place of the work, and the option that chooses it."""
        if self.target_endpoint is not None:
            return SERVER, "--target-endpoint"
        return (HERE, "") if self.trace_from is None else (RECORDED, "--trace-from")


def acceptance_run(shared: Shared, source: TextSource, k_max: int, chat: bool, dry_run: bool) -> AcceptanceRun:
    """A prediction of acceptance at every k, for which no model is loaded.

    Args:
        shared: the command's shared options.
        source: servers, or the file of recorded traffic.
        k_max: largest k.
        chat: whether prompts are messages.
        dry_run: whether nothing will be asked or read.

    Raises:
        UsageError: options that contradict each other, or sampling whose probabilities no server gives.
    """
    if source.target_endpoint is not None and source.trace_from is not None:
        raise UsageError("`--trace-from` and `--target-endpoint` are two sources of one text", "name one of them")
    if source.draft_endpoint is not None and "draft" in shared.flags:
        raise UsageError("`--draft` has no effect with --draft-endpoint, whose server has the draft", "leave one out")
    shared.loads_models = False
    resolved = shared.resolve()
    _check(resolved.recipe, source)
    check_files(shared)
    prompts = PromptSet([])
    if source.trace_from is None:
        prompts = chosen_prompts(resolved.recipe.workload, chat, only_at_hand=dry_run)
    place = Place([resolved], [_DRAFT], MeasurementOptions(1, 1, chat), prompts, shared)
    return AcceptanceRun(place, source, k_max)


def _check(recipe: Recipe, source: TextSource) -> None:
    """Refuse what cannot be predicted, before a server is asked or a file is read."""
    from specdec_cli.measure.predict.remote_trace import check_sampling

    if source.trace_from is None:
        check_sampling(recipe.sampling)
    for url, flag in ((source.target_endpoint, "--target-endpoint"), (source.draft_endpoint, "--draft-endpoint")):
        if url is not None:
            parse_address(url, flag)
    if source.draft_endpoint is None:
        reader_without_models(recipe)


@dataclass(slots=True)
class TracedText:
    """A text with a draft along it.

    Args:
        trace: the text.
        draft: the draft's name in it.
        source: where it comes from, with the document's keys.
    """

    trace: Trace
    draft: str
    source: dict[str, Any]


@dataclass(slots=True)
class AcceptanceRun(MeasuredRun["TracedText"]):
    """One run of the command."""

    document_class = AcceptanceDocument
    has_gates = False

    source: TextSource
    k_max: int

    def plan(self, num: int | None) -> tuple[dict[str, Any], str]:
        """The requests that would be sent, or the file that would be read."""
        source, most = self.source, self.arms.recipe.workload.num_prompts
        servers = [url for url in (source.target_endpoint, source.draft_endpoint) if url is not None]
        texts = f"prompts through {' and '.join(servers)}"
        if source.trace_from is not None:
            texts = f"recorded answers in {source.trace_from}"
        body = {"num_prompts": most, "k_max": self.k_max, "servers": servers}
        return body, f"# would predict k = 1 to {self.k_max} over at most {most} {texts}"

    def study(self) -> TracedText:
        """The text with the draft along it: Ctrl-C ends it at once."""
        recipe, begin = self.arms.recipe, perf_counter()
        reader = None if self.source.draft_endpoint is not None else reader_without_models(recipe)
        with timed_progress(self.arms.screen) as tell:
            made = asyncio.run(self._ask(tell)) if self.source.trace_from is None else self._recorded()
            if reader is not None:
                reader.read(made.trace, self.k_max, lambda done, total: tell("tracing the draft", done, total))
                made.draft = reader.name
        made.source["seconds"] = perf_counter() - begin
        return made

    def measure(self, study: TracedText, stopped: Callable[[], bool]) -> None:
        """Nothing is measured."""

    def is_measured(self, study: TracedText) -> bool:
        """Whether there is a text."""
        return True

    def document(self, study: TracedText, interrupted: bool) -> dict[str, Any]:
        """The document."""
        body = acceptance_body(study.trace, study.draft, study.source, self.k_max)
        return envelope(self.document_class, self.arms.recipe.as_dict(), body)

    def draw(self, page: Console, study: TracedText, document: dict[str, Any]) -> None:
        """Print the report."""
        print_acceptance(page, document, self.arms.shared.details)

    def _recorded(self) -> TracedText:
        """Trace of a log of prompts and answers."""
        from specdec_cli.lm.load import load_tokenizer
        from specdec_cli.measure.predict.recorded import recorded_trace
        from specdec_cli.text.chat_template import chat_tokenizer

        path, recipe = self.source.trace_from, self.arms.recipe
        assert path is not None, "a log is named"
        target = recipe.target
        loaded = load_tokenizer(target.model, revision=target.revision, load_format=target.load_format)
        tokenizer = chat_tokenizer(loaded, target.chat_template, target.default_chat_template_kwargs)
        trace = recorded_trace(path, tokenizer, target.model, recipe.workload.num_prompts)
        return TracedText(trace, "", {"kind": "recorded", "words": f"from the answers in {path}"})

    async def _ask(self, tell: Tell) -> TracedText:
        """Through one server, or two."""
        from specdec_cli.measure.endpoint.endpoint import Endpoint
        from specdec_cli.measure.predict.engine_rules import DRAFTS_PAST_END, sampled_faults
        from specdec_cli.measure.predict.remote_trace import RemoteTracer

        source, resolved, chat = self.source, self.arms.resolved, self.arms.options.chat
        rows = self.arms.rows[: resolved.recipe.workload.num_prompts]
        key, timeout_s, at_a_time = check_key(key_of(source.key)), source.timeout_s or 300.0, source.concurrency or 8
        named = "" if resolved.built_in_pair else resolved.recipe.target.model
        assert source.target_endpoint is not None
        address = parse_address(source.target_endpoint, "--target-endpoint")
        async with Endpoint(address, key, timeout_s, at_a_time) as target:
            model = await target.choose_model(named)
            sampling, beyond = resolved.recipe.sampling, self.k_max if target.owner in DRAFTS_PAST_END else 0
            tracer = RemoteTracer(target, model, rows, sampling, chat, at_a_time, beyond)
            trace = await tracer.trace_target(lambda done, total: tell("the target's server decodes", done, total))
            if sampling.temperature:
                trace.notices += sampled_faults(target.owner, await target.version())
            servers = [target]
            if source.draft_endpoint is not None:
                draft_address = parse_address(source.draft_endpoint, "--draft-endpoint")
                async with Endpoint(draft_address, key, timeout_s, at_a_time) as draft:
                    name = await draft.choose_model("")
                    watch = lambda done, total: tell("the draft's server scores", done, total)  # noqa: E731
                    trace.drafts[_DRAFT] = await tracer.trace_draft(trace, draft, name, watch)
                    servers.append(draft)
        trace.drafts = {name: trace.drafts[_DRAFT]} if _DRAFT in trace.drafts else {}
        source_facts = {
            "kind": "servers",
            "words": f"through {' and '.join(server.address.root for server in servers)}",
            "requests": sum(server.num_requests for server in servers),
            "bytes": sum(server.num_bytes for server in servers),
        }
        return TracedText(trace, next(iter(trace.drafts), ""), source_facts)
