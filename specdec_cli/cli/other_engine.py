"""Another engine as a command line asks for it: the command line of its server, and what it will not do as asked."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from specdec_cli.engine.driver import never
from specdec_cli.engine.promise import Promise
from specdec_cli.engine.synthetic import at_depth
from specdec_cli.errors import UsageError
from specdec_cli.export import ServerCommand, server_command
from specdec_cli.export.draft_kind import folder_of
from specdec_cli.export.settings import ExportSettings
from specdec_cli.measure.elsewhere.engine_process import EngineError, EngineProcess
from specdec_cli.measure.elsewhere.launch import find_program, refuse_options, split_arguments, wheel_program
from specdec_cli.measure.elsewhere.protocols import PROTOCOLS
from specdec_cli.recipe.keys import default_of
from specdec_cli.report.pace import Pace
from specdec_cli.verification import RULES

if TYPE_CHECKING:
    from specdec_cli.cli.shared import Shared
    from specdec_cli.measure.endpoint.endpoint import Endpoint
    from specdec_cli.recipe import Resolved
    from specdec_cli.report.view import Screen

_NO_CACHE = "engine.enable_prefix_caching"


@dataclass(frozen=True, slots=True)
class OtherEngine:
    """The engine that a recipe names, on this machine.

    Args:
        resolved: the recipe.
        command: program that starts it; None looks for its usual one on PATH.
        arguments: further ones of its server.
        timeout_s: how long it may take until it answers.
        trust_remote_code: run code that comes with a checkpoint.
    """

    resolved: Resolved
    command: str | None
    arguments: tuple[str, ...]
    timeout_s: float
    trust_remote_code: bool = False

    @classmethod
    def of(cls, resolved: Resolved, shared: Shared) -> OtherEngine:
        """The engine that a recipe names, as the command line starts it.

        Raises:
            UsageError: its further arguments cannot be read.
        """
        engine, arguments = resolved.recipe.engine, split_arguments(shared.engine_args)
        return cls(resolved, shared.engine_command, arguments, engine.start_timeout_seconds, shared.trust_remote_code)

    @property
    def model(self) -> str:
        """The name that its server answers to: the first that the recipe gives it, else the target's hub id or path."""
        recipe = self.resolved.recipe
        named = recipe.serve.served_model_name
        return named[0] if named else str(folder_of(recipe.target.model) or recipe.target.model)

    @property
    def k(self) -> int:
        """Most tokens that its draft guesses in a step, by the recipe."""
        recipe = self.resolved.recipe
        return ExportSettings(recipe, self.resolved.origins, recipe.engine.name, is_here=True).k

    @property
    def promise(self) -> Promise:
        """Promise of the engine's own rule."""
        recipe = self.resolved.recipe
        if recipe.speculation.is_synthetic:
            return Promise("synthetic", is_lossless=False)
        if recipe.sampling.temperature == 0:
            return Promise("greedy", is_lossless=True, keeps_tokens=True)
        own = self.server().verifies_by
        if own is not None:
            return Promise(own, is_lossless=True)
        rule = RULES.get(recipe.speculation.verify)
        return Promise("block" if rule is not None and rule.judges_jointly else "rejection", is_lossless=True)

    def without_prefix_caching(self) -> OtherEngine:
        """Engine for a measurement, in which no arm may reuse prefixes that an earlier pass cached."""
        recipe = self.resolved.recipe
        engine = recipe.engine.model_copy(update={"enable_prefix_caching": False})
        origins = self.resolved.origins | {_NO_CACHE: "the measurement"}
        return replace(
            self,
            resolved=replace(self.resolved, recipe=recipe.model_copy(update={"engine": engine}), origins=origins),
        )

    def with_p_min(self, p_min: float) -> OtherEngine:
        """Engine whose draft ends before a token that it is less sure of; 0 always drafts k tokens."""
        policy = {"depth_policy": "confidence", "p_min": p_min} if p_min else {"depth_policy": "fixed"}
        recipe = self.resolved.recipe
        speculation = recipe.speculation.model_copy(update=policy)
        changed = replace(self.resolved, recipe=recipe.model_copy(update={"speculation": speculation}))
        return replace(self, resolved=changed)

    @property
    def protocol(self) -> type[Endpoint]:
        """The class that asks its server."""
        return PROTOCOLS[self.resolved.recipe.engine.name]

    def server(self, k: int | None = None) -> ServerCommand:
        """The recipe in the engine's own words.

        Args:
            k: tokens to draft in place of the recipe's; 0 decodes without a draft.

        Raises:
            UsageError: the engine has no such draft, or refuses the sampling together with one.
        """
        resolved = self.resolved if k is None else at_k(self.resolved, k)
        made = server_command(resolved.recipe.engine.name, resolved)
        recipe = resolved.recipe
        settings = ExportSettings(recipe, resolved.origins, made.name, is_here=True)
        if settings.k and not made.drafts:
            raise UsageError(f"{made.name} has no draft like {settings.draft.what}", "name another draft with --draft")
        if made.drafts:
            for name in made.refused_with_draft:
                if getattr(recipe.sampling, name):
                    message = f"{made.name} refuses `sampling.{name}` together with speculation"
                    raise UsageError(message, "leave it out, or decode without a draft: -k 0")
            if recipe.speculation.tree is not None:
                message = f"`speculation.tree` has no effect with --engine {recipe.engine.name}: it drafts chains"
                raise UsageError(message, "leave it out")
        for name in made.refused_sampling:
            if getattr(recipe.sampling, name) != default_of(f"sampling.{name}"):
                raise UsageError(f"{made.name} has no `sampling.{name}`", "leave it out")
        if recipe.structured.is_given:
            key = next(iter(recipe.structured.given))
            raise UsageError(f"`structured.{key}` has no effect with --engine {recipe.engine.name}", "leave it out")
        return made

    def words(self, k: int | None = None) -> tuple[str, ...]:
        """The arguments of its program, without its address.

        Raises:
            UsageError: one of the further arguments is specdec's to choose.
        """
        made = self.server(k)
        refuse_options(self.arguments, (*made.words, *made.own_options), made.short_options)
        trusted = ("--trust-remote-code",) if self.trust_remote_code else ()
        return (*made.words, *trusted, *self.arguments)

    def shown(self, k: int | None = None) -> str:
        """The command line for people; the program need not be there."""
        made = self.server(k)
        words = [*wheel_program(self.command, made.wheel), *self.words(k)]
        return f"{self.command or made.program} {shlex.join(words)}"

    def process(
        self,
        screen: Screen,
        k: int | None = None,
        tell: Callable[[str], None] | None = None,
        stopped: Callable[[], bool] = never,
    ) -> EngineProcess:
        """Process of the server, not yet started.

        Args:
            screen: shows how far its start is.
            k: as in `server`.
            tell: takes words about its start; None shows them on the screen, seldom.
            stopped: whether to give up the start.

        Raises:
            RunError: its program is not there.
        """
        made = self.server(k)
        program = find_program(self.command, made.program, made.name)
        words = (*program, *wheel_program(self.command, made.wheel), *self.words(k))
        return EngineProcess(made.name, words, self.timeout_s, tell or _seldom(screen), stopped)

    def unknown_version(self, version: str | None) -> str | None:
        """A sentence about a release whose settings were not checked, or None."""
        made = self.server()
        checked = " and ".join(made.checked)
        if version is None:
            return f"{made.name} does not say its version: its settings were checked for {checked}"
        if any(version == release or version.startswith(f"{release}.") for release in made.checked):
            return None
        return f"{made.name} {version} answers, and its settings were checked for {checked}: an option may differ"


@contextmanager
def showing_log(screen: Screen) -> Iterator[None]:
    """Show the last lines of an engine's log where it failed: outside of all that is drawn, and once."""
    try:
        yield
    except EngineError as error:
        for line in error.lines:
            screen.say(line)
        raise


def _seldom(screen: Screen) -> Callable[[str], None]:
    """Shows words about a start, as often as a plain stream gets its next line."""
    pace = Pace()

    def tell(words: str) -> None:
        if pace.is_due():
            screen.say(f"{words} ({pace.words()})")

    return tell


def at_k(resolved: Resolved, k: int) -> Resolved:
    """The recipe with one k for every batch size, and the same synthetic acceptance of each drafted token."""
    alone = {"k_by_batch": None, "k_by_context": None, "disable_by_batch_size": None}
    speculation = at_depth(resolved.recipe.speculation, k).model_copy(update=alone)
    return replace(resolved, recipe=resolved.recipe.model_copy(update={"speculation": speculation}))
