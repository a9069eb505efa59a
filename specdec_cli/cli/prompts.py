"""Prompts that a command line gives: arguments, `--prompt-file`, standard input."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from specdec_cli.errors import UsageError
from specdec_cli.measure.prompts import (
    PromptRow,
    decode_text,
    looks_like_jsonl,
    parse_prompts,
    read_prompt_file,
    rows_of,
)

_STDIN = "standard input"


def given_prompts(prompts: Sequence[str], prompt_file: str | None) -> list[PromptRow]:
    """Rows from arguments, from a file, or from standard input where it is asked for or nothing else is given.

    Args:
        prompts: the arguments; `-` stands for one prompt on standard input.
        prompt_file: a file, `-` for one on standard input (JSONL if it begins with a brace), or None.

    Raises:
        UsageError: no prompt, two sources, or one that cannot be read.
    """
    if prompt_file is not None:
        if prompts:
            raise UsageError("prompts are given as arguments and with --prompt-file", "give one of them")
        if prompt_file != "-":
            return read_prompt_file(Path(prompt_file))
        text = _read_stdin()
        return parse_prompts(text, _STDIN, is_jsonl=looks_like_jsonl(text))
    if not prompts:
        if sys.stdin is None or sys.stdin.isatty():
            hint = 'for example: specdec generate "Once upon a time"'
            raise UsageError("there is no prompt: give one as an argument, with --prompt-file or in a pipe", hint)
        prompts = ["-"]
    if list(prompts).count("-") > 1:
        raise UsageError(f"`-` stands twice among the prompts, and {_STDIN} can be read once", "give it once")
    return rows_of(_one_from_stdin() if prompt == "-" else prompt for prompt in prompts)


def _one_from_stdin() -> str:
    text = _read_stdin()
    if not text.strip():
        raise UsageError(f"the prompt on {_STDIN} is empty", "give a prompt as an argument or in a pipe")
    return text.removesuffix("\n").removesuffix("\r")


def _read_stdin() -> str:
    if sys.stdin is None:
        raise UsageError(f"{_STDIN} is closed", "give prompts as arguments or with --prompt-file")
    try:
        return decode_text(sys.stdin.buffer.read(), _STDIN)
    except OSError as error:
        raise UsageError(f"{_STDIN} cannot be read: {error.strerror}", "give prompts as arguments") from error
