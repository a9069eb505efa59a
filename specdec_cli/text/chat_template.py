"""A chat template that somebody names in place of a tokenizer's own: a file, or the template itself."""

from __future__ import annotations

from pathlib import Path

from specdec_cli.errors import UsageError

_MARKS = "{}\n"
_HINT = "give a file with a Jinja template, or the template itself"


def named_template(given: str) -> str:
    """The text of a chat template.

    Args:
        given: the name of a file, or the template, which holds a brace or a line break, as in vLLM.

    Raises:
        UsageError: no such file, one that is no text, or an empty template.
    """
    text = given if any(mark in given for mark in _MARKS) and not _is_file(given) else _read(given)
    if not text.strip():
        raise UsageError("the chat template of `--chat-template` is empty", _HINT)
    return text


def _is_file(given: str) -> bool:
    try:
        return Path(given).expanduser().is_file()
    except (OSError, ValueError, RuntimeError):  # too long or strange to be a name
        return False


def _read(name: str) -> str:
    try:
        return Path(name).expanduser().read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"chat template `{name}` is not valid UTF-8: byte `{error.start}`", _HINT) from error
    except OSError as error:
        raise UsageError(f"chat template `{name}` cannot be read: {error.strerror or error}", _HINT) from error
    except (ValueError, RuntimeError) as error:
        raise UsageError(f"chat template `{name}` cannot be read: {error}", _HINT) from error
