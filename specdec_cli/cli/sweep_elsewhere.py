"""`sweep-k` without the models: acceptance at every k through servers that hold them, or from recorded traffic."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec_cli.cli.draft_reader import reader_without_models
from specdec_cli.cli.endpoint_options import key_of, refuse_others
from specdec_cli.cli.measurement_options import FILES, chosen_prompts, show_plan
from specdec_cli.cli.options import DETAILS_OPTION, OPTIONS, WORKLOAD_OPTIONS, Shared
from specdec_cli.cli.output import deliver_with_report, envelope
from specdec_cli.cli.screen import open_screen, timed_progress
from specdec_cli.errors import UsageError
from specdec_cli.measure.endpoint.address import check_key, parse_address
from specdec_cli.recipe.present import to_yaml
from specdec_cli.report.acceptance import SCHEMA, print_acceptance

if TYPE_CHECKING:
    from specdec_cli.measure.predict.trace import Trace
    from specdec_cli.recipe import Recipe, Resolved

_SERVERS = "Servers"
_OWN = {"target_endpoint", "draft_endpoint", "trace_from", "endpoint_timeout", "api_key", "at_a_time"}
_OWN |= {"k_max", "chat", "dry_run"}
_PATHS = {"recipe", "sets", "json", "output", "force", "quiet", "details", "target.model", "target.revision", "draft"}
_SECTIONS = ("sampling.", "workload.")
_DRAFT, _NUM = "draft", "workload.num_prompts"

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
class ElsewhereWish:
    """The values of these options; None if an option is not given."""

    target_endpoint: str | None
    draft_endpoint: str | None
    trace_from: Path | None
    timeout_s: float | None
    key: str | None = field(repr=False)
    concurrency: int | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether the models are elsewhere."""
        return self.target_endpoint is not None or self.trace_from is not None


def check_unwanted(wish: ElsewhereWish) -> None:
    """Refuse options about servers where the models are loaded here.

    Raises:
        UsageError: there is such an option.
    """
    given = {
        "--draft-endpoint": wish.draft_endpoint,
        "--endpoint-timeout": wish.timeout_s,
        "--api-key": wish.key,
        "--concurrency": wish.concurrency,
    }
    name = next((name for name, value in given.items() if value is not None), None)
    if name is not None:
        raise UsageError(f"`{name}` has no effect without --target-endpoint", "name the server: --target-endpoint URL")


def run_elsewhere(
    context: typer.Context, shared: Shared, wish: ElsewhereWish, k_max: int, chat: bool, dry_run: bool
) -> None:
    """Predict acceptance at every k without loading a model.

    Args:
        context: the command line, whose options that have no meaning here are refused.
        shared: the command's shared options.
        wish: servers, or the file of recorded traffic.
        k_max: largest k.
        chat: whether prompts are messages.
        dry_run: show what would be asked or read, without doing it.

    Raises:
        UsageError: options that contradict each other, or sampling whose probabilities no server gives.
        RunError: a server cannot be reached, or gives too little.
    """
    known = (*OPTIONS, *WORKLOAD_OPTIONS, DETAILS_OPTION)
    refuse_others(context, known, _OWN, _PATHS, _SECTIONS, "--target-endpoint or --trace-from")
    if wish.target_endpoint is not None and wish.trace_from is not None:
        raise UsageError("`--trace-from` and `--target-endpoint` are two sources of one text", "name one of them")
    _refuse_unread(shared, wish, chat)
    shared.loads_models = False
    resolved = shared.resolve()
    _check(resolved.recipe, wish)
    if dry_run:
        _show(resolved, wish, k_max, shared)
        return
    begin = perf_counter()
    found = (
        _recorded(resolved, wish, k_max, shared) if wish.trace_from else _served(resolved, wish, k_max, chat, shared)
    )
    found.source["seconds"] = perf_counter() - begin
    document = envelope(SCHEMA, resolved.recipe.as_dict(), found.body(k_max))
    deliver_with_report(document, shared, lambda page: print_acceptance(page, document, shared.details))


def _refuse_unread(shared: Shared, wish: ElsewhereWish, chat: bool) -> None:
    """Refuse what the other source of text, or the draft's server, leaves without a meaning."""
    if wish.draft_endpoint is not None and "draft" in shared.flags:
        raise UsageError("`--draft` has no effect with --draft-endpoint, whose server has the draft", "leave one out")
    if wish.trace_from is None:
        return
    fields = [path for path in shared.flags if path.startswith(("sampling.", "workload.")) and path != _NUM]
    names = [shared.flags[path][1] for path in fields] + (["--chat"] if chat else [])
    if names:
        said = f"`{names[0]}` has no effect with --trace-from, which reads answers that were given"
        raise UsageError(said, "leave it out; --num-prompts says how many rows to read")


def _check(recipe: Recipe, wish: ElsewhereWish) -> None:
    """Refuse what cannot be predicted, before a server is asked or a file is read."""
    from specdec_cli.measure.predict.remote_trace import check_sampling

    if wish.trace_from is not None:
        check_unwanted(wish)
    else:
        check_sampling(recipe.sampling)
    for url, flag in ((wish.target_endpoint, "--target-endpoint"), (wish.draft_endpoint, "--draft-endpoint")):
        if url is not None:
            parse_address(url, flag)
    if wish.draft_endpoint is None:
        reader_without_models(recipe)


