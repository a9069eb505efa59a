"""`specdec sweep-k`: how deep to speculate: one trace, every k predicted, the best few measured, one recommendation."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec_cli.cli.options import GATE_OPTIONS, WORKLOAD_OPTIONS, Shared, with_shared_options
from specdec_cli.cli.output import (
    check_destination,
    deliver,
    deliver_with_report,
    envelope,
    machine_of,
    write_file,
)
from specdec_cli.cli.screen import interruptible, open_screen, progress
from specdec_cli.errors import ExitCode, UsageError
from specdec_cli.measure.dataset import is_at_hand
from specdec_cli.measure.workload import read_rows
from specdec_cli.recipe.present import to_yaml
from specdec_cli.report.generate import Promise
from specdec_cli.report.sweep_k import SCHEMA, SweepView, json_schema, print_sweep, sweep_body, tuned_recipe
from specdec_cli.report.view import Screen
from specdec_cli.sampling.params import SamplingParams

if TYPE_CHECKING:
    from specdec_cli.engine.engine import Engine
    from specdec_cli.measure.gates import Judged
    from specdec_cli.measure.machine import Machine
    from specdec_cli.measure.prompts import PromptRow
    from specdec_cli.measure.sweep import Sweep
    from specdec_cli.measure.workload import Workload
    from specdec_cli.recipe import Recipe, Resolved

_HOW, _FILES = "How it is measured", "Result files"
_LEFT_OUT = ("sampling.logprobs", "speculation.num_speculative_tokens", "speculation.disable_by_batch_size")
_FAIL_IF = tuple(option for option in GATE_OPTIONS if option.path == "gates.fail_if")


@with_shared_options(without=_LEFT_OUT, beside=(*WORKLOAD_OPTIONS, *_FAIL_IF))
def sweep_k(
    k_max: Annotated[int, typer.Option(min=1, max=64, help="The largest k to consider.", rich_help_panel=_HOW)] = 8,
    exhaustive: Annotated[
        bool,
        typer.Option("--exhaustive", help="Measure every k, not only the best predicted.", rich_help_panel=_HOW),
    ] = False,
    repeats: Annotated[
        int, typer.Option(min=1, help="How often every measured k decodes every prompt.", rich_help_panel=_HOW)
    ] = 2,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Prompts of one task that are decoded together.", rich_help_panel=_HOW)
    ] = 1,
    chat: Annotated[
        bool, typer.Option("--chat", help="Prompts are messages: use the chat template.", rich_help_panel=_HOW)
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would run; load nothing.", rich_help_panel=_HOW)
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(help="Read the trace from this file; write it if there is none.", rich_help_panel=_FILES),
    ] = None,
    write_recipe: Annotated[
        Path | None, typer.Option(help="Write the recipe with the recommended k.", rich_help_panel=_FILES)
    ] = None,
    *,
    shared: Shared,
) -> ExitCode | None:
    """Find how deep to speculate, or that it does not pay. Exit code 3 if a gate is crossed."""
    resolved = shared.resolve()
    wish = _Wish(k_max, exhaustive, repeats, batch_size, chat, trace, write_recipe)
    _check(resolved.recipe, shared, wish)
    unknowable = _unknowable(resolved.recipe, wish)
    if dry_run:
        _show_plan(resolved, wish, shared)
        return None
    workload = resolved.recipe.workload
    rows = read_rows(workload.dataset, workload.tasks, workload.num_prompts)
    return _Run(resolved, wish, rows, shared, open_screen(shared.quiet, streams_text=False), unknowable).go()


@dataclass(frozen=True, slots=True)
class _Wish:
    """What the command's own options ask for."""

    k_max: int
    exhaustive: bool
    repeats: int
    batch_size: int
    chat: bool
    trace: Path | None
    write_recipe: Path | None


