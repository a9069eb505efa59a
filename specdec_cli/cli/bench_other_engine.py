"""`specdec bench --engine vllm`: another engine with the draft against the same engine without it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specdec_cli.cli.judged_run import JudgedRun
from specdec_cli.cli.measurement_options import num_at_hand, num_prompts_words, show_plan
from specdec_cli.cli.other_engine import OtherEngine
from specdec_cli.cli.output import envelope
from specdec_cli.cli.screen import interruptible
from specdec_cli.errors import ExitCode, RunError, UsageError
from specdec_cli.measure.elsewhere.near_ties import LeftText, left_texts, words
from specdec_cli.measure.elsewhere.requests import requests_of
from specdec_cli.measure.elsewhere.server_arm import ServerArm
from specdec_cli.measure.machine.load import Conditions, Load, look_at_load
from specdec_cli.measure.workload.workload import task_of
from specdec_cli.recipe.present import to_yaml
from specdec_cli.report.bench import SCHEMA, BenchView, bench_body, json_schema, print_bench
from specdec_cli.report.generate import Promise

if TYPE_CHECKING:
    from rich.console import Console

    from specdec_cli.cli.measurement_options import MeasurementOptions
    from specdec_cli.cli.options import Shared
    from specdec_cli.measure.bench.bench import Bench
    from specdec_cli.recipe import Resolved

_ONE_BY_ONE = (
    "the two servers ran one after the other, the one without a draft first, because each takes the memory that it "
    "finds: a machine that becomes slower or faster between them changes the speed-up"
)


def show_other_plan(resolved: Resolved, engine: OtherEngine, asked: MeasurementOptions, shared: Shared) -> None:
    """Show what would be started and sent, without starting anything."""
    num = num_at_hand(resolved.recipe.workload)
    commands = {"without a draft": engine.shown(0), "with the draft": engine.shown()}
    body: dict[str, Any] = {
        "origins": resolved.origins,
        "num_prompts": num,
        "arms": list(commands),
        "repeats": asked.repeats,
        "batch_size": asked.batch_size,
        "commands": commands,
    }
    prompts = num_prompts_words(resolved.recipe.workload, num)
    lines = [f"# would measure {prompts}, {asked.repeats} times in each arm:"]
    lines += [f"#   {name}: {command}" for name, command in commands.items()]
    lines += [f"# warning: {warning}" for warning in engine.server().warnings]
    text = "\n".join([*lines, to_yaml(resolved, origins=True)])
    show_plan(resolved.recipe.as_dict(), body, shared, text)


@dataclass(slots=True)
class OtherBenchRun(JudgedRun["Bench"]):
    """One run of the command."""

    schema = SCHEMA

    engine: OtherEngine
    must_agree: bool = True
    _arms: dict[str, ServerArm] = field(init=False, default_factory=dict)
    _left: list[LeftText] = field(init=False, default_factory=list)
    _load: Load = field(init=False, default_factory=look_at_load)

    def json_schema(self) -> dict[str, Any]:
        """The JSON Schema of the document."""
        return json_schema()

    def gate_names(self) -> dict[str, list[str]]:
        """Tasks; there are no other engines beside this one."""
        return {"by_task": list(dict.fromkeys(map(task_of, self.rows))), "against": []}

    def go(self) -> ExitCode | None:
        """Start, measure, show, write, judge."""
        self.prepare_gates()
        for warning in self.engine.server().warnings:
            self.screen.say(f"warning: {warning}", "yellow")
        with interruptible() as stopped:
            bench = self._bench(stopped)
            self._measure(bench, stopped)
            was_stopped = stopped()
            if not (bench.draft.passes and bench.plain.passes):
                return self._nothing(was_stopped)
            document = self._document(bench, was_stopped)
            self.write(bench, document, was_stopped)
            if was_stopped:
                self.screen.say("interrupted: these are the results so far", "yellow")
                return ExitCode.INTERRUPTED
        self.raise_if_crossed()
        return None

    def csv(self, study: Bench, document: dict[str, Any]) -> str:
        """A row per task and arm."""
        from specdec_cli.report.result_files import bench_csv

        return bench_csv(study)

    def draw(self, page: Console, study: Bench, document: dict[str, Any]) -> None:
        """Print the report."""
        print_bench(page, study, document)

    def _nothing(self, was_stopped: bool) -> ExitCode:
        if not was_stopped:
            raise RunError("no prompt decoded a second token, so nothing was measured", "raise -n")
        self.screen.say("interrupted before anything was measured", "yellow")
        return ExitCode.INTERRUPTED

    def _bench(self, stopped: Callable[[], bool]) -> Bench:
        """The benchmark of two arms, of which one is up at a time."""
        from specdec_cli.measure.bench.bench import Bench, Plan

        workload = requests_of(self.rows, self.recipe)
        for name, k in (("without a draft", 0), ("with the draft", None)):
            process = self.engine.process(self.screen, k, self.screen.say, stopped)
            sampling, size = self.recipe.sampling, self.asked.batch_size
            self._arms[name] = ServerArm(name, process, sampling, k is None, self.asked.chat, size)
        draft, plain = self._arms["with the draft"], self._arms["without a draft"]
        return Bench(workload, Plan(self.asked.batch_size, self.asked.repeats, in_turn=False), draft, plain)

    def _measure(self, bench: Bench, stopped: Callable[[], bool]) -> None:
        """Let one arm run after the other; while the last is up, its differences are explained."""
        view = BenchView(self.screen.console, self.screen.is_live, say=self.screen.say)
        with view, closing(bench.run(stopped)) as passes:
            for at in passes:
                view.show(bench, at)
                if at.done == at.total and self._compares and not stopped():
                    self._left = left_texts(self._arms["with the draft"], bench.draft, bench.plain)

    @property
    def _compares(self) -> bool:
        return self.must_agree and self._promise.keeps_tokens

    @property
    def _promise(self) -> Promise:
        """Promise of the engine's own rule."""
        recipe = self.recipe
        if recipe.speculation.is_synthetic:
            return Promise("synthetic", is_lossless=False)
        if recipe.sampling.temperature == 0:
            return Promise("greedy", is_lossless=True, keeps_tokens=True)
        is_block = recipe.speculation.verify in ("block", "traversal")
        return Promise("block" if is_block else "rejection", is_lossless=True)

    def _document(self, bench: Bench, interrupted: bool) -> dict[str, Any]:
        draft, plain = self._arms["with the draft"], self._arms["without a draft"]
        conditions = Conditions.of(self._load, bench.passes)
        body = bench_body(bench, self._promise, self._compares, conditions.as_dict(), None, {}, interrupted)
        body["plan"] |= {"chat": self.asked.chat, "resumed": 0}
        unknown = self.engine.unknown_version(draft.version)
        made = self.engine.server()
        body["notices"] = [
            *self.prompts.notices,
            f"{made.name} {draft.version} decoded: times are those of its streams over HTTP",
            _ONE_BY_ONE,
            *([unknown] if unknown else []),
            *made.warnings,
            *body["notices"],
            *draft.notices,
            *words(self._left),
        ]
        body["engine"] = {
            "name": self.recipe.engine.name,
            "version": draft.version,
            "commands": {"plain": plain.process.launch.shown(), "draft": draft.process.launch.shown()},
            "differences": [one.as_dict() for one in self._left],
        }
        document = envelope(SCHEMA, self.document_recipe(), body)
        self.judge(document)
        return document


def check_bench_options(given: dict[str, bool], name: str) -> None:
    """Refuse what another engine does not do in a benchmark.

    Args:
        given: option to whether the command line gives it.
        name: the engine, as `--engine` has it.

    Raises:
        UsageError: there is such an option.
    """
    wrong = next((option for option, is_given in given.items() if is_given), None)
    if wrong is not None:
        raise UsageError(f"`{wrong}` has no effect with --engine {name}", "leave it out")
