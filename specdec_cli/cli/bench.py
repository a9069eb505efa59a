"""`specdec bench`: what a draft gains on a set of prompts, against the same engine without it and against others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec_cli.cli.endpoint_options import (
    ApiKey,
    Concurrency,
    EndpointModel,
    EndpointTimeout,
    EndpointWish,
    ExtraBody,
    MaxTokens,
    RequestRate,
    refuse_without_server,
    url_option,
)
from specdec_cli.cli.measurement import Measurement
from specdec_cli.cli.measurement_options import (
    HOW,
    BatchSize,
    Csv,
    DryRun,
    Html,
    Junit,
    Markdown,
    MeasurementOptions,
    Plot,
    check_files,
    check_regression,
    check_speculates,
    chosen_prompts,
    num_prompts_words,
    repeats_option,
    show_plan,
)
from specdec_cli.cli.options import (
    DETAILS_OPTION,
    ENGINE_OPTIONS,
    GATE_OPTIONS,
    RESUME_OPTION,
    WORKLOAD_OPTIONS,
    Chat,
    Shared,
    check_template,
    with_shared_options,
)
from specdec_cli.cli.other_engine import OtherEngine
from specdec_cli.cli.screen import open_screen
from specdec_cli.errors import ExitCode, UsageError
from specdec_cli.measure.workload.workload import task_of
from specdec_cli.recipe.present import to_yaml
from specdec_cli.report.bench import SCHEMA, BenchView, bench_body, json_schema, print_bench
from specdec_cli.report.generate import Promise

if TYPE_CHECKING:
    from rich.console import Console

    from specdec_cli.engine.engine import Engine
    from specdec_cli.lm.door import LM
    from specdec_cli.measure.bench.against import PeerArm
    from specdec_cli.measure.bench.bench import Bench
    from specdec_cli.measure.bench.passes import Pass
    from specdec_cli.measure.workload.workload import Workload
    from specdec_cli.recipe import Recipe, Resolved


_REPEATS = 2


@with_shared_options(
    without=["sampling.logprobs"],
    beside=(*WORKLOAD_OPTIONS, *GATE_OPTIONS, RESUME_OPTION, DETAILS_OPTION, *ENGINE_OPTIONS),
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
    lossless_check: Annotated[
        bool,
        typer.Option(help="Compare every token with plain decoding (greedy and gumbel modes).", rich_help_panel=HOW),
    ] = True,
    dry_run: DryRun = False,
    markdown: Markdown = None,
    csv: Csv = None,
    junit: Junit = None,
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
    api_key: ApiKey = None,
    plot: Plot = None,
    html: Html = None,
    *,
    shared: Shared,
) -> ExitCode | None:
    """Measure the speed-up of a draft over the same engine without one. Exits with 3 if a gate is crossed."""
    check_template(shared, chat)
    asked = EndpointWish(
        endpoint,
        concurrency,
        endpoint_model,
        endpoint_timeout,
        request_rate,
        extra_body,
        max_tokens_field,
        api_key,
    )
    refuse_without_server(context, endpoint)
    if endpoint is not None:
        from specdec_cli.cli.bench_endpoint import run_endpoint

        files = {"markdown": markdown, "csv": csv, "junit": junit}
        wish = MeasurementOptions(repeats or 1, 1, chat, plot, html, files)
        return run_endpoint(context, shared, asked, wish, dry_run)
    from specdec_cli.measure.bench.against import check_peers, parse_against

    resolved = shared.resolve()
    files = {"markdown": markdown, "csv": csv, "junit": junit}
    _check(resolved.recipe, batch_size, shared)
    peers = parse_against(against)
    check_peers(peers, resolved.recipe, batch_size)
    wish = _BenchOptions(repeats or _REPEATS, batch_size, chat, plot, html, files, peers, lossless_check)
    check_files(wish, shared)
    engine = OtherEngine.asked(resolved, shared)
    if engine is not None:
        return _elsewhere(engine.without_prefix_caching(), wish, shared, dry_run)
    prompts = chosen_prompts(resolved.recipe.workload, chat, only_at_hand=dry_run)
    run = _BenchRun(resolved, wish, prompts, shared, open_screen(shared.quiet, streams_text=False))
    if dry_run:
        _show_plan(resolved, wish, shared, run.rehearse())
        return None
    return run.go()


@dataclass(frozen=True, slots=True)
class _BenchOptions(MeasurementOptions):
    """The command's further options."""

    peers: tuple[str, ...]
    lossless_check: bool


def _elsewhere(engine: OtherEngine, wish: _BenchOptions, shared: Shared, dry_run: bool) -> ExitCode | None:
    """Measure another engine, which is started as a subprocess."""
    from specdec_cli.cli.bench_other_engine import OtherBenchRun, show_other_plan
    from specdec_cli.cli.other_engine_run import refuse_elsewhere

    resolved = engine.resolved
    refuse_elsewhere({"--against": bool(wish.peers), "--resume": shared.resume}, resolved.recipe.engine.name)
    prompts = chosen_prompts(resolved.recipe.workload, wish.chat, only_at_hand=dry_run)
    screen = open_screen(shared.quiet, streams_text=False)
    run = OtherBenchRun(resolved, wish, prompts, shared, screen, engine, wish.lossless_check)
    if dry_run:
        show_other_plan(resolved, engine, wish, shared, run.rehearse())
        return None
    return run.go()