def _show(resolved: Resolved, wish: ElsewhereWish, k_max: int, shared: Shared) -> None:
    """Show what would be asked, and where each value comes from."""
    servers = [url for url in (wish.target_endpoint, wish.draft_endpoint) if url is not None]
    source = f"recorded answers in {wish.trace_from}" if wish.trace_from else f"prompts through {' and '.join(servers)}"
    most = resolved.recipe.workload.num_prompts
    body = {"origins": resolved.origins, "k_max": k_max, "servers": servers, "num_prompts": most}
    head = f"# would predict k = 1 to {k_max} over at most {most} {source}"
    show_plan(resolved.recipe.as_dict(), body, shared, f"{head}\n{to_yaml(resolved, origins=True)}")


@dataclass(slots=True)
class _Found:
    trace: Trace
    draft: str
    source: dict[str, Any]

    def body(self, k_max: int) -> dict[str, Any]:
        """The document's own fields."""
        from specdec_cli.measure.predict.acceptance import acceptance_rows, rule_rows

        rows = acceptance_rows(self.trace, self.draft, k_max)
        return {
            "target": self.trace.target,
            "draft": self.draft,
            "source": self.source,
            "prompts": len(self.trace.prompts),
            "tokens": self.trace.num_emitted_tokens,
            "k_max": k_max,
            "rules": rule_rows(row["rule"] for row in rows),
            "rows": rows,
            "notices": self.trace.notices,
        }


def _recorded(resolved: Resolved, wish: ElsewhereWish, k_max: int, shared: Shared) -> _Found:
    """From a log of prompts and answers."""
    from specdec_cli.lm.load import load_tokenizer
    from specdec_cli.measure.predict.recorded import recorded_trace
    from specdec_cli.text.chat_template import chat_tokenizer

    assert wish.trace_from is not None
    recipe = resolved.recipe
    reader, target = reader_without_models(recipe), recipe.target
    loaded = load_tokenizer(target.model, revision=target.revision, load_format=target.load_format)
    tokenizer = chat_tokenizer(loaded, target.chat_template, target.default_chat_template_kwargs)
    trace = recorded_trace(wish.trace_from, tokenizer, target.model, recipe.workload.num_prompts)
    with timed_progress(open_screen(shared.quiet, streams_text=False)) as tell:
        reader.read(trace, k_max, lambda done, total: tell("tracing the draft", done, total))
    return _Found(trace, reader.name, {"kind": "recorded", "words": f"from the answers in {wish.trace_from}"})


def _served(resolved: Resolved, wish: ElsewhereWish, k_max: int, chat: bool, shared: Shared) -> _Found:
    """Through one server, or two."""
    import asyncio

    reader = None if wish.draft_endpoint is not None else reader_without_models(resolved.recipe)
    rows = chosen_prompts(resolved.recipe.workload, chat).rows
    num = resolved.recipe.workload.num_prompts
    with timed_progress(open_screen(shared.quiet, streams_text=False)) as tell:
        found = asyncio.run(_ask(resolved, wish, k_max, rows[:num], chat, tell))
        if reader is not None:
            reader.read(found.trace, k_max, lambda done, total: tell("tracing the draft", done, total))
            found.draft = reader.name
    return found


async def _ask(resolved: Resolved, wish: ElsewhereWish, k_max: int, rows: Any, chat: bool, tell: Any) -> _Found:
    from specdec_cli.measure.endpoint.endpoint import Endpoint
    from specdec_cli.measure.predict.acceptance import sampled_faults
    from specdec_cli.measure.predict.engine_rules import DRAFTS_PAST_END
    from specdec_cli.measure.predict.remote_trace import RemoteTracer

    key, timeout_s, at_a_time = check_key(key_of(wish.key)), wish.timeout_s or 300.0, wish.concurrency or 8
    named = "" if resolved.built_in_pair else resolved.recipe.target.model
    assert wish.target_endpoint is not None
    address = parse_address(wish.target_endpoint, "--target-endpoint")
    async with Endpoint(address, key, timeout_s, at_a_time) as target:
        model = await target.choose_model(named)
        sampling, beyond = resolved.recipe.sampling, k_max if target.owner in DRAFTS_PAST_END else 0
        tracer = RemoteTracer(target, model, rows, sampling, chat, at_a_time, beyond)
        trace = await tracer.trace_target(lambda done, total: tell("the target's server decodes", done, total))
        if sampling.temperature:
            trace.notices += sampled_faults(target.owner, await target.version())
        servers = [target]
        if wish.draft_endpoint is not None:
            draft_address = parse_address(wish.draft_endpoint, "--draft-endpoint")
            async with Endpoint(draft_address, key, timeout_s, at_a_time) as draft:
                name = await draft.choose_model("")
                watch = lambda done, total: tell("the draft's server scores", done, total)  # noqa: E731
                trace.drafts[_DRAFT] = await tracer.trace_draft(trace, draft, name, watch)
                servers.append(draft)
    trace.drafts = {name: trace.drafts[_DRAFT]} if _DRAFT in trace.drafts else {}
    source = {
        "kind": "servers",
        "words": f"through {' and '.join(one.address.root for one in servers)}",
        "requests": sum(one.num_requests for one in servers),
        "bytes": sum(one.num_bytes for one in servers),
    }
    return _Found(trace, next(iter(trace.drafts), ""), source)
