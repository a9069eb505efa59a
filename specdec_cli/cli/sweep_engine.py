"""`sweep-k --engine`: every k of another engine predicted from three of its starts, the best few measured there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import typer

from specdec_cli.cli.draft_reader import DraftReader, draft_reader
from specdec_cli.cli.endpoint_options import refuse_others
from specdec_cli.cli.measurement_options import check_named, chosen_prompts, show_plan
from specdec_cli.cli.options import DETAILS_OPTION, ENGINE_OPTIONS, OPTIONS, WORKLOAD_OPTIONS, Shared
from specdec_cli.cli.other_engine import OtherEngine, showing_log
from specdec_cli.cli.output import deliver_with_report, envelope, write_file
from specdec_cli.cli.screen import interruptible, open_screen, timed_progress
from specdec_cli.errors import RunError, UsageError
from specdec_cli.recipe.present import to_yaml
from specdec_cli.report.engine_sweep import SCHEMA, engine_sweep_body, print_engine_sweep
from specdec_cli.report.tuned_recipe import tuned_recipe

if TYPE_CHECKING:
    from specdec_cli.measure.elsewhere.engine_process import EngineProcess
    from specdec_cli.measure.elsewhere.engine_sweep import EngineSweep, EngineSweepPlan
    from specdec_cli.measure.predict.trace import Trace
    from specdec_cli.measure.predict.tracing import Tell
    from specdec_cli.recipe import Recipe, Resolved
    from specdec_cli.report.view import Screen

_OWN = {"k_max", "batch_sizes", "chat", "dry_run", "write_recipe"}
_PATHS = {"recipe", "sets", "json", "output", "force", "quiet", "details", "trust_remote_code"}
_PATHS |= {"engine_command", "engine_args"}
_SECTIONS = ("target.", "draft", "speculation.", "sampling.", "engine.", "workload.")
_NUM_MEASURED = 2
_CPU_LOG = "cpu_worker.py"
"""Stands in vLLM's log where it runs on a CPU."""


@dataclass(frozen=True, slots=True)
class EngineSweepWish:
    """The values of the command's own options."""

    k_max: int
    batch_sizes: tuple[int, ...]
    chat: bool
    dry_run: bool
    write_recipe: Path | None


def sweep_on_engine(
    context: typer.Context, shared: Shared, resolved: Resolved, other: OtherEngine, wish: EngineSweepWish
) -> None:
    """Find the best k of another engine.

    Args:
        context: the command line, whose options that have no meaning here are refused.
        shared: the command's shared options.
        resolved: the recipe, which names the engine.
        other: the engine.
        wish: the command's own options.

    Raises:
        UsageError: options without a meaning here, a draft that cannot be traced, sampling without a prediction, a
            file that cannot be written.
        RunError: the engine does not start or answer, or does not sample from the target.
    """
    name = resolved.recipe.engine.name
    known = (*OPTIONS, *WORKLOAD_OPTIONS, DETAILS_OPTION, *ENGINE_OPTIONS)
    told = (f"--engine {name}", "it sweeps chains on another engine", "leave it out")
    refuse_others(context, known, _OWN, _PATHS, _SECTIONS, *told)
    reader = _reader(resolved.recipe, shared.trust_remote_code)
    check_named({"--write-recipe": wish.write_recipe}, shared)
    other = other.without_prefix_caching()
    config = speculative_config(other, wish.k_max)
    if wish.dry_run:
        _show(resolved, other, wish, shared)
        return
    screen, begin = open_screen(shared.quiet, streams_text=False), perf_counter()
    for warning in other.server(wish.k_max).warnings:
        screen.say(f"warning: {warning}", "yellow")
    reader.check()
    with showing_log(screen):
        sweep = _EngineSweepRun(resolved.recipe, other, wish, reader, screen).go(_rule(resolved.recipe, config))
    body = engine_sweep_body(sweep, name, other.shown(wish.k_max), config, perf_counter() - begin)
    document = envelope(SCHEMA, resolved.recipe.as_dict(), body)
    if wish.write_recipe is not None:
        write_file(wish.write_recipe, tuned_recipe(resolved, document), shared.force)
    deliver_with_report(document, shared, lambda page: print_engine_sweep(page, document, shared.details))


def speculative_config(other: OtherEngine, k: int) -> dict[str, Any]:
    """The engine's settings of speculation at one k, as its command line has them."""
    words = other.words(k)
    found: dict[str, Any] = json.loads(words[words.index("--speculative-config") + 1])
    return found


