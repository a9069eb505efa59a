"""The command line that starts another engine's server, and the port that it gets."""

from __future__ import annotations

import re
import shlex
import shutil
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path

from specdec_cli.errors import RunError, UsageError

HOST = "127.0.0.1"
"""The address that a started server listens on."""
_HINT = "install {name} in an environment of its own and name its program: --engine-command /path/to/{program}"


def find_program(command: str | None, program: str, name: str) -> tuple[str, ...]:
    """The words that start an engine's program.

    Args:
        command: what `--engine-command` says; None looks for `program` on PATH.
        program: the engine's usual program.
        name: the engine's, for people.

    Raises:
        UsageError: the command cannot be read.
        RunError: there is no such program.
    """
    try:
        words = shlex.split(command) if command is not None else [program]
    except ValueError as error:
        message = str(error).lower()
        raise UsageError(
            f"`--engine-command {command}` cannot be read: {message}", "check its quotation marks"
        ) from None
    if not words:
        raise UsageError("`--engine-command` is empty", f"name the program, for example {program}")
    if shutil.which(words[0]) is None:
        where = "is not on PATH" if command is None else "is no program that can be run"
        raise RunError(f"`{words[0]}` {where}", _HINT.format(name=name, program=program))
    return tuple(words)


def wheel_program(command: str | None, wheel: Path | None) -> tuple[str, ...]:
    """The program of ours that a Python runs for its engine's wheel; nothing where the command is the engine's own.

    Args:
        command: what `--engine-command` says.
        wheel: the program; None for an engine that is no wheel.
    """
    words = [word for word in shlex.split(command or "") if word != "env" and "=" not in word.partition("/")[0]]
    is_python = bool(words) and re.fullmatch(r"python[\d.]*(\.exe)?", Path(words[0]).name) is not None
    has_program = any(word == "-m" or word.endswith(".py") for word in words[1:])
    return (str(wheel),) if wheel is not None and is_python and not has_program else ()


def split_arguments(text: str | None) -> tuple[str, ...]:
    """The arguments that `--engine-args` adds.

    Raises:
        UsageError: they cannot be read, or set the address, which specdec chooses.
    """
    try:
        words = shlex.split(text or "")
    except ValueError as error:
        message = str(error).lower()
        raise UsageError(f"`--engine-args {text}` cannot be read: {message}", "check its quotation marks") from None
    for word in words:
        if word.partition("=")[0] in ("--host", "--port", "--uds"):
            raise UsageError(f"`--engine-args` must not hold `{word}`: specdec chooses the address", "leave it out")
    return tuple(words)


def refuse_options(arguments: Iterable[str], options: Iterable[str], short: Mapping[str, str]) -> None:
    """Refuse arguments of `--engine-args` that would undo what specdec says to the engine.

    Args:
        arguments: those of `--engine-args`.
        options: specdec's own, and other words between them.
        short: short names of options, to the long ones.

    Raises:
        UsageError: an argument is such an option, also abbreviated, with underscores, or as its opposite.
    """
    own = {_long_form(word) for word in options if word.startswith("--")}
    for word in arguments:
        name = _long_form(word)
        name = short.get(name, name)
        if name.startswith("--") and any(option.startswith(name) for option in own):
            raise UsageError(
                f"`--engine-args` must not hold `{word}`: specdec chooses it",
                "use specdec's own options or leave it out",
            )


def _long_form(word: str) -> str:
    """An option without its value, its key in it and `no-`, with hyphens."""
    name = word.partition("=")[0].partition(".")[0].replace("_", "-")
    return f"--{name.removeprefix('--no-')}" if name.startswith("--no-") else name


def free_port() -> int:
    """A port of this machine that nothing listens on now."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])
