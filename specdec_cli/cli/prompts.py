"""Prompts that a command line gives: arguments, `--prompt-file`, standard input."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from specdec_cli.engine.prompts import PromptSet, rows_of
from specdec_cli.errors import UsageError
from specdec_cli.files import decoded, unpacked
from specdec_cli.measure.workload.dataset import read_prompt_file
from specdec_cli.measure.workload.reading import Reading, prompts_of
from specdec_cli.measure.workload.tables import rows_of_bytes

_STDIN = "standard input"


def given_prompts(prompts: Sequence[str], prompt_file: str | None, chat: bool) -> PromptSet:
    """Rows from arguments, from a file, or from standard input where it is asked for or nothing else is given.

    Args:
        prompts: the arguments; `-` stands for one prompt on standard input.
        prompt_file: a file of any format that rows have, `-` for one on standard input, or None.
        chat: whether whole conversations are wanted.

    Raises:
        UsageError: no prompt, two sources, or one that cannot be read.
    """
    if prompt_file is not None:
        if prompts:
            raise UsageError("prompts are given as arguments and with --prompt-file", "give one of them")
        if prompt_file != "-":
            return read_prompt_file(prompt_file, chat)
        return prompts_of(rows_of_bytes(_read_stdin(), _STDIN, _STDIN), _STDIN, Reading(chat))
    if not prompts:
        if sys.stdin is None or sys.stdin.isatty():
            hint = 'for example: `specdec generate "Once upon a time"`'
            raise UsageError("there is no prompt: give one as an argument, with --prompt-file or in a pipe", hint)
        prompts = ["-"]
    if list(prompts).count("-") > 1:
        raise UsageError(f"`-` stands twice among the prompts, and {_STDIN} can be read once", "give it once")
    return PromptSet(rows_of(_one_from_stdin() if prompt == "-" else prompt for prompt in prompts))


def _one_from_stdin() -> str:
    text = decoded(_read_stdin(), _STDIN)
    if not text.strip():
        raise UsageError(f"the prompt on {_STDIN} is empty", "give a prompt as an argument or in a pipe")
    return text.removesuffix("\n").removesuffix("\r")


def _read_stdin() -> bytes:
    if sys.stdin is None:
        raise UsageError(f"{_STDIN} is closed", "give prompts as arguments or with --prompt-file")
    try:
        return unpacked(sys.stdin.buffer.read(), _STDIN)
    except OSError as error:
        raise UsageError(f"{_STDIN} cannot be read: {error.strerror}", "give prompts as arguments") from error