def _check(recipe: Recipe, shared: Shared, wish: _Wish) -> None:
    """Refuse what contradicts itself before anything is read or loaded."""
    if recipe.draft.method == "none":
        raise UsageError("there is no draft to sweep", "name one with --draft")
    if recipe.draft.method == "prediction":
        raise UsageError("the draft `prediction` reads one prompt's text, and a sweep has many", "choose another")
    limit = recipe.speculation.disable_by_batch_size
    if limit is not None and wish.batch_size > limit:
        raise UsageError(
            f"the recipe does not speculate beyond `{limit}` sequences, and `{wish.batch_size}` should run together",
            "lower --batch-size",
        )
    named = [path.resolve() for path in (shared.output, wish.trace, wish.write_recipe) if path is not None]
    if len(set(named)) < len(named):
        raise UsageError("two files have the same name", "give each its own")
    check_destination(wish.write_recipe, shared.force, "--write-recipe")
    if wish.trace is not None and not wish.trace.exists():
        check_destination(wish.trace, False, "--trace")


def _unknowable(recipe: Recipe, wish: _Wish) -> str | None:
    """Why no trace can tell; then every k is measured, which has to be asked for.

    Raises:
        UsageError: nobody asked for it, or a trace was named all the same.
    """
    from specdec_cli.measure.starts import check_knowable

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


def _show_plan(resolved: Resolved, wish: _Wish, shared: Shared) -> None:
    """What would run, and where every value came from; a data set that is not at hand is not read."""
    workload = resolved.recipe.workload
    num: int | None = None
    if workload.dataset.startswith("builtin:") or is_at_hand(workload.dataset):
        num = len(read_rows(workload.dataset, workload.tasks, workload.num_prompts))
    if shared.json or shared.output is not None:
        body: dict[str, Any] = {
            "origins": resolved.origins,
            "num_prompts": num,
            "k_max": wish.k_max,
            "exhaustive": wish.exhaustive,
            "repeats": wish.repeats,
            "batch_size": wish.batch_size,
        }
        document = envelope("specdec.recipe/1", resolved.recipe.as_dict(), body)
        deliver(document, to_stdout=shared.json, path=shared.output, force=shared.force)
    if not shared.json:
        prompts = f"{'up to ' if num is None else ''}{workload.num_prompts if num is None else num} prompts"
        which = "all" if wish.exhaustive else "the best few"
        head = f"# would predict k = 1 to {wish.k_max} over {prompts} of {workload.dataset} and measure {which} of them"
        sys.stdout.write(f"{head}\n{to_yaml(resolved, origins=True)}")


