"""`specdec compare-drafts`: which draft to use for a target, each at its own best k, paired with intervals."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec_cli import drafters
from specdec_cli.cli.options import DRAFTS_OPTION, GATE_OPTIONS, WORKLOAD_OPTIONS, Shared, with_shared_options
from specdec_cli.cli.output import check_destination, deliver, deliver_with_report, envelope, machine_of
from specdec_cli.cli.screen import interruptible, open_screen, progress
from specdec_cli.errors import ExitCode, UsageError
from specdec_cli.measure.dataset import is_at_hand
from specdec_cli.measure.workload import read_rows, task_of
from specdec_cli.recipe.present import to_yaml, yaml_value
from specdec_cli.report.bench import BenchView
from specdec_cli.report.compare_drafts import SCHEMA, compare_body, drafts_table, json_schema, print_compare
from specdec_cli.report.generate import Promise
from specdec_cli.report.view import Screen
from specdec_cli.sampling.params import SamplingParams

if TYPE_CHECKING:
    from specdec_cli.engine.engine import Engine
    from specdec_cli.measure.compare import Comparison
    from specdec_cli.measure.gates import Judged
    from specdec_cli.measure.machine import Machine
    from specdec_cli.measure.prompts import PromptRow
    from specdec_cli.measure.trace import Trace
    from specdec_cli.measure.workload import Workload
    from specdec_cli.recipe import Recipe, Resolved

_HOW = "How it is measured"


@with_shared_options(
    without=["draft", "speculation.num_speculative_tokens", "sampling.logprobs"],
    beside=(DRAFTS_OPTION, *WORKLOAD_OPTIONS, *GATE_OPTIONS),
)
def compare_drafts(
    k_max: Annotated[int, typer.Option(min=1, help="Largest k of every draft.", rich_help_panel=_HOW)] = 8,
    exhaustive: Annotated[
        bool, typer.Option("--exhaustive", help="Measure every k of every draft.", rich_help_panel=_HOW)
    ] = False,
    repeats: Annotated[
        int, typer.Option(min=1, help="How often every arm decodes every prompt.", rich_help_panel=_HOW)
    ] = 2,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Prompts of one task that are decoded together.", rich_help_panel=_HOW)
    ] = 1,
    chat: Annotated[
        bool, typer.Option("--chat", help="Prompts are messages: use the chat template.", rich_help_panel=_HOW)
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Read the target's text from this file, or write it there.", metavar="FILE", rich_help_panel=_HOW
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would run; load nothing.", rich_help_panel=_HOW)
    ] = False,
    *,
    shared: Shared,
) -> ExitCode | None:
    """Compare drafts for one target, each at its own best k. Exit code 3 if a gate is crossed."""
    resolved = shared.resolve_drafts()
    wish = _Wish(k_max, exhaustive, repeats, batch_size, chat, trace)
    names = _names([one.recipe for one in resolved])
    _check(resolved, shared, wish)
    if dry_run:
        _show_plan(resolved, names, wish, shared)
        return None
    workload = resolved[0].recipe.workload
    rows = read_rows(workload.dataset, workload.tasks, workload.num_prompts)
    return _Run(resolved, names, wish, rows, shared, open_screen(shared.quiet, streams_text=False)).go()


@dataclass(frozen=True, slots=True)
class _Wish:
    """What the command's own options ask for."""

    k_max: int
    exhaustive: bool
    repeats: int
    batch_size: int
    chat: bool
    trace: Path | None


def _names(recipes: Sequence[Recipe]) -> list[str]:
    """What the drafts are called; one that is loaded in two ways has a number behind it."""
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


def _check(resolved: Sequence[Resolved], shared: Shared, wish: _Wish) -> None:
    """Refuse what contradicts itself before anything is read or loaded."""
    from specdec_cli.measure.starts import check_knowable

    recipe = resolved[0].recipe
    methods = [one.recipe.draft.method for one in resolved]
    if all(method == "none" for method in methods):
        raise UsageError("there is no draft to compare", "name drafts: -d builtin:draft -d ngram -d none")
    if "prediction" in methods:
        raise UsageError("the draft `prediction` reads one prompt's text, and a comparison has many", "leave it out")
    if "gates.max_regression" in shared.flags and recipe.gates.baseline is None:
        raise UsageError("`--max-regression` has no effect without a baseline", "add --baseline FILE")
    if not wish.exhaustive:
        check_knowable(recipe.speculation.verify, _p_min(recipe))
    if wish.trace is not None and not _is_predictable(recipe):
        raise UsageError("`--trace` has no effect where no trace tells the acceptance", "leave --trace out")
    if wish.trace is not None and not wish.trace.exists():
        check_destination(wish.trace, False, "--trace")


