"""`specdec compare-drafts`: which draft to use for a target, each at its own best k, paired with intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec_cli import drafters
from specdec_cli.cli.arms import OwnArms, arms_from
from specdec_cli.cli.measured_run import ComparedRun
from specdec_cli.cli.measurement_options import (
    FURTHEST,
    K_MAX,
    BatchSize,
    DryRun,
    Exhaustive,
    KMax,
    MeasurementOptions,
    TraceFile,
    check_files,
    check_fixed_depth,
    check_regression,
    check_speculates,
    depth_within_rates,
    num_prompts_words,
    repeats_option,
)
from specdec_cli.cli.options import DRAFTS_OPTION, MEASURING_OPTIONS, Chat
from specdec_cli.cli.place import PLAIN, Arms
from specdec_cli.cli.screen import timed_progress
from specdec_cli.cli.shared import Shared, check_template, with_shared_options
from specdec_cli.errors import ExitCode, UsageError
from specdec_cli.measure.documents.compare_drafts import CompareDocument, compare_body
from specdec_cli.recipe.present import to_yaml, yaml_value
from specdec_cli.report.bench import BenchView
from specdec_cli.report.compare_drafts import drafts_table, print_compare

if TYPE_CHECKING:
    from rich.console import Console

    from specdec_cli.measure.bench.compare import DraftComparison
    from specdec_cli.measure.bench.passes import Pass
    from specdec_cli.measure.machine.load import Conditions
    from specdec_cli.recipe import Recipe, Resolved


@with_shared_options(
    common="recipe target draft engine k-max dataset num-prompts batch-size max-new-tokens json output html",
    without=[
        "draft",
        *(f"speculation.{key}" for key in ("num_speculative_tokens", "k_by_batch", "k_by_context")),
        "sampling.logprobs",
    ],
    beside=(DRAFTS_OPTION, *MEASURING_OPTIONS),
)
def compare_drafts(
    context: typer.Context,
    k_max: KMax = None,
    exhaustive: Exhaustive = False,
    repeats: Annotated[int, repeats_option()] = 2,
    batch_size: BatchSize = 1,
    chat: Chat = False,
    dry_run: DryRun = False,
    trace: TraceFile = None,
    *,
    shared: Shared,
) -> ExitCode | None:
    """Compare drafts for one target, each at its own best k.

    Exits with 0 for every verdict (speculate, do-not-speculate, inconclusive) and with 3 if a gate is crossed, such as
    --fail-if 'verdict != speculate'.

    Examples:
        # Compare the built-in draft with an n-gram draft.
        specdec compare-drafts -d builtin:draft -d ngram
        # Compare two draft models on your own data set.
        specdec compare-drafts -t MODEL -d DRAFT-A -d DRAFT-B --dataset prompts.jsonl
        # Write a page with tables and plots.
        specdec compare-drafts -d builtin:draft -d ngram:max=4 --html drafts.html
    """
    check_template(shared, chat)
    resolved = shared.resolve_drafts()
    speculation = resolved[0].recipe.speculation
    goes_further = k_max is None and not speculation.is_synthetic and speculation.tree is None
    k_max, capped = depth_within_rates(speculation, k_max or K_MAX)
    furthest = FURTHEST if goes_further else k_max
    options = _CompareOptions(repeats, batch_size, chat, k_max, furthest, exhaustive, trace)
    names = _names([draft.recipe for draft in resolved])
    _check(resolved, shared, options)
    check_files(shared, {"--trace": trace})
    arms = arms_from(context, resolved, names, options, shared, dry_run, are_several=True, k_max=furthest)
    return CompareRun(arms, options, capped).start(dry_run)


@dataclass(frozen=True, slots=True)
class _CompareOptions(MeasurementOptions):
    """The command's further options. k goes up to `furthest` while a draft's best k is the largest."""

    k_max: int
    furthest: int
    exhaustive: bool
    trace: Path | None


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


def _check(resolved: Sequence[Resolved], shared: Shared, options: _CompareOptions) -> None:
    """Refuse what contradicts itself before anything is read or loaded."""
    from specdec_cli.measure.predict.starts import check_knowable

    recipe = resolved[0].recipe
    methods = [draft.recipe.draft.method for draft in resolved]
    if all(method == "none" for method in methods):
        raise UsageError("there is no draft to compare", "name drafts: -d builtin:draft -d ngram -d none")
    if "prediction" in methods:
        raise UsageError("the draft `prediction` reads one prompt's text, and a comparison has many", "leave it out")
    check_fixed_depth(recipe.speculation)
    check_speculates(recipe.speculation, options.batch_size)
    check_regression(recipe, shared)
    if not options.exhaustive and recipe.speculation.tree is None:
        check_knowable(recipe.speculation.verify, recipe.speculation.least_confidence)
    if options.trace is not None and not _is_predictable(recipe):
        raise UsageError("`--trace` has no effect if no trace can predict the acceptance", "leave --trace out")


def _is_predictable(recipe: Recipe) -> bool:
    """Whether a trace knows this verification."""
    from specdec_cli.measure.predict.starts import REPLAYABLE

    speculation = recipe.speculation
    is_chain = speculation.tree is None and not speculation.least_confidence
    return is_chain and speculation.verify in ("auto", *REPLAYABLE)


def _plan_yaml(resolved: Sequence[Resolved]) -> str:
    """The recipe as YAML, its drafts as a list."""
    lines, is_draft = [], False
    for line in to_yaml(resolved[0], origins=True).splitlines():
        is_draft = line == "draft:" or (is_draft and line.startswith(" "))
        if line == "draft:":
            lines += [line, *(f"  - {yaml_value(draft.recipe.as_dict()['draft'])}" for draft in resolved)]
        elif not is_draft:
            lines.append(line)
    return "\n".join(lines) + "\n"


@dataclass(slots=True)
class CompareRun(ComparedRun["DraftComparison"]):
    """One run of the command.

    Args:
        arms: where it decodes.
        options: the command's own.
        capped: why k_max is below what was asked for; empty where it is not.
    """

    document_class = CompareDocument
    doing = "comparing drafts for"

    arms: Arms
    options: _CompareOptions
    capped: list[str]

    def gate_names(self) -> dict[str, list[str]]:
        """Drafts, which have a place too, and tasks, of every draft."""
        names, tasks = list(self.arms.names), self.tasks
        places = [*names, *range(len(names))]
        return {"rows": names, "task_winners": tasks} | {f"rows.{place}.by_task": tasks for place in places}

    def shown(self, recipe: Recipe) -> dict[str, Any]:
        """A recipe with all the drafts."""
        return recipe.as_dict() | {"draft": [draft.recipe.as_dict()["draft"] for draft in self.arms.drafts]}

    def plan(self, num: int | None) -> tuple[dict[str, Any], str]:
        """The drafts, and the ks at which they are measured."""
        arms, options = self.arms, self.options
        kept = {path: origin for path, origin in arms.resolved.origins.items() if not path.startswith("draft.")}
        body: dict[str, Any] = {"origins": kept, "drafts": list(arms.names)}
        depths = ""
        if isinstance(arms, OwnArms):
            body |= {"k_max": options.k_max, "exhaustive": options.exhaustive}
            depths = (
                f"every k up to {options.k_max}" if options.exhaustive else f"the best k up to {options.k_max} of each"
            )
            depths += ", "
        body |= {"repeats": options.repeats, "batch_size": options.batch_size}
        prompts = num_prompts_words(arms.recipe.workload, num)
        message = f"# would compare {', '.join(arms.names)}: {depths}{prompts}, {options.repeats} times in each arm"
        return body, message

    def plan_yaml(self) -> str:
        """The recipe as a dry run shows it, its drafts as a list."""
        return _plan_yaml(self.arms.drafts)

    def study(self) -> DraftComparison:
        """Every draft; where it is loaded here traced, priced and predicted."""
        from specdec_cli.measure.bench.compare import DraftComparison

        arms, options = self.arms, self.options
        comparison = DraftComparison(
            arms.contenders(),
            arms.workload,
            options.k_max,
            options.furthest,
            options.batch_size,
            options.repeats,
            options.exhaustive,
            notices=[*self.capped],
            journal=self.journal,
            load=arms.load_before,
            verify=arms.recipe.speculation.verify,
        )
        if isinstance(arms, OwnArms):
            self._predict(comparison, arms)
        else:
            message = "each draft was measured at the recipe's k alone; `sweep-k` finds a draft's own best k"
            comparison.notices.append(message)
            comparison.k_max = max(contender.k or 0 for contender in comparison.contenders)
        return comparison

    def _predict(self, comparison: DraftComparison, arms: OwnArms) -> None:
        """Trace, price and predict every draft."""
        comparison.notices += arms.matching()
        with timed_progress(arms.screen) as tell:
            comparison.study(_is_predictable(arms.recipe), self.trace_file(self.options.trace), tell)

    def measure(self, study: DraftComparison, stopped: Callable[[], bool]) -> None:
        """Let the drafts take turns, or one server run after the other."""
        screen, placed = self.arms.screen, list(enumerate(study.contenders))
        first = next(place for place, arm in placed if arm.drafts)
        plain = self.arms.arm(PLAIN, 0, first)
        arms = [
            (arm, k, self.arms.arm(f"{arm.draft} k={k}", k, place))
            for place, arm in placed
            if arm.drafts
            for k in study.depths(arm)
        ]
        view = BenchView(screen.console, screen.is_live, lambda _: drafts_table(study), screen.say)
        self.watch(study.measure(arms, plain, stopped, self.arms.in_turn), lambda: study.bench, view)

    def is_measured(self, study: DraftComparison) -> bool:
        """Whether there is a draft and a plain arm to compare."""
        return study.is_measured

    def passes(self, study: DraftComparison) -> list[Pass]:
        """Counted passes of all arms."""
        return study.bench.passes

    def body(self, study: DraftComparison, machine: Conditions, interrupted: bool) -> dict[str, Any]:
        """The document's own keys."""
        return compare_body(study, self.arms.promise, self.must_agree, machine, interrupted)

    def csv(self, study: DraftComparison, document: dict[str, Any]) -> str:
        """A row per draft, and one for each of its tasks."""
        from specdec_cli.report.result_files import compare_csv

        return compare_csv(document)

    def draw(self, page: Console, study: DraftComparison, document: dict[str, Any]) -> None:
        """Print the report."""
        print_compare(page, document, self.arms.shared.details)
