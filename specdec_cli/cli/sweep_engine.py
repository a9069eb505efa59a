"""`sweep-k --engine`: every k of another engine predicted from three of its starts, the best few measured there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import typer

from specdec_cli.cli.endpoint_options import refuse_others
from specdec_cli.cli.measurement_options import check_named, chosen_prompts, show_plan
from specdec_cli.cli.options import ENGINE_OPTIONS, OPTIONS, WORKLOAD_OPTIONS, Shared
from specdec_cli.cli.other_engine import OtherEngine
from specdec_cli.cli.output import deliver_with_report, envelope, write_file
from specdec_cli.cli.screen import interruptible, open_screen, timed_progress
from specdec_cli.cli.sweep_elsewhere import lookup_draft, trace_lookup
from specdec_cli.errors import RunError, UsageError
from specdec_cli.export.draft_kind import DRAFT_MODEL, draft_kind
from specdec_cli.recipe.present import to_yaml
from specdec_cli.report.engine_sweep import SCHEMA, engine_sweep_body, print_engine_sweep
from specdec_cli.report.tuned_recipe import tuned_recipe

if TYPE_CHECKING:
    from specdec_cli.measure.elsewhere.engine_process import EngineProcess
    from specdec_cli.measure.elsewhere.engine_sweep import EngineSweep
    from specdec_cli.measure.predict.trace import Trace
    from specdec_cli.recipe import Recipe, Resolved
    from specdec_cli.report.view import Screen

_OWN = {"k_max", "batch_sizes", "chat", "dry_run", "write_recipe"}
_PATHS = {"recipe", "sets", "json", "output", "force", "quiet", "trust_remote_code"}
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
    known = (*OPTIONS, *WORKLOAD_OPTIONS, *ENGINE_OPTIONS)
    refuse_others(context, known, _OWN, _PATHS, _SECTIONS, f"--engine {name}", "it sweeps chains on another engine")
    _check(resolved.recipe)
    check_named({"--write-recipe": wish.write_recipe}, shared)
    other = other.without_prefix_caching()
    config = speculative_config(other, wish.k_max)
    if wish.dry_run:
        _show(resolved, other, wish, shared)
        return
    screen, begin = open_screen(shared.quiet, streams_text=False), perf_counter()
    for warning in other.server(wish.k_max).warnings:
        screen.say(f"warning: {warning}", "yellow")
    sweep = _run(resolved, other, wish, config, screen)
    body = engine_sweep_body(sweep, name, other.shown(wish.k_max), config, perf_counter() - begin)
    document = envelope(SCHEMA, resolved.recipe.as_dict(), body)
    if wish.write_recipe is not None:
        write_file(wish.write_recipe, tuned_recipe(resolved, document), shared.force)
    deliver_with_report(document, shared, lambda page: print_engine_sweep(page, document))


def speculative_config(other: OtherEngine, k: int) -> dict[str, Any]:
    """The engine's settings of speculation at one k, as its command line has them."""
    words = other.words(k)
    found: dict[str, Any] = json.loads(words[words.index("--speculative-config") + 1])
    return found


def _check(recipe: Recipe) -> None:
    """Refuse what no trace tells, before an engine is started."""
    from specdec_cli.measure.predict.remote_trace import check_sampling

    check_sampling(recipe.sampling)
    if recipe.speculation.is_synthetic:
        raise UsageError("synthetic acceptance leaves nothing to predict", "leave it out, or run `bench --engine`")
    if not _is_model(recipe):
        lookup_draft(recipe)


def _is_model(recipe: Recipe) -> bool:
    """Whether the draft is a language model of its own, which can read the target's text by itself."""
    draft = recipe.draft
    return draft_kind(draft.model, draft.method, draft.options).method == DRAFT_MODEL


