"""`specdec compare-drafts`: which draft to use for a target, each at its own best k, paired with intervals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec_cli import drafters
from specdec_cli.cli.measurement import Measurement
from specdec_cli.cli.measurement_options import (
    BatchSize,
    Csv,
    DryRun,
    Exhaustive,
    Html,
    Junit,
    KMax,
    Markdown,
    MeasurementOptions,
    Plot,
    TraceFile,
    check_files,
    check_fixed_depth,
    check_regression,
    check_speculates,
    chosen_prompts,
    depth_within_rates,
    num_prompts_words,
    repeats_option,
    show_plan,
)
from specdec_cli.cli.options import (
    DETAILS_OPTION,
    DRAFTS_OPTION,
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
from specdec_cli.cli.screen import open_screen, timed_progress
from specdec_cli.errors import ExitCode, UsageError
from specdec_cli.measure.workload.workload import task_of
from specdec_cli.recipe.present import to_yaml, yaml_value
from specdec_cli.report.bench import BenchView
from specdec_cli.report.compare_drafts import SCHEMA, compare_body, drafts_table, json_schema, print_compare
from specdec_cli.report.generate import Promise

if TYPE_CHECKING:
    from rich.console import Console

    from specdec_cli.engine.engine import Engine
    from specdec_cli.measure.bench.compare_loaded import LoadedComparison, LoadedContender
    from specdec_cli.measure.bench.passes import Pass
    from specdec_cli.measure.predict.trace import Trace
    from specdec_cli.measure.workload.workload import Workload
    from specdec_cli.recipe import Recipe, Resolved


@with_shared_options(
    without=["draft", "speculation.num_speculative_tokens", "speculation.k_by_batch", "sampling.logprobs"],
    beside=(DRAFTS_OPTION, *WORKLOAD_OPTIONS, *GATE_OPTIONS, RESUME_OPTION, DETAILS_OPTION, *ENGINE_OPTIONS),
)
def compare_drafts(
    context: typer.Context,
    k_max: KMax = 8,
    exhaustive: Exhaustive = False,
    repeats: Annotated[int, repeats_option()] = 2,
    batch_size: BatchSize = 1,
    chat: Chat = False,
    dry_run: DryRun = False,
    trace: TraceFile = None,
    markdown: Markdown = None,
    csv: Csv = None,
    junit: Junit = None,
    plot: Plot = None,
    html: Html = None,
    *,
    shared: Shared,
) -> ExitCode | None:
    """Compare drafts for one target, each at its own best k.

    Exits with 0 for every verdict (speculate, do-not-speculate, inconclusive) and with 3 if a gate is crossed, such as
    --fail-if 'verdict != speculate'.
    """
    check_template(shared, chat)
    resolved = shared.resolve_drafts()
    k_max, capped = depth_within_rates(resolved[0].recipe.speculation, k_max)
    files = {"markdown": markdown, "csv": csv, "junit": junit}
    wish = _CompareOptions(repeats, batch_size, chat, plot, html, files, k_max, exhaustive, trace)
    names = _names([one.recipe for one in resolved])
    _check(resolved, shared, wish)
    check_files(wish, shared, {"--trace": trace})
    engines = [OtherEngine.asked(one, shared) for one in resolved]
    if others := [one.without_prefix_caching() for one in engines if one is not None]:
        named = {name: _is_given(context, name) for name in ("k_max", "exhaustive", "trace")}
        return _elsewhere(others, names, wish, shared, named, dry_run)
    prompts = chosen_prompts(resolved[0].recipe.workload, chat, only_at_hand=dry_run)
    screen = open_screen(shared.quiet, streams_text=False)
    run = _CompareRun(resolved[0], wish, prompts, shared, screen, resolved, names, capped)
    if dry_run:
        _show_plan(resolved, names, wish, shared, run.rehearse())
        return None
    return run.go()


@dataclass(frozen=True, slots=True)
class _CompareOptions(MeasurementOptions):
    """The command's further options."""

    k_max: int
    exhaustive: bool
    trace: Path | None


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _elsewhere(
    engines: Sequence[OtherEngine],
    names: Sequence[str],
    wish: _CompareOptions,
    shared: Shared,
    named: Mapping[str, bool],
    dry_run: bool,
) -> ExitCode | None:
    """Compare drafts in another engine, which is started once for each."""
    from specdec_cli.cli.compare_other_engine import OtherCompareRun, show_other_drafts
    from specdec_cli.cli.other_engine_run import refuse_elsewhere

    resolved = engines[0].resolved
    given = {f"--{name.replace('_', '-')}": is_given for name, is_given in named.items()}
    refuse_elsewhere({**given, "--resume": shared.resume}, resolved.recipe.engine.name)
    prompts = chosen_prompts(resolved.recipe.workload, wish.chat, only_at_hand=dry_run)
    screen = open_screen(shared.quiet, streams_text=False)
    first = next(one for one in engines if one.resolved.recipe.draft.method != "none")
    run = OtherCompareRun(resolved, wish, prompts, shared, screen, first, names=names, engines=engines)
    if dry_run:
        show_other_drafts(names, engines, wish, shared, run.rehearse())
        return None
    return run.go()