def _p_min(recipe: Recipe) -> float:
    return recipe.speculation.p_min if recipe.speculation.depth_policy == "confidence" else 0.0


def _is_predictable(recipe: Recipe) -> bool:
    """Whether a trace knows this verification."""
    return recipe.speculation.verify != "typical" and _p_min(recipe) == 0


def _document_recipe(resolved: Sequence[Resolved]) -> dict[str, Any]:
    """The recipe with all its drafts."""
    drafts = [one.recipe.as_dict()["draft"] for one in resolved]
    return resolved[0].recipe.as_dict() | {"draft": drafts}


def _show_plan(resolved: Sequence[Resolved], names: Sequence[str], wish: _Wish, shared: Shared) -> None:
    """What would run, and where every value came from; a data set that is not at hand is not read."""
    workload = resolved[0].recipe.workload
    rows: list[PromptRow] | None = None
    if workload.dataset.startswith("builtin:") or is_at_hand(workload.dataset):
        rows = read_rows(workload.dataset, workload.tasks, workload.num_prompts)
    if shared.json or shared.output is not None:
        origins = {path: origin for path, origin in resolved[0].origins.items() if not path.startswith("draft.")}
        body: dict[str, Any] = {
            "origins": origins,
            "drafts": list(names),
            "num_prompts": None if rows is None else len(rows),
            "k_max": wish.k_max,
            "exhaustive": wish.exhaustive,
            "repeats": wish.repeats,
            "batch_size": wish.batch_size,
        }
        document = envelope("specdec.recipe/1", _document_recipe(resolved), body)
        deliver(document, to_stdout=shared.json, path=shared.output, force=shared.force)
    if not shared.json:
        num = f"up to {workload.num_prompts}" if rows is None else str(len(rows))
        depths = f"every k up to {wish.k_max}" if wish.exhaustive else f"the best k up to {wish.k_max} of each"
        sys.stdout.write(
            f"# would compare {', '.join(names)}: {depths}, {num} prompts of {workload.dataset}, "
            f"{wish.repeats} times in each arm\n{_plan_yaml(resolved)}"
        )


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
class _Run:
    """One run of the command."""

    resolved: Sequence[Resolved]
    names: Sequence[str]
    wish: _Wish
    rows: Sequence[PromptRow]
    shared: Shared
    screen: Screen
    _judged: list[Judged] = field(default_factory=list)
    _baseline: dict[str, Any] | None = None

    @property
    def recipe(self) -> Recipe:
        """What all drafts have in common."""
        return self.resolved[0].recipe

    def go(self) -> ExitCode | None:
        """Load, trace, predict, measure, show, write, judge."""
        from specdec_cli.measure.gates import raise_if_crossed

        self._prepare_gates()
        if self.resolved[0].built_in_pair:
            self.screen.say(f"no target named: comparing drafts for the built-in {self.recipe.target.model}")
        with progress(self.screen) as say:
            machine, comparison = self._load(say)
        self._study(comparison)
        with interruptible() as stopped:
            self._measure(comparison, stopped)
            if not comparison.is_measured:
                self.screen.say("interrupted before anything was measured", "yellow")
                return ExitCode.INTERRUPTED
            document = self._document(machine, comparison, stopped())
            self._write(comparison, document)
            if stopped():
                self.screen.say("interrupted: this is what there was", "yellow")
                return ExitCode.INTERRUPTED
        raise_if_crossed(self._judged)
        return None

    def _prepare_gates(self) -> None:
        """Refuse gates that could not be judged, before anything is loaded."""
        from specdec_cli.measure.gates import check_measurable, check_paths, parse_all, read_baseline

        gates = self.recipe.gates
        tasks = list(dict.fromkeys(map(task_of, self.rows)))
        names = {f"rows.{place}.by_task": tasks for place in range(len(self.names))}
        check_paths(parse_all(gates.fail_if), json_schema(), names | {"task_winners": tasks})
        if gates.baseline is not None:
            self._baseline = read_baseline(gates.baseline, SCHEMA)
        check_measurable(gates, len(self.rows) * self.wish.repeats)

    def _load(self, say: Callable[[str], None]) -> tuple[Machine, Comparison]:
        """The machine before we keep it busy, the target once, every draft, and the tokenised workload."""
        say("starting torch and transformers")
        from specdec_cli.engine import build
        from specdec_cli.measure.compare import Comparison, Contender
        from specdec_cli.measure.machine import look

        machine = look()
        recipes = [self._sized(one.recipe) for one in self.resolved]
        engines = build.engines_from_recipes(recipes, trust_remote_code=self.shared.trust_remote_code, progress=say)
        contenders = [
            Contender(name, recipe.draft.method or "model", engine)
            for name, recipe, engine in zip(self.names, recipes, engines, strict=True)
        ]
        workload = self._workload(engines[0])
        return machine, Comparison(
            contenders,
            workload,
            self.wish.k_max,
            self.wish.batch_size,
            self.wish.repeats,
            self.wish.exhaustive,
            self.recipe.speculation.verify,
            self._read_trace(engines[0], workload),
        )

    def _sized(self, recipe: Recipe) -> Recipe:
        """The recipe with room for the batch and for the largest k."""
        num_seqs = max(recipe.engine.max_num_seqs, self.wish.batch_size)
        speculation = recipe.speculation.model_copy(update={"num_speculative_tokens": self.wish.k_max})
        engine = recipe.engine.model_copy(update={"max_num_seqs": num_seqs})
        return recipe.model_copy(update={"engine": engine, "speculation": speculation})

    def _workload(self, engine: Engine) -> Workload:
        from specdec_cli.measure.workload import tokenize

        def encode(row: PromptRow) -> list[int]:
            return engine.encode([{"role": "user", "content": row.prompt}] if self.wish.chat else row.prompt)

        params = SamplingParams(**self.recipe.sampling.model_dump() | {"logprobs": None})
        return tokenize(self.rows, self.recipe.workload.dataset, encode, params, engine.target.max_context)

    def _read_trace(self, engine: Engine, workload: Workload) -> Trace | None:
        """An earlier trace of the same prompts; drafts are traced anew, as they may have changed."""
        from specdec_cli.measure.trace import load

        if self.wish.trace is None or not self.wish.trace.exists():
            return None
        trace = load(self.wish.trace)
        trace.check(engine.tokenizer, workload.requests)
        return trace

    def _study(self, comparison: Comparison) -> None:
        """Trace and predict; said in lines, as a spinner would draw while step times are measured."""
        is_new = comparison.trace is None
        comparison.study(_is_predictable(self.recipe), lambda text: self.screen.say(text, "dim"))
        if self.wish.trace is not None and is_new and comparison.trace is not None:
            comparison.trace.save(self.wish.trace)

    def _measure(self, comparison: Comparison, stopped: Callable[[], bool]) -> None:
        if comparison.workload.notice:
            self.screen.say(f"note: {comparison.workload.notice}", "yellow")
        view = BenchView(self.screen.console, self.screen.is_live, lambda _: drafts_table(comparison))
        with view:
            for at in comparison.run(stopped):
                view.show(comparison.bench, at)

    def _document(self, machine: Machine, comparison: Comparison, interrupted: bool) -> dict[str, Any]:
        from specdec_cli.engine.verify import is_lossless, resolve_mode
        from specdec_cli.measure.gates import against_baseline, judge, other_recipe, parse_all

        temperature = self.recipe.sampling.temperature
        mode = resolve_mode(self.recipe.speculation.verify, temperature)
        promise = Promise(mode, is_lossless(mode))
        must_agree = promise.is_lossless and (mode == "gumbel" or temperature == 0)
        body = compare_body(comparison, promise, must_agree, machine.load_since(), interrupted)
        first = comparison.contenders[0].engine
        document = envelope(SCHEMA, _document_recipe(self.resolved), body, **machine_of(first))
        self._judged = judge(parse_all(self.recipe.gates.fail_if), document)
        if self._baseline is not None:
            self._judged += against_baseline(document, self._baseline, self.recipe.gates.max_regression)
            if unlike := other_recipe(document, self._baseline):
                document["notices"].append(unlike)
        document["gates"] = [one.as_dict() for one in self._judged]
        return document

    def _write(self, comparison: Comparison, document: dict[str, Any]) -> None:
        """The document, then the report, on stdout unless the document stands there."""
        deliver_with_report(document, self.shared, lambda page: print_compare(page, comparison, document))
