"""One run of `generate`, wherever it decodes: from loading to the summary and the document."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specdec_cli.cli.output import deliver, envelope, show_plan
from specdec_cli.cli.screen import interruptible, open_screen, say_notices
from specdec_cli.errors import ExitCode, RunError, in_words
from specdec_cli.quantities import counted
from specdec_cli.recipe.present import to_yaml
from specdec_cli.report.view import Screen

if TYPE_CHECKING:
    from specdec_cli.cli.shared import Shared
    from specdec_cli.engine.prompts import PromptSet
    from specdec_cli.recipe import Recipe, Resolved

_MOST_FAILURES = 5  # prompts whose errors are shown one by one


@dataclass(slots=True)
class GenerateRun(ABC):
    """One run of the command.

    Args:
        resolved: the recipe.
        prompts: what is decoded.
        chat: whether prompts are messages.
        shared: the command's shared options.
    """

    resolved: Resolved
    prompts: PromptSet
    chat: bool
    shared: Shared
    screen: Screen = field(init=False)

    def __post_init__(self) -> None:
        """Open the screen."""
        self.screen = open_screen(self.shared.quiet, streams_text=not self.shared.json)

    @property
    def recipe(self) -> Recipe:
        """The recipe that is decoded with."""
        return self.resolved.recipe

    def command(self) -> str | None:
        """The command line of what is started; None where nothing is."""
        return None

    @abstractmethod
    def open(self) -> Sequence[str]:
        """Load what decodes; gives notes about it."""

    @abstractmethod
    def decode(self, stopped: Callable[[], bool]) -> None:
        """Decode every prompt, and show its text."""

    @abstractmethod
    def summarize(self) -> None:
        """Show the figures."""

    @abstractmethod
    def body(self) -> dict[str, Any]:
        """The document's own fields."""

    def machine(self) -> dict[str, Any]:
        """Device, dtype and decoder of the models, for `envelope`."""
        return {}

    @property
    def num_prompts(self) -> int:
        """Prompts that are decoded, each turn of a conversation one."""
        return len(self.prompts.rows)

    def failures(self) -> Mapping[int, Exception]:
        """Errors by prompt."""
        return {}

    def showing_failures(self) -> AbstractContextManager[None]:
        """Show more of a failure than its sentence."""
        return nullcontext()

    def start(self, dry_run: bool) -> ExitCode | None:
        """Show what would run, and where each value comes from, or run it."""
        if not dry_run:
            return self.go()
        num, command = len(self.prompts.rows), self.command()
        say_notices(self.prompts.notices, self.shared.quiet)
        prompts = counted(num, "prompt")
        body = {"origins": self.resolved.origins, "num_prompts": num} | ({"command": command} if command else {})
        head = f"# would decode {prompts}{f' with {command}' if command else ''}"
        show_plan(self.recipe.as_dict(), body, self.shared, f"{head}\n{to_yaml(self.resolved, origins=True)}")
        return None

    def go(self) -> ExitCode | None:
        """Load, decode, show, write.

        Raises:
            RunError: prompts failed.
        """
        for note in [*self.prompts.notices, *self.open()]:
            self.note(note)
        with self.showing_failures(), interruptible() as stopped:
            self.decode(stopped)
            self.summarize()
            if stopped():
                self.screen.say("interrupted: these are the results so far", "yellow")
            if self.shared.wants_document:
                from specdec_cli.measure.documents.generate import GenerateDocument

                document = envelope(GenerateDocument, self.recipe.as_dict(), self.body(), **self.machine())
                deliver(document, self.shared)
            if stopped():
                return ExitCode.INTERRUPTED
        if failures := self.failures():
            raise _prompts_failed(failures, self.num_prompts)
        return None

    def note(self, text: str) -> None:
        """Say something about the run."""
        self.screen.say(f"note: {text}", "yellow")


def _prompts_failed(errors: Mapping[int, Exception], num_prompts: int) -> RunError:
    """The error that reports prompts that failed."""
    first, *rest = [f"prompt {index + 1}: {in_words(error)[0]}" for index, error in sorted(errors.items())]
    shown = [f"{len(errors)} of {counted(num_prompts, 'prompt')} failed; {first}", *rest[: _MOST_FAILURES - 1]]
    num_hidden = len(errors) - len(shown)
    lines = [*shown, f"and {num_hidden} more"] if num_hidden else shown
    return RunError("\n".join(lines), "run these again; the other outputs are complete")