def _names(recipes: Sequence[Recipe]) -> list[str]:
    """The drafts' names. A draft that is loaded in two ways gets a number."""
    names: list[str] = []
    seen: list[dict[str, Any]] = []
    for recipe in recipes:
        draft, name = recipe.as_dict()["draft"], drafters.to_spec(recipe.draft_fields())
        if draft in seen:
            raise UsageError(f"the draft `{name}` is named twice", "name each draft once")
        seen.append(draft)
        num = 1 + sum(other == name or other.startswith(f"{name} #") for other in names)
        names.append(name if num == 1 else f"{name} #{num}")
    return names


def _check(resolved: Sequence[Resolved], shared: Shared, wish: _CompareOptions) -> None:
    """Refuse what contradicts itself before anything is read or loaded."""
    from specdec_cli.measure.predict.starts import check_knowable

    recipe = resolved[0].recipe
    methods = [one.recipe.draft.method for one in resolved]
    if all(method == "none" for method in methods):
        raise UsageError("there is no draft to compare", "name drafts: -d builtin:draft -d ngram -d none")
    if "prediction" in methods:
        raise UsageError("the draft `prediction` reads one prompt's text, and a comparison has many", "leave it out")
    check_fixed_depth(recipe.speculation)
    check_speculates(recipe.speculation, wish.batch_size)
    check_regression(recipe, shared)
    if not wish.exhaustive and recipe.speculation.tree is None:
        check_knowable(recipe.speculation.verify, _p_min(recipe))
    if wish.trace is not None and not _is_predictable(recipe):
        raise UsageError("`--trace` has no effect if no trace can predict the acceptance", "leave --trace out")


def _p_min(recipe: Recipe) -> float:
    return recipe.speculation.p_min if recipe.speculation.depth_policy == "confidence" else 0.0


def _is_predictable(recipe: Recipe) -> bool:
    """Whether a trace knows this verification."""
    from specdec_cli.measure.predict.starts import RULES

    return recipe.speculation.verify in ("auto", *RULES) and _p_min(recipe) == 0 and recipe.speculation.tree is None


def _drafts(resolved: Sequence[Resolved]) -> list[dict[str, Any]]:
    return [one.recipe.as_dict()["draft"] for one in resolved]


def _show_plan(
    resolved: Sequence[Resolved], names: Sequence[str], wish: _CompareOptions, shared: Shared, num: int | None
) -> None:
    """Show what would run, and where each value comes from."""
    workload = resolved[0].recipe.workload
    body: dict[str, Any] = {
        "origins": {path: origin for path, origin in resolved[0].origins.items() if not path.startswith("draft.")},
        "drafts": list(names),
        "num_prompts": num,
        "k_max": wish.k_max,
        "exhaustive": wish.exhaustive,
        "repeats": wish.repeats,
        "batch_size": wish.batch_size,
    }
    depths = f"every k up to {wish.k_max}" if wish.exhaustive else f"the best k up to {wish.k_max} of each"
    head = (
        f"# would compare {', '.join(names)}: {depths}, {num_prompts_words(workload, num)}, "
        f"{wish.repeats} times in each arm"
    )
    recipe = resolved[0].recipe.as_dict() | {"draft": _drafts(resolved)}
    show_plan(recipe, body, shared, f"{head}\n{_plan_yaml(resolved)}")


def _plan_yaml(resolved: Sequence[Resolved]) -> str:
    """The recipe as YAML, its drafts as a list."""
    lines, is_draft = [], False
    for line in to_yaml(resolved[0], origins=True).splitlines():
        is_draft = line == "draft:" or (is_draft and line.startswith(" "))
        if line == "draft:":
            lines += [line, *(f"  - {yaml_value(one.recipe.as_dict()['draft'])}" for one in resolved)]
        elif not is_draft:
            lines.append(line)
    return "\n".join(lines) + "\n"


