"""`specdec`: the commands, and the one place where errors become words and exit codes.

A command's module imports neither torch nor transformers at its top, so that `--help` is quick; its function returns
None or an ExitCode. `commands.py` lists the commands.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Annotated, Any

import typer

from specdec_cli import __version__
from specdec_cli.cli.commands import Program
from specdec_cli.cli.terminal import colourful, version_of
from specdec_cli.cli.termination import Termination, terminable
from specdec_cli.errors import ExitCode, did_you_mean, in_words

_UsageProblem: Any = typer.BadParameter.__mro__[1]  # typer keeps its UsageError to itself
_COLOURS = {"error": "\x1b[31m", "hint": "\x1b[36m"}

_HELP = """Speculative decoding of language models: whether it pays off, with which draft and which k.

Examples:
    # Decode a prompt with the built-in pair.
    specdec generate "Once upon a time"
    # Find the best k for a target and a draft.
    specdec sweep-k -t MODEL -d DRAFT
    # Serve an OpenAI-compatible API.
    specdec serve --recipe tuned.yaml
"""


def _app() -> typer.Typer:
    app = typer.Typer(
        name="specdec",
        cls=Program,
        help=_HELP,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        suggest_commands=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_globals)
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        others = ", ".join(f"{name} {version_of(name) or 'not installed'}" for name in ("torch", "transformers"))
        sys.stdout.write(f"specdec {__version__} ({others})\n")
        raise typer.Exit


def _globals(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Show the versions of specdec, torch and transformers.",
            callback=_show_version,
            is_eager=True,
        ),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks; SPECDEC_DEBUG=1 does too.")] = False,
) -> None:
    pass


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code.

    Args:
        arguments: without the program's name; None takes the process's own.
    """
    given, debug = _take_debug(list(sys.argv[1:] if arguments is None else arguments))
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the parent process has closed it
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    with terminable() as termination:
        code = _guarded(given, debug, termination)
    if termination.is_received and code in (ExitCode.INTERRUPTED, ExitCode.TERMINATED):
        code = _complain("ended by SIGTERM", None, ExitCode.TERMINATED)
    for stream in (sys.stdout, sys.stderr):
        code = _flush(stream, code)
    return code


def _take_debug(arguments: list[str]) -> tuple[list[str], bool]:
    """`--debug` counts wherever it stands before a bare `--`."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    rest = [word for word in arguments[:end] if word != "--debug"] + arguments[end:]
    wanted = os.environ.get("SPECDEC_DEBUG", "").lower() not in ("", "0", "false")
    return rest, wanted or len(rest) < len(arguments)


def _guarded(arguments: list[str], debug: bool, termination: Termination) -> int:
    try:
        return _invoke(arguments)
    except (KeyboardInterrupt, typer.Abort) as error:
        if not termination.is_received:
            with suppress(BrokenPipeError):
                sys.stderr.write(f"interrupted{error}\n")
        return ExitCode.INTERRUPTED
    except typer.Exit as exit_:
        return exit_.exit_code
    except SystemExit as exit_:
        if exit_.code != ExitCode.TERMINATED:
            raise
        return ExitCode.TERMINATED
    except BrokenPipeError:
        return ExitCode.DONE
    except Exception as error:
        if debug:
            traceback.print_exc()
        return _failed(error)


def _failed(error: Exception) -> int:
    """Write an error's sentence, and return the exit code."""
    if isinstance(error, OSError) and _flush(sys.stdout, ExitCode.DONE) != ExitCode.DONE:
        return ExitCode.COULD_NOT_RUN  # it has said that the output cannot be written
    return _complain(*_words(error))


def _words(error: Exception) -> tuple[str, str | None, ExitCode]:
    """An error's sentence, hint and exit code."""
    return (*_usage_words(error), ExitCode.USAGE) if isinstance(error, _UsageProblem) else in_words(error)


def _invoke(arguments: list[str]) -> int:
    """Parse and call, without typer's own handling of errors."""
    command = typer.main.get_command(_app())
    if "_SPECDEC_COMPLETE" in os.environ:  # the shell asks for completions
        command.main(prog_name="specdec")
    with command.make_context("specdec", arguments) as context:
        code = command.invoke(context)
    return code if isinstance(code, int) else ExitCode.DONE


