"""`specdec sweep-k`: one trace, every k and the wanted trees predicted, the best few measured, one recommendation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec_cli.cli.endpoint_options import ApiKey, EndpointTimeout
from specdec_cli.cli.measurement import Measurement
from specdec_cli.cli.measurement_options import (
    FILES,
    HOW,
    Csv,
    DryRun,
    Exhaustive,
    Html,
    Junit,
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
    k_max_option,
    num_prompts_words,
    repeats_option,
    show_plan,
    whole_numbers,
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
from specdec_cli.cli.output import write_file
from specdec_cli.cli.screen import open_screen, timed_progress
from specdec_cli.cli.sweep_elsewhere import (
    AtATime,
    DraftEndpoint,
    ElsewhereWish,
    TargetEndpoint,
    TraceFrom,
    check_unwanted,
    run_elsewhere,
)
from specdec_cli.cli.sweep_trees import Trees, check_ranks, check_trees, wanted_trees
from specdec_cli.drafted import MOST_NODES
from specdec_cli.errors import ExitCode, UsageError
from specdec_cli.measure.predict.draft_shape import DraftShape
from specdec_cli.recipe.present import to_yaml
from specdec_cli.report.generate import Promise
from specdec_cli.report.sweep_k import SCHEMA, SweepView, json_schema, print_sweeps, sweep_body
from specdec_cli.report.tuned_recipe import tuned_recipe
from specdec_cli.tree_shape import AUTO, TreeShape

if TYPE_CHECKING:
    from rich.console import Console

    from specdec_cli.engine.engine import Engine
    from specdec_cli.measure.bench.passes import Pass
    from specdec_cli.measure.bench.sweeps import Sweeps
    from specdec_cli.measure.predict.cost import Costs
    from specdec_cli.measure.predict.traced import Traced
    from specdec_cli.measure.predict.tracing import Tell
    from specdec_cli.measure.workload.workload import Workload
    from specdec_cli.recipe import Recipe, Resolved


_LEFT_OUT = (
    "sampling.logprobs",
    "speculation.num_speculative_tokens",
    "speculation.disable_by_batch_size",
    "speculation.k_by_batch",
    "speculation.tree",
)
_MOST_TOGETHER = 1024
_K_MAX, _FURTHEST = 8, 32  # without --k-max: where a sweep begins to end, and where it ends in any case

BatchSizes = Annotated[
    str,
    typer.Option(
        "--batch-sizes",
        "--batch-size",
        help="Numbers of prompts to decode together. Each gets its own k.",
        metavar="N,...",
        rich_help_panel=HOW,
    ),
]


@with_shared_options(
    without=_LEFT_OUT, beside=(*WORKLOAD_OPTIONS, *GATE_OPTIONS, RESUME_OPTION, DETAILS_OPTION, *ENGINE_OPTIONS)
)
def sweep_k(
    context: typer.Context,
    k_max: Annotated[
        int | None,
        k_max_option("Largest k to consider.", shown="8, or up to 32 while the best is the largest"),
    ] = None,
    exhaustive: Exhaustive = False,
    repeats: Annotated[int | None, repeats_option("1; 2 with --exhaustive", "Maximum number of times")] = None,
    tree: Trees = None,
    batch_sizes: BatchSizes = "1",
    chat: Chat = False,
    dry_run: DryRun = False,
    trace: TraceFile = None,
    target_endpoint: TargetEndpoint = None,
    draft_endpoint: DraftEndpoint = None,
    trace_from: TraceFrom = None,
    endpoint_timeout: EndpointTimeout = None,
    api_key: ApiKey = None,
    at_a_time: AtATime = None,
    write_recipe: Annotated[
        Path | None,
        typer.Option(help="Write the recipe with the recommended k or tree.", metavar="FILE", rich_help_panel=FILES),
    ] = None,
    markdown: Markdown = None,
    csv: Csv = None,
    junit: Junit = None,
    plot: Plot = None,
    html: Html = None,
    *,
    shared: Shared,
) -> ExitCode | None:
    """Find the best k or tree, show that no draft pays off, or say what is missing to decide.

    Exits with 0 for every verdict (speculate, do-not-speculate, inconclusive) and with 3 if a gate is crossed, such as
    --fail-if 'recommended.verdict == inconclusive'.
    """
    check_template(shared, chat)
    elsewhere = ElsewhereWish(target_endpoint, draft_endpoint, trace_from, endpoint_timeout, api_key, at_a_time)
    if elsewhere.is_wanted:
        run_elsewhere(context, shared, elsewhere, k_max or _K_MAX, chat, dry_run)
        return None
    check_unwanted(elsewhere)
    resolved = shared.resolve()
    sizes = whole_numbers(batch_sizes, "--batch-sizes", _MOST_TOGETHER)
    other = OtherEngine.asked(resolved, shared)
    if other is not None:
        from specdec_cli.cli.sweep_engine import EngineSweepWish, sweep_on_engine

        there = EngineSweepWish(k_max or _K_MAX, sizes, chat, dry_run, write_recipe)
        sweep_on_engine(context, shared, resolved, other, there)
        return None
    repeats = repeats or (2 if exhaustive else 1)
    goes_further = k_max is None and not resolved.recipe.speculation.is_synthetic
    k_max, capped = depth_within_rates(resolved.recipe.speculation, k_max or _K_MAX)
    files = {"markdown": markdown, "csv": csv, "junit": junit}
    trees = wanted_trees(tree or [], resolved.recipe.speculation, k_max)
    wish = _SweepOptions(
        repeats, sizes[-1], chat, plot, html, files, k_max, exhaustive, sizes, trace, write_recipe, trees, goes_further
    )
    _check(resolved.recipe, wish)
    check_regression(resolved.recipe, shared)
    check_files(wish, shared, {"--trace": trace, "--write-recipe": write_recipe})
    unknowable = _unknowable(resolved.recipe, wish)
    prompts = chosen_prompts(resolved.recipe.workload, chat, only_at_hand=dry_run)
    screen = open_screen(shared.quiet, streams_text=False)
    run = _SweepRun(resolved, wish, prompts, shared, screen, unknowable, capped)
    if dry_run:
        _show_plan(resolved, wish, shared, run.rehearse())
        return None
    return run.go()


@dataclass(frozen=True, slots=True)
class _SweepOptions(MeasurementOptions):
    """The command's further options.

    `trees` has each shape once, and `auto` first. `goes_further` lets k_max grow while the best k is the largest.
    """

    k_max: int
    exhaustive: bool
    batch_sizes: tuple[int, ...]
    trace: Path | None
    write_recipe: Path | None
    trees: tuple[str, ...]
    goes_further: bool

    @property
    def shapes(self) -> list[TreeShape]:
        """The named trees."""
        return [TreeShape.parse(tree) for tree in self.trees if tree != AUTO]

    @property
    def first_batch_size(self) -> int:
        """That of the document's own figures; `by_batch_size` has the others."""
        return self.batch_sizes[0]