def _show(resolved: Resolved, other: OtherEngine, wish: EngineSweepWish, shared: Shared) -> None:
    """Show what would be started, and where each value comes from."""
    num, command = resolved.recipe.workload.num_prompts, other.shown(wish.k_max)
    body = {"origins": resolved.origins, "k_max": wish.k_max, "num_prompts": num, "engine_command": command}
    body["batch_sizes"] = list(wish.batch_sizes)
    head = f"# would predict k = 1 to {wish.k_max} over at most {num} prompts from three starts of\n# {command}"
    show_plan(resolved.recipe.as_dict(), body, shared, f"{head}\n{to_yaml(resolved, origins=True)}")


def _run(
    resolved: Resolved, other: OtherEngine, wish: EngineSweepWish, config: dict[str, Any], screen: Screen
) -> EngineSweep:
    from specdec_cli.measure.elsewhere.engine_sweep import EngineSweep, EngineSweepPlan
    from specdec_cli.measure.predict.engine_rules import engine_rule

    recipe = resolved.recipe
    rows = chosen_prompts(recipe.workload, wish.chat).rows[: recipe.workload.num_prompts]
    setting = config.get("rejection_sample_method") or config.get("draft_sample_method")
    rule = engine_rule(recipe.engine.name, needs=setting).rule
    assert rule is not None, "a default has a rule"
    plan = EngineSweepPlan(rows, recipe.sampling, wish.chat, wish.k_max, wish.batch_sizes, _NUM_MEASURED, rule)
    running: list[EngineProcess] = []
    with interruptible() as stopped, timed_progress(screen) as tell:

        @contextmanager
        def start(k: int) -> Iterator[str]:
            process = other.process(screen, k, tell, stopped)
            running[:] = [process]
            with _watched(process) as url:
                yield url

        def check(version: str | None) -> None:
            is_cpu = _CPU_LOG in running[0].log_text
            refuse_faulty(recipe, version, is_cpu=is_cpu)

        sweep = EngineSweep(start, plan, lambda trace: _trace(trace, resolved, wish.k_max), tell, stopped, check)
        sweep.run()
    return sweep


@contextmanager
def _watched(process: EngineProcess) -> Iterator[str]:
    """An engine's address; one that ends meanwhile gives its own reason in place of the connection's."""
    from specdec_cli.measure.elsewhere.server_arm import DYING_SECONDS
    from specdec_cli.measure.endpoint.refusal import EndpointError

    with process as url:
        try:
            yield url
        except RunError as error:
            process.check(DYING_SECONDS if isinstance(error, EndpointError) else 0.0)
            raise


def refuse_faulty(recipe: Recipe, version: str | None, *, is_cpu: bool) -> None:
    """Refuse a build whose sampled text with speculation is not the target's.

    Raises:
        RunError: the recipe samples, and it is such a build.
    """
    from specdec_cli.measure.predict.acceptance import sampled_faults

    faults = sampled_faults(recipe.engine.name, version) if is_cpu and recipe.sampling.temperature else []
    if faults:
        raise RunError(faults[0], "sweep at --temperature 0, or on a GPU")


def _trace(trace: Trace, resolved: Resolved, k_max: int) -> str:
    """Read the target's text with the draft, which is loaded here."""
    from specdec_cli.drafters import from_fields
    from specdec_cli.drafters.contract import Resources
    from specdec_cli.lm.load import load_lm
    from specdec_cli.measure.predict.traced import draft_name
    from specdec_cli.measure.predict.tracing import trace_draft

    recipe = resolved.recipe
    fields, name, draft = recipe.draft_fields(), draft_name(recipe), recipe.draft
    if not _is_model(recipe):
        trace_lookup(trace, *lookup_draft(recipe), k_max, lambda _done, _total: None)
        return name
    lm = load_lm(str(draft.model), revision=draft.revision, dtype=draft.dtype, max_num_seqs=1)
    if lm.vocab_size < trace.num_tokens:
        said = f"the draft `{name}` has {lm.vocab_size} tokens, and the target's text has token {trace.num_tokens - 1}"
        raise UsageError(said, "use a draft with the target's tokenizer")
    drafter = from_fields(fields)
    drafter.load(Resources(lambda _: lm, None, lm.vocab_size))
    trace.drafts[name] = trace_draft(trace, drafter, k_max)
    return name
