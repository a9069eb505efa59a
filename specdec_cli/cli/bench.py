"""`specdec bench`: what a draft gains on a set of prompts, against the same engine without it and against others."""

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
from specdec_cli.measure.workload import read_rows, task_of
from specdec_cli.recipe.present import to_yaml
from specdec_cli.report.bench import SCHEMA, BenchView, bench_body, json_schema, print_bench
from specdec_cli.report.generate import Promise
from specdec_cli.report.view import Screen
from specdec_cli.sampling.params import SamplingParams

if TYPE_CHECKING:
    from specdec_cli.engine.engine import Engine
    from specdec_cli.measure.against import PeerArm
    from specdec_cli.measure.bench import Bench
    from specdec_cli.measure.gates import Judged
    from specdec_cli.measure.machine import Machine
    from specdec_cli.measure.prompts import PromptRow
    from specdec_cli.measure.workload import Workload
    from specdec_cli.recipe import Recipe, Resolved

_HOW, _FILES = "How it is measured", "Result files"


@with_shared_options(without=["sampling.logprobs"], beside=(*WORKLOAD_OPTIONS, *GATE_OPTIONS))
def bench(
    repeats: Annotated[
        int, typer.Option(min=1, help="How often every arm decodes every prompt.", rich_help_panel=_HOW)
    ] = 2,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Prompts of one task that are decoded together.", rich_help_panel=_HOW)
    ] = 1,
    against: Annotated[
        str,
        typer.Option(
            help="Plain arms: none (this engine without a draft, always there), transformers, transformers-assisted.",
            metavar="A,B",
            rich_help_panel=_HOW,
        ),
    ] = "none",
    chat: Annotated[
        bool, typer.Option("--chat", help="Prompts are messages: use the chat template.", rich_help_panel=_HOW)
    ] = False,
    lossless_check: Annotated[
        bool, typer.Option(help="Compare every token of greedy and gumbel decoding.", rich_help_panel=_HOW)
    ] = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would run; load nothing.", rich_help_panel=_HOW)
    ] = False,
    markdown: Annotated[
        Path | None, typer.Option(help="Write tables for a CI job's summary.", metavar="FILE", rich_help_panel=_FILES)
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(help="Write a row per task and arm.", metavar="FILE", rich_help_panel=_FILES)
    ] = None,
    junit: Annotated[
        Path | None,
        typer.Option(help="Write gates and the lossless check as JUnit XML.", metavar="FILE", rich_help_panel=_FILES),
    ] = None,
    *,
    shared: Shared,
) -> ExitCode | None:
    """Measure what a draft gains, against the same engine without one. Exit code 3 if a gate is crossed."""
    from specdec_cli.measure.against import check_peers, parse_against

    resolved = shared.resolve()
    files = {"markdown": markdown, "csv": csv, "junit": junit}
    _check(resolved.recipe, shared, files)
    peers = parse_against(against)
    check_peers(peers, resolved.recipe, batch_size)
    wish = _Wish(repeats, batch_size, peers, chat, lossless_check, files)
    if dry_run:
        _show_plan(resolved, wish, shared)
        return None
    recipe = resolved.recipe
    rows = read_rows(recipe.workload.dataset, recipe.workload.tasks, recipe.workload.num_prompts)
    return _Run(resolved, wish, rows, shared, open_screen(shared.quiet, streams_text=False)).go()


@dataclass(frozen=True, slots=True)
class _Wish:
    """What the command's own options ask for."""

    repeats: int
    batch_size: int
    peers: tuple[str, ...]
    chat: bool
    lossless_check: bool
    files: dict[str, Path | None]


