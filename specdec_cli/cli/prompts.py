"""Prompts that a command line gives: arguments, `--prompt-file`, `--dataset`, standard input."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from specdec_cli.cli.names import PROMPT_FILE
from specdec_cli.engine.prompts import PromptSet, rows_of
from specdec_cli.errors import UsageError
from specdec_cli.files import decoded, read_limited, unpacked
from specdec_cli.measure.workload.dataset import read_prompt_file
from specdec_cli.measure.workload.reading import Reading, prompts_of
from specdec_cli.measure.workload.tables import rows_of_bytes
from specdec_cli.measure.workload.workload import read_rows, select

if TYPE_CHECKING:
    from specdec_cli.recipe.schema import WorkloadSection

_STDIN, _DATASET = "standard input", "workload.dataset"
_ALL = 2**31 - 1


def given_prompts(
    prompts: Sequence[str], workload: WorkloadSection, flags: Mapping[str, tuple[Any, str]], chat: bool
) -> PromptSet:
    """Rows from arguments, from a file, or from standard input where it is asked for or nothing else is given.

    Args:
        prompts: the arguments; `-` stands for one prompt on standard input.
        workload: names the data set or file, if the command line does.
        flags: the command line's options by the recipe's key.
        chat: whether whole conversations are wanted.

    Raises:
        UsageError: no prompt, two sources, or one that cannot be read.
    """
    if _DATASET in flags:
        if prompts:
            raise UsageError(f"prompts are given as arguments and with {flags[_DATASET][1]}", "give one of them")
        return rows_wanted(workload, flags, chat)
    for path in ("workload.tasks", "workload.num_prompts"):
        if path in flags:
            raise UsageError(f"`{flags[path][1]}` has no effect without a data set", f"add --dataset or {PROMPT_FILE}")
    if not prompts:
        if sys.stdin is None or sys.stdin.isatty():
            hint = 'for example: `specdec generate "Once upon a time"`'
            raise UsageError("there is no prompt: give one as an argument, with --prompt-file or in a pipe", hint)
        prompts = ["-"]
    if list(prompts).count("-") > 1:
        raise UsageError(f"`-` stands twice among the prompts, and {_STDIN} can be read once", "give it once")
    return PromptSet(rows_of(_one_from_stdin() if prompt == "-" else prompt for prompt in prompts))


def rows_wanted(
    workload: WorkloadSection, flags: Mapping[str, tuple[Any, str]], chat: bool | None, num_prompts: int | None = None
) -> PromptSet:
    """The rows that the command line's options for prompts choose.

    Args:
        workload: the recipe's, with these options.
        flags: the command line's options by the recipe's key.
        chat: whether whole conversations are wanted; None takes either.
        num_prompts: most rows without `--num-prompts`; None for all.

    Raises:
        UsageError: an unknown data set or task, or a file that cannot be read.
        RunError: a data set that cannot be read.
    """
    name, flag = flags[_DATASET]
    if name == "-":
        prompts = prompts_of(rows_of_bytes(_read_stdin(), _STDIN, _STDIN), _STDIN, Reading(chat))
    elif flag == PROMPT_FILE:
        prompts = read_prompt_file(name, chat)
    else:
        prompts = read_rows(name, None, _ALL, chat)
    most = workload.num_prompts if "workload.num_prompts" in flags else num_prompts
    return replace(prompts, rows=select(prompts.rows, workload.tasks, _ALL if most is None else most))


def _one_from_stdin() -> str:
    text = decoded(_read_stdin(), _STDIN)
    if not text.strip():
        raise UsageError(f"the prompt on {_STDIN} is empty", "give a prompt as an argument or in a pipe")
    return text.removesuffix("\n").removesuffix("\r")


def _read_stdin() -> bytes:
    if sys.stdin is None:
        raise UsageError(f"{_STDIN} is closed", "give prompts as arguments or with --prompt-file")
    try:
        return unpacked(read_limited(sys.stdin.buffer.read, _STDIN), _STDIN)
    except OSError as error:
        raise UsageError(f"{_STDIN} cannot be read: {error.strerror}", "give prompts as arguments") from error
