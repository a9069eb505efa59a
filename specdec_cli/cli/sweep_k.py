"""`specdec sweep-k`: one trace, every k and the wanted trees predicted, the best few measured, one recommendation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec_cli.cli.arms import OwnArms
from specdec_cli.cli.endpoint_options import ApiKey, EndpointTimeout
from specdec_cli.cli.honoured import ENGINE, HERE, other_engine, refuse_without_effect
from specdec_cli.cli.measurement_options import (
    FURTHEST,
    HOW,
    K_MAX,
    DryRun,
    Exhaustive,
    KMax,
    TraceFile,
    check_files,
    check_fixed_depth,
    check_regression,
    check_speculates,
    chosen_prompts,
    depth_within_rates,
    num_prompts_words,
    repeats_option,
    whole_numbers,
)
from specdec_cli.cli.options import FILES, MEASURING_OPTIONS, Chat
from specdec_cli.cli.screen import timed_progress
from specdec_cli.cli.shared import Shared, check_template, with_shared_options
from specdec_cli.cli.sweep_elsewhere import (
    AtATime,
    DraftEndpoint,
    TargetEndpoint,
    TextSource,
    TraceFrom,
    acceptance_run,
)
from specdec_cli.cli.sweep_run import SweepOptions, SweepRun
from specdec_cli.cli.sweep_trees import Trees, check_ranks, check_trees, wanted_trees
from specdec_cli.draft_shape import DraftShape
from specdec_cli.drafted import MOST_NODES
from specdec_cli.errors import ExitCode, UsageError
from specdec_cli.report.bench import BenchView
from specdec_cli.report.sweep_k import live_tables
from specdec_cli.tree_shape import AUTO, TreeShape

if TYPE_CHECKING:
    from specdec_cli.engine.engine import Engine
    from specdec_cli.measure.bench.sweep import Sweeps
    from specdec_cli.measure.predict.cost import Costs
    from specdec_cli.measure.predict.traced import Traced
    from specdec_cli.measure.predict.tracing import Tell
    from specdec_cli.recipe import Recipe


_LEFT_OUT = (
    "sampling.logprobs",
    "speculation.num_speculative_tokens",
    "speculation.disable_by_batch_size",
    "speculation.k_by_batch",
    "speculation.k_by_context",
    "speculation.tree",
)
_MOST_TOGETHER = 1024

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
    common="recipe target draft engine k-max dataset num-prompts batch-sizes max-new-tokens write-recipe "
    "json output html",
    without=_LEFT_OUT,
    beside=MEASURING_OPTIONS,
)
def sweep_k(
    context: typer.Context,
    k_max: KMax = None,
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
    *,
    shared: Shared,
) -> ExitCode | None:
    """Find the best k or tree, show that no draft pays off, or say what is missing to decide.

    Exits with 0 for every verdict (speculate, do-not-speculate, inconclusive) and with 3 if a gate is crossed, such as
    --fail-if 'recommended.verdict == inconclusive'.

    Examples:
        # Find k for the built-in pair.
        specdec sweep-k --num-prompts 8
        # Find k for your models and write a recipe for serve.
        specdec sweep-k -t MODEL -d DRAFT --write-recipe tuned.yaml
        # Find k at three batch sizes.
        specdec sweep-k -r builtin --batch-sizes 1,4,16 --num-prompts 32 --output sweep.json
    """
    check_template(shared, chat)
    source = TextSource(target_endpoint, draft_endpoint, trace_from, endpoint_timeout, api_key, at_a_time)
    place, named = source.place
    refuse_without_effect(context, place, named)
    if place != HERE:
        prediction = acceptance_run(shared, source, k_max or K_MAX, chat, dry_run)
        refuse_without_effect(context, place, named, prediction.arms.resolved)
        return prediction.start(dry_run)
    resolved = shared.resolve()
    sizes = whole_numbers(batch_sizes, "--batch-sizes", _MOST_TOGETHER)
    other = other_engine(resolved, shared)
    if other is not None:
        from specdec_cli.cli.sweep_engine import engine_sweep_run

        refuse_without_effect(context, ENGINE, f"--engine {resolved.recipe.engine.name}", resolved)
        there = SweepOptions(repeats or 1, sizes[-1], chat, k_max or K_MAX, sizes, write_recipe)
        return engine_sweep_run(other, there, shared, dry_run).start(dry_run)
    recipe = resolved.recipe
    repeats = repeats or (2 if exhaustive else 1)
    goes_further = k_max is None and not recipe.speculation.is_synthetic
    k_max, capped = depth_within_rates(recipe.speculation, k_max or K_MAX)
    trees = wanted_trees(tree or [], recipe.speculation, k_max)
    options = SweepOptions(repeats, sizes[-1], chat, k_max, sizes, write_recipe, exhaustive, trace, trees, goes_further)
    _check(recipe, options)
    check_regression(recipe, shared)
    check_files(shared, {"--trace": trace, "--write-recipe": write_recipe})
    unknowable = _unknowable(recipe, options)
    largest, room = (FURTHEST if goes_further else k_max), {"tree": f"dynamic:{MOST_NODES}" if trees else None}
    prompts = chosen_prompts(recipe.workload, chat, only_at_hand=dry_run)
    arms = OwnArms([resolved], ["draft"], options, prompts, shared, k_max=largest, room=room)
    return OwnSweepRun(arms, options, resolved, capped, unknowable).start(dry_run)


def _check(recipe: Recipe, options: SweepOptions) -> None:
    """Refuse what contradicts itself before anything is read or loaded."""
    if recipe.draft.method == "none":
        raise UsageError("there is no draft to sweep", "name one with --draft")
    if recipe.draft.method == "prediction":
        raise UsageError("the draft `prediction` reads one prompt's text, and a sweep has many", "choose another")
    check_fixed_depth(recipe.speculation)
    check_speculates(recipe.speculation, options.batch_size)
    if options.trees:
        check_trees(recipe, options.batch_sizes)


def _unknowable(recipe: Recipe, options: SweepOptions) -> str | None:
    """Why no trace can tell; then every k is measured, which has to be asked for.

    Raises:
        UsageError: --exhaustive is missing, or a trace was named although none is used.
    """
    from specdec_cli.measure.predict.starts import check_knowable

    speculation = recipe.speculation
    try:
        check_knowable(speculation.verify, speculation.least_confidence)
    except UsageError as error:
        if not options.exhaustive:
            raise UsageError(error.message, "measure every k without a prediction: --exhaustive") from None
        if options.trace is not None:
            raise UsageError(error.message, "leave --trace out") from None
        return error.message
    return None


@dataclass(slots=True)
class OwnSweepRun(SweepRun["Sweeps"]):
    """One run of the command on our engine.

    Args:
        arms: where it decodes.
        options: the command's own, whose k_max may grow.
        given: the recipe.
        notices: what a reader should know of k_max and of the predictions.
        unknowable: why no trace can tell, or None.
    """

    order = "A B B A"

    arms: OwnArms
    unknowable: str | None

    def plan(self, num: int | None) -> tuple[dict[str, Any], str]:
        """The ks and trees, and how many of them are measured."""
        options = self.options
        body = {
            "k_max": options.k_max,
            "exhaustive": options.exhaustive,
            "repeats": options.repeats,
            "batch_sizes": list(options.batch_sizes),
            "trees": list(options.trees),
        }
        which = "all" if options.exhaustive else "the best few"
        often = "once" if options.repeats == 1 else f"{options.repeats} times"
        together = "" if options.batch_sizes == (1,) else f", {', '.join(map(str, options.batch_sizes))} together"
        prompts = num_prompts_words(self.arms.recipe.workload, num)
        beside = f" and trees ({' '.join(options.trees)})" if options.trees else ""
        measured = f"measure {which} of them {often}{together}"
        return body, f"# would predict k = 1 to {options.k_max}{beside} over {prompts} and {measured}"

    def opened(self) -> None:
        """Refuse trees that the draft has no ranks for, and leave out every k that it cannot reach."""
        engine, recipe = self.arms.engine, self.arms.recipe
        if self.options.trees:
            from specdec_cli.measure.predict.tracing import has_ranks

            check_ranks(recipe, has_ranks=has_ranks(engine.drafter, recipe.sampling.temperature))
        self._end_at_draft(engine)

    def _end_at_draft(self, engine: Engine) -> None:
        """Leave out every k that the draft cannot reach, for which it drafts as many tokens as for the one before.

        Raises:
            UsageError: a named tree is deeper than the draft goes.
        """
        from specdec_cli.engine.depth.draft_limit import check_depth, depths_within

        for shape in self.options.shapes:
            check_depth(engine.drafter, shape)
        k_max, message = depths_within(engine.drafter, self.options.k_max)
        self.options = replace(self.options, k_max=k_max)
        self.notices += message

    def study(self) -> Sweeps:
        """Every k and tree predicted, at every batch size."""
        from specdec_cli.measure.bench.sweep import Sweep, Sweeps
        from specdec_cli.measure.predict.traced import trace_further

        options, engine, workload = self.options, self.arms.engine, self.arms.workload
        with timed_progress(self.arms.screen) as tell:
            traced = self._traced(tell)
            by_size = {size: self._costs(size, tell) for size in options.batch_sizes}
            while traced is not None and self._grow(engine, traced, by_size):
                trace_further(traced, engine, self.options.k_max, tell)
                by_size = {size: self._costs(size, tell) for size in options.batch_sizes}
        options, sweeps = self.options, []
        for size, costs in by_size.items():
            trees = self._trees(traced, costs)
            sweep = Sweep(
                engine=engine,
                workload=workload,
                batch_size=size,
                k_max=options.k_max,
                costs=costs,
                prediction=None if traced is None else traced.predict(options.k_max, costs, trees),
                load=self.arms.load_before,
                in_use=self._in_use,
                is_exhaustive=options.exhaustive,
                repeats=options.repeats,
                journal=self.journal,
            )
            if traced is not None:
                sweep.profile_in_turn(traced, trees)
            sweeps.append(sweep)
        self._note_approximations()
        return Sweeps(sweeps, traced)

    def _note_approximations(self) -> None:
        """Note what no trace predicts, and what it predicts roughly."""
        sizes = ", ".join(str(size) for size in self.options.batch_sizes if size > 1)
        if self.unknowable is not None:
            self.notices.insert(0, self.unknowable)
        elif sizes:
            self.notices.append(
                f"predictions at batch size {sizes} are approximate: they assume that all sequences of a batch run to "
                "its end at one context length; measured figures are not affected"
            )

    def _grow(self, engine: Engine, traced: Traced, by_size: dict[int, Costs]) -> bool:
        """Consider larger ks if the best one is predicted to be the largest and nothing limits it; whether it does."""
        old = self.options.k_max
        best = (traced.predict(old, costs).fastest_k for costs in by_size.values())
        if not self.options.goes_further or old >= FURTHEST or old not in best:
            return False
        self.options = replace(self.options, k_max=min(2 * old, FURTHEST))
        self._end_at_draft(engine)
        if self.options.k_max > old:
            self.notices.append(f"k = {old} was predicted to be best, so larger ones were considered, too")
        return self.options.k_max > old

    @property
    def _in_use(self) -> DraftShape:
        """The recipe's own k or tree."""
        speculation = self.arms.resolved.recipe.speculation
        tree = None if speculation.tree is None else TreeShape.parse(speculation.tree)
        return DraftShape(speculation.num_speculative_tokens) if tree is None else DraftShape.of(tree)

    def _trees(self, traced: Traced | None, costs: Costs) -> list[TreeShape]:
        """The named trees and, where they are wanted, the best ones."""
        from specdec_cli.measure.bench.sweep import MAX_TREES

        is_wanted = traced is not None and AUTO in self.options.trees
        best = traced.best_trees(costs, MAX_TREES) if traced is not None and is_wanted else []
        return sorted({*self.options.shapes, *best}, key=DraftShape.of)

    def _costs(self, size: int, tell: Tell) -> Costs:
        """Costs at a batch size; of an earlier run that this one continues, its own."""
        from specdec_cli.measure.bench.sweep import profile_workload
        from specdec_cli.measure.predict.tracing import in_phase
        from specdec_cli.measure.predict.tree_costs import probe_trees

        arms, together = self.arms, "" if size == 1 else f" at batch size {size}"
        probes = probe_trees(self.options.k_max) if self.options.trees else ()
        trees = tuple(dict.fromkeys([*probes, *self.options.shapes]))

        name = f"draft, {size} together{'' if self.options.k_max <= K_MAX else f', k up to {self.options.k_max}'}"
        return profile_workload(
            arms.engine,
            arms.workload,
            self.options.k_max,
            size,
            watch=in_phase(tell, f"measuring the costs of steps{together}"),
            trees=trees,
            journal=self.journal,
            name=name,
        )

    def _traced(self, tell: Tell) -> Traced | None:
        """The evidence for predictions; None if no trace can predict."""
        from specdec_cli.measure.predict.traced import Traced, draft_name, obtain_trace

        if self.unknowable is not None:
            return None
        arms = self.arms
        name, path = draft_name(arms.recipe), self.trace_file(self.options.trace)
        is_read = path is not None and path.exists()
        needs = {"needs_ranks": bool(self.options.trees)}
        trace = obtain_trace(arms.engine, arms.workload.requests, name, self.options.k_max, path, tell, **needs)
        traced = Traced(trace, name, arms.recipe.speculation.verify)
        self.keep_trace(traced, is_read)
        return traced

    def measure(self, study: Sweeps, stopped: Callable[[], bool]) -> None:
        """Let the candidates take turns."""
        screen = self.arms.screen
        with BenchView(screen.console, screen.is_live, live_tables, screen.say) as view:
            for sweep, at in study.run(stopped):
                view.show(sweep, at)