def _reader(recipe: Recipe, trust_remote_code: bool) -> DraftReader:
    """The reader of the draft as the engine runs it; refuses what no trace tells, before an engine is started."""
    from specdec_cli.measure.predict.remote_trace import check_sampling

    check_sampling(recipe.sampling)
    if recipe.speculation.is_synthetic:
        raise UsageError("synthetic acceptance leaves nothing to predict", "leave it out, or run `bench --engine`")
    alone = recipe.draft.model_copy(update={"first": None})  # that another engine asks no draft before it, it warns of
    return draft_reader(recipe.model_copy(update={"draft": alone}), trust_remote_code=trust_remote_code)


def _rule(recipe: Recipe, config: Mapping[str, Any]) -> str:
    """The engine's rule above temperature 0, as a trace replays it."""
    from specdec_cli.measure.predict.engine_rules import engine_rule

    setting = config.get("rejection_sample_method") or config.get("draft_sample_method")
    rule = engine_rule(recipe.engine.name, needs=setting).rule
    assert rule is not None, "a default has a rule"
    return rule


def _show(resolved: Resolved, other: OtherEngine, wish: EngineSweepWish, shared: Shared) -> None:
    """Show what would be started, and where each value comes from."""
    num, command = resolved.recipe.workload.num_prompts, other.shown(wish.k_max)
    body = {"origins": resolved.origins, "k_max": wish.k_max, "num_prompts": num, "engine_command": command}
    body["batch_sizes"] = list(wish.batch_sizes)
    head = f"# would predict k = 1 to {wish.k_max} over at most {num} prompts from three starts of\n# {command}"
    show_plan(resolved.recipe.as_dict(), body, shared, f"{head}\n{to_yaml(resolved, origins=True)}")


@dataclass(slots=True)
class _EngineSweepRun:
    """One run of the command.

    Args:
        recipe: names the engine.
        other: the engine.
        wish: the command's own options.
        reader: reads the target's text with the draft.
        screen: shows the progress.
    """

    recipe: Recipe
    other: OtherEngine
    wish: EngineSweepWish
    reader: DraftReader
    screen: Screen
    _running: EngineProcess | None = field(init=False, default=None)

    def go(self, rule: str) -> EngineSweep:
        """Start the engine with one k after the other.

        Args:
            rule: its rule of verification.
        """
        from specdec_cli.measure.elsewhere.engine_sweep import EngineSweep

        plan = self._plan(rule)
        with interruptible() as stopped, timed_progress(self.screen) as tell:

            def start(k: int) -> AbstractContextManager[str]:
                return self._start(self.other.process(self.screen, k, tell, stopped))

            def read(trace: Trace) -> str:
                return self._read(trace, tell, stopped)

            sweep = EngineSweep(start, plan, read, tell, stopped, self._check)
            sweep.run()
        return sweep

    def _plan(self, rule: str) -> EngineSweepPlan:
        from specdec_cli.measure.elsewhere.engine_sweep import EngineSweepPlan

        wish, workload = self.wish, self.recipe.workload
        rows = chosen_prompts(workload, wish.chat).rows[: workload.num_prompts]
        return EngineSweepPlan(rows, self.recipe.sampling, wish.chat, wish.k_max, wish.batch_sizes, _NUM_MEASURED, rule)

    @contextmanager
    def _start(self, process: EngineProcess) -> Iterator[str]:
        """An engine's address; one that ends meanwhile gives its own reason in place of the connection's."""
        from specdec_cli.measure.elsewhere.server_arm import DYING_SECONDS
        from specdec_cli.measure.endpoint.refusal import EndpointError

        self._running = process
        with process as url:
            try:
                yield url
            except RunError as error:
                process.check(DYING_SECONDS if isinstance(error, EndpointError) else 0.0)
                raise

    def _check(self, version: str | None) -> None:
        assert self._running is not None, "a version is an engine's that runs"
        refuse_faulty(self.recipe, version, is_cpu=_CPU_LOG in self._running.log_text)

    def _read(self, trace: Trace, tell: Tell, stopped: Callable[[], bool]) -> str:
        """Read the target's text with the draft, until Ctrl-C."""

        def watch(done: int, total: int) -> None:
            if stopped():
                raise KeyboardInterrupt
            tell("tracing the draft", done, total)

        self.reader.read(trace, self.wish.k_max, watch)
        return self.reader.name


def refuse_faulty(recipe: Recipe, version: str | None, *, is_cpu: bool) -> None:
    """Refuse a build whose sampled text with speculation is not the target's.

    Raises:
        RunError: the recipe samples, and it is such a build.
    """
    from specdec_cli.measure.predict.acceptance import sampled_faults

    faults = sampled_faults(recipe.engine.name, version) if is_cpu and recipe.sampling.temperature else []
    if faults:
        raise RunError(faults[0], "sweep at --temperature 0, or on a GPU")
