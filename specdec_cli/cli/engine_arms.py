"""Arms of another engine: a server for each, started, measured and ended one after the other."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specdec_cli.cli.other_engine import OtherEngine, showing_log
from specdec_cli.cli.place import PLAIN, Arms
from specdec_cli.drafters.elsewhere import REMEMBER_REQUESTS
from specdec_cli.measure.documents.parts import EngineResult
from specdec_cli.measure.elsewhere.near_ties import LeftText, left_texts, words
from specdec_cli.measure.elsewhere.server_arm import ServerArm, requests_of
from specdec_cli.measure.endpoint.request_counts import joint_source
from specdec_cli.measure.machine.load import look_at_load

if TYPE_CHECKING:
    from specdec_cli.engine.promise import Promise
    from specdec_cli.measure.bench.bench import Bench
    from specdec_cli.measure.bench.compare import Contender

_ONE_BY_ONE = (
    "the servers ran one after the other, the one without a draft first, because each takes the memory that it finds: "
    "a machine that becomes slower or faster between them changes the speed-up"
)
_REMEMBERS = (
    "`{}` drafts from earlier requests as well: a prompt that is sent again, with --repeats or because its pass was "
    "interrupted, is drafted from its own answer"
)


@dataclass(slots=True)
class EngineArms(Arms):
    """Arms of another engine.

    Attributes:
        tell: takes words about a server's start; None shows them on the screen, seldom.
    """

    in_turn = False

    engines: Sequence[OtherEngine] = field(kw_only=True)
    tell: Callable[[str], None] | None = field(init=False, default=None)
    _arms: dict[str, ServerArm] = field(init=False, default_factory=dict)
    _left: dict[str, list[LeftText]] = field(init=False, default_factory=dict)

    @property
    def promise(self) -> Promise:
        """Promise of the engine's own rule."""
        return self._drafting[0].promise

    @property
    def _drafting(self) -> list[OtherEngine]:
        """The engines that have a draft."""
        return [engine for engine in self.engines if engine.resolved.recipe.draft.method != "none"]

    def open(self) -> None:
        """Say what will be started; nothing is yet."""
        self.load_before = look_at_load()
        self.workload = requests_of(self.rows, self.recipe)
        for warning in self.warnings():
            self.screen.say(f"warning: {warning}", "yellow")
        name = self.engines[0].server().name
        self.screen.say(f"starting {name} once for each way of decoding, one after the other")

    def arm(self, name: str, k: int | None, draft: int = 0, p_min: float | None = None) -> ServerArm:
        """An arm, whose server is not started yet; a p-min stands in place of the recipe's policy, 0 for none."""
        engine = self.engines[draft] if p_min is None else self.engines[draft].with_p_min(p_min)
        process = engine.process(self.screen, k, self.tell, lambda: self.stopped())
        drafts = engine.server(k).drafts
        options, protocol = self.options, engine.protocol
        made = ServerArm(
            name, process, self.recipe.sampling, drafts, options.chat, options.batch_size, protocol=protocol
        )
        self._arms[name] = made
        return made

    def contenders(self) -> list[Contender]:
        """The drafts, each at its recipe's k."""
        from specdec_cli.measure.bench.compare import Contender

        pairs = zip(self.names, self.engines, strict=True)
        return [Contender(name, engine.resolved.recipe.draft.method or "model", k=engine.k) for name, engine in pairs]

    def commands(self) -> dict[str, str]:
        """Command lines by arm."""
        pairs = zip(self.names, self.engines, strict=True)
        named = {name: engine.shown() for name, engine in pairs if engine in self._drafting}
        return {PLAIN: self._drafting[0].shown(0), **named}

    def warnings(self) -> list[str]:
        """Sentences about what the engine does not do as the recipe says, each once."""
        return list(dict.fromkeys(warning for engine in self.engines for warning in engine.server().warnings))

    def explain(self, bench: Bench) -> None:
        """Ask the engine that is up about the differences of its text."""
        for track in bench.tracks:
            arm = self._arms[track.name]
            if arm.is_up and arm.drafts:
                self._left[track.name] = left_texts(arm, track, bench.plain)

    def notices(self) -> list[str]:
        """Sentences about the engine, its times and its texts."""
        engine, version = self._drafting[0], self._version()
        unknown = engine.unknown_version(version)
        message = [
            f"{engine.server().name} {version or ''} decoded: times are those of its streams over HTTP",
            _ONE_BY_ONE,
            *([unknown] if unknown else []),
            *self.warnings(),
            *(_REMEMBERS.format(method) for method in self._methods() if method in REMEMBER_REQUESTS),
        ]
        for name, arm in self._arms.items():
            several = f"{name}: " if len(self._arms) > 2 else ""
            message += [f"{several}{notice}" for notice in (*arm.notices, *words(self._left.get(name, [])))]
        return message

    def section(self) -> dict[str, Any]:
        """The document's part about the engine."""
        engine = EngineResult(
            name=self.recipe.engine.name,
            version=self._version(),
            commands={name: shlex.join(arm.process.words) for name, arm in self._arms.items()},
            differences=[difference for left in self._left.values() for difference in left],
            acceptance_from=joint_source(arm.acceptance_from for arm in self._arms.values()),
        )
        return {"engine": engine.as_json()}

    def showing_failures(self) -> AbstractContextManager[None]:
        """Show the last lines of the log of an engine that fails."""
        return showing_log(self.screen)

    def _methods(self) -> list[str | None]:
        return [engine.resolved.recipe.draft.method for engine in self._drafting]

    def _version(self) -> str | None:
        return next((arm.version for arm in self._arms.values() if arm.version is not None), None)
