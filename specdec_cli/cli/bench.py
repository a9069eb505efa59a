"""`specdec bench`: what a draft gains on a set of prompts, against the same engine without it and against others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec_cli.cli.arms import arms_from
from specdec_cli.cli.endpoint_options import (
    ApiKey,
    Concurrency,
    EndpointModel,
    EndpointOptions,
    EndpointTimeout,
    ExtraBody,
    MaxTokens,
    PlainEndpoint,
    RequestRate,
    url_option,
)
from specdec_cli.cli.honoured import HERE, SERVER, refuse_without_effect
from specdec_cli.cli.measured_run import ComparedRun
from specdec_cli.cli.measurement_options import (
    HOW,
    BatchSize,
    DryRun,
    MeasurementOptions,
    check_files,
    check_regression,
    check_speculates,
    num_prompts_words,
    repeats_option,
)
from specdec_cli.cli.options import MEASURING_OPTIONS, PAIR, Chat
from specdec_cli.cli.place import PLAIN, Arms
from specdec_cli.cli.shared import Shared, check_template, with_shared_options
from specdec_cli.errors import ExitCode, UsageError
from specdec_cli.measure.documents.bench import BenchDocument, bench_body
from specdec_cli.report.bench import BenchView, print_bench

if TYPE_CHECKING:
    from rich.console import Console

    from specdec_cli.measure.bench.bench import Bench
    from specdec_cli.measure.bench.passes import Pass
    from specdec_cli.measure.machine.load import Conditions
    from specdec_cli.recipe import Recipe

_REPEATS = 2


@with_shared_options(
    common=f"{PAIR} engine endpoint dataset num-prompts batch-size max-new-tokens json output markdown",
    without=["sampling.logprobs"],
    beside=MEASURING_OPTIONS,
)
def bench(
    context: typer.Context,
    repeats: Annotated[int | None, repeats_option(shown="2; 1 with --endpoint")] = None,
    batch_size: BatchSize = 1,
    against: Annotated[
        str,
        typer.Option(
            help="Plain arms: none (this engine without a draft, always there), transformers, transformers-assisted, "
            "transformers-cb (its continuous batching).",
            metavar="A,B",
            rich_help_panel=HOW,
        ),
    ] = "none",
    chat: Chat = False,
    by: Annotated[
        str | None,
        typer.Option(
            help="Report a row for each category, or for each value of another column, which --tasks then names.",
            metavar="category|COLUMN",
            rich_help_panel=HOW,
        ),
    ] = None,
    lossless_check: Annotated[
        bool,
        typer.Option(help="Compare every token with plain decoding (greedy and gumbel modes).", rich_help_panel=HOW),
    ] = True,
    dry_run: DryRun = False,
    endpoint: Annotated[
        str | None,
        url_option("Measure this OpenAI-compatible server instead of a local engine."),
    ] = None,
    concurrency: Concurrency = None,
    endpoint_model: EndpointModel = None,
    endpoint_timeout: EndpointTimeout = None,
    request_rate: RequestRate = None,
    extra_body: ExtraBody = None,
    max_tokens_field: MaxTokens = None,
    slo: Annotated[
        str | None,
        typer.Option(
            help="Find how many users the server serves at once, up to --concurrency (64), so that 90 % of requests "
            "meet these bounds of ttft, tpot, latency and tokens_per_second; with its draft and without.",
            metavar="A,B",
            rich_help_panel="Server",
        ),
    ] = None,
    plain_endpoint: PlainEndpoint = None,
    api_key: ApiKey = None,
    *,
    shared: Shared,
) -> ExitCode | None:
    """Measure the speed-up of a draft over the same engine without one. Exits with 3 if a gate is crossed.

    Examples:
        # Measure the built-in pair on eight prompts.
        specdec bench --num-prompts 8
        # Fail with exit code 3 if the draft does not pay off.
        specdec bench -r tuned.yaml --fail-if 'speedup.decode < 1.2' --junit gates.xml
        # Measure a running server.
        specdec bench --endpoint http://127.0.0.1:8000 --request-rate 2 --num-prompts 32
    """
    check_template(shared, chat)
    if endpoint is not None:
        from specdec_cli.cli.bench_endpoint import endpoint_run

        refuse_without_effect(context, SERVER, "--endpoint")
        server = EndpointOptions(
            endpoint, concurrency, endpoint_model, endpoint_timeout, request_rate, extra_body, max_tokens_field, api_key
        )
        if slo is not None:
            from specdec_cli.cli.bench_slo import slo_run

            slo_options = MeasurementOptions(1, 1, chat)
            if repeats is not None or by is not None:
                raise UsageError(
                    f"`--{'by' if repeats is None else 'repeats'}` has no effect with `--slo`", "leave it out"
                )
            slo_run(shared, server, slo_options, slo, plain_endpoint, dry_run)
            return None
        if plain_endpoint is not None:
            raise UsageError("`--plain-endpoint` has no effect without `--slo`", "add --slo, or leave it out")
        return endpoint_run(shared, server, MeasurementOptions(repeats or 1, 1, chat, by=by), dry_run).start(dry_run)
    from specdec_cli.measure.bench.against import check_peers, parse_against

    refuse_without_effect(context, HERE)
    resolved = shared.resolve()
    _check(resolved.recipe, batch_size, shared)
    peers = parse_against(against)
    check_peers(peers, resolved.recipe, batch_size)
    check_files(shared)
    options = MeasurementOptions(repeats or _REPEATS, batch_size, chat, by=by)
    kind = " (synthetic)" if resolved.recipe.speculation.is_synthetic else ""
    arms = arms_from(context, [resolved], [f"with the draft{kind}"], options, shared, dry_run, against=peers)
    return BenchRun(arms, lossless_check).start(dry_run)


def _check(recipe: Recipe, batch_size: int, shared: Shared) -> None:
    """Refuse what contradicts itself before anything is read or loaded."""
    if recipe.draft.method == "none" or recipe.speculation.num_speculative_tokens == 0:
        raise UsageError("there is no draft to measure", "name one with --draft, and k above 0")
    if recipe.draft.method == "prediction":
        raise UsageError("the draft `prediction` reads one prompt's text, and a benchmark has many", "choose another")
    check_speculates(recipe.speculation, batch_size)
    check_regression(recipe, shared)


@dataclass(slots=True)
class BenchRun(ComparedRun["Bench"]):
    """One run of the command.

    Args:
        arms: where and with what it decodes.
        compares_tokens: whether every token is compared with plain decoding.
    """

    document_class = BenchDocument

    arms: Arms
    compares_tokens: bool

    @property
    def must_agree(self) -> bool:
        """Whether tokens with and without a draft are promised to be the same, and compared."""
        return self.compares_tokens and self.arms.promise.keeps_tokens

    def gate_names(self) -> dict[str, list[str]]:
        """Tasks and other engines."""
        return {"by_task": self.tasks, "against": list(self.arms.against)}

    def plan(self, num: int | None) -> tuple[dict[str, Any], str]:
        """The arms, and how often each decodes."""
        options, names = self.arms.options, [*self.arms.names, PLAIN, *self.arms.against]
        body = {"arms": names, "repeats": options.repeats, "batch_size": options.batch_size}
        prompts = num_prompts_words(self.arms.recipe.workload, num)
        return body, f"# would measure {prompts}, {options.repeats} times in each arm ({', '.join(names)})"

    def study(self) -> Bench:
        """The benchmark."""
        from specdec_cli.measure.bench.bench import Bench

        arms, options = self.arms, self.arms.options
        pace = options.batch_size, options.repeats, arms.in_turn
        draft, plain = arms.arm(arms.names[0], None), arms.arm(PLAIN, 0)
        return Bench(
            arms.workload, draft, plain, arms.peers, *pace, notices=list(arms.cut_drafts()), journal=self.journal
        )

    def measure(self, study: Bench, stopped: Callable[[], bool]) -> None:
        """Let the arms take turns, or one run after the other."""
        screen = self.arms.screen
        self.watch(study.run(stopped), lambda: study, BenchView(screen.console, screen.is_live, say=screen.say))

    def is_measured(self, study: Bench) -> bool:
        """Whether both arms decoded."""
        return bool(study.draft.passes and study.plain.passes)

    def passes(self, study: Bench) -> list[Pass]:
        """Counted passes of all arms."""
        return study.passes

    def body(self, study: Bench, machine: Conditions, interrupted: bool) -> dict[str, Any]:
        """The document's own keys; the machine's bandwidth is measured for it."""
        from specdec_cli.measure.bench.verdict import measure_roofline
        from specdec_cli.measure.machine.figures import figure

        arms, target = self.arms, self.arms.target
        roofline = None
        if target is not None:
            roofline = figure("the roofline", lambda: measure_roofline(study, target), study.notices)
        versions = {peer.name: peer.peer.version for peer in arms.peers}
        return bench_body(study, arms.promise, self.must_agree, machine, roofline, versions, interrupted)

    def csv(self, study: Bench, document: dict[str, Any]) -> str:
        """A row per task and arm."""
        from specdec_cli.report.result_files import bench_csv

        return bench_csv(study)

    def draw(self, page: Console, study: Bench, document: dict[str, Any]) -> None:
        """Print the report."""
        print_bench(page, document, self.arms.shared.details)
