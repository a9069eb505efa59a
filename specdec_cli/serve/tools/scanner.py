"""Pieces of JSON read letter by letter, for texts that are still being written."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from typing import Any

SPACE = " \t\r\n"
Steps = Generator[None, str | None, str | None]
"""A reader of characters: None is the text's end; it returns the first character that is not its own."""
Reading = Generator[None, str | None, str]
"""A reader that returns what it read, and has not asked for the character after it."""


class NoCallError(Exception):
    """The text is not a tool call."""


def quoted(text: str) -> str:
    """A text as a literal of a grammar."""
    return json.dumps(text, ensure_ascii=False)


def expect(expected: str, char: str | None) -> None:
    """Refuse any other letter."""
    if char != expected:
        raise NoCallError


def after_space(char: str | None) -> Steps:
    """Pass over white space."""
    while char is not None and char in SPACE:
        char = yield
    return char


def one_of(words: tuple[str, ...], char: str | None) -> Reading:
    """Read one of several words, none of which begins another."""
    seen = ""
    while char is not None:
        seen += char
        if seen in words:
            return seen
        if not any(word.startswith(seen) for word in words):
            break
        char = yield
    raise NoCallError


def read_until(end: str, char: str | None, allowed: Callable[[str], bool] = lambda _: True) -> Reading:
    """Read up to and with a word; what stands before it."""
    seen = ""
    while char is not None and allowed(char):
        seen += char
        if seen.endswith(end):
            return seen[: -len(end)]
        char = yield
    raise NoCallError


def read_body(end: str, followers: tuple[str, ...], seen: list[str]) -> Generator[None, str | None, str | None]:
    """Read a text up to the closing word that one of some words follows; elsewhere that word is part of the text.

    Args:
        end: the closing word.
        followers: words of which one comes next, after white space.
        seen: takes the characters of the text.

    Returns:
        The word that followed; where the output ends before one, "" after the closing word and None inside the text.
    """
    closed_at: int | None = None
    tail = after = ""
    while (char := (yield)) is not None:
        seen.append(char)
        tail = (tail + char)[-len(end) :]
        if closed_at is not None:
            after = (after + char).lstrip()
            if after in followers:
                del seen[closed_at:]
                return after
            if not any(word.startswith(after) for word in followers):
                closed_at = None
        if tail == end:
            closed_at, after = len(seen) - len(end), ""
    if closed_at is None:
        return None
    del seen[closed_at:]
    return ""


def read_value(char: str | None, sink: Callable[[str], object]) -> Steps:
    """Pass a JSON value's characters on."""
    depth, in_string, is_escaped = 0, False, False
    is_word = char is not None and char not in '{["'
    while char is not None:
        if is_word and char in ",]}" + SPACE:
            return char
        sink(char)
        if in_string:
            in_string = is_escaped or char != '"'
            is_escaped = not is_escaped and char == "\\"
        else:
            in_string = char == '"'
            depth += (char in "{[") - (char in "}]")
        if not (is_word or in_string or depth):
            return (yield)
        char = yield
    raise NoCallError


def read_arguments(char: str | None, sink: Callable[[str], object]) -> Steps:
    """An object as it is written; a string is the JSON inside it, and null no arguments."""
    if char == "{":
        return (yield from read_value(char, sink))
    characters: list[str] = []
    char = yield from read_value(char, characters.append)
    inner = loads(characters)
    sink(inner if isinstance(inner, str) else "{}" if inner is None else "".join(characters))
    return char


def loads(characters: list[str]) -> Any:
    """A value whose letters are all there."""
    try:
        return json.loads("".join(characters))
    except (ValueError, RecursionError):
        raise NoCallError from None