def _check(recipe: Recipe, wish: _SweepOptions) -> None:
    """Refuse what contradicts itself before anything is read or loaded."""
    if recipe.draft.method == "none":
        raise UsageError("there is no draft to sweep", "name one with --draft")
    if recipe.draft.method == "prediction":
        raise UsageError("the draft `prediction` reads one prompt's text, and a sweep has many", "choose another")
    check_fixed_depth(recipe.speculation)
    check_speculates(recipe.speculation, wish.batch_size)
    if wish.trees:
        check_trees(recipe, wish.batch_sizes)


def _unknowable(recipe: Recipe, wish: _SweepOptions) -> str | None:
    """Why no trace can tell; then every k is measured, which has to be asked for.

    Raises:
        UsageError: --exhaustive is missing, or a trace was named although none is used.
    """
    from specdec_cli.measure.predict.starts import check_knowable

    speculation = recipe.speculation
    try:
        check_knowable(speculation.verify, speculation.p_min if speculation.depth_policy == "confidence" else 0.0)
    except UsageError as error:
        if not wish.exhaustive:
            raise UsageError(error.message, "measure every k without a prediction: --exhaustive") from None
        if wish.trace is not None:
            raise UsageError(error.message, "leave --trace out") from None
        return error.message
    return None


def _show_plan(resolved: Resolved, wish: _SweepOptions, shared: Shared, num: int | None) -> None:
    """Show what would run, and where each value comes from."""
    body: dict[str, Any] = {
        "origins": resolved.origins,
        "num_prompts": num,
        "k_max": wish.k_max,
        "exhaustive": wish.exhaustive,
        "repeats": wish.repeats,
        "batch_sizes": list(wish.batch_sizes),
        "trees": list(wish.trees),
    }
    which = "all" if wish.exhaustive else "the best few"
    often = "once" if wish.repeats == 1 else f"{wish.repeats} times"
    together = "" if wish.batch_sizes == (1,) else f", {', '.join(map(str, wish.batch_sizes))} together"
    prompts = num_prompts_words(resolved.recipe.workload, num)
    beside = f" and trees ({' '.join(wish.trees)})" if wish.trees else ""
    head = f"# would predict k = 1 to {wish.k_max}{beside} over {prompts} and measure {which} of them {often}{together}"
    show_plan(resolved.recipe.as_dict(), body, shared, f"{head}\n{to_yaml(resolved, origins=True)}")


