"""A chat template that replaces a tokenizer's own: a file, or the template itself."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Set
from contextlib import suppress
from typing import Any

from specdec_cli.errors import UsageError
from specdec_cli.files import given_path, read_text
from specdec_cli.text.tokenizer import Tokenizer

TEMPLATE_ARGUMENTS = {"conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt"}
TEMPLATE_ARGUMENTS |= {"continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors"}
TEMPLATE_ARGUMENTS |= {"return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "sanitize_control_tokens"}
"""Variables that are always passed to a template or to transformers, and that requests may not set."""
_MARKS = "{}\n"
_HINT = "give a file with a Jinja template, or the template itself"


def chat_tokenizer(hf_tokenizer: Any, template: str | None, variables: Mapping[str, Any] | None) -> Tokenizer:
    """A tokenizer with the user's conversation settings.

    Args:
        hf_tokenizer: a tokenizer object of transformers.
        template: as `named_template` takes it; None keeps the tokenizer's own.
        variables: that every conversation passes to the template, unless it sets them.

    Raises:
        UsageError: a template that cannot be read or is broken, or a variable that it does not read.
    """
    tokenizer = Tokenizer(hf_tokenizer, None if template is None else named_template(template), variables)
    if template is not None:
        tokenizer.template_reads()
    for name in variables or ():
        _check_variable(tokenizer, name)
    return tokenizer


def _check_variable(tokenizer: Tokenizer, name: str) -> None:
    reads = tokenizer.template_reads().variables | tokenizer.template_reads(has_tools=True).variables
    check_variable(name, reads, tokenizer.template_owner)


def check_variable(name: str, reads: Set[str], whose: str) -> None:
    """Refuse a variable for every conversation that its chat template does not read.

    Args:
        name: of the variable.
        reads: variables that the template reads.
        whose: the model whose template it is.

    Raises:
        UsageError: it does not, or requests have a field for it.
    """
    message = f"`default_chat_template_kwargs` sets `{name}`"
    if name in TEMPLATE_ARGUMENTS:
        raise UsageError(f"{message}, which is no variable of a template", "leave it out: requests have a field for it")
    if name not in reads:
        known = ", ".join(sorted(reads - TEMPLATE_ARGUMENTS))
        hint = f"leave it out; the template reads {known}" if known else "leave it out"
        raise UsageError(f"{message}, which the chat template of `{whose}` does not read", hint)


def check_variables(names: Iterable[str], templates: Iterable[str], whose: str) -> None:
    """The same for several, by the texts of the templates; a broken one is left to who renders it.

    Raises:
        UsageError: as `check_variable` says.
    """
    import jinja2

    from specdec_cli.text.template import read_template

    with suppress(jinja2.TemplateSyntaxError):
        reads = frozenset[str]().union(*(read_template(text).variables for text in templates))
        for name in names:
            check_variable(name, reads, whose)


def check_template(given: str) -> None:
    """Refuse a chat template that cannot be read or parsed, before a tokenizer is loaded.

    Raises:
        UsageError: why not.
    """
    text = named_template(given)
    import jinja2

    from specdec_cli.text.template import read_template

    try:
        read_template(text)
    except jinja2.TemplateSyntaxError as error:
        message = f"the chat template of `--chat-template` is broken: {error.message}, in line {error.lineno}"
        raise UsageError(message, "correct it") from error


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
    """Whether a text is a file's name, however long or strange for one it is."""
    return "\n" not in given and os.path.isfile(os.path.expanduser(given))


def _read(name: str) -> str:
    return read_text(given_path(name), f"chat template `{name}`")
