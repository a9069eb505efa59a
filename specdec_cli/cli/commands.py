"""The commands by name, each imported when it is first asked for, so that `specdec --help` imports none of them.

A command is the function of its name in the file of its name (`sweep-k`: `sweep_k` in `sweep_k.py`; `import`, a word of
Python: `import_`), or there an `app` of several commands. A new one is that file and a line in `COMMANDS`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from importlib import import_module
from keyword import iskeyword
from typing import Any

import typer
from typer.core import TyperCommand

from specdec_cli.cli.help import Command, CommandGroup

COMMANDS = {
    "generate": "Decode prompts with a draft. The output is the target's own, only faster.",
    "chat": "Chat with a model in the terminal and see what the draft contributes to each answer.",
    "serve": "Serve a model over an OpenAI-compatible HTTP API with continuous batching and speculation.",
    "bench": "Measure the speed-up of a draft over the same engine without one. Exits with 3 if a gate is crossed.",
    "compare-drafts": "Compare drafts for one target, each at its own best k.",
    "sweep-k": "Find the best k or tree, show that no draft pays off, or say what is missing to decide.",
    "audit": "Check that the output is exactly what the target alone produces. Exits with 3 if it is not.",
    "train-draft": "Train a draft for a target on the target's own answers, and see its acceptance while it trains.",
    "export": "Write a recipe as another engine's configuration, ready to run.",
    "import": "Read the speculation of a run that another tool made. Exits with 3 if a gate is crossed.",
    "doctor": "Check this machine and, with a target, a draft or a recipe, the pair without loading its weights.",
    "recipe": "List, show, copy and check recipes.",
}
"""The first sentence of each command's help."""


@functools.cache
def load(name: str) -> Any:
    """Import a command and make it one of typer's."""
    python_name = name.replace("-", "_") + "_" * iskeyword(name)
    module = import_module(f"specdec_cli.cli.{python_name}")
    if hasattr(module, "app"):
        group = typer.main.get_command(module.app)
        group.name = name
        return group
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(name, cls=Command)(getattr(module, python_name))
    return typer.main.get_command(app)


class Commands(Mapping[str, Any]):
    """Commands by name; each is loaded once, when it is first looked up."""

    def __getitem__(self, name: str) -> Any:
        if name not in COMMANDS:
            raise KeyError(name)
        return load(name)

    def __contains__(self, name: object) -> bool:
        return name in COMMANDS

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class Program(CommandGroup):
    """The program, whose commands are loaded when they are asked for."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.commands: Any = Commands()

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Commands and options that begin with what was typed, without loading a command."""
        loaded = self.commands
        self.commands = {name: TyperCommand(name, help=text) for name, text in COMMANDS.items()}
        try:
            return super().shell_complete(ctx, incomplete)
        finally:
            self.commands = loaded

    def summaries(self) -> list[tuple[str, str]]:
        """The summary of each command, without loading it."""
        return list(COMMANDS.items())