@dataclass(slots=True)
class _CompareRun(Measurement["LoadedComparison"]):
    """One run of the command.

    Args:
        drafts: the recipe once for each draft.
        names: the drafts'.
        capped: why k_max is below what was asked for; empty where it is not.
    """

    schema = SCHEMA
    doing = "comparing drafts for"

    asked: _CompareOptions
    drafts: Sequence[Resolved]
    names: Sequence[str]
    capped: list[str]
    _contenders: list[LoadedContender] = field(init=False, default_factory=list)

    def json_schema(self) -> dict[str, Any]:
        """The JSON Schema of the document."""
        return json_schema()

    def gate_names(self) -> dict[str, list[str]]:
        """Drafts, which have a place too, and tasks, of every draft."""
        tasks = list(dict.fromkeys(map(task_of, self.rows)))
        places = [*self.names, *range(len(self.names))]
        return {"rows": list(self.names), "task_winners": tasks} | {f"rows.{one}.by_task": tasks for one in places}

    def document_recipe(self) -> dict[str, Any]:
        """The recipe with all its drafts."""
        return self.recipe.as_dict() | {"draft": _drafts(self.drafts)}

    def load(self, say: Callable[[str], None]) -> tuple[Engine, Workload]:
        """The target once, every draft, and the tokenized workload."""
        from specdec_cli.engine.build import engines_from_recipes
        from specdec_cli.engine.engine import Engine
        from specdec_cli.measure.bench.compare_loaded import LoadedContender

        recipes = [self.sized(one.recipe, self.asked.k_max) for one in self.drafts]
        engines = engines_from_recipes(Engine, recipes, trust_remote_code=self.shared.trust_remote_code, progress=say)
        self._contenders = [
            LoadedContender(name, engine.drafters.own_name, engine=engine)
            for name, engine in zip(self.names, engines, strict=True)
        ]
        return engines[0], self.tokenize(engines[0])

    def study(self, engine: Engine, workload: Workload) -> LoadedComparison:
        """Every draft traced, priced and predicted."""
        from specdec_cli.engine.draft_tokenizer import matching
        from specdec_cli.measure.bench.compare_loaded import LoadedComparison

        wish, earlier = self.asked, self._read_trace(engine, workload)
        comparison = LoadedComparison(
            self._contenders,
            workload,
            wish.k_max,
            wish.batch_size,
            wish.repeats,
            wish.exhaustive,
            journal=self.journal,
            load=self.load_before,
            verify=self.recipe.speculation.verify,
            trace=earlier,
        )
        comparison.notices += self.capped
        for contender in self._contenders[1:]:  # the first one's is among the run's
            comparison.notices += [f"{contender.draft}: {said}" for said in matching(contender.engine.drafter)]
        with timed_progress(self.screen) as tell:
            comparison.study(_is_predictable(self.recipe), tell)
        path = self.trace_file(wish.trace)
        if path is not None and earlier is None and comparison.trace is not None:
            comparison.trace.save(path)
        return comparison

    def _read_trace(self, engine: Engine, workload: Workload) -> Trace | None:
        """An earlier trace of the same prompts. Drafts are traced again because they may have changed."""
        from specdec_cli.measure.predict.trace import load

        path = self.trace_file(self.asked.trace)
        if path is None or not path.exists():
            return None
        trace = load(path)
        trace.check(engine.tokenizer, workload.requests)
        return trace

    def measure(self, study: LoadedComparison, stopped: Callable[[], bool]) -> None:
        """Let the drafts take turns."""
        view = BenchView(self.screen.console, self.screen.is_live, lambda _: drafts_table(study), self.screen.say)
        with view:
            for at in study.run(stopped):
                view.show(study.bench, at)

    def is_measured(self, study: LoadedComparison) -> bool:
        """Whether there is a draft and a plain arm to compare."""
        return study.is_measured

    def passes(self, study: LoadedComparison) -> list[Pass]:
        """Those that count, of all arms."""
        return study.bench.passes

    def body(
        self, study: LoadedComparison, promise: Promise, must_agree: bool, machine: dict[str, Any], interrupted: bool
    ) -> dict[str, Any]:
        """The document's own keys."""
        return compare_body(study, promise, must_agree, machine, interrupted)

    def csv(self, study: LoadedComparison, document: dict[str, Any]) -> str:
        """A row per draft, and one for each of its tasks."""
        from specdec_cli.report.result_files import compare_csv

        return compare_csv(document)

    def draw(self, page: Console, study: LoadedComparison, document: dict[str, Any]) -> None:
        """Print the report."""
        print_compare(page, document, self.shared.details)