def _check(recipe: Recipe, batch_size: int, shared: Shared) -> None:
    """Refuse what contradicts itself before anything is read or loaded."""
    if recipe.draft.method == "none" or recipe.speculation.num_speculative_tokens == 0:
        raise UsageError("there is no draft to measure", "name one with --draft, and k above 0")
    if recipe.draft.method == "prediction":
        raise UsageError("the draft `prediction` reads one prompt's text, and a benchmark has many", "choose another")
    check_speculates(recipe.speculation, batch_size)
    check_regression(recipe, shared)


def _show_plan(resolved: Resolved, wish: _BenchOptions, shared: Shared, num: int | None) -> None:
    """Show what would run, and where each value comes from."""
    arms = ["with the draft", "without a draft", *wish.peers]
    body: dict[str, Any] = {
        "origins": resolved.origins,
        "num_prompts": num,
        "arms": arms,
        "repeats": wish.repeats,
        "batch_size": wish.batch_size,
    }
    prompts = num_prompts_words(resolved.recipe.workload, num)
    head = f"# would measure {prompts}, {wish.repeats} times in each arm ({', '.join(arms)})"
    show_plan(resolved.recipe.as_dict(), body, shared, f"{head}\n{to_yaml(resolved, origins=True)}")


@dataclass(slots=True)
class _BenchRun(Measurement["Bench"]):
    """One run of the command."""

    schema = SCHEMA
    doing = "measuring"

    asked: _BenchOptions
    _peers: list[PeerArm] = field(init=False, default_factory=list)
    _target: LM = field(init=False)

    def json_schema(self) -> dict[str, Any]:
        """The JSON Schema of the document."""
        return json_schema()

    def gate_names(self) -> dict[str, list[str]]:
        """Tasks and other engines."""
        return {"by_task": list(dict.fromkeys(map(task_of, self.rows))), "against": list(self.asked.peers)}

    def load(self, say: Callable[[str], None]) -> tuple[Engine, Workload]:
        """The pair, the tokenized workload, and the other engines."""
        from specdec_cli.engine.engine import Engine
        from specdec_cli.measure.bench.against import check_lengths, load_peers

        trust = self.shared.trust_remote_code
        engine = Engine.from_recipe(self.recipe, trust_remote_code=trust, progress=say)
        workload = self.tokenize(engine)
        check_lengths(self.asked.peers, self.study(engine, workload).groups())
        self._target = engine.target
        self._peers = load_peers(self.asked.peers, self.recipe, engine.eos_token_ids, trust, say)
        return engine, workload

    def study(self, engine: Engine, workload: Workload) -> Bench:
        """The benchmark."""
        from specdec_cli.engine.arms import EngineArm
        from specdec_cli.engine.depth.draft_limit import own_cut_drafts
        from specdec_cli.measure.bench.against import unequal_precision
        from specdec_cli.measure.bench.bench import Bench, Plan

        kind = " (synthetic)" if self.recipe.speculation.is_synthetic else ""
        draft, plain = EngineArm(f"with the draft{kind}", engine, None), EngineArm("without a draft", engine, 0)
        plan = Plan(self.asked.batch_size, self.asked.repeats)
        found = Bench(workload, plan, draft, plain, self._peers, journal=self.journal)
        if unequal := unequal_precision(self.asked.peers, self.recipe):
            found.notices.append(unequal)
        found.notices += own_cut_drafts(engine)
        return found

    def measure(self, study: Bench, stopped: Callable[[], bool]) -> None:
        """Let the arms take turns."""
        with BenchView(self.screen.console, self.screen.is_live, say=self.screen.say) as view:
            for at in study.run(stopped):
                view.show(study, at)

    def is_measured(self, study: Bench) -> bool:
        """Whether both arms decoded."""
        return bool(study.draft.passes and study.plain.passes)

    def passes(self, study: Bench) -> list[Pass]:
        """Those that count, of all arms."""
        return study.passes

    def body(
        self, study: Bench, promise: Promise, must_agree: bool, machine: dict[str, Any], interrupted: bool
    ) -> dict[str, Any]:
        """The document's own keys; the machine's bandwidth is measured for it."""
        from specdec_cli.measure.bench.verdict import measure_roofline
        from specdec_cli.measure.machine.figures import figure

        roofline = figure("the roofline", lambda: measure_roofline(study, self._target), study.notices)
        return bench_body(
            study,
            promise,
            must_agree and self.asked.lossless_check,
            machine,
            roofline,
            {peer.name: peer.peer.version for peer in self._peers},
            interrupted,
        )

    def csv(self, study: Bench, document: dict[str, Any]) -> str:
        """A row per task and arm."""
        from specdec_cli.report.result_files import bench_csv

        return bench_csv(study)

    def draw(self, page: Console, study: Bench, document: dict[str, Any]) -> None:
        """Print the report."""
        print_bench(page, document, self.shared.details)