def _usage_words(problem: Any) -> tuple[str, str | None]:
    """The parser's message about a command line, in this program's form, with a hint."""
    context = getattr(problem, "ctx", None)
    path = context.command_path if context is not None else "specdec"
    is_group = context is None or hasattr(context.command, "commands")
    hint = f"`{path} --help` lists the commands" if is_group else f"`{path} --help-all` lists every option"
    if type(problem).__name__ == "NoArgsIsHelpError":
        sys.stdout.write(f"{problem.message}\n")
        return "", None
    if name := getattr(problem, "option_name", None):
        parameters = context.command.get_params(context) if context is not None else []
        known = [
            option
            for parameter in parameters
            for option in (*parameter.opts, *parameter.secondary_opts)
            if option.startswith("-")
        ]
        if type(problem).__name__ == "NoSuchOption":
            return f"there is no option `{name}` of `{path}`{_meant_option(name, known)}", hint
    if wrong := re.match(r"Input should be ([^,]+)", str(getattr(problem, "message", ""))):
        return f"`{max(problem.param.opts, key=len)}` must be {wrong[1]}", hint
    if unknown := re.fullmatch(r"No such command '(.*)'\.", str(getattr(problem, "message", "")), re.DOTALL):
        commands = context.command.commands if context is not None else ()
        return f"there is no command `{unknown[1]}` of `{path}`{did_you_mean(unknown[1], commands)}", hint
    message = re.sub(r"'([^']*)'", r"`\1`", problem.format_message()).strip().rstrip(".")
    message = re.sub(r"\s*\n\s*", " ", message).replace("argument(s)", "argument")
    return message[:1].lower() + message[1:], hint


def _meant_option(name: str, known: Sequence[str]) -> str:
    """`; ` and why there is no such option, or the known one that was meant; nothing where that is not clear."""
    from specdec_cli.cli.options import OPTIONS
    from specdec_cli.recipe.aliases import key_of_other_engines, why_removed

    if meant := why_removed(name) or did_you_mean(name, known):
        return meant
    key = key_of_other_engines(name)
    path = "draft" if key == "draft.model" else key
    same = next((option.flag for option in OPTIONS if option.path == path and option.flag in known), None)
    return "" if same is None else f"; did you mean `{same}`?"


def _complain(message: str, hint: str | None, code: ExitCode) -> int:
    """Write `error: …`, one line for each of the message's, an empty line and `hint: …` to stderr."""
    lines = [part for line in message.split("\n") for part in _folded(f"error: {_printable(line)}")] if message else []
    lines += ["", *_folded(f"hint: {_printable(hint)}")] if hint else []
    if colourful(sys.stderr):
        lines = [re.sub(r"^(error|hint):", lambda word: f"{_COLOURS[word[1]]}{word[0]}\x1b[0m", line) for line in lines]
    with suppress(BrokenPipeError):  # stderr has no reader; the exit code remains
        sys.stderr.write("".join(f"{line}\n" for line in lines))
    return code


def _folded(line: str) -> list[str]:
    """A line as lines that a terminal breaks within neither a word nor a command; elsewhere as it is."""
    if not sys.stderr.isatty():
        return [line]
    from rich.text import Text

    from specdec_cli.report.wrapping import wrapped

    return [part.plain for part in wrapped(Text(line), shutil.get_terminal_size().columns)]


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "�" for letter in text)


def _flush(stream: IO[str], code: int) -> int:
    """Empty a stream's buffer now, so that a reader that went away makes no noise when Python ends."""
    try:
        stream.flush()
    except OSError as error:
        from specdec_cli.report.page import to_nowhere

        to_nowhere(stream)
        if isinstance(error, BrokenPipeError):
            return code
        return _complain(f"the output cannot be written: {error.strerror}", None, ExitCode.COULD_NOT_RUN)
    return code


if __name__ == "__main__":
    sys.exit(run())