@dataclass(slots=True)
class _Run:
    """One run of the command."""

    resolved: Resolved
    wish: _Wish
    rows: Sequence[PromptRow]
    shared: Shared
    screen: Screen
    unknowable: str | None
    _judged: list[Judged] = field(default_factory=list)
    _trace: dict[str, Any] | None = None

    @property
    def recipe(self) -> Recipe:
        return self.resolved.recipe

    def go(self) -> ExitCode | None:
        """Load, trace, predict, measure, show, write, judge."""
        from specdec_cli.measure.gates import check_paths, parse_all, raise_if_crossed

        check_paths(parse_all(self.recipe.gates.fail_if), json_schema(), {})
        if self.resolved.built_in_pair:
            self.screen.say(f"no target named: measuring the built-in {self.recipe.target.model}")
        with progress(self.screen) as say:
            machine, engine, sweep = self._load(say)
        with interruptible() as stopped:
            if sweep.workload.notice:
                self.screen.say(f"note: {sweep.workload.notice}", "yellow")
            with SweepView(self.screen.console, self.screen.is_live) as view:
                for at in sweep.run(stopped):
                    view.show(sweep, at)
            if sweep.prediction is None and not sweep.measured():
                self.screen.say("interrupted before anything was measured", "yellow")
                return ExitCode.INTERRUPTED
            document = self._document(machine, engine, sweep, stopped())
            self._write(sweep, document, stopped())
            if stopped():
                self.screen.say("interrupted: this is what there was", "yellow")
                return ExitCode.INTERRUPTED
        raise_if_crossed(self._judged)
        return None

    def _load(self, say: Callable[[str], None]) -> tuple[Machine, Engine, Sweep]:
        """The machine before we keep it busy, the pair, and every k predicted."""
        say("starting torch and transformers")
        from specdec_cli.engine.build import engine_from_recipe
        from specdec_cli.measure.machine import look
        from specdec_cli.measure.sweep import Sweep, profile_workload

        machine = look()
        trust = self.shared.trust_remote_code
        engine = engine_from_recipe(self._sized_recipe(), trust_remote_code=trust, progress=say)
        workload = self._workload(engine)
        predict = self._predictor(engine, workload, say)
        costs = profile_workload(engine, workload, self.wish.k_max, self.wish.batch_size, say=say)
        wish = self.wish
        prediction = None if predict is None else predict(costs)
        sweep = Sweep(engine, workload, costs, prediction, wish.k_max, wish.exhaustive, wish.batch_size, wish.repeats)
        return machine, engine, sweep

    def _predictor(self, engine: Engine, workload: Workload, say: Callable[[str], None]) -> Callable[[Any], Any] | None:
        """Traces; then it takes costs and gives the prediction. None where no trace can tell."""
        from specdec_cli.measure.sweep import draft_name, obtain_trace, predict_all

        if self.unknowable is not None:
            return None
        name, path = draft_name(self.recipe), self.wish.trace
        is_read = path is not None and path.exists()
        trace = obtain_trace(engine, workload.requests, name, self.wish.k_max, path, say)
        self._trace = {
            "file": None if path is None else str(path),
            "read": is_read,
            "draft": name,
            "prompts": len(trace.prompts),
            "tokens": trace.num_output_tokens,
        }
        return lambda costs: predict_all(trace, name, self.recipe.speculation.verify, self.wish.k_max, costs)

    def _sized_recipe(self) -> Recipe:
        """The recipe with room for the batch and the largest k."""
        engine, speculation = self.recipe.engine, self.recipe.speculation
        num_seqs = max(engine.max_num_seqs, self.wish.batch_size)
        return self.recipe.model_copy(
            update={
                "engine": engine.model_copy(update={"max_num_seqs": num_seqs}),
                "speculation": speculation.model_copy(update={"num_speculative_tokens": self.wish.k_max}),
            }
        )

    def _workload(self, engine: Engine) -> Workload:
        from specdec_cli.measure.workload import tokenize

        def encode(row: PromptRow) -> list[int]:
            return engine.encode([{"role": "user", "content": row.prompt}] if self.wish.chat else row.prompt)

        params = SamplingParams(**self.recipe.sampling.model_dump() | {"logprobs": None})
        return tokenize(self.rows, self.recipe.workload.dataset, encode, params, engine.target.max_context)

    def _document(self, machine: Machine, engine: Engine, sweep: Sweep, interrupted: bool) -> dict[str, Any]:
        from specdec_cli.engine.verify import is_lossless, resolve_mode
        from specdec_cli.measure.gates import judge, parse_all

        temperature = self.recipe.sampling.temperature
        mode = resolve_mode(self.recipe.speculation.verify, temperature)
        promise = Promise(mode, is_lossless(mode))
        body = sweep_body(
            sweep,
            promise,
            promise.is_lossless and (mode == "gumbel" or temperature == 0),
            machine.load_since(),
            self._trace,
            self._notices(sweep),
            interrupted,
        )
        document = envelope(SCHEMA, self.recipe.as_dict(), body, **machine_of(engine))
        self._judged = judge(parse_all(self.recipe.gates.fail_if), document)
        document["gates"] = [one.as_dict() for one in self._judged]
        return document

    def _notices(self, sweep: Sweep) -> list[str]:
        found = [notice for notice in (sweep.workload.notice, self.unknowable) if notice]
        if self.recipe.gates.baseline is not None:
            found.append("the recipe's baseline was not judged: `specdec bench` compares with one")
        return found + (sweep.bench.notices if sweep.bench is not None else [])

    def _write(self, sweep: Sweep, document: dict[str, Any], interrupted: bool) -> None:
        """The document, the recipe, then the report, on stdout unless the document stands there."""
        path, found = self.wish.write_recipe, document["recommended"]
        if path is not None and interrupted:
            self.screen.say(f"{path} was not written: the sweep is not whole", "yellow")
        elif path is not None:
            write_file(path, tuned_recipe(self.resolved, found["k"], found["why"]), self.shared.force)
        deliver_with_report(document, self.shared, lambda page: print_sweep(page, sweep, document))
