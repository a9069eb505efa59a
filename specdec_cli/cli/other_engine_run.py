"""A measurement of another engine: servers that run one after the other, compared by their streams and counters."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specdec_cli.cli.judged_run import JudgedRun, Study
from specdec_cli.cli.other_engine import OtherEngine, showing_log
from specdec_cli.cli.screen import interruptible
from specdec_cli.errors import ExitCode, RunError, UsageError
from specdec_cli.measure.elsewhere.near_ties import LeftText, left_texts, words
from specdec_cli.measure.elsewhere.server_arm import ServerArm
from specdec_cli.measure.machine.load import Load, look_at_load

if TYPE_CHECKING:
    from specdec_cli.measure.bench.bench import Bench, Progress
    from specdec_cli.report.bench import BenchView
    from specdec_cli.report.generate import Promise

PLAIN = "without a draft"
_ONE_BY_ONE = (
    "the servers ran one after the other, the one without a draft first, because each takes the memory that it finds: "
    "a machine that becomes slower or faster between them changes the speed-up"
)


@dataclass(slots=True)
class OtherEngineRun(JudgedRun[Study]):
    """One run of a measuring command with another engine.

    Args:
        engine: the engine with the draft; of several drafts with the first.
        must_agree: whether tokens with and without a draft are compared.
    """

    engine: OtherEngine
    must_agree: bool = True
    arms: dict[str, ServerArm] = field(init=False, default_factory=dict)
    left: dict[str, list[LeftText]] = field(init=False, default_factory=dict)
    load_before: Load = field(init=False, default_factory=look_at_load)

    def go(self) -> ExitCode | None:
        """Start, measure, show, write, judge."""
        self.prepare_gates()
        for warning in self.warnings():
            self.screen.say(f"warning: {warning}", "yellow")
        name = self.engine.server().name
        self.screen.say(f"starting {name} once without a draft and once with each draft, one after the other")
        with interruptible() as stopped, showing_log(self.screen):
            study = self.study(stopped)
            self.measure(study, stopped)
            was_stopped = stopped()
            if not self.is_measured(study):
                if not was_stopped:
                    raise RunError("no prompt decoded a second token, so nothing was measured", "raise -n")
                self.screen.say("interrupted before anything was measured", "yellow")
                return ExitCode.INTERRUPTED
            document = self.document(study, was_stopped)
            self.judge(document)
            self.write(study, document, was_stopped)
            if was_stopped:
                self.screen.say("interrupted: these are the results so far", "yellow")
                return ExitCode.INTERRUPTED
        self.raise_if_crossed()
        return None

    def warnings(self) -> list[str]:
        """Sentences about what the engine does not do as the recipe says."""
        return list(self.engine.server().warnings)

    @abstractmethod
    def study(self, stopped: Callable[[], bool]) -> Study:
        """Prepare the measurement, without starting a server."""

    @abstractmethod
    def measure(self, study: Study, stopped: Callable[[], bool]) -> None:
        """Let one server run after the other."""

    @abstractmethod
    def is_measured(self, study: Study) -> bool:
        """Whether there is anything to report."""

    @abstractmethod
    def document(self, study: Study, interrupted: bool) -> dict[str, Any]:
        """The document, whose gates are not judged yet."""

    @property
    def compares(self) -> bool:
        """Whether texts with and without a draft are compared."""
        return self.must_agree and self.promise.keeps_tokens

    @property
    def promise(self) -> Promise:
        """Promise of the engine's own rule."""
        return self.engine.promise

    def arm(self, name: str, engine: OtherEngine, k: int | None, stopped: Callable[[], bool]) -> ServerArm:
        """An arm of the engine, which is not started yet.

        Args:
            name: what a report calls it.
            engine: with its draft.
            k: 0 for none; None for the recipe's.
            stopped: whether to give up its start.
        """
        process = engine.process(self.screen, k, stopped=stopped)
        drafts = engine.server(k).drafts
        made = ServerArm(name, process, self.recipe.sampling, drafts, self.asked.chat, self.asked.batch_size)
        self.arms[name] = made
        return made

    def watch(
        self,
        passes: Generator[Progress, None, None],
        bench: Callable[[], Bench],
        view: BenchView,
        stopped: Callable[[], bool],
    ) -> None:
        """Run the passes; before a server with a draft ends, the differences of its text are explained."""
        with view, closing(passes):
            for at in passes:
                view.show(bench(), at)
                if not at.arm and self.compares and not stopped():
                    self._explain(bench())

    def _explain(self, bench: Bench) -> None:
        for track in bench.tracks:
            arm = self.arms[track.name]
            if arm.is_up and arm.drafts:
                self.left[track.name] = left_texts(arm, track, bench.plain)

    def notices(self) -> list[str]:
        """Sentences that a reader needs beside the figures."""
        version = self._version()
        unknown = self.engine.unknown_version(version)
        found = [
            f"{self.engine.server().name} {version or ''} decoded: times are those of its streams over HTTP",
            _ONE_BY_ONE,
            *([unknown] if unknown else []),
            *self.warnings(),
        ]
        for name, arm in self.arms.items():
            several = f"{name}: " if len(self.arms) > 2 else ""
            found += [f"{several}{said}" for said in (*arm.notices, *words(self.left.get(name, [])))]
        return found

    def engine_section(self) -> dict[str, Any]:
        """The document's part about the engine."""
        return {
            "name": self.recipe.engine.name,
            "version": self._version(),
            "commands": {name: arm.process.launch.shown() for name, arm in self.arms.items()},
            "differences": [{"arm": name} | one.as_dict() for name, left in self.left.items() for one in left],
        }

    def _version(self) -> str | None:
        return next((arm.version for arm in self.arms.values() if arm.version is not None), None)


def refuse_elsewhere(given: Mapping[str, bool], name: str) -> None:
    """Refuse options that another engine does not have in a measurement.

    Args:
        given: option to whether the command line gives it.
        name: the engine, as `--engine` has it.

    Raises:
        UsageError: there is such an option.
    """
    wrong = next((option for option, is_given in given.items() if is_given), None)
    if wrong is not None:
        raise UsageError(f"`{wrong}` has no effect with --engine {name}", "leave it out")