def _check(recipe: Recipe, shared: Shared, files: dict[str, Path | None]) -> None:
    """Refuse what contradicts itself before anything is read or loaded."""
    if recipe.draft.method == "none" or recipe.speculation.num_speculative_tokens == 0:
        raise UsageError("there is no draft to measure", "name one with --draft, and k above 0")
    if recipe.draft.method == "prediction":
        raise UsageError("the draft `prediction` reads one prompt's text, and a benchmark has many", "choose another")
    if "gates.max_regression" in shared.flags and recipe.gates.baseline is None:
        raise UsageError("`--max-regression` has no effect without a baseline", "add --baseline FILE")
    named = {path for path in (shared.output, *files.values()) if path is not None}
    if len({path.resolve() for path in named}) < sum(path is not None for path in (shared.output, *files.values())):
        raise UsageError("two result files have the same name", "give each its own")
    for name, path in files.items():
        check_destination(path, shared.force, f"--{name}")


def _show_plan(resolved: Resolved, wish: _Wish, shared: Shared) -> None:
    """What would run, and where every value came from; a data set that is not at hand is not read."""
    workload = resolved.recipe.workload
    rows: list[PromptRow] | None = None
    if workload.dataset.startswith("builtin:") or is_at_hand(workload.dataset):
        rows = read_rows(workload.dataset, workload.tasks, workload.num_prompts)
    num = len(rows) if rows is not None else workload.num_prompts
    arms = ["with the draft", "without a draft", *wish.peers]
    if shared.json or shared.output is not None:
        body: dict[str, Any] = {
            "origins": resolved.origins,
            "num_prompts": len(rows) if rows is not None else None,
            "arms": arms,
            "repeats": wish.repeats,
            "batch_size": wish.batch_size,
        }
        document = envelope("specdec.recipe/1", resolved.recipe.as_dict(), body)
        deliver(document, to_stdout=shared.json, path=shared.output, force=shared.force)
    if not shared.json:
        prompts = f"{'' if rows is not None else 'up to '}{num} prompts of {workload.dataset}"
        head = f"# would measure {prompts}, {wish.repeats} times in each arm ({', '.join(arms)})"
        sys.stdout.write(f"{head}\n{to_yaml(resolved, origins=True)}")


