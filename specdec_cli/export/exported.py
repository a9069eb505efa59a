"""Exports: their files and the next command; pieces that the files of several engines share."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from specdec_cli.export.measured import machine_of, step_times
from specdec_cli.export.settings import ExportSettings, on_one_line

_BESIDE = re.compile(r"\$HERE/[a-z.]+")


@dataclass(frozen=True, slots=True)
class Export:
    """An export.

    Args:
        files: by their names below the output folder, the main one first.
        executable: names of those that are run.
        next_command: what to do once the engine runs; None where the files themselves are run.
    """

    files: dict[str, str]
    executable: frozenset[str] = frozenset()
    next_command: str | None = None


@dataclass(frozen=True, slots=True)
class ExportJob:
    """The input of an engine's exporter.

    Args:
        settings: the recipe.
        specdec: the version that writes.
        engine: the engine and the version whose settings were checked.
        measured: sentences about what was measured or predicted, and on what; empty where nothing was.
        source: the recipe, as the user names it; None without one.
        document: the measurement that `--measured` names; None without one.
    """

    settings: ExportSettings
    specdec: str
    engine: str
    measured: Sequence[str] = ()
    source: str | None = None
    document: Mapping[str, Any] | None = None

    def comment(self, next_command: str | None = None, mark: str = "#") -> str:
        """The head of every file. Made last: what was not read by then is warned about."""
        self.settings.warn_of_the_rest()
        source = f", from {self.source}." if self.source else "."
        message = [f"Written by specdec {self.specdec} for {self.engine}{source}"]
        message += self.measured or ["Nothing was measured: give the result of a measurement with --measured FILE."]
        message += [f"Warning: {sentence}." for sentence in self.settings.warnings]
        if next_command is not None:
            message.append(f"Measure it: {next_command}")
        return "".join(f"{mark} {on_one_line(line)}\n" for line in message)

    def dspark_step_times(self) -> dict[int, float]:
        """Measured seconds of a step by the tokens that it verifies; empty without a measurement or a DSpark draft.

        By these an engine decides how much of a batch's drafts to verify.
        """
        if self.document is None or self.settings.draft.method != "dspark":
            return {}
        times, why = step_times(self.document)
        engine, machine = self.settings.engine, machine_of(self.document)
        words = f"the step times are those of specdec's own engine on {machine}: take {engine}'s own where it will run"
        self.settings.warn(words if times else f"{engine}'s table of step times is left out: {why}")
        return times


def script(comment: str, words: Sequence[str], before: Sequence[str] = ()) -> str:
    """A shell script that becomes one program, an option to a line; its own arguments come last."""
    lines, line = [], ""
    for word in words:
        if word.startswith("--") and line:
            lines.append(line)
            line = ""
        line = f"{line} {quoted(word)}".strip()
    lines += [line, '"$@"']
    body = " \\\n  ".join(lines)
    earlier = "".join(f"{earlier_line}\n" for earlier_line in before)
    return f"#!/usr/bin/env bash\n{comment}set -euo pipefail\n{earlier}exec {body}\n"


def quoted(word: str) -> str:
    """A word for a shell; `$HERE` stays a variable in front of the name of a file that an exporter writes."""
    return f'"{word}"' if _BESIDE.fullmatch(word) else shlex.quote(word)


HERE = 'HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)'
"""Line of a script that finds the files beside it."""


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Arguments as options: true is the option alone, false its `--no-` form, a mapping JSON."""
    words: list[str] = []
    for name, value in arguments.items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(option if value else f"--no-{option.removeprefix('--')}")
        elif isinstance(value, dict):
            words += [option, json.dumps(value, ensure_ascii=False)]
        elif isinstance(value, list | tuple):
            words += [option, *map(str, value)]
        else:
            words += [option, str(value)]
    return words


def to_yaml(value: Any) -> str:
    """A block of YAML in the order that it was made in."""
    text: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=10_000)
    return text
