"""Prompts: text lines, or JSONL rows that may bring an id, a category, a length and a seed of their own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec_cli.errors import UsageError
from specdec_cli.sampling.params import settled_seed

_JSONL_SUFFIXES = (".jsonl", ".ndjson")


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One prompt and what its row asked for.

    Args:
        index: its place among the rows, from 0.
        prompt: the text.
        id: the row's own name, if it has one.
        category: the row's kind, if it says.
        max_new_tokens: its own length, or None for the run's.
        seed: its own seed (its noise index is then 0; a negative one is drawn), or None for the run's.
    """

    index: int
    prompt: str
    id: str | int | None = None
    category: str | None = None
    max_new_tokens: int | None = None
    seed: int | None = None


def rows_of(prompts: Iterable[str]) -> list[PromptRow]:
    """Rows of prompts given one by one.

    Raises:
        UsageError: no prompt, or an empty one.
    """
    rows = [PromptRow(index, prompt) for index, prompt in enumerate(prompts)]
    for row in rows:
        _check_text(row.prompt, f"prompt {row.index + 1} of {len(rows)}" if len(rows) > 1 else "the prompt")
    if not rows:
        raise UsageError("there is no prompt", "give one as an argument, with --prompt-file, or on standard input")
    return rows


def read_prompt_file(path: Path) -> list[PromptRow]:
    """Rows of a prompt file: JSONL by its name (`.jsonl`, `.ndjson`) or its first brace, else one prompt a line.

    Raises:
        UsageError: the file cannot be read, is not UTF-8, is empty, or a row is wrong (`file:line`).
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"prompt file `{path}` cannot be read: {error.strerror or error}", "check the path and its permissions"
        ) from error
    text = decode_text(data, f"prompt file `{path}`")
    return parse_prompts(text, str(path), path.suffix.lower() in _JSONL_SUFFIXES or looks_like_jsonl(text))


def looks_like_jsonl(text: str) -> bool:
    """Whether a prompt text without a telling name holds JSON objects."""
    return text.lstrip().startswith("{")


def decode_text(data: bytes, what: str) -> str:
    """UTF-8 text, a byte order mark dropped.

    Args:
        data: the bytes.
        what: names their source in an error.

    Raises:
        UsageError: the bytes are not UTF-8.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{what} is not valid UTF-8: byte `{error.start}`", "save it as UTF-8") from error


def parse_prompts(text: str, name: str, is_jsonl: bool) -> list[PromptRow]:
    """Rows of a prompt file's text; blank lines are no rows.

    Args:
        text: the file's text.
        name: names the file in errors.
        is_jsonl: whether its lines are JSON objects; else each is a prompt.

    Raises:
        UsageError: no row, or a row that is wrong (`file:line`).
    """
    rows: list[PromptRow] = []
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.removesuffix("\r")
        if not line.strip():
            continue
        where = f"{name}:{number}"
        rows.append(_parse_row(line, where, len(rows)) if is_jsonl else PromptRow(len(rows), line))
    if not rows:
        raise UsageError(f"`{name}` has no prompt", "write one prompt per line, or JSONL rows with `prompt`")
    return rows


def _parse_row(line: str, where: str, index: int) -> PromptRow:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "too deep or too large a value"
        raise UsageError(f"{where}: not a JSON object: {reason}", "write one JSON object per line") from error
    if not isinstance(row, dict):
        raise UsageError(
            f"{where}: not a JSON object but {_kind(row)}", 'write rows such as {"prompt": "Once upon a time"}'
        )
    prompt = _prompt_of(row, where)
    seed = _field(row, "seed", where, "an integer below 2^63", lambda v: _is_int(v) and abs(v) < 2**63)
    return PromptRow(
        index,
        prompt,
        id=_field(row, "id", where, "a string or an integer", lambda v: isinstance(v, str) or _is_int(v)),
        category=_field(row, "category", where, "a string", lambda v: isinstance(v, str)),
        max_new_tokens=_field(row, "max_new_tokens", where, "an integer of at least 1", lambda v: _is_int(v) and v > 0),
        seed=None if seed is None else settled_seed(seed),
    )


def _prompt_of(row: dict[str, Any], where: str) -> str:
    if "prompt" in row:
        prompt = row["prompt"]
    else:
        turns = row.get("turns")
        if turns is None:
            raise UsageError(f"{where}: the row has no `prompt`", "give each row a `prompt`, or Spec-Bench's `turns`")
        if not isinstance(turns, list) or not turns:
            raise UsageError(f"{where}: `turns` must be a list of strings with at least one", "its first is the prompt")
        prompt = turns[0]
    if not isinstance(prompt, str):
        raise UsageError(f"{where}: the prompt must be a string, not {_kind(prompt)}")
    _check_text(prompt, f"{where}: the prompt")
    return prompt


def _check_text(prompt: str, what: str) -> None:
    if not prompt.strip():
        raise UsageError(f"{what} is empty", "give at least one word")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{what} is not valid Unicode: character `{error.start}`", "give it as UTF-8") from error


def _field(row: dict[str, Any], name: str, where: str, wanted: str, is_fine: Callable[[Any], bool]) -> Any:
    value = row.get(name)
    if value is not None and not is_fine(value):
        raise UsageError(f"{where}: `{name}` must be {wanted}, not `{json.dumps(value)[:60]}`")
    return value


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")