@dataclass(slots=True)
class _Run:
    """One run of the command."""

    resolved: Resolved
    wish: _Wish
    rows: Sequence[PromptRow]
    shared: Shared
    screen: Screen
    _judged: list[Judged] = field(default_factory=list)
    _baseline: dict[str, Any] | None = None

    @property
    def recipe(self) -> Recipe:
        return self.resolved.recipe

    def go(self) -> ExitCode | None:
        """Load, measure, show, write, judge."""
        from specdec_cli.measure.gates import raise_if_crossed

        self._prepare_gates()
        if self.resolved.built_in_pair:
            self.screen.say(f"no target named: measuring the built-in {self.recipe.target.model}")
        with progress(self.screen) as say:
            machine, engine, peers, found = self._load(say)
        with interruptible() as stopped:
            self._measure(found, stopped)
            if not found.draft.passes or not found.plain.passes:
                self.screen.say("interrupted before anything was measured", "yellow")
                return ExitCode.INTERRUPTED
            document = self._document(machine, engine, peers, found, stopped())
            self._write(found, document)
            if stopped():
                self.screen.say("interrupted: this is what there was", "yellow")
                return ExitCode.INTERRUPTED
        raise_if_crossed(self._judged)
        return None

    def _prepare_gates(self) -> None:
        """Refuse gates that could not be judged, before anything is loaded."""
        from specdec_cli.measure.gates import check_measurable, check_paths, parse_all, read_baseline

        gates = self.recipe.gates
        names = {"by_task": list(dict.fromkeys(map(task_of, self.rows))), "against": list(self.wish.peers)}
        check_paths(parse_all(gates.fail_if), json_schema(), names)
        if gates.baseline is not None:
            self._baseline = read_baseline(gates.baseline, SCHEMA)
        check_measurable(gates, len(self.rows) * self.wish.repeats)

    def _load(self, say: Callable[[str], None]) -> tuple[Machine, Engine, list[PeerArm], Bench]:
        """The machine before we keep it busy, the pair, the other engines, and the tokenised workload."""
        say("starting torch and transformers")
        from specdec_cli.engine.build import engine_from_recipe
        from specdec_cli.measure.against import check_lengths, load_peers
        from specdec_cli.measure.bench import Bench, Plan
        from specdec_cli.measure.machine import look

        machine = look()
        trust = self.shared.trust_remote_code
        engine = engine_from_recipe(self._sized_recipe(), trust_remote_code=trust, progress=say)
        plan = Plan(self.recipe.speculation.num_speculative_tokens, self.wish.batch_size, self.wish.repeats)
        found = Bench(engine, self._workload(engine), plan)
        check_lengths(self.wish.peers, found.groups())
        peers = load_peers(self.wish.peers, self.recipe, engine.eos_token_ids, trust, say)
        found.others = peers
        return machine, engine, peers, found

    def _sized_recipe(self) -> Recipe:
        """The recipe with room for the batch."""
        sizes = self.recipe.engine
        num_seqs = max(sizes.max_num_seqs, self.wish.batch_size)
        return self.recipe.model_copy(update={"engine": sizes.model_copy(update={"max_num_seqs": num_seqs})})

    def _workload(self, engine: Engine) -> Workload:
        from specdec_cli.measure.workload import tokenize

        def encode(row: PromptRow) -> list[int]:
            return engine.encode([{"role": "user", "content": row.prompt}] if self.wish.chat else row.prompt)

        params = SamplingParams(**self.recipe.sampling.model_dump() | {"logprobs": None})
        return tokenize(self.rows, self.recipe.workload.dataset, encode, params, engine.target.max_context)

    def _measure(self, found: Bench, stopped: Callable[[], bool]) -> None:
        if found.workload.notice:
            self.screen.say(f"note: {found.workload.notice}", "yellow")
        with BenchView(self.screen.console, self.screen.is_live) as view:
            for at in found.run(stopped):
                view.show(found, at)

    def _document(
        self, machine: Machine, engine: Engine, peers: Sequence[PeerArm], found: Bench, interrupted: bool
    ) -> dict[str, Any]:
        from specdec_cli.engine.verify import is_lossless, resolve_mode
        from specdec_cli.measure.gates import against_baseline, judge, other_recipe, parse_all
        from specdec_cli.measure.verdict import measure_roofline

        temperature = self.recipe.sampling.temperature
        mode = resolve_mode(self.recipe.speculation.verify, temperature)
        promise = Promise(mode, is_lossless(mode))
        must_agree = promise.is_lossless and (mode == "gumbel" or temperature == 0)
        body = bench_body(
            found,
            promise,
            must_agree and self.wish.lossless_check,
            machine.load_since(),
            measure_roofline(found),
            {peer.name: peer.peer.version for peer in peers},
            interrupted,
        )
        document = envelope(SCHEMA, self.recipe.as_dict(), body, **machine_of(engine))
        self._judged = judge(parse_all(self.recipe.gates.fail_if), document)
        if self._baseline is not None:
            self._judged += against_baseline(document, self._baseline, self.recipe.gates.max_regression)
            if unlike := other_recipe(document, self._baseline):
                document["notices"].append(unlike)
        document["gates"] = [one.as_dict() for one in self._judged]
        return document

    def _write(self, found: Bench, document: dict[str, Any]) -> None:
        """The document and the other files, then the report, on stdout unless the document stands there."""
        from specdec_cli.report import bench_files

        texts: dict[str, Callable[[], str]] = {
            "markdown": lambda: bench_files.markdown(found, document),
            "csv": lambda: bench_files.csv_text(found),
            "junit": lambda: bench_files.junit(document),
        }
        for name, path in self.wish.files.items():
            if path is not None:
                write_file(path, texts[name](), self.shared.force)
        deliver_with_report(document, self.shared, lambda page: print_bench(page, found, document))