@dataclass(slots=True)
class _SweepRun(Measurement["Sweeps"]):
    """One run of the command.

    Args:
        unknowable: why no trace can tell, or None.
        capped: why k_max is below what was asked for; empty where it is not.
    """

    schema = SCHEMA
    doing = "measuring"

    asked: _SweepOptions
    unknowable: str | None
    capped: list[str]
    _trace: dict[str, Any] | None = field(init=False, default=None)

    def json_schema(self) -> dict[str, Any]:
        """The JSON Schema of the document."""
        return json_schema()

    def gate_names(self) -> dict[str, list[str]]:
        """Tasks."""
        return {"by_task": list(dict.fromkeys(row.category for row in self.rows if row.category is not None))}

    def load(self, say: Callable[[str], None]) -> tuple[Engine, Workload]:
        """The pair, with room for the largest k and tree, and the tokenized workload."""
        from specdec_cli.engine.engine import Engine

        recipe = self.sized(self.recipe, _FURTHEST if self.asked.goes_further else self.asked.k_max)
        largest = f"dynamic:{MOST_NODES}" if self.asked.trees else None
        recipe = recipe.model_copy(update={"speculation": recipe.speculation.model_copy(update={"tree": largest})})
        engine = Engine.from_recipe(recipe, trust_remote_code=self.shared.trust_remote_code, progress=say)
        if self.asked.trees:
            from specdec_cli.measure.predict.tracing import has_ranks

            check_ranks(recipe, has_ranks=has_ranks(engine.drafter, recipe.sampling.temperature))
        self._end_at_draft(engine)
        return engine, self.tokenize(engine)

    def _end_at_draft(self, engine: Engine) -> None:
        """Leave out every k that the draft cannot reach, for which it drafts as many tokens as for the one before.

        Raises:
            UsageError: a named tree is deeper than the draft goes.
        """
        from specdec_cli.engine.depth.draft_limit import check_depth, depths_within

        for shape in self.asked.shapes:
            check_depth(engine.drafter, shape)
        k_max, said = depths_within(engine.drafter, self.asked.k_max)
        self.asked = replace(self.asked, k_max=k_max)
        self.capped += said

    def study(self, engine: Engine, workload: Workload) -> Sweeps:
        """Every k and tree predicted, at every batch size."""
        from specdec_cli.measure.bench.sweep import Sweep, arms_of, profile_in_turn
        from specdec_cli.measure.bench.sweeps import Sweeps
        from specdec_cli.measure.predict.traced import trace_further

        wish = self.asked
        with timed_progress(self.screen) as tell:
            traced = self._traced(engine, workload, tell)
            by_size = {size: self._costs(engine, workload, size, tell) for size in wish.batch_sizes}
            while traced is not None and self._grow(engine, traced, by_size):
                trace_further(traced, engine, self.asked.k_max, tell)
                by_size = {size: self._costs(engine, workload, size, tell) for size in wish.batch_sizes}
        wish, found = self.asked, []
        for size, costs in by_size.items():
            trees = self._trees(traced, costs)
            made = None if traced is None else traced.predict(wish.k_max, costs, trees)
            few = (wish.k_max, wish.exhaustive, size, wish.repeats)
            sweep = Sweep(arms_of(engine), workload, costs, made, *few, self.journal, self.load_before, self._in_use)
            sweep.most_depth = engine.drafter.most_depth
            if traced is not None:
                measured = [shape.tree for shape in sweep.shapes if shape.tree is not None]
                which = {"profiled": tuple(dict.fromkeys([*costs.trees, *measured])), "trees": trees}
                sweep.in_turn = profile_in_turn(engine, workload, traced, wish.k_max, size, self.journal, **which)
            found.append(sweep)
        return Sweeps(tuple(found), traced)

    def _grow(self, engine: Engine, traced: Traced, by_size: dict[int, Costs]) -> bool:
        """Consider larger ks if the best one is predicted to be the largest and nothing limits it; whether it does."""
        old = self.asked.k_max
        best = (traced.predict(old, costs).fastest_k for costs in by_size.values())
        if not self.asked.goes_further or old >= _FURTHEST or old not in best:
            return False
        self.asked = replace(self.asked, k_max=min(2 * old, _FURTHEST))
        self._end_at_draft(engine)
        if self.asked.k_max > old:
            self.capped.append(f"k = {old} was predicted to be best, so larger ones were considered, too")
        return self.asked.k_max > old

    @property
    def _in_use(self) -> DraftShape:
        """The recipe's own k or tree."""
        speculation = self.resolved.recipe.speculation
        tree = None if speculation.tree is None else TreeShape.parse(speculation.tree)
        return DraftShape(speculation.num_speculative_tokens) if tree is None else DraftShape.of(tree)

    def _trees(self, traced: Traced | None, costs: Costs) -> list[TreeShape]:
        """The named trees and, where they are wanted, the best ones."""
        from specdec_cli.measure.bench.sweep import MAX_TREES

        is_wanted = traced is not None and AUTO in self.asked.trees
        best = traced.best_trees(costs, MAX_TREES) if traced is not None and is_wanted else []
        return sorted({*self.asked.shapes, *best}, key=DraftShape.of)

    def _costs(self, engine: Engine, workload: Workload, size: int, tell: Tell) -> Costs:
        """Costs at a batch size; of an earlier run that this one continues, its own."""
        from specdec_cli.measure.bench.sweep import profile_workload
        from specdec_cli.measure.predict.tracing import in_phase
        from specdec_cli.measure.predict.tree_costs import probe_trees

        together = "" if size == 1 else f" at batch size {size}"
        probes = probe_trees(self.asked.k_max) if self.asked.trees else ()
        trees = tuple(dict.fromkeys([*probes, *self.asked.shapes]))

        def measure() -> Costs:
            watch = in_phase(tell, f"measuring the costs of steps{together}")
            return profile_workload(engine, workload, self.asked.k_max, size, watch=watch, trees=trees)

        name = f"draft, {size} together{'' if self.asked.k_max <= _K_MAX else f', k up to {self.asked.k_max}'}"
        return measure() if self.journal is None else self.journal.costs(name, measure)

    def _traced(self, engine: Engine, workload: Workload, tell: Tell) -> Traced | None:
        """The evidence for predictions; None if no trace can predict."""
        from specdec_cli.measure.predict.traced import Traced, draft_name, obtain_trace

        if self.unknowable is not None:
            return None
        name, path = draft_name(self.recipe), self.trace_file(self.asked.trace)
        is_read = path is not None and path.exists()
        wanted = {"needs_ranks": bool(self.asked.trees)}
        trace = obtain_trace(engine, workload.requests, name, self.asked.k_max, path, tell, **wanted)
        self._trace = {
            "file": None if self.asked.trace is None else str(self.asked.trace),
            "read": is_read,
            "draft": name,
            "prompts": len(trace.prompts),
            "tokens": trace.num_output_tokens,
        }
        return Traced(trace, name, self.recipe.speculation.verify)

    def measure(self, study: Sweeps, stopped: Callable[[], bool]) -> None:
        """Let the candidates take turns."""
        with SweepView(self.screen.console, self.screen.is_live, self.screen.say) as view:
            for sweep, at in study.run(stopped):
                view.show(sweep, at)

    def is_measured(self, study: Sweeps) -> bool:
        """Whether a prediction or a measurement can be reported."""
        return bool(study.known())

    def passes(self, study: Sweeps) -> list[Pass]:
        """Those that count, of all arms and batch sizes."""
        return [one for track in study.tracks() for one in track.passes]

    def body(
        self, study: Sweeps, promise: Promise, must_agree: bool, machine: dict[str, Any], interrupted: bool
    ) -> dict[str, Any]:
        """The document's own keys."""
        found = sweep_body(study, promise, must_agree, machine, self._trace, self._notices(study), interrupted)
        found["plan"]["trees"] = list(self.asked.trees)
        return found

    def _notices(self, sweeps: Sweeps) -> list[str]:
        found = [notice for notice in (sweeps.first.workload.notice, self.unknowable, *self.capped) if notice]
        sizes = [size for size in self.asked.batch_sizes if size > 1]
        if sizes and self.unknowable is None:
            found.append(
                f"predictions at batch size {', '.join(map(str, sizes))} are approximate: they assume that all "
                "sequences of a batch run to its end at one context length; measured figures are not affected"
            )
        return found + sweeps.notices()

    def write_files(self, study: Sweeps, document: dict[str, Any], interrupted: bool) -> None:
        """The tuned recipe."""
        path = self.asked.write_recipe
        if path is not None and interrupted:
            self.screen.say(f"{path} was not written: the sweep is not whole", "yellow")
        elif path is not None:
            write_file(path, tuned_recipe(self.resolved, document), self.shared.force)

    def csv(self, study: Sweeps, document: dict[str, Any]) -> str:
        """A row per batch size and k, and one per tree."""
        from specdec_cli.report.result_files import sweep_csv

        return sweep_csv(document)

    def draw(self, page: Console, study: Sweeps, document: dict[str, Any]) -> None:
        """Print the report."""
        print_sweeps(page, document, self.shared.details)
